"""The embedded engine beyond the contract: single steps, who displaces whom, and what all that costs. Deterministic: the work
runs on the loop, step by step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from engine_contract import Consumer, Got, ask, close, run
from engine_models import Staged, named, prompt, reference_logprobs, save, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollout.embedded import EmbeddedEngine
from segue.clock import Compute, LogicalCompute, LogicalLoop, now
from segue.errors import UserError
from segue.ports.engine import Admission, EngineCounts, EngineDead, FinishReason, PauseMode

T = TypeVar("T")
torch.set_num_threads(1)


@cache
def model_of(version: int) -> Any:
    return tiny(version)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(model_of(0), tmp_path_factory.mktemp("engine"))


async def started(folder: str, compute: Compute | None = None, version: int = 0, **options: Any) -> EmbeddedEngine:
    settings: dict[str, Any] = {"slots": 4, "max_tokens": 128, "dtype": "float32", "device": "cpu", "chunk_tokens": 1}
    engine = EmbeddedEngine(folder, compute=compute or LogicalCompute(), **{**settings, **options})
    await engine.start()
    await load(engine, version, epoch=1)
    return engine


async def load(engine: EmbeddedEngine, version: int, epoch: int, mode: PauseMode = PauseMode.ABORT) -> None:
    await engine.pause(mode, epoch)
    await engine.load(version, Staged(version, named(model_of(version))))
    await engine.resume(epoch)


def check(got: Got, context: list[int], version: int = 0) -> None:
    close(got.logprobs, reference_logprobs(model_of(version), context + got.tokens, len(context)))


def logically(scene: Coroutine[Any, Any, T]) -> T:
    """The result of a scene on a logical clock, which leaves nothing behind."""
    loop = LogicalLoop()
    try:
        return loop.run_until_complete(scene)
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks))
        loop.close()


# --- F26: a split request is the unsplit one -------------------------------------------------------------------------------


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 30),  # context
        st.integers(1, 20),  # new tokens
        st.sampled_from([0.0, 0.8, 1.0]),
        st.integers(0, 2),  # priority
        st.integers(0, 3),  # stop token, often never sampled
    ),
    min_size=1,
    max_size=6,
)
PAUSES = st.lists(st.tuples(st.integers(0, 12), st.sampled_from(PauseMode), st.booleans()), max_size=5)


@settings(max_examples=10, deadline=None)
@given(requests=REQUESTS, pauses=PAUSES, slots=st.integers(1, 3), idle_slots=st.sampled_from([0, 0, 2]), chunk=st.integers(1, 5))
def test_however_often_it_is_interrupted_the_result_is_the_same(
    folder: str, requests: list[Any], pauses: list[Any], slots: int, idle_slots: int, chunk: int
) -> None:
    """Pauses of both kinds at any step, more requests than slots, displacement by priority: tokens equal those of each request
    alone and uninterrupted, and everything recorded about them is theirs. Loading equal weights under a new version may move
    versions only."""

    async def scene() -> tuple[list[Got], list[Got], EngineCounts]:
        engine = await started(folder, slots=slots, idle_slots=idle_slots, chunk_tokens=chunk)
        alone = [
            await run(engine, ask(prompt(i, n), max_tokens=m, temperature=t, seed=i, stop_tokens=(s,)))
            for i, (n, m, t, _, s) in enumerate(requests)
        ]

        async def episode(i: int) -> Got:
            n, m, t, p, s = requests[i]
            whole = Got()
            while True:
                request = ask(
                    prompt(i, n) + whole.tokens,
                    max_tokens=m - len(whole.tokens),
                    temperature=t,
                    seed=i,
                    offset=len(whole.tokens),
                    priority=p,
                    episode=i,
                    stop_tokens=(s,),
                    lineage=engine.version,
                )
                part = await run(engine, request)
                for field in ("tokens", "logprobs", "versions", "kv_versions", "admissions"):
                    getattr(whole, field).extend(getattr(part, field))
                whole.finish = part.finish
                if part.finish != FinishReason.PAUSED:
                    return whole

        tasks = [asyncio.ensure_future(episode(i)) for i in range(len(requests))]
        for epoch, (steps, mode, swap) in enumerate(pauses, start=2):
            for _ in range(steps):
                await asyncio.sleep(0)
            await engine.pause(mode, epoch)
            decoded = engine.counts().decode_tokens
            if swap:
                await engine.load(engine.version + 1, Staged(engine.version + 1, named(model_of(0))))
            await asyncio.sleep(0)
            assert engine.counts().decode_tokens == decoded
            await engine.resume(epoch)
        results = list(await asyncio.gather(*tasks))
        await engine.stop()
        return alone, results, engine.counts()

    expected, results, counts = logically(scene())
    for got, alone in zip(results, expected, strict=True):
        assert got.tokens == alone.tokens and got.finish == alone.finish
        assert len(got.versions) == len(got.kv_versions) == len(got.tokens)
        assert got.versions == sorted(got.versions)
        assert all(kv <= v for kv, v in zip(got.kv_versions, got.versions, strict=True))
        close(got.logprobs, alone.logprobs)
    both = [*expected, *results]
    assert counts.prefill_tokens == sum(a.prefilled for got in both for a in got.admissions)
    assert counts.cached_tokens == sum(a.cached for got in both for a in got.admissions)
    assert counts.decode_tokens == sum(len(got.tokens) for got in both)


# --- priorities, eviction, groups ------------------------------------------------------------------------------------------


async def test_an_older_group_displaces_a_decoding_request_which_comes_back(folder: str) -> None:
    engine = await started(folder, slots=1)
    alone = await run(engine, ask(prompt(2, 9), max_tokens=30, seed=2))
    young = Consumer(engine, ask(prompt(2, 9), max_tokens=30, seed=2, priority=5, episode=2))
    await young.got.at_least(10)
    old = Consumer(engine, ask(prompt(3, 9), max_tokens=10, seed=3, priority=1, episode=3))
    await old.task
    n = len(young.got.tokens)
    assert 10 <= n < 20, "it went on decoding beside an older group in its only slot"
    got = await young.task
    assert got.tokens == alone.tokens and got.finish == FinishReason.LENGTH
    close(got.logprobs, alone.logprobs)
    _, second = got.admissions
    assert second == Admission(context=9 + n - 1, cached=0, prefilled=9 + n - 1, lost="preemption")
    assert (engine.counts().preemptions, engine.counts().evictions) == (1, 2)
    check(old.got, prompt(3, 9))


async def test_a_displaced_request_is_recomputed_under_the_weights_of_the_day(folder: str) -> None:
    """Under `keep` its KV would have gone on; lost, it is that of the version now loaded, and the chunk says so."""
    engine = await started(folder, slots=1)
    young = Consumer(engine, ask(prompt(2, 9), max_tokens=30, seed=2, priority=5, episode=2))
    await young.got.at_least(10)
    old = Consumer(engine, ask(prompt(3, 9), max_tokens=40, seed=3, priority=1, episode=3))
    await old.got.at_least(3)
    await load(engine, 1, epoch=2, mode=PauseMode.FREEZE)
    got = await young.task
    n = got.versions.count(0)
    assert got.versions == got.kv_versions == [0] * n + [1] * (30 - n)
    assert [a.lost for a in got.admissions] == ["", "preemption"]
    close(got.logprobs[n:], reference_logprobs(model_of(1), prompt(2, 9) + got.tokens, 9 + n))


async def test_tokens_sampled_on_kept_kv_are_told_apart_from_those_after_the_kv_was_lost(folder: str) -> None:
    """Displaced in the middle of a chunk: what it had sampled goes out with the lineage it was sampled on."""
    engine = await started(folder, slots=1, chunk_tokens=16)
    young = Consumer(engine, ask(prompt(2, 9), max_tokens=60, seed=2, priority=5, episode=2))
    await young.got.at_least(16)
    await load(engine, 1, epoch=2, mode=PauseMode.FREEZE)
    before = engine.counts().decode_tokens
    while (sampled := engine.counts().decode_tokens - before) % 16 < 4:  # noqa: ASYNC110 — every turn of the loop is a step
        await asyncio.sleep(0)
    await run(engine, ask(prompt(3, 9), max_tokens=5, seed=3, priority=1, episode=3, lineage=1))
    got = await young.task
    old = got.kv_versions.count(0)
    assert got.versions.count(0) + sampled <= old < 60 and got.kv_versions == [0] * old + [1] * (60 - old)
    assert [a.lost for a in got.admissions] == ["", "preemption"]
    close(got.logprobs[old:], reference_logprobs(model_of(1), prompt(2, 9) + got.tokens, 9 + old))


async def test_more_episodes_than_slots_lose_their_kv_and_know_why(folder: str) -> None:
    engine = await started(folder, slots=2)
    contexts = {e: prompt(e, 20 + e) for e in range(4)}
    for e, context in contexts.items():
        got = await run(engine, ask(context, episode=e))
        contexts[e] = context + got.tokens + [1, 2]
    assert engine.counts().evictions == 2
    kept = await run(engine, ask(contexts[3], episode=3))
    assert kept.admissions[0] == Admission(context=36, cached=34, prefilled=2)
    lost = await run(engine, ask(contexts[0], episode=0))
    assert lost.admissions[0] == Admission(context=33, cached=0, prefilled=33, lost="eviction")
    check(lost, contexts[0])


async def test_a_group_computes_its_prompt_once(folder: str) -> None:
    engine = await started(folder, slots=4)
    context = prompt(1, 40)
    members = await asyncio.gather(*[run(engine, ask(context, group=1, seed=i, max_tokens=20)) for i in range(6)])
    assert sorted(a.cached for got in members for a in got.admissions) == [0, 39, 39, 39, 39, 39]
    assert engine.counts().prefill_tokens == 39
    assert len({tuple(got.tokens) for got in members}) == 6
    for got in members:
        check(got, context)


async def test_after_an_update_a_group_computes_its_prompt_once_again(folder: str) -> None:
    engine = await started(folder, slots=4)
    context = prompt(1, 40)
    await asyncio.gather(*[run(engine, ask(context, episode=i, seed=i)) for i in range(3)])
    await load(engine, 1, epoch=2)
    before = engine.counts().prefill_tokens
    members = await asyncio.gather(*[run(engine, ask(context, episode=i, seed=i, lineage=1)) for i in range(3)])
    assert engine.counts().prefill_tokens - before == 39
    assert [a.lost for got in members for a in got.admissions] == ["weight_update"] * 3
    for got in members:
        check(got, context, 1)


async def test_kept_lineages_are_never_shared(folder: str) -> None:
    engine = await started(folder)
    context = prompt(1, 40)
    await run(engine, ask(context, episode=1))
    await load(engine, 1, epoch=2, mode=PauseMode.FREEZE)
    mate = await run(engine, ask(context, episode=2, lineage=0))
    assert mate.admissions[0].cached == 0 and set(mate.kv_versions) == {1}
    check(mate, context, 1)


async def test_rows_that_move_together_keep_their_kv(folder: str) -> None:
    """Most sequences end early, so the rest are moved; one sits where another episode's KV waits, which moves too."""
    engine = await started(folder, slots=8)
    requests = [ask(prompt(i, 10 + i), max_tokens=40 if i >= 6 else 3 + i, seed=i, episode=i) for i in range(8)]
    answers = await asyncio.gather(*[run(engine, r) for r in requests])
    for request, got in zip(requests, answers, strict=True):
        check(got, request.tokens)
    turn = requests[0].tokens + answers[0].tokens + [5]
    got = await run(engine, ask(turn, episode=0))
    assert got.admissions[0].prefilled == 1
    check(got, turn)


