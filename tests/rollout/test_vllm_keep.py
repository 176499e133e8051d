"""`keep` on vLLM, token by token: each is judged by the KV it was sampled on, position by position, over updates in a row."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from engine_contract import DEADLINE, Consumer, ask, close
from engine_models import prompt, reference_kept
from vllm_harness import Cores, Progress, VllmHarness

from segue.ports.engine import Engine, FinishReason, PauseMode

pytestmark = [
    pytest.mark.processes,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
UPDATES = 5


@pytest_asyncio.fixture(loop_scope="session")
async def harness(cores: Cores) -> AsyncIterator[VllmHarness]:
    harness = VllmHarness(cores)
    yield harness
    await harness.close()


class Episode:
    """Turns of one episode, and under which version the KV was computed that each was sampled on, position by position."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.tokens = prompt(200 + number // 2, 20 + number // 2)
        self.computed: list[int] = []
        self.turns: list[tuple[list[int], list[int], int, list[float]]] = []
        self.lineage: int | None = None

    async def turn(self, engine: Engine) -> None:
        """One request, frozen over whatever updates come, and an observation after it."""
        lineage = engine.version if self.lineage is None else self.lineage
        start = len(self.tokens)
        request = ask(
            list(self.tokens), episode=self.number, group=self.number // 2, seed=self.number, max_tokens=14, lineage=lineage
        )
        got = await Consumer(engine, request).task
        assert got.finish is FinishReason.LENGTH and len(got.admissions) == 1
        (admission,) = got.admissions
        known = self.computed[: admission.cached]
        known += [got.kv_versions[0]] * (admission.cached - len(known))  # a group-mate's, all of the lineage
        # what was not found was computed as the first token was sampled; from then on each token's KV as the next one was
        self.computed = known + [got.versions[0]] * admission.prefilled + got.versions
        self.tokens += got.tokens
        self.turns.append((list(self.computed), list(self.tokens), start, got.logprobs))
        self.tokens += prompt(300 + start, 5)
        self.lineage = got.kv_versions[-1]

    async def play(self, engine: Engine) -> None:
        for _ in range(6):
            await self.turn(engine)

    def check(self, harness: VllmHarness) -> None:
        """Against a reference that computes each position under the version that computed it in the engine."""
        for computed, tokens, start, logprobs in self.turns:
            runs = [(harness.reference(version), len(list(run))) for version, run in itertools.groupby(computed)]
            close(logprobs, reference_kept(runs, tokens, start))


async def test_kept_kv_is_what_every_token_was_sampled_on(harness: VllmHarness) -> None:
    """F24, F41: five updates under load; turns find the KV of earlier ones, whatever version computed it."""
    engine = await harness.engine()
    core = await harness.cores.get(False)
    progress = Progress(engine, core)
    episodes = [Episode(number) for number in range(6)]
    async with asyncio.timeout(2 * DEADLINE):
        plays = [asyncio.ensure_future(episode.play(engine)) for episode in episodes]
        for version in range(1, UPDATES + 1):
            await progress.more(40)
            epoch = harness.epoch()
            await engine.pause(PauseMode.FREEZE, epoch)
            await engine.load(version, harness.staged(version))
            await engine.resume(epoch)
        await asyncio.gather(*plays)
    for episode in episodes:
        episode.check(harness)
    assert sum(len(set(episode.computed)) > 1 for episode in episodes) >= 4
