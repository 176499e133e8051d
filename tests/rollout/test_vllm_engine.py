"""What the engine contract leaves open, on vLLM: stop strings, KV that is short, weights that fail half way."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator
from typing import Any

import chat_tokenizers as made
import pytest
import pytest_asyncio
from engine_contract import DEADLINE, Consumer, ask, close, run
from engine_models import prompt, reference_logprobs
from vllm_harness import Cores, VllmHarness

from segue.ports.engine import FinishReason, PauseMode

pytestmark = [
    pytest.mark.processes,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest_asyncio.fixture(loop_scope="session")
async def harness(cores: Cores) -> AsyncIterator[VllmHarness]:
    harness = VllmHarness(cores)
    yield harness
    await harness.close()


async def test_a_stop_string_ends_with_the_token_that_completes_it(harness: VllmHarness) -> None:
    """Over the border of two tokens too; what vLLM sampled beyond is nobody's, and the next request is as exact."""
    engine = await harness.engine(tokenizer=made.words())
    free = await run(engine, ask(prompt(400, 10), max_tokens=40, seed=2))
    sampled = len(free.tokens)
    for last in (0, 5, 23):
        text = made.words().decode(free.tokens[: last + 1])
        stop = text[-6:]
        first = next(n for n in range(1, 41) if stop in made.words().decode(free.tokens[:n]))
        got = await run(engine, ask(prompt(400, 10), max_tokens=40, seed=2, stop_strings=("never said", stop)))
        assert got.finish is FinishReason.STOP
        assert got.tokens == free.tokens[:first]
        sampled += len(got.tokens)
        close(got.logprobs, free.logprobs[:first])
    counts = engine.counts()
    assert counts.running == counts.waiting == 0
    assert counts.discarded_tokens == counts.decode_tokens - sampled, "what nobody got is counted"


async def test_consumers_that_are_gone_leave_tokens_that_are_counted(harness: VllmHarness) -> None:
    engine: Any = await harness.engine()
    async with asyncio.timeout(DEADLINE):
        consumers = [Consumer(engine, ask(prompt(405 + i, 9), max_tokens=100)) for i in range(3)]
        await asyncio.gather(*[consumer.got.at_least(3) for consumer in consumers])
        for consumer in consumers:
            consumer.task.cancel()
        await asyncio.wait([consumer.task for consumer in consumers])
        epoch = harness.epoch()
        await engine.pause(PauseMode.ABORT, epoch)
        counts = engine.counts()
        assert counts.decode_tokens == counts.discarded_tokens + sum(len(consumer.got.tokens) for consumer in consumers)
        await engine.resume(epoch)


async def test_requests_that_take_each_others_kv_lose_nothing_and_say_so(harness: VllmHarness) -> None:
    """F88: four contexts where two fit. Every token is right, each time a request got its slot back is told, and all adds up."""
    engine = await harness.engine(tied=True)
    requests = [ask(prompt(410 + i, 20), max_tokens=120, seed=i, episode=i, priority=i) for i in range(4)]
    async with asyncio.timeout(2 * DEADLINE):
        answers = await asyncio.gather(*[Consumer(engine, request).task for request in requests])
    for request, got in zip(requests, answers, strict=True):
        assert got.finish is FinishReason.LENGTH and len(got.tokens) == 120
        whole = request.tokens + got.tokens
        close(got.logprobs, reference_logprobs(harness.reference(0, True), whole, 20))
    again = [a for got in answers for a in got.admissions[1:]]
    counts = engine.counts()
    assert counts.preemptions == len(again) > 0 and all(a.lost == "preemption" for a in again)
    assert len(answers[0].admissions) == 1, "the first in order keeps its slot"
    everything = [a for got in answers for a in got.admissions]
    assert sum(a.prefilled for a in everything) == counts.prefill_tokens
    assert sum(a.cached for a in everything) == counts.cached_tokens
    assert counts.decode_tokens == 4 * 120
    records = harness.records[engine]
    refilled = [a.prefilled + 1 for a in records.admitted if a.again]
    assert records.refilled == sum(refilled) > 0, "what vLLM itself says preempted requests had to fill anew"


