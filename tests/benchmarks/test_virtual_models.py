"""The modelled parts against slow references: distributions against samples, batching and engine against a loop over steps."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

import numpy as np
import pytest
from virtual_world import small

from benchmarks.virtual.batching import Batch
from benchmarks.virtual.distributions import Distribution, Draws, uniform
from benchmarks.virtual.engine import ModelledEngine
from benchmarks.virtual.kv import KvCache
from benchmarks.virtual.scenario import EngineModel
from benchmarks.virtual.tokenizer import END_TOKEN, ByteTokenizer
from benchmarks.virtual.workload import Workload
from rollout.chat import ChatRenderer
from segue.clock import LogicalLoop, now
from segue.ports.engine import Chunk, FinishReason, GenerateRequest, PauseMode
from segue.ports.envpool import ChatMessage

T = TypeVar("T")
MODEL = EngineModel(
    decode_seconds=0.02,
    decode_seconds_per_request=0.003,
    decode_seconds_per_kv_token=1e-5,
    prefill_seconds_per_token=1e-3,
    kv_tokens=100_000,
    block_tokens=16,
    swap_seconds=0.5,
)


# --- distributions ----------------------------------------------------------------------------------------------------------


def samples(spec: Distribution, values: tuple[float, ...] = (), groups: int = 500) -> np.ndarray:
    draws = Draws(spec, 7, values)
    return np.array([[[draws.draw(g, m, t) for t in range(4)] for m in range(4)] for g in range(groups)])


@pytest.mark.parametrize(
    ("spec", "mean", "deviation"),
    [
        (Distribution(mean=3.0), 3.0, 0.0),
        (Distribution("uniform", low=2.0, high=6.0), 4.0, 4.0 / math.sqrt(12.0)),
        (Distribution("gaussian", 10.0, 1.0), 10.0, 1.0),
        (Distribution("lognormal", 10.0, 0.5), 10.0, 10.0 * math.sqrt(math.exp(0.25) - 1.0)),
        (Distribution("pareto", 10.0, 4.0), 10.0, math.sqrt(4.0 / (3.0**2 * 2.0)) * 30.0),
    ],
)
def test_a_distribution_has_the_moments_it_says(spec: Distribution, mean: float, deviation: float) -> None:
    drawn = samples(spec)
    assert drawn.mean() == pytest.approx(mean, rel=0.03)
    assert drawn.std() == pytest.approx(deviation, rel=0.15, abs=1e-12)
    assert Draws(spec, 7).mean() == pytest.approx(mean, rel=0.01)


def test_negative_draws_are_clipped_or_redrawn() -> None:
    clipped, redrawn = (samples(Distribution("gaussian", 10.0, 10.0, negatives=how)) for how in ("clip", "redraw"))
    normal = np.random.default_rng(0).normal(10.0, 10.0, 200_000)
    assert clipped.mean() == pytest.approx(np.clip(normal, 0.0, None).mean(), rel=0.03)
    assert redrawn.mean() == pytest.approx(normal[normal > 0.0].mean(), rel=0.03)
    assert (clipped == 0.0).mean() == pytest.approx((normal < 0.0).mean(), abs=0.02) and redrawn.min() > 0.0


def test_shares_correlate_draws_and_leave_each_as_it_was() -> None:
    apart = samples(Distribution("lognormal", 5.0, 0.8))
    tied = samples(Distribution("lognormal", 5.0, 0.8, group_share=0.4, episode_share=0.3))
    assert np.quantile(tied, [0.25, 0.5, 0.75]) == pytest.approx(np.quantile(apart, [0.25, 0.5, 0.75]), rel=0.1)

    def correlation(drawn: np.ndarray, a: tuple[int, int], b: tuple[int, int]) -> float:
        return float(np.corrcoef(np.log(drawn[:, a[0], a[1]]), np.log(drawn[:, b[0], b[1]]))[0, 1])

    assert correlation(tied, (0, 0), (0, 1)) == pytest.approx(0.7, abs=0.12)  # two turns of an episode
    assert correlation(tied, (0, 0), (1, 0)) == pytest.approx(0.4, abs=0.15)  # two members of a group
    assert correlation(apart, (0, 0), (0, 1)) == pytest.approx(0.0, abs=0.15)


def test_an_empirical_distribution_has_the_quantiles_of_its_values() -> None:
    values = tuple(np.random.default_rng(1).gamma(2.0, 3.0, 400))
    drawn = samples(Distribution("empirical", file="x"), values)
    assert np.quantile(drawn, [0.1, 0.5, 0.9]) == pytest.approx(np.quantile(values, [0.1, 0.5, 0.9]), rel=0.08)
    assert min(values) <= drawn.min() and drawn.max() <= max(values)


def test_a_draw_is_splitmix64_over_its_keys() -> None:
    def in_one_loop(*keys: int) -> float:
        mask, h = (1 << 64) - 1, 0x9E3779B97F4A7C15
        for key in keys:
            h = ((h ^ key) + 0x9E3779B97F4A7C15) & mask
            h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & mask
            h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & mask
            h ^= h >> 31
        return ((h >> 11) + 0.5) * 2.0**-53

    for keys in [(0, 0, 0, 0), (1, 2, 3, 4), (256, 7, 1 << 40, 2), (1, 2, 3, (5 << 24) + 6)]:
        assert uniform(*keys) == uniform(*keys) == in_one_loop(*keys)


def test_a_draw_depends_on_its_keys_alone() -> None:
    many = [uniform(1, 2, 3, turn) for turn in range(2000)]
    assert many == [uniform(1, 2, 3, turn) for turn in range(2000)] and len(set(many)) == 2000
    assert all(0.0 < u < 1.0 for u in many) and np.mean(many) == pytest.approx(0.5, abs=0.03)
    drawn = Draws(Distribution("lognormal", 5.0, 0.8, group_share=0.4), 7)
    first = drawn.draw(3, 1, 2)
    drawn.draw(4, 1, 2)
    assert drawn.draw(3, 1, 2) == first != Draws(drawn.spec, 8).draw(3, 1, 2)


# --- batching ---------------------------------------------------------------------------------------------------------------


def stepwise(model: EngineModel, contexts: list[int], targets: list[int]) -> list[float]:
    """When each request ends, by looking at every single step; all are there from the start, and prefill comes first."""
    clock = model.prefill_seconds_per_token * sum(n - 1 for n in contexts)
    tokens, left = list(contexts), list(targets)
    ends = [0.0] * len(contexts)
    while any(left):
        running = [i for i, n in enumerate(left) if n]
        held = sum(tokens[i] for i in running)
        clock += model.decode_seconds + model.decode_seconds_per_request * len(running) + model.decode_seconds_per_kv_token * held
        for i in running:
            tokens[i] += 1
            left[i] -= 1
            if not left[i]:
                ends[i] = clock
    return ends


def test_the_closed_form_agrees_with_a_loop_over_steps() -> None:
    contexts, targets = [400, 900, 20, 3000], [50, 120, 120, 7]
    batch = Batch(MODEL, 1, 0.0)
    for n in contexts:
        batch.join(n, n - 1)
    order = sorted(range(4), key=lambda i: targets[i])
    ends = [0.0] * 4
    clock = 0.0
    for i in order:
        clock += batch.seconds_to(targets[i])
        batch.advance(clock)
        assert batch.reached(targets[i])
        ends[i] = clock
        batch.leave(contexts[i] + targets[i])
    assert ends == pytest.approx(stepwise(MODEL, contexts, targets), rel=2e-3)
    assert batch.decode_seconds + batch.prefill_seconds == pytest.approx(clock)
    assert batch.tokens == batch.requests == 0


def test_advancing_in_small_pieces_comes_to_the_same() -> None:
    whole, pieces = Batch(MODEL, 1, 0.0), Batch(MODEL, 1, 0.0)
    for batch in (whole, pieces):
        batch.join(500, 100)
        batch.join(800, 0)
    whole.advance(7.0)
    for i in range(1, 701):
        pieces.advance(i / 100)
    assert (pieces.steps, pieces.tokens) == pytest.approx((whole.steps, whole.tokens), rel=1e-6)
    assert (pieces.prefill_seconds, pieces.decode_seconds) == pytest.approx((whole.prefill_seconds, whole.decode_seconds))


# --- KV ---------------------------------------------------------------------------------------------------------------------


def test_prefixes_are_found_by_lineage_in_whole_blocks_and_among_group_mates() -> None:
    kv = KvCache(16)
    assert kv.find(1, 5, 0, 100) == (0, 0)
    assert kv.take(1, 5, 0, prompt=100) == ""
    assert kv.find(2, 5, 0, 100) == (96, 4) and kv.find(2, 5, 1, 100) == (0, 0) and kv.find(2, 6, 0, 100) == (0, 0)
    kv.keep(1, 5, 0, 150)
    assert kv.idle == kv.held(1) == 150 and kv.find(1, 5, 0, 170) == (144, 6)
    assert kv.take(1, 5, 1, None) == "weight_update" and kv.idle == 0
    assert kv.find(2, 5, 0, 100) == (0, 0)  # nobody holds that prompt any more


def test_what_was_used_longest_ago_goes_first_and_is_remembered_as_evicted() -> None:
    kv = KvCache(1)
    for episode in (1, 2, 3):
        kv.take(episode, episode, 0, None)
        kv.keep(episode, episode, 0, 10 * episode)
    assert kv.evict(but=1) and kv.held(2) == 0 and kv.idle == 40
    assert kv.evict() and kv.held(1) == 0
    assert kv.take(2, 2, 0, None) == "eviction" and kv.take(3, 3, 0, None) == ""
    kv.keep(3, 3, 0, 30)
    kv.clear("weight_update")
    assert kv.idle == 0 and kv.take(3, 3, 1, None) == "weight_update" and not kv.evict()


# --- the engine -------------------------------------------------------------------------------------------------------------


def run(work: Callable[[ModelledEngine], Awaitable[T]], model: EngineModel = MODEL, slots: int = 8) -> T:
    async def main() -> T:
        world = small(
            config={"rollout": {"max_turn_tokens": 1000}}, workload={"action_tokens": {"kind": "constant", "mean": 40.0}}
        )
        engine = ModelledEngine(model, Workload(world), slots, 1)
        await engine.start()
        await engine.pause(PauseMode.ABORT, 0)
        await engine.load(0, None)
        await engine.resume(0)
        return await work(engine)

    with asyncio.Runner(loop_factory=LogicalLoop) as runner:
        return runner.run(main())


def request(episode: int, context: int = 100, offset: int = 0, lineage: int = 0, **other: int) -> GenerateRequest:
    given = {"max_tokens": 500, "priority": 0, "group": episode, "seed": episode} | other
    return GenerateRequest(
        id=f"{episode}.{offset}.{lineage}",
        tokens=[1] * context,
        temperature=1.0,
        stop_tokens=(END_TOKEN,),
        stop_strings=(),
        offset=offset,
        episode=episode,
        lineage=lineage,
        **given,
    )


async def whole(engine: ModelledEngine, asked: GenerateRequest) -> tuple[Chunk, float]:
    chunks = [chunk async for chunk in engine.generate(asked)]
    assert len(chunks) == 1
    return chunks[0], now()


def test_requests_end_when_a_loop_over_steps_says_so() -> None:
    async def work(engine: ModelledEngine) -> tuple[list[tuple[Chunk, float]], float]:
        began = now()
        asked = [request(1, 300), request(2, 800, max_tokens=25), request(3, 50, max_tokens=10)]
        return await asyncio.gather(*(whole(engine, each) for each in asked)), began

    found, began = run(work)
    assert [len(chunk.tokens) for chunk, _ in found] == [40, 25, 10]
    assert [chunk.finish for chunk, _ in found] == [FinishReason.STOP, FinishReason.LENGTH, FinishReason.LENGTH]
    assert found[0][0].tokens[-1] == END_TOKEN
    expected = stepwise(MODEL, [300, 800, 50], [40, 25, 10])
    assert [when - began for _, when in found] == pytest.approx(expected, rel=2e-3)


def test_an_interrupted_turn_goes_on_where_it_was_and_reads_no_old_kv() -> None:
    async def work(engine: ModelledEngine) -> tuple[Chunk, Chunk]:
        first = asyncio.create_task(whole(engine, request(1, 200)))
        await asyncio.sleep(0.7)
        await engine.pause(PauseMode.ABORT, 1)
        part, _ = await first
        await engine.load(1, None)
        await engine.resume(1)
        n = len(part.tokens)
        rest, _ = await whole(engine, request(1, 200 + n, offset=n, lineage=1))
        return part, rest

    part, rest = run(work)
    n = len(part.tokens)
    assert part.finish is FinishReason.PAUSED and 0 < n < 40 and part.spans == [(0, n)]
    assert rest.finish is FinishReason.STOP and n + len(rest.tokens) == 40 and rest.spans == [(1, 40 - n)]
    assert (rest.admissions[0].cached, rest.admissions[0].lost) == (0, "weight_update")


def test_a_frozen_request_keeps_its_kv_and_straddles_the_update() -> None:
    async def work(engine: ModelledEngine) -> tuple[Chunk, float, float]:
        began = now()
        first = asyncio.create_task(whole(engine, request(1, 200)))
        await asyncio.sleep(0.7)
        await engine.pause(PauseMode.FREEZE, 1)
        await engine.load(1, None)
        await engine.resume(1)
        chunk, when = await first
        return chunk, when - began, engine.counts().busy_seconds

    chunk, seconds, _ = run(work)
    assert [version for version, _ in chunk.spans] == [0, 1] and sum(n for _, n in chunk.spans) == 40
    assert chunk.kv_version == 0 and len(chunk.admissions) == 1
    assert seconds == pytest.approx(stepwise(MODEL, [200], [40])[0] + MODEL.swap_seconds, rel=5e-3)


def test_a_full_cache_preempts_who_would_be_admitted_last() -> None:
    tight = EngineModel(decode_seconds=0.01, prefill_seconds_per_token=1e-4, kv_tokens=450, block_tokens=1)

    async def work(engine: ModelledEngine) -> tuple[list[Chunk], int]:
        found = await asyncio.gather(*(whole(engine, request(e, 195, priority=e)) for e in (1, 2)))
        return [chunk for chunk, _ in found], engine.counts().preemptions

    (first, second), preemptions = run(work, tight)
    assert preemptions == 1 and len(first.admissions) == 1
    assert [admission.lost for admission in second.admissions] == ["", "preemption"]
    assert len(first.tokens) == len(second.tokens) == 40
    assert second.admissions[1].context > second.admissions[0].context


def test_counts_are_those_of_the_admissions_and_an_abort_gives_back_what_there_was() -> None:
    async def work(engine: ModelledEngine) -> tuple[Chunk, Chunk]:
        first, _ = await whole(engine, request(1, 200))
        second = asyncio.create_task(whole(engine, request(1, 300, offset=40)))
        await asyncio.sleep(0.4)
        assert await engine.abort(request(1, offset=40).id) and not await engine.abort("nobody")
        chunk, _ = await second
        counts = engine.counts()
        admissions = [*first.admissions, *chunk.admissions]
        assert counts.prefill_tokens == sum(a.prefilled for a in admissions)
        assert counts.cached_tokens == sum(a.cached for a in admissions)
        assert counts.decode_tokens == len(first.tokens) + len(chunk.tokens)
        assert all(a.context == a.cached + a.prefilled for a in admissions)
        return first, chunk

    _, chunk = run(work)
    assert chunk.finish is FinishReason.ABORTED and 0 < len(chunk.tokens) < 40
    assert chunk.admissions[0].cached == 239 // 16 * 16 and chunk.admissions[0].block == 239 % 16


# --- the tokenizer ----------------------------------------------------------------------------------------------------------


def test_the_production_renderer_takes_the_modelled_tokenizer_and_adds_three_tokens() -> None:
    renderer = ChatRenderer(ByteTokenizer())
    assert len(renderer.prompt([ChatMessage("user", "p" * 50)])) == 53
    assert len(renderer.delta([ChatMessage("user", "o" * 20)])) == 23
    assert renderer.close_tokens == renderer.stop_tokens == (END_TOKEN,)
    assert renderer.text([97, 98, END_TOKEN]) == "ab" and renderer.closing([97]) == (END_TOKEN,)
    forged = renderer.delta([ChatMessage("user", "<|end|>")])
    assert forged.count(END_TOKEN) == 1  # what a message says is text
