"""The contract suite against the embedded engine, with its work in a thread as in production."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import torch
from engine_books import Books
from engine_contract import EngineContract
from engine_models import Staged, named, save, tiny
from engine_updates import ManyUpdates

from rollout.embedded import EmbeddedEngine
from segue.clock import ThreadCompute
from segue.ports.engine import Engine, PauseMode
from segue.ports.weights import StagedWeights

T = TypeVar("T")
torch.set_num_threads(1)


@cache
def model_of(version: int, tied: bool) -> Any:
    return tiny(version, tie_word_embeddings=tied)


class BreakableCompute(ThreadCompute):
    """A thread that can be lost."""

    broken = False

    async def run(self, work: Callable[[], T], cost: float) -> T:
        if self.broken:
            raise RuntimeError("the worker is gone")
        return await super().run(work, cost)


class Filled:
    """Counts the positions that a started engine's model really fills, and those that a plan says are there."""

    def __init__(self, engine: Any) -> None:
        self.books = Books(engine)
        self.computed = self.found = 0
        self._prefill, self._admit = engine._runner.prefill, engine._policy.admit
        engine._runner.prefill, engine._policy.admit = self._fill, self._plan

    def _fill(self, parts: list[tuple[int, int, list[int]]]) -> None:
        self.computed += sum(len(tokens) for _, _, tokens in parts)
        self._prefill(parts)

    def _plan(self, *args: Any) -> Any:
        plan = self._admit(*args)
        self.found += sum(placement.cached for placement in plan.placements)
        return plan


class EmbeddedHarness:
    block = 1

    def __init__(self, folders: dict[bool, str]) -> None:
        self._folders = folders
        self._epoch = 0
        self._engines: list[tuple[EmbeddedEngine, BreakableCompute, Filled]] = []

    async def engine(self, *, slots: int = 4, tied: bool = False, version: int | None = 0) -> Engine:
        compute = BreakableCompute("engine")
        engine = EmbeddedEngine(
            self._folders[tied], slots=slots, max_tokens=160, dtype="float32", device="cpu", compute=compute, chunk_tokens=1
        )
        await engine.start()
        self._engines.append((engine, compute, Filled(engine)))
        if version is not None:
            epoch = self.epoch()
            await engine.pause(PauseMode.ABORT, epoch)
            await engine.load(version, self.staged(version, tied))
            await engine.resume(epoch)
        return engine

    def epoch(self) -> int:
        self._epoch += 1
        return self._epoch

    def reference(self, version: int, tied: bool = False) -> Any:
        return model_of(version, tied)

    def staged(self, version: int, tied: bool = False) -> StagedWeights:
        return Staged(version, named(model_of(version, tied)))

    def misfits(self, version: int) -> list[tuple[str, StagedWeights]]:
        good = named(model_of(version, False))
        first, *others = good
        missing = Staged(version, {name: good[name] for name in others})
        extra = Staged(version, {**good, "model.norm.bias": torch.zeros(32)})
        misshapen = Staged(version, {**good, first: good[first][:-1]})
        integers = Staged(version, {**good, first: good[first].long()})
        specs = [*Staged(version, good).manifest.tensors[1:]]
        silent = Staged(version, good, msgspec.structs.replace(Staged(version, good).manifest, tensors=specs))
        adapter = Staged(version, good, msgspec.structs.replace(Staged(version, good).manifest, what="adapter"))
        return [
            (first, missing),
            ("model.norm.bias", extra),
            (first, misshapen),
            (first, integers),
            (first, silent),
            ("adapter", adapter),
        ]

    async def break_down(self, engine: Engine) -> None:
        next(compute for other, compute, _ in self._engines if other is engine).broken = True

    async def close(self) -> None:
        for engine, compute, filled in self._engines:
            try:
                if filled.books.used and not engine.dead:
                    await engine.pause(PauseMode.ABORT, self.epoch())
                    filled.books.balance(filled.computed, filled.found)
            finally:
                await engine.stop()
                compute.close()


@pytest.fixture(scope="session")
def contract_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, str]:
    def folder(tied: bool) -> Path:
        return tmp_path_factory.mktemp("tied" if tied else "untied")

    return {tied: save(model_of(0, tied), folder(tied)) for tied in (False, True)}


class TestEmbedded(EngineContract, ManyUpdates):
    @pytest.fixture
    async def harness(self, contract_folders: dict[bool, str]) -> AsyncIterator[EmbeddedHarness]:
        harness = EmbeddedHarness(contract_folders)
        yield harness
        await harness.close()