async def test_a_waiting_episodes_kv_survives_among_rows_that_decode(folder: str) -> None:
    """One hole among eight rows is stepped over, not moved: nothing may be written where the episode's KV waits."""
    engine = await started(folder, slots=9)
    requests = [ask(prompt(i, 10 + i), max_tokens=30 if i else 3, seed=i, episode=i) for i in range(9)]
    answers = await asyncio.gather(*[run(engine, r) for r in requests])
    turn = requests[0].tokens + answers[0].tokens + [5]
    got = await run(engine, ask(turn, episode=0))
    assert got.admissions[0].prefilled == 1
    check(got, turn)


async def test_kv_that_an_update_left_behind_makes_room_first(folder: str) -> None:
    """Unless kept on purpose: then an episode of the older lineage comes back for it."""
    for mode, evictions in ((PauseMode.ABORT, 0), (PauseMode.FREEZE, 1)):
        engine = await started(folder, slots=2)
        await run(engine, ask(prompt(1, 20), episode=1))
        await load(engine, 1, epoch=2, mode=mode)
        for episode in (2, 3):
            await run(engine, ask(prompt(episode, 20), episode=episode, lineage=1))
        assert engine.counts().evictions == evictions


# --- stop strings ----------------------------------------------------------------------------------------------------------