class Filling:
    """Waits until vLLM is in the middle of a context: tokens were computed, and nothing was sampled."""

    def __init__(self, engine: Any, core: Any) -> None:
        self._engine, self._take = engine, core.on_step
        self._stepped = asyncio.Event()
        core.on_step = self._step

    def _step(self, step: Any) -> None:
        self._take(step)
        self._stepped.set()

    async def begun(self) -> None:
        before = self._engine.counts()
        while self._engine.counts().prefill_tokens == before.prefill_tokens:
            self._stepped.clear()
            await self._stepped.wait()


async def test_a_context_cut_short_counts_as_far_as_it_was_filled(harness: VllmHarness) -> None:
    """F88: an abort, a pause and an update in the middle of a long prefill, and a request that is frozen there and goes on."""
    engine: Any = await harness.engine(tied=True)
    filling = Filling(engine, await harness.cores.get(True))
    cut: list[int] = []
    async with asyncio.timeout(DEADLINE):
        aborted = Consumer(engine, ask(prompt(450, 190), max_tokens=3))
        await filling.begun()
        assert await engine.abort(aborted.request.id)
        paused = Consumer(engine, ask(prompt(451, 190), max_tokens=3, episode=7))
        cut += [a.prefilled for a in (await aborted.task).admissions]
        await filling.begun()
        epoch = harness.epoch()
        await engine.pause(PauseMode.ABORT, epoch)
        got = await paused.task
        assert got.finish is FinishReason.PAUSED
        cut += [a.prefilled for a in got.admissions]
        await engine.load(1, harness.staged(1, True))
        frozen = Consumer(engine, ask(prompt(451, 190), max_tokens=3, episode=7, lineage=1))
        await engine.resume(epoch)
        await filling.begun()
        epoch = harness.epoch()
        await engine.pause(PauseMode.FREEZE, epoch)
        await engine.load(2, harness.staged(2, True))
        await engine.resume(epoch)
        whole = await frozen.task
    assert all(0 < n <= 189 for n in cut)
    assert any(n < 189 for n in cut), "one at least was cut in the middle (a slow machine hears of the step after it is over)"
    (admission,) = whole.admissions
    assert (admission.context, admission.cached, admission.lost) == (189, 0, "weight_update" if len(cut) > 1 else "")
    assert engine.counts().prefill_tokens == sum(cut) + 189


async def test_kv_that_was_evicted_is_missed(harness: VllmHarness) -> None:
    engine = await harness.engine(tied=True)
    context = prompt(420, 70)
    first = await run(engine, ask(context, episode=1))
    for other in range(5):
        await run(engine, ask(prompt(430 + other, 100), max_tokens=30))
    turn = context + first.tokens + prompt(421, 6)
    second = await run(engine, ask(turn, episode=1))
    (admission,) = second.admissions
    assert admission.lost == "eviction" and admission.cached < 64 and engine.counts().evictions == 1
    close(second.logprobs, reference_logprobs(harness.reference(0, True), turn + second.tokens, len(turn)))


async def test_an_abort_while_a_sequence_is_scored_waits_for_that(harness: VllmHarness) -> None:
    engine: Any = await harness.engine()
    async with asyncio.timeout(DEADLINE):
        consumers = [Consumer(engine, ask(prompt(440 + i, 9), max_tokens=100)) for i in range(2)]
        await asyncio.gather(*[consumer.got.at_least(2) for consumer in consumers])
        epoch = harness.epoch()
        await engine.pause(PauseMode.FREEZE, epoch)
        scored = asyncio.ensure_future(engine.score(prompt(445, 90)))
        await asyncio.sleep(0)
        assert await engine.abort(consumers[0].request.id)
        close(await scored, reference_logprobs(harness.reference(0), prompt(445, 90), 1))
        assert (await consumers[0].task).finish is FinishReason.ABORTED
        await engine.resume(epoch)
        assert len((await consumers[1].task).tokens) == 100
