"""The engine contract's harness for vLLM. Starting vLLM takes long: engines of many tests share a core, one after the other."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import chat_tokenizers as made
import msgspec
import torch
from engine_books import Books
from engine_models import Staged, named, save, tiny

from rollout.model_config import meta_model
from rollout.vllm.build import engine_arguments
from rollout.vllm.environment import set_environment
from rollout.vllm.expected import open_config
from rollout.vllm.record import Admitted
from segue.ports.engine import Engine, PauseMode
from segue.ports.weights import StagedWeights

SLOTS, MAX_TOKENS = 4, 200
KV_BYTES = 2 * 2 * 32 * 4
"""Of a token: keys and values, two layers, one head of 32, float32."""
EXTENSION = "vllm_faults.FaultyExtension"
"""The real one, and a switch."""
SHORT_BLOCKS = 20
"""Blocks of the core with tied embeddings, those that scoring keeps included: two long contexts fit, four do not."""
CHUNK = 64
"""Tokens of a step of that core, so that longer contexts are filled in several."""
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # the smallest that vLLM runs on CPUs
    "vocab_size": len(made.words()),
}

_models: dict[tuple[int, bool], Any] = {}


def model_of(version: int, tied: bool) -> Any:
    key = (version, tied)
    if key not in _models:
        _models[key] = tiny(version, tie_word_embeddings=tied, **SIZES)
    return _models[key]


class Cores:
    """A running vLLM per model, started when it is first needed; one that has died is started anew."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._cores: dict[bool, Any] = {}
        set_environment("cpu", 1)

    def model_folder(self, tied: bool) -> str:
        path = self._folder / ("tied" if tied else "untied")
        if not path.is_dir():
            path.mkdir(parents=True)
            save(model_of(0, tied), path)
        return str(path)

    async def get(self, tied: bool) -> Any:
        """Running, with nothing in it."""
        from rollout.vllm.core import Core

        core = self._cores.get(tied)
        if core is None or core.dead:
            if core is not None:
                await core.stop()
            path = self.model_folder(tied)
            arguments = engine_arguments(
                path,
                open_config(path, MAX_TOKENS),
                slots=SLOTS,
                max_tokens=MAX_TOKENS,
                score_tokens=MAX_TOKENS,
                dtype="float32",
                device="cpu",
                seed=0,
                worker_extension=EXTENSION,
                given={"kv_cache_memory_bytes": SHORT_BLOCKS * 32 * KV_BYTES, "max_num_batched_tokens": CHUNK} if tied else {},
            )
            core = self._cores[tied] = Core(arguments)
            await core.start()
        return core

    async def close(self) -> None:
        for core in self._cores.values():
            await core.stop()

    def model(self, tied: bool) -> Any:
        """On the meta device."""
        return meta_model(open_config(self.model_folder(tied), MAX_TOKENS), "float32")


async def leave(core: Any) -> None:
    """Leave a core as the next engine expects it: empty and going."""
    if not core.dead:
        await core.pause(keep=False)
        await core.resume()


class Progress:
    """Lets a test wait until so many tokens have been sampled. `engine` must have been started."""

    def __init__(self, engine: Any, core: Any) -> None:
        self._engine = engine
        self._take = core.on_step
        self._stepped = asyncio.Event()
        core.on_step = self._step

    def _step(self, step: Any) -> None:
        self._take(step)
        self._stepped.set()

    async def more(self, tokens: int) -> None:
        """Wait for `tokens` more."""
        goal = self._engine.counts().decode_tokens + tokens
        while self._engine.counts().decode_tokens < goal:
            self._stepped.clear()
            await self._stepped.wait()


class Records:
    """What the scheduler inside vLLM wrote down for an engine, request by request. `engine` must have been started."""

    def __init__(self, engine: Any, core: Any) -> None:
        self.books = Books(engine)
        self.admitted: list[Admitted] = []
        self.refilled = 0
        self._take = core.on_step
        core.on_step = self._step

    def _step(self, step: Any) -> None:
        self.admitted += step.record.admitted
        self.refilled += step.record.refilled_tokens
        self._take(step)

    def balance(self) -> None:
        """vLLM is idle: what the scheduler gave each request is what the workers computed in all, and what got a cause."""
        filled, cached = sum(a.prefilled for a in self.admitted), sum(a.cached for a in self.admitted)
        self.books.balance(filled, cached)
        again = [a.prefilled for a in self.admitted if a.again]
        assert self.refilled >= sum(again) + len(again), "vLLM's own figure for preempted requests, before any was cut short"


class VllmHarness:
    block = 32

    def __init__(self, cores: Cores) -> None:
        self.cores = cores
        self._epoch = 0
        self._engines: list[tuple[Any, Any]] = []
        self.records: dict[Any, Records] = {}

    async def engine(self, *, slots: int = SLOTS, tied: bool = False, version: int | None = 0, tokenizer: Any = None) -> Engine:
        from rollout.vllm.engine import VllmEngine

        assert slots <= SLOTS
        core = await self.cores.get(tied)
        engine = VllmEngine(
            core,
            self.cores.model(tied),
            slots=slots,
            max_tokens=MAX_TOKENS,
            score_tokens=MAX_TOKENS,
            ahead=0,
            chunk_tokens=1,
            owns_core=False,
            tokenizer=tokenizer,
        )
        self._engines.append((engine, core))
        await engine.start()
        self.records[engine] = Records(engine, core)
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
        extra = Staged(version, {**good, "model.norm.bias": torch.zeros(64)})
        misshapen = Staged(version, {**good, first: good[first][:-1]})
        integers = Staged(version, {**good, first: good[first].long()})
        manifest = Staged(version, good).manifest
        silent = Staged(version, good, msgspec.structs.replace(manifest, tensors=manifest.tensors[1:]))
        adapter = Staged(version, good, msgspec.structs.replace(manifest, what="adapter"))
        return [
            (first, missing),
            ("model.norm.bias", extra),
            (first, misshapen),
            (first, integers),
            (first, silent),
            ("adapter", adapter),
        ]

    async def break_down(self, engine: Engine) -> None:
        core = next(core for other, core in self._engines if other is engine)
        os.kill(core.pids()[-1], signal.SIGKILL)

    async def close(self) -> None:
        for engine, core in self._engines:
            records = self.records[engine]
            try:
                if records.books.used and not engine.dead:
                    await engine.pause(PauseMode.ABORT, self.epoch())
                    records.balance()
            finally:
                await engine.stop()
                await leave(core)