def letters() -> Any:
    """One letter per token, so that a string has many."""
    vocabulary = {chr(33 + i): i for i in range(61)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


async def test_a_stop_string_ends_the_turn_with_the_token_that_completes_it(folder: str) -> None:
    engine = await started(folder, tokenizer=letters())
    free = await run(engine, ask(prompt(5, 10), max_tokens=30, seed=11))
    text = "".join(chr(33 + t) for t in free.tokens)
    stop = text[12:15]
    at = text.index(stop) + 3
    got = await run(engine, ask(prompt(5, 10), max_tokens=30, seed=11, stop_strings=(stop, "never there")))
    assert got.finish == FinishReason.STOP and got.tokens == free.tokens[:at]
    for n in (at - 1, at - 2):  # split inside the string
        rest = await run(
            engine,
            ask(prompt(5, 10) + free.tokens[:n], max_tokens=30 - n, seed=11, offset=n, stop_strings=(stop, "never there")),
        )
        assert rest.finish == FinishReason.STOP and rest.tokens == free.tokens[n:at]


async def test_stop_strings_without_a_tokenizer_are_a_sentence(folder: str) -> None:
    engine = await started(folder)
    with pytest.raises(UserError, match="no tokenizer"):
        await run(engine, ask([1, 2], stop_strings=("x",)))


# --- the edges of the front ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_tokens": 119}, "a slot holds 128"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 1e-30}, "greedy"),
        ({"tokens": [0, 61]}, "vocabulary of 61"),
        ({"tokens": [-1]}, "vocabulary"),
        ({"stop_strings": ("",)}, "empty stop string"),
    ],
)
async def test_requests_that_cannot_be_served_are_a_sentence(folder: str, options: dict[str, Any], words: str) -> None:
    engine = await started(folder, tokenizer=letters())
    tokens = options.pop("tokens", prompt(1, 10))
    with pytest.raises(UserError, match=words):
        await run(engine, ask(tokens, **options))
    assert engine.counts().waiting == 0


