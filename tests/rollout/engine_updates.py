"""What every engine must do over many updates in a row: one suite beside `engine_contract`, run against each engine.

`keep` is judged token by token, by the KV it was sampled on, position by position: five updates, and fifty in the full suite.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import pytest
from engine_contract import DEADLINE, Got, Harness, ask, close
from engine_models import prompt, reference_kept

from segue.ports.engine import Engine, FinishReason, PauseMode

UPDATES = [5, pytest.param(50, marks=pytest.mark.full)]
TURNS, TURN_TOKENS = 6, 14


class Episode:
    """Turns of one episode, and under which version the KV was computed that each was sampled on, position by position."""

    def __init__(self, number: int, grown: Callable[[], None]) -> None:
        self.number = number
        self.tokens = prompt(200 + number // 2, 20 + number // 2 % 8)
        self.computed: list[int] = []
        self.turns: list[tuple[list[int], list[int], int, list[float]]] = []
        self.lineage: int | None = None
        self._grown = grown

    async def turn(self, engine: Engine) -> None:
        """One request, frozen over whatever updates come, and an observation after it."""
        lineage = engine.version if self.lineage is None else self.lineage
        start = len(self.tokens)
        request = ask(
            list(self.tokens),
            episode=self.number,
            group=self.number // 2,
            seed=self.number,
            max_tokens=TURN_TOKENS,
            lineage=lineage,
        )
        got, filled_at = Got(), -1
        async for chunk in engine.generate(request):
            if chunk.admissions:  # alone: the engine was paused between filling the context and the first token
                filled_at = chunk.spans[0][0] if chunk.tokens else engine.version
            got.add(chunk)
        assert got.finish is FinishReason.LENGTH and len(got.admissions) == 1
        (admission,) = got.admissions
        known = self.computed[: admission.cached]
        known += [got.kv_versions[0]] * (admission.cached - len(known))  # a group-mate's, all of the lineage
        # from the first sampled token on, each token's KV is computed as the next one is sampled
        self.computed = known + [filled_at] * admission.prefilled + got.versions
        self.tokens += got.tokens
        self.turns.append((list(self.computed), list(self.tokens), start, got.logprobs))
        self.tokens += prompt(300 + start, 5)
        self.lineage = got.kv_versions[-1]
        self._grown()

    async def play(self, engine: Engine) -> None:
        for _ in range(TURNS):
            await self.turn(engine)

    def check(self, harness: Harness) -> None:
        """Against a reference that computes each position under the version that computed it in the engine."""
        for computed, tokens, start, logprobs in self.turns:
            runs = [(harness.reference(version), len(list(run))) for version, run in itertools.groupby(computed)]
            close(logprobs, reference_kept(runs, tokens, start))


class ManyUpdates:
    """The tests; a test module gives the fixture `harness`."""

    @pytest.mark.parametrize("updates", UPDATES)
    async def test_kept_kv_is_what_every_token_was_sampled_on(self, updates: int, harness: Harness) -> None:
        """F24, F41: updates under load; turns find the KV of earlier ones, whatever version computed it."""
        engine = await harness.engine()
        turned = asyncio.Semaphore(0)
        episodes = [Episode(number, turned.release) for number in range(3 * updates // TURNS + 6)]
        async with asyncio.timeout(DEADLINE + updates):
            plays = [asyncio.ensure_future(episode.play(engine)) for episode in episodes]
            for version in range(1, updates + 1):
                for _ in range(3):
                    await turned.acquire()
                epoch = harness.epoch()
                await engine.pause(PauseMode.FREEZE, epoch)
                await engine.load(version, harness.staged(version))
                await engine.resume(epoch)
            await asyncio.gather(*plays)
        for episode in episodes:
            episode.check(harness)
        assert sum(len(set(computed)) > 1 for episode in episodes for computed, *_ in episode.turns) >= 2 * updates
