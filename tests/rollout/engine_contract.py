"""What every engine must do, whatever runs inside: one suite, run against each engine through a `Harness`.

A test module derives a class from `EngineContract` and gives it a fixture `harness`. Nothing here looks behind the port.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol

import msgspec
import pytest
from engine_models import prompt, reference_kept, reference_logprobs

from segue.ports.engine import Admission, Chunk, Engine, EngineDead, FinishReason, GenerateRequest, PauseMode
from segue.ports.weights import StagedWeights

TOLERANCE = 1e-4
DEADLINE = 60.0


class Harness(Protocol):
    """One engine under test, and the truth about its models. Versions 0, 1, 2, … are different weights of one architecture."""

    block: int
    """KV is found again in whole blocks of so many tokens."""

    async def engine(self, *, slots: int = 4, tied: bool = False, version: int | None = 0) -> Engine:
        """Started, holding at least 128 tokens per sequence, with `version` loaded and resumed (None: nothing loaded)."""
        ...

    def epoch(self) -> int:
        """A new epoch for a pause."""
        ...

    def reference(self, version: int, tied: bool = False) -> Any:
        """The float32 model of a version."""
        ...

    def staged(self, version: int, tied: bool = False) -> StagedWeights: ...

    def misfits(self, version: int) -> list[tuple[str, StagedWeights]]:
        """Weights that do not fit, and what the engine's sentence must contain."""
        ...

    async def break_down(self, engine: Engine) -> None:
        """Let the engine's worker die."""
        ...


class Got:
    """Everything a consumer got of one request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.kv_versions: list[int] = []
        self.admissions: list[Admission] = []
        self.finish: FinishReason | None = None
        self._grown = asyncio.Event()

    def add(self, chunk: Chunk) -> None:
        assert self.finish is None, "a chunk after the last one"
        assert len(chunk.tokens) == len(chunk.logprobs) == sum(n for _, n in chunk.spans)
        self.tokens += chunk.tokens
        self.logprobs += chunk.logprobs
        self.versions += [version for version, n in chunk.spans for _ in range(n)]
        self.kv_versions += [chunk.kv_version] * len(chunk.tokens)
        self.admissions += chunk.admissions
        self.finish = chunk.finish
        self._grown.set()

    async def at_least(self, count: int) -> None:
        """Wait until it has so many tokens, or is complete."""
        while len(self.tokens) < count and self.finish is None:
            self._grown.clear()
            await self._grown.wait()


class Consumer:
    """A task that reads one request's chunks."""

    def __init__(self, engine: Engine, request: GenerateRequest) -> None:
        self.request = request
        self.got = Got()
        self._stream: AsyncIterator[Chunk] = engine.generate(request)
        self.task = asyncio.ensure_future(self._read())

    async def _read(self) -> Got:
        async for chunk in self._stream:
            self.got.add(chunk)
        assert self.got.finish is not None
        return self.got


_ids = iter(range(10**9))


def ask(tokens: list[int], **options: Any) -> GenerateRequest:
    """A request with plain defaults; every one is its own episode unless it says otherwise."""
    number = next(_ids)
    fields: dict[str, Any] = {
        "id": f"r{number}",
        "max_tokens": 12,
        "temperature": 1.0,
        "stop_tokens": (),
        "stop_strings": (),
        "seed": 5,
        "offset": 0,
        "priority": 0,
        "episode": 100_000 + number,
        "group": 100_000 + number,
        "lineage": 0,
    }
    return GenerateRequest(tokens=tokens, **{**fields, **options})


async def run(engine: Engine, request: GenerateRequest) -> Got:
    """The whole answer to one request."""
    async with asyncio.timeout(DEADLINE):
        return await Consumer(engine, request).task


def close(actual: list[float], expected: list[float]) -> None:
    assert len(actual) == len(expected)
    assert actual == pytest.approx(expected, abs=TOLERANCE, rel=0)


async def update(harness: Harness, engine: Engine, version: int, mode: PauseMode = PauseMode.ABORT, tied: bool = False) -> None:
    """Pause, load, resume."""
    epoch = harness.epoch()
    await engine.pause(mode, epoch)
    await engine.load(version, harness.staged(version, tied))
    await engine.resume(epoch)