async def test_the_last_token_that_fits_is_sampled(folder: str) -> None:
    engine = await started(folder)
    got = await run(engine, ask(prompt(1, 10), max_tokens=118))
    assert len(got.tokens) == 118
    check(got, prompt(1, 10))


async def test_an_id_in_use_is_refused_and_its_owner_goes_on(folder: str) -> None:
    engine = await started(folder)
    first = Consumer(engine, ask(prompt(1, 9), id="same"))
    await first.got.at_least(1)
    with pytest.raises(UserError, match="same is already in use"):
        await run(engine, ask(prompt(2, 9), id="same"))
    assert (await first.task).finish == FinishReason.LENGTH


async def test_what_a_cancelled_consumer_cost_is_counted_and_nothing_of_it_is_left(folder: str) -> None:
    engine = await started(folder, slots=1, chunk_tokens=100)
    consumer = Consumer(engine, ask(prompt(1, 30), max_tokens=50, episode=4))
    for _ in range(4):
        await asyncio.sleep(0)
    assert engine.counts().prefill_tokens == 29
    consumer.task.cancel()
    await asyncio.wait([consumer.task])
    again = await run(engine, ask(prompt(1, 30), episode=4))
    assert again.admissions[0].cached == 0, "a cancelled request leaves nothing behind"


async def test_a_forgotten_running_episode_frees_its_slot_when_it_ends(folder: str) -> None:
    engine = await started(folder)
    consumer = Consumer(engine, ask(prompt(1, 30), episode=4))
    await consumer.got.at_least(2)
    engine.forget(4)
    assert (await consumer.task).finish == FinishReason.LENGTH
    assert (await run(engine, ask(prompt(1, 30), episode=4))).admissions[0].cached == 0


async def test_a_later_pause_may_end_what_an_earlier_one_froze(folder: str) -> None:
    """Update by `turn`: frozen while turns drain, ended when the deadline comes."""
    engine = await started(folder)
    consumer = Consumer(engine, ask(prompt(1, 9), max_tokens=50))
    await consumer.got.at_least(3)
    await engine.pause(PauseMode.FREEZE, 2)
    await engine.pause(PauseMode.ABORT, 3)
    got = await consumer.task
    assert got.finish == FinishReason.PAUSED and len(got.tokens) >= 3
    await engine.resume(2)
    assert engine.stale_controls == 1
    await engine.resume(3)
    assert (await run(engine, ask(prompt(1, 9)))).finish == FinishReason.LENGTH


async def test_version_ids_are_never_used_again(folder: str) -> None:
    engine = await started(folder, version=5)
    await engine.pause(PauseMode.ABORT, 2)
    with pytest.raises(ValueError, match="never reused"):
        await engine.load(4, Staged(4, named(model_of(4))))
    with pytest.raises(ValueError, match="never reused"):
        await engine.load(-1, Staged(-1, named(model_of(4))))


async def test_weights_are_loaded_only_while_paused(folder: str) -> None:
    engine = await started(folder)
    with pytest.raises(AssertionError, match="paused"):
        await engine.load(1, Staged(1, named(model_of(1))))


async def test_sequences_are_scored_only_while_paused(folder: str) -> None:
    engine = await started(folder)
    with pytest.raises(AssertionError, match="paused"):
        await engine.score([1, 2])


async def test_nothing_resumes_an_engine_that_scores(folder: str) -> None:
    compute = SlowCompute()
    engine = await started(folder, compute)
    await engine.pause(PauseMode.ABORT, 2)
    compute.held.clear()
    scoring = asyncio.ensure_future(engine.score(prompt(1, 9)))
    await asyncio.sleep(0)
    with pytest.raises(AssertionError, match="scored"):
        await engine.resume(2)
    compute.held.set()
    close(await scoring, reference_logprobs(model_of(0), prompt(1, 9), 1))
    await engine.resume(2)


async def test_weights_that_are_no_numbers_kill_the_engine(folder: str) -> None:
    """F34: better dead than a log-probability that is none."""
    engine = await started(folder)
    await engine.pause(PauseMode.ABORT, 2)
    tensors = {name: tensor.clone() for name, tensor in named(model_of(1)).items()}
    tensors["model.norm.weight"][0] = float("nan")
    await engine.load(1, Staged(1, tensors))
    await engine.resume(2)
    with pytest.raises(EngineDead, match="version 1 give log-probabilities that are no numbers"):
        await run(engine, ask(prompt(1, 9), lineage=1))


class SlowCompute(LogicalCompute):
    """Each call takes a while of real turns of the loop, and says that it began."""

    def __init__(self) -> None:
        super().__init__()
        self.began = asyncio.Event()
        self.held = asyncio.Event()
        self.held.set()

    async def run(self, work: Callable[[], T], cost: float) -> T:
        self.began.set()
        await self.held.wait()
        return await super().run(work, cost)


async def test_a_load_that_is_cancelled_half_way_kills_the_engine(folder: str) -> None:
    """F39: nobody can tell any more which weights are in it."""
    compute = SlowCompute()
    engine = await started(folder, compute)
    await engine.pause(PauseMode.ABORT, 2)
    loading = asyncio.ensure_future(engine.load(1, Staged(1, named(model_of(1)))))
    for _ in range(2):  # the check, then the copy
        compute.began.clear()
        await compute.began.wait()
    compute.held.clear()
    loading.cancel()
    await asyncio.wait([loading])
    assert loading.cancelled() and engine.version == 0
    with pytest.raises(EngineDead, match="version 1 ended half way"):
        await engine.resume(2)


async def test_a_pause_ends_requests_whose_stop_strings_are_still_being_sifted(folder: str) -> None:
    """F19: submitted is submitted; otherwise it would go on later, asking for the lineage of before the update."""
    compute = SlowCompute()
    engine = await started(folder, compute, tokenizer=letters())
    compute.held.clear()
    consumer = Consumer(engine, ask(prompt(1, 9), stop_strings=("abc",)))
    await asyncio.sleep(0)
    await engine.pause(PauseMode.ABORT, 2)
    compute.held.set()
    got = await consumer.task
    assert got.finish == FinishReason.PAUSED and not got.tokens
    await engine.resume(2)
    assert (await run(engine, ask(prompt(1, 9), stop_strings=("abc",)))).finish == FinishReason.LENGTH


class StuckCompute(LogicalCompute):
    """Stands still once told to."""

    stuck = False

    async def run(self, work: Callable[[], T], cost: float) -> T:
        if self.stuck:
            await asyncio.get_running_loop().create_future()
        return await super().run(work, cost)


def test_a_step_past_its_deadline_kills_the_engine(folder: str) -> None:
    async def scene() -> float:
        compute = StuckCompute()
        engine = await started(folder, compute, step_seconds=30.0, decode_cost=1.0)
        consumer = Consumer(engine, ask(prompt(1, 9), max_tokens=50))
        await consumer.got.at_least(40)  # many deadlines' worth of steps, each well within its own
        compute.stuck = True
        begun = now()
        with pytest.raises(EngineDead, match="longer than 30 s"):
            await consumer.task
        with pytest.raises(EngineDead):
            await engine.pause(PauseMode.ABORT, 9)
        return now() - begun

    assert 29.0 <= logically(scene()) <= 31.0