class EngineContract:
    """The tests. Numbers in brackets: the scenarios of the engine's reference page and of the fault list."""

    # --- log-probabilities and versions -----------------------------------------------------------------------------

    @pytest.mark.parametrize("tied", [False, True])
    async def test_logprobs_are_of_the_distribution_sampled_from_after_every_update(self, harness: Harness, tied: bool) -> None:
        """F16, F37: at temperatures other than 1, and with tied embeddings, at start and after each of three updates."""
        engine = await harness.engine(tied=tied)
        for version in range(4):
            if version:
                await update(harness, engine, version, tied=tied)
            model = harness.reference(version, tied)
            requests = [ask(prompt(i, 9 + i), temperature=t, lineage=version) for i, t in enumerate((1.0, 0.7, 0.0, 1.6))]
            for request, got in zip(requests, await asyncio.gather(*[run(engine, r) for r in requests]), strict=True):
                assert got.finish == FinishReason.LENGTH
                assert got.versions == got.kv_versions == [version] * 12
                whole = request.tokens + got.tokens
                close(got.logprobs, reference_logprobs(model, whole, len(request.tokens), request.temperature))

    async def test_greedy_takes_the_likeliest_token(self, harness: Harness) -> None:
        engine = await harness.engine()
        request = ask(prompt(1, 10), temperature=0.0)
        got = await run(engine, request)
        tokens = list(request.tokens)
        for token, logprob in zip(got.tokens, got.logprobs, strict=True):
            others = [reference_logprobs(harness.reference(0), [*tokens, t], len(tokens))[0] for t in range(5)]
            assert logprob >= max(others) - TOLERANCE
            tokens.append(token)

    async def test_no_stale_kv_after_an_update(self, harness: Harness) -> None:
        """F41, F44: the same prompt before and after, the next turn of an episode, and a request that arrived in the pause."""
        engine = await harness.engine()
        tokens = prompt(2, 64)
        first = await run(engine, ask(tokens, episode=1))
        epoch = harness.epoch()
        await engine.pause(PauseMode.ABORT, epoch)
        early = Consumer(engine, ask(tokens, lineage=1))
        await engine.load(1, harness.staged(1))
        await engine.resume(epoch)
        turn = tokens + first.tokens + prompt(3, 5)
        async with asyncio.timeout(DEADLINE):
            answers = [
                (tokens, await early.task),
                (tokens, await run(engine, ask(tokens, lineage=1))),
                (turn, await run(engine, ask(turn, episode=1, lineage=1))),
            ]
        for context, got in answers:
            assert set(got.versions) == set(got.kv_versions) == {1}
            close(got.logprobs, reference_logprobs(harness.reference(1), context + got.tokens, len(context)))
        assert answers[2][1].admissions[0].lost == "weight_update"

    async def test_kept_kv_goes_on_under_new_weights_and_says_so(self, harness: Harness) -> None:
        """F24: N in flight before an in-place update, N go on after; every token is judged by the weights it is stamped with."""
        engine = await harness.engine()
        consumers = [Consumer(engine, ask(prompt(10 + i, 8 + i), max_tokens=60, episode=i)) for i in range(3)]
        async with asyncio.timeout(DEADLINE):
            await asyncio.gather(*[c.got.at_least(3) for c in consumers])
            before = engine.counts()
            await update(harness, engine, 1, PauseMode.FREEZE)
            for consumer in consumers:
                await consumer.task
        assert engine.counts().prefill_tokens == before.prefill_tokens
        for consumer in consumers:
            got, context = consumer.got, consumer.request.tokens
            assert got.finish == FinishReason.LENGTH and len(got.tokens) == 60
            assert len(got.admissions) == 1
            old = got.versions.count(0)
            assert 3 <= old < 60 and got.versions == [0] * old + [1] * (60 - old)
            assert set(got.kv_versions) == {0}
            whole = context + got.tokens
            kept = reference_kept(
                [(harness.reference(0), len(context) - 1 + old), (harness.reference(1), 60 - old)], whole, len(context)
            )
            close(got.logprobs, kept)

    async def test_kept_kv_goes_on_across_turns(self, harness: Harness) -> None:
        """`keep`: the next turn asks for its lineage and gets the old KV; an episode of the new version never does."""
        engine = await harness.engine()
        context = prompt(20, 64)
        first = await run(engine, ask(context, episode=1, max_tokens=33))
        await update(harness, engine, 1, PauseMode.FREEZE)
        turn = context + first.tokens + prompt(21, 6)
        second = await run(engine, ask(turn, episode=1, lineage=0))
        assert set(second.versions) == {1} and set(second.kv_versions) == {0}
        cached = second.admissions[0].cached
        assert cached > 64 and second.admissions[0].lost == ""
        kept = [(harness.reference(0), cached), (harness.reference(1), len(turn) + len(second.tokens) - cached)]
        close(second.logprobs, reference_kept(kept, turn + second.tokens, len(turn)))
        fresh = await run(engine, ask(turn, lineage=1))
        assert fresh.admissions[0].cached == 0 and set(fresh.kv_versions) == {1}
        close(fresh.logprobs, reference_logprobs(harness.reference(1), turn + fresh.tokens, len(turn)))

    async def test_recomputed_requests_go_on_under_new_weights(self, harness: Harness) -> None:
        """`recompute`: what was sampled is kept; the rest is sampled on fresh KV, and each part is of its own version."""
        engine = await harness.engine()
        context = prompt(30, 11)
        consumer = Consumer(engine, ask(context, max_tokens=60, episode=1))
        async with asyncio.timeout(DEADLINE):
            await consumer.got.at_least(4)
            before = engine.counts().prefill_tokens
            await update(harness, engine, 1)
            part = await consumer.task
        assert part.finish == FinishReason.PAUSED and 4 <= len(part.tokens) < 60 and set(part.versions) == {0}
        close(part.logprobs, reference_logprobs(harness.reference(0), context + part.tokens, 11))
        n = len(part.tokens)
        rest = await run(engine, ask(context + part.tokens, max_tokens=60 - n, offset=n, episode=1, lineage=1))
        assert len(rest.tokens) == 60 - n and set(rest.versions) == set(rest.kv_versions) == {1}
        whole = context + part.tokens + rest.tokens
        close(rest.logprobs, reference_logprobs(harness.reference(1), whole, 11 + n))
        (admission,) = rest.admissions
        assert (admission.cached, admission.prefilled, admission.lost) == (0, 11 + n - 1, "weight_update")
        assert engine.counts().prefill_tokens - before == 11 + n - 1

    # --- sampling ---------------------------------------------------------------------------------------------------

    async def test_seeds_are_exact_in_any_company(self, harness: Harness) -> None:
        engine = await harness.engine(slots=4)
        request = ask(prompt(40, 10), max_tokens=24, seed=77)
        alone = await run(engine, request)
        others = [Consumer(engine, ask(prompt(50 + i, 5 + 9 * i), max_tokens=10 + 6 * i, seed=i)) for i in range(6)]
        again = await run(engine, ask(prompt(40, 10), max_tokens=24, seed=77))
        async with asyncio.timeout(DEADLINE):
            await asyncio.gather(*[o.task for o in others])
        assert again.tokens == alone.tokens
        close(again.logprobs, alone.logprobs)
        different = await run(engine, ask(prompt(40, 10), max_tokens=24, seed=78))
        assert different.tokens != alone.tokens

    async def test_an_offset_goes_on_with_the_noise(self, harness: Harness) -> None:
        """F18, F26: a request split at any token gives the same tokens as the whole one."""
        engine = await harness.engine()
        context = prompt(41, 10)
        whole = await run(engine, ask(context, max_tokens=16, seed=3))
        parts = [run(engine, ask(context + whole.tokens[:n], max_tokens=16 - n, seed=3, offset=n)) for n in range(1, 16)]
        for n, got in enumerate(await asyncio.gather(*parts), start=1):
            assert got.tokens == whole.tokens[n:], n
            close(got.logprobs, whole.logprobs[n:])

    # --- stops ------------------------------------------------------------------------------------------------------

    async def test_a_stop_token_ends_the_turn_and_is_kept(self, harness: Harness) -> None:
        engine = await harness.engine()
        request = ask(prompt(60, 10), max_tokens=20, seed=9)
        free = await run(engine, request)
        for at in (0, 7, 19):
            stop = free.tokens[at]
            first = free.tokens.index(stop)
            got = await run(engine, ask(prompt(60, 10), max_tokens=20, seed=9, stop_tokens=(stop, 999_999)))
            assert got.finish == FinishReason.STOP
            assert got.tokens == free.tokens[: first + 1]
            close(got.logprobs, free.logprobs[: first + 1])

    async def test_length_is_exact(self, harness: Harness) -> None:
        engine = await harness.engine()
        for limit in (1, 2, 17):
            got = await run(engine, ask(prompt(61, 5), max_tokens=limit))
            assert got.finish == FinishReason.LENGTH and len(got.tokens) == limit

    # --- interruptions ----------------------------------------------------------------------------------------------

    async def test_abort_gives_back_everything_so_far(self, harness: Harness) -> None:
        engine = await harness.engine()
        whole = await run(engine, ask(prompt(70, 8), max_tokens=50, seed=4))
        consumer = Consumer(engine, ask(prompt(70, 8), max_tokens=50, seed=4))
        async with asyncio.timeout(DEADLINE):
            await consumer.got.at_least(5)
            assert await engine.abort(consumer.request.id)
            part = await consumer.task
        n = len(part.tokens)
        assert part.finish == FinishReason.ABORTED and 5 <= n < 50
        assert part.tokens == whole.tokens[:n]
        rest = await run(engine, ask(prompt(70, 8) + part.tokens, max_tokens=50 - n, seed=4, offset=n))
        assert part.tokens + rest.tokens == whole.tokens
        close(part.logprobs + rest.logprobs, whole.logprobs)
        assert not await engine.abort(consumer.request.id), "an id the engine no longer knows"
        assert not await engine.abort("never heard of")

    async def test_pause_under_more_load_than_slots(self, harness: Harness) -> None:
        """F19, F45: everything submitted before the pause ends with it, waiting or not; nothing is lost, doubled, or sampled
        while paused; what is resubmitted goes on."""
        engine = await harness.engine(slots=2)
        consumers = [Consumer(engine, ask(prompt(80 + i, 6 + i), max_tokens=40, seed=i, episode=i)) for i in range(7)]
        async with asyncio.timeout(DEADLINE):
            await consumers[0].got.at_least(3)
            epoch = harness.epoch()
            await engine.pause(PauseMode.ABORT, epoch)
            parts = [await c.task for c in consumers]
            counts = engine.counts()
            assert counts.running == counts.waiting == 0
            assert all(p.finish == FinishReason.PAUSED for p in parts)
            assert sum(not p.tokens for p in parts) >= 5, "no more than the slots can have begun"
            held = [
                Consumer(
                    engine,
                    ask(c.request.tokens + p.tokens, max_tokens=40 - len(p.tokens), seed=i, offset=len(p.tokens), episode=i),
                )
                for i, (c, p) in enumerate(zip(consumers, parts, strict=True))
            ]
            for _ in range(20):
                await asyncio.sleep(0)
            assert engine.counts().decode_tokens == counts.decode_tokens, "sampled while paused"
            await engine.resume(epoch)
            rests = [await h.task for h in held]
        for i, (consumer, part, rest) in enumerate(zip(consumers, parts, rests, strict=True)):
            assert len(part.tokens) + len(rest.tokens) == 40
            whole = consumer.request.tokens + part.tokens + rest.tokens
            close(part.logprobs + rest.logprobs, reference_logprobs(harness.reference(0), whole, 6 + i))

    async def test_cancelling_a_consumer_frees_what_it_held(self, harness: Harness) -> None:
        """F21, F23: while it decodes, while it waits, and while the engine is paused; the others notice nothing."""
        engine = await harness.engine(slots=2)
        alone = await run(engine, ask(prompt(90, 9), max_tokens=40, seed=1))
        async with asyncio.timeout(DEADLINE):
            steady = Consumer(engine, ask(prompt(90, 9), max_tokens=40, seed=1))
            doomed = [Consumer(engine, ask(prompt(91 + i, 9), max_tokens=100)) for i in range(4)]
            await doomed[0].got.at_least(2)
            for consumer in (doomed[0], doomed[3]):
                consumer.task.cancel()
            await asyncio.wait([doomed[0].task, doomed[3].task])
            epoch = harness.epoch()
            await engine.pause(PauseMode.FREEZE, epoch)
            for consumer in doomed[1:3]:
                consumer.task.cancel()
            await asyncio.wait([doomed[1].task, doomed[2].task])
            assert engine.counts().running + engine.counts().waiting == 1
            await engine.resume(epoch)
            assert (await steady.task).tokens == alone.tokens
            assert engine.counts().running == engine.counts().waiting == 0
            after = await asyncio.gather(*[run(engine, ask(prompt(95 + i, 9))) for i in range(2)])
        assert all(got.finish == FinishReason.LENGTH for got in after)

    async def test_a_frozen_request_can_be_aborted(self, harness: Harness) -> None:
        """F23: aborting inside a pause neither breaks the resume nor the others."""
        engine = await harness.engine()
        async with asyncio.timeout(DEADLINE):
            first, second = (Consumer(engine, ask(prompt(96 + i, 9), max_tokens=50)) for i in range(2))
            await asyncio.gather(first.got.at_least(3), second.got.at_least(3))
            epoch = harness.epoch()
            await engine.pause(PauseMode.FREEZE, epoch)
            assert await engine.abort(first.request.id)
            got = await first.task
            assert got.finish == FinishReason.ABORTED and 3 <= len(got.tokens) < 50
            await engine.resume(epoch)
            assert (await second.task).finish == FinishReason.LENGTH and len(second.got.tokens) == 50

    async def test_pause_and_resume_are_idempotent_and_the_late_are_ignored(self, harness: Harness) -> None:
        """F22."""
        engine = await harness.engine()
        async with asyncio.timeout(DEADLINE):
            old, epoch = harness.epoch(), harness.epoch()
            await engine.pause(PauseMode.FREEZE, epoch)
            await engine.pause(PauseMode.FREEZE, epoch)
            waiting = Consumer(engine, ask(prompt(97, 9)))
            await engine.pause(PauseMode.ABORT, old)
            await engine.resume(old)
            for _ in range(3):
                await engine.score(prompt(98, 9))  # steps of the engine, in which a request that may run would
            assert not waiting.got.tokens and not waiting.task.done(), "a stale resume opened the gate"
            await engine.resume(epoch)
            await engine.resume(epoch)
            await engine.pause(PauseMode.ABORT, epoch)  # arrives after its own resume
            assert (await waiting.task).finish == FinishReason.LENGTH

    async def test_what_is_sampled_before_a_freeze_is_delivered_before_it_returns(self, harness: Harness) -> None:
        engine = await harness.engine()
        async with asyncio.timeout(DEADLINE):
            consumer = Consumer(engine, ask(prompt(98, 9), max_tokens=100))
            await consumer.got.at_least(3)
            epoch = harness.epoch()
            await engine.pause(PauseMode.FREEZE, epoch)
            assert len(consumer.got.tokens) == engine.counts().decode_tokens
            await engine.resume(epoch)
            consumer.task.cancel()

    # --- accounting -------------------------------------------------------------------------------------------------

    async def test_admissions_add_up_to_the_engines_own_count(self, harness: Harness) -> None:
        """F88: over turns, group members and an update; contexts split into cached and prefilled without remainder."""
        engine = await harness.engine(slots=3)
        contexts = {episode: prompt(100, 40) for episode in range(4)}
        admissions: list[Admission] = []
        sampled = 0
        for turn in range(3):
            if turn == 2:
                await update(harness, engine, 1)
            requests = [ask(c, episode=e, group=1, seed=e, lineage=turn // 2) for e, c in contexts.items()]
            for request, got in zip(requests, await asyncio.gather(*[run(engine, r) for r in requests]), strict=True):
                admissions += got.admissions
                sampled += len(got.tokens)
                contexts[request.episode] = request.tokens + got.tokens + prompt(turn, 7)
        counts = engine.counts()
        assert all(a.cached + a.prefilled == a.context and a.block <= a.prefilled for a in admissions)
        assert sum(a.prefilled for a in admissions) == counts.prefill_tokens
        assert sum(a.cached for a in admissions) == counts.cached_tokens
        assert counts.decode_tokens == sampled

    async def test_the_second_turn_finds_its_kv(self, harness: Harness) -> None:
        engine = await harness.engine()
        context = prompt(101, 70)
        first = await run(engine, ask(context, episode=1, max_tokens=12))
        (admission,) = first.admissions
        assert admission.cached == 0 and admission.lost == ""
        known = len(context) + len(first.tokens) - 1  # the last token was never fed
        second = await run(engine, ask(context + first.tokens + prompt(102, 5), episode=1))
        (admission,) = second.admissions
        assert admission.cached == known - known % harness.block
        assert admission.block == known % harness.block
        assert admission.lost == ""

    async def test_turns_compute_next_to_nothing_twice(self, harness: Harness) -> None:
        """F88: turns only, no updates, nothing shared: what is computed is what no full block of an earlier turn holds."""
        engine = await harness.engine(slots=4)
        contexts = {episode: prompt(180 + episode, 20 + 9 * episode) for episode in range(4)}
        held = dict.fromkeys(contexts, 0)
        computed = necessary = 0
        for turn in range(4):
            requests = [ask(c, episode=e, seed=e + turn, max_tokens=5 + 3 * e) for e, c in contexts.items()]
            for request, got in zip(requests, await asyncio.gather(*[run(engine, r) for r in requests]), strict=True):
                episode = request.episode
                computed += sum(a.prefilled for a in got.admissions)
                necessary += len(request.tokens) - 1 - held[episode] // harness.block * harness.block
                whole = request.tokens + got.tokens
                held[episode] = len(whole) - 1  # the last token was never fed
                contexts[episode] = whole + prompt(190 + turn, 6)
        assert 1.0 <= computed / necessary <= 1.02
        assert engine.counts().prefill_tokens == computed

    async def test_group_members_share_their_prompt(self, harness: Harness) -> None:
        engine = await harness.engine()
        context = prompt(103, 65)
        first = await run(engine, ask(context, group=1, seed=1))
        second = await run(engine, ask(context, group=1, seed=2))
        assert first.admissions[0].cached == 0
        assert second.admissions[0].cached == 64
        assert second.admissions[0].lost == "", "it never had any KV"
        close(second.logprobs, reference_logprobs(harness.reference(0), context + second.tokens, 65))

    async def test_a_forgotten_episode_has_lost_nothing(self, harness: Harness) -> None:
        engine = await harness.engine(slots=1)
        await run(engine, ask(prompt(104, 20), episode=1))
        await run(engine, ask(prompt(105, 20), episode=2))  # where there is one slot, it takes 1's place
        engine.forget(1)
        engine.forget(3)
        again = await run(engine, ask(prompt(106, 20), episode=1))
        assert again.admissions[0].lost == ""

    # --- weights ----------------------------------------------------------------------------------------------------

    async def test_weights_that_do_not_fit_change_nothing(self, harness: Harness) -> None:
        """F35, F38, F39: a sentence, no new version, and the old weights serve on, as they were."""
        engine = await harness.engine()
        before = await run(engine, ask(prompt(110, 12)))
        for words, weights in harness.misfits(1):
            epoch = harness.epoch()
            await engine.pause(PauseMode.ABORT, epoch)
            with pytest.raises(ValueError, match=words):
                await engine.load(1, weights)
            assert engine.version == 0
            await engine.resume(epoch)
            again = await run(engine, ask(prompt(110, 12)))
            assert again.tokens == before.tokens and set(again.versions) == {0}
            close(again.logprobs, before.logprobs)
        await update(harness, engine, 1)
        good = await run(engine, ask(prompt(110, 12), lineage=1))
        close(good.logprobs, reference_logprobs(harness.reference(1), prompt(110, 12) + good.tokens, 12))

    async def test_nothing_is_sampled_before_the_first_load(self, harness: Harness) -> None:
        engine = await harness.engine(version=None)
        async with asyncio.timeout(DEADLINE):
            with pytest.raises(ValueError, match="weights"):
                await run(engine, ask(prompt(111, 5)))
            epoch = harness.epoch()
            await engine.pause(PauseMode.ABORT, epoch)
            early = Consumer(engine, ask(prompt(111, 5), lineage=4))
            await engine.load(4, harness.staged(4))
            await engine.resume(epoch)
            got = await early.task
        assert set(got.versions) == {4} and engine.version == 4
        close(got.logprobs, reference_logprobs(harness.reference(4), prompt(111, 5) + got.tokens, 5))

    # --- scoring ----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("tied", [False, True])
    async def test_a_sequence_is_scored_under_the_weights_now_loaded(self, harness: Harness, tied: bool) -> None:
        """F37, F41: after every load, while paused, although there is older KV of the very same tokens."""
        engine = await harness.engine(tied=tied)
        tokens = prompt(150, 64)
        await run(engine, ask(tokens, episode=1))
        for version in range(1, 4):
            epoch = harness.epoch()
            await engine.pause(PauseMode.ABORT if version % 2 else PauseMode.FREEZE, epoch)
            await engine.load(version, harness.staged(version, tied))
            for scored in (tokens, tokens[:2], tokens[:3], tokens + prompt(151, 36)):
                close(await engine.score(scored), reference_logprobs(harness.reference(version, tied), scored, 1))
            await engine.resume(epoch)

    async def test_scoring_changes_nothing_for_requests_and_their_counts(self, harness: Harness) -> None:
        """F88: frozen requests, more than slots, go on with the KV they had; what was scored is counted apart."""
        engine = await harness.engine(slots=2)
        consumers = [Consumer(engine, ask(prompt(152 + i, 9 + i), max_tokens=40, episode=i, seed=i)) for i in range(3)]
        idle = await run(engine, ask(prompt(156, 20), episode=9, priority=-1, max_tokens=4))
        async with asyncio.timeout(DEADLINE):
            await consumers[0].got.at_least(3)
            epoch = harness.epoch()
            await engine.pause(PauseMode.FREEZE, epoch)
            before = engine.counts()
            lengths = (64, 100, 9)
            for i, length in enumerate(lengths):  # the last one is a context whose KV is there
                tokens = prompt(152 if length == 9 else 160 + i, length)
                close(await engine.score(tokens), reference_logprobs(harness.reference(0), tokens, 1))
            after = engine.counts()
            assert after.scored_tokens - before.scored_tokens == sum(lengths)
            apart = {name: getattr(before, name) for name in ("scored_tokens", "busy_seconds", "phases")}
            assert msgspec.structs.replace(after, **apart) == before
            await engine.resume(epoch)
            for consumer in consumers:
                await consumer.task
        for consumer in consumers:
            assert consumer.got.finish == FinishReason.LENGTH
            context = consumer.request.tokens
            whole = context + consumer.got.tokens
            close(consumer.got.logprobs, reference_logprobs(harness.reference(0), whole, len(context)))
        admissions = [a for got in (idle, *[c.got for c in consumers]) for a in got.admissions]
        assert sum(a.prefilled for a in admissions) == engine.counts().prefill_tokens

    async def test_what_cannot_be_scored_is_refused(self, harness: Harness) -> None:
        """No token has a log-probability without one before it; and before the first load there is nothing to score with."""
        empty = await harness.engine(version=None)
        await empty.pause(PauseMode.ABORT, harness.epoch())
        with pytest.raises(ValueError, match="weights"):
            await empty.score([1, 2])
        engine = await harness.engine()
        epoch = harness.epoch()
        await engine.pause(PauseMode.ABORT, epoch)
        for tokens in ([], [1], [1, 10**9], [-1, 1], [1] * 100_000):
            with pytest.raises(ValueError, match="token"):
                await engine.score(tokens)
        assert engine.counts().scored_tokens == 0
        await engine.resume(epoch)
        assert (await run(engine, ask(prompt(170, 9)))).finish == FinishReason.LENGTH
        await engine.stop()
        with pytest.raises(EngineDead):
            await engine.score([1, 2])

    # --- what cannot be served, and the end -------------------------------------------------------------------------

    async def test_a_request_that_cannot_fit_is_refused(self, harness: Harness) -> None:
        engine = await harness.engine()
        for request in (ask(prompt(120, 20), max_tokens=100_000), ask([], max_tokens=3), ask([1, 2], max_tokens=0)):
            with pytest.raises(ValueError, match="tokens"):
                await run(engine, request)
        assert (await run(engine, ask(prompt(120, 20)))).finish == FinishReason.LENGTH

    async def test_a_dead_worker_fails_every_request(self, harness: Harness) -> None:
        """Never a silent wait: those that decode, those that wait, and those that come later."""
        engine = await harness.engine(slots=2)
        async with asyncio.timeout(DEADLINE):
            consumers = [Consumer(engine, ask(prompt(130 + i, 9), max_tokens=100)) for i in range(4)]
            await consumers[0].got.at_least(2)
            await harness.break_down(engine)
            for consumer in consumers:
                with pytest.raises(EngineDead):
                    await consumer.task
            with pytest.raises(EngineDead):
                await run(engine, ask(prompt(140, 9)))
            with pytest.raises(EngineDead):
                await engine.pause(PauseMode.ABORT, harness.epoch())

    async def test_stopping_ends_open_requests(self, harness: Harness) -> None:
        engine = await harness.engine()
        async with asyncio.timeout(DEADLINE):
            consumer = Consumer(engine, ask(prompt(141, 9), max_tokens=100))
            await consumer.got.at_least(1)
            await engine.stop()
            with pytest.raises(EngineDead):
                await consumer.task