def test_a_score_past_its_deadline_kills_the_engine(folder: str) -> None:
    async def scene() -> None:
        compute = StuckCompute()
        engine = await started(folder, compute, step_seconds=30.0)
        await engine.pause(PauseMode.ABORT, 2)
        compute.stuck = True
        scoring = asyncio.ensure_future(engine.score([1, 2]))
        await asyncio.sleep(31.0)
        with pytest.raises(EngineDead, match="longer than 30 s"):
            await engine.resume(2)
        scoring.cancel()

    logically(scene())


def test_logical_seconds_are_those_of_the_costs(folder: str) -> None:
    """Serial mode: a step costs `decode_cost`, a prefilled token its own; an idle engine arms no timer."""

    async def scene() -> tuple[float, Any]:
        engine = await started(folder, decode_cost=0.5, prefill_cost_per_token=0.25)
        begun = now()
        await run(engine, ask(prompt(1, 9), max_tokens=6))
        took = now() - begun
        await asyncio.sleep(1000.0)
        await engine.pause(PauseMode.ABORT, 2)
        await engine.score(prompt(2, 9))
        return took, engine.counts()

    took, counts = logically(scene())
    assert took == 8 * 0.25 + 6 * 0.5
    score = 4 * 0.25 + 0.5  # half of its context is prefilled, and one pass scores all
    assert (counts.prefill_seconds, counts.decode_seconds, counts.busy_seconds) == (2.0, 3.0, 5.0 + score)


def test_two_logical_runs_are_equal(folder: str) -> None:
    async def scene() -> list[tuple[float, int, list[int]]]:
        engine = await started(folder, slots=2, decode_cost=0.01, prefill_cost_per_token=0.001)
        seen: list[tuple[float, int, list[int]]] = []

        async def one(i: int) -> None:
            await asyncio.sleep(0.003 * i)
            async for chunk in engine.generate(ask(prompt(i, 5 + i), priority=i % 3, seed=i, episode=i)):
                seen.append((now(), i, chunk.tokens))

        await asyncio.gather(*[one(i) for i in range(7)])
        return seen

    first, second = (logically(scene()) for _ in range(2))
    assert first == second


async def test_requests_that_arrive_one_by_one_are_let_in_together(folder: str) -> None:
    """While others decode, a lone newcomer waits for company, but not for ever."""
    engine = await started(folder, admit_batch=3, admit_steps=20)
    busy = Consumer(engine, ask(prompt(1, 9), max_tokens=100))
    await busy.got.at_least(2)
    lone = Consumer(engine, ask(prompt(2, 9), max_tokens=2))
    begun = len(busy.got.tokens)
    await lone.task
    assert 20 <= len(busy.got.tokens) - begun <= 28
    three = [Consumer(engine, ask(prompt(3 + i, 9), max_tokens=2)) for i in range(3)]
    begun = len(busy.got.tokens)
    await asyncio.gather(*[c.task for c in three])
    assert len(busy.got.tokens) - begun <= 8


async def test_chunks_come_in_pieces_of_the_asked_size(folder: str) -> None:
    engine = await started(folder, chunk_tokens=4)
    sizes = [len(chunk.tokens) async for chunk in engine.generate(ask(prompt(1, 9), max_tokens=10))]
    assert sizes == [4, 4, 2]


async def test_a_pause_hands_out_what_no_chunk_was_full_of(folder: str) -> None:
    engine = await started(folder, chunk_tokens=100)
    consumer = Consumer(engine, ask(prompt(1, 9), max_tokens=50))
    for _ in range(30):
        await asyncio.sleep(0)
    assert not consumer.got.tokens
    await engine.pause(PauseMode.FREEZE, 2)
    assert len(consumer.got.tokens) == engine.counts().decode_tokens >= 5
    await engine.pause(PauseMode.FREEZE, 1)  # late: neither waits nor changes anything
    await engine.resume(2)
    await engine.pause(PauseMode.ABORT, 2)
    assert not consumer.task.done() and engine.stale_controls == 2
    assert (await consumer.task).finish == FinishReason.LENGTH


async def test_a_folder_that_holds_no_model_is_a_sentence(tmp_path: Path) -> None:
    engine = EmbeddedEngine(str(tmp_path), slots=1, max_tokens=8, dtype="float32", device="cpu", compute=LogicalCompute())
    with pytest.raises(UserError, match="no model folder"):
        await engine.start()


@pytest.fixture(autouse=True)
async def _nothing_left_running() -> AsyncIterator[None]:
    yield
    for task in asyncio.all_tasks():
        if task.get_name() == "embedded-engine":
            task.cancel()
