"""Weight updates: every mode at every moment, what is interrupted, what goes on, and what a failed update leaves behind."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import chat_tokenizers as made
import numpy as np
import pytest
from node_world import World, config, run, until

from segue.clock import now
from segue.config import Config
from segue.episode import Outcome, Task
from segue.ports.engine import Chunk, EngineDead, GenerateRequest, PauseMode
from segue.ports.rollout import AbandonUpdate, Drop, Loaded, LoadFailed, ParkOrder, Paused, Resumed

MODES = ["recompute", "keep", "turn", "episode"]
TASK = Task("task", "talk", 5, {"turns": 4})


def in_mode(inflight: str) -> Config:
    return config(update={"inflight": inflight})


def events(w: World) -> Counter[str]:
    return Counter(type(e).__name__ for e in w.scheduler.events)


def endless(request: GenerateRequest, index: int) -> int:
    return 20 + index % 7


LONG = {"max_turn_tokens": 100, "max_tokens": 2000}


@pytest.mark.parametrize("mode", MODES)
def test_an_update_at_every_moment(mode: str) -> None:
    """Whatever goes on when weights come, the episode's tokens are those it would have had, stamped with what sampled them."""

    async def main(wait: float) -> tuple[list[int], Counter[str], str]:
        async with World(in_mode(mode)) as w:
            w.node.receiver.seconds = 0.0
            await w.lease(0, task=TASK)
            await asyncio.sleep(wait)
            loaded = await w.update()
            assert isinstance(loaded, Loaded) and loaded.version == w.node.engine.version == 2
            record = await w.scheduler.finished(0)
            log = record.log()
            log.validate()
            versions = log.versions[log.mask == 1]
            kv = log.kv_versions[log.mask == 1]
            assert np.all(np.diff(versions) >= 0), "versions never decrease"
            if mode == "keep":
                assert set(kv.tolist()) <= {1} or set(versions.tolist()) == {2}
            else:
                assert np.array_equal(versions, kv), "no token was sampled on old KV"
            counts = w.node.shell.counts()
            repeats = counts["prefill_weight_update"]
            assert (repeats > 0) == (mode != "keep" and len(set(versions.tolist())) == 2), repeats
            causes = sum(counts[f"prefill_{c}"] for c in ("first", "turn", "weight_update"))
            assert causes == counts["prefill_tokens"] == w.node.engine.prefill
            found = events(w)
            assert found["Paused"] == found["Resumed"]
            return log.tokens.tolist(), found, "".join(str(v) for v in sorted(set(versions.tolist())))

    alone = run(main(100.0))[0]
    seen: Counter[str] = Counter()
    for i in range(45):
        tokens, found, versions = run(main(0.011 * i))
        assert tokens == alone
        seen[versions] += 1
        seen["paused"] += found["Paused"]
    assert seen["12"] > 0 or mode == "episode"
    assert (seen["paused"] > 0) == (mode == "recompute"), seen


@pytest.mark.parametrize("mode", MODES)
def test_many_episodes_and_many_updates(mode: str) -> None:
    """Nothing is lost, doubled or sampled while paused; every allowance counts what was sampled before (F18)."""

    async def main() -> None:
        cfg = config(update={"inflight": mode}, rollout={"max_turn_tokens": 12})
        async with World(cfg, policy=endless) as w:
            w.node.receiver.seconds = 0.05
            for episode in range(10):
                await w.lease(episode, group=episode // 2)
            for _ in range(12):
                assert isinstance(await w.update(drain_seconds=0.05), Loaded)
                await asyncio.sleep(0.03)
            for episode in range(10):
                record = await w.scheduler.finished(episode)
                for body in record.bodies():
                    body.log.validate()
                log = record.log()
                assert [s.length for s in log.segments if s.author == 2] == [13] * 3, (
                    "twelve sampled tokens and the close, each turn"
                )
                assert np.all(np.diff(log.versions[log.mask == 1]) >= 0)
            assert (
                w.node.shell.counts()["prefill_tokens"] == w.node.engine.prefill == sum(w.node.shell._ledger.prefilled.values())
            )
            found = events(w)
            assert found["Paused"] == found["Resumed"] and (found["Paused"] > 0 or mode == "keep")
            assert {c for c in w.node.engine.control if c.startswith("pause")} == {f"pause {PauseMode.ABORT}"} or mode == "keep"
            assert w.node.engine.arrived_while_paused == 0, "gates close before the engine pauses (F25)"
            pauses = w.node.metrics.value("segue_rollout_pause_seconds", reason="update")
            assert pauses == 13 == w.node.engine.control.count("resume")

    run(main())


def test_staging_does_not_stop_generation() -> None:
    async def main() -> None:
        async with World(config(rollout=LONG), policy=endless) as w:
            w.node.receiver.seconds = 0.5
            await w.lease(0, task=TASK)
            await asyncio.sleep(0.1)
            before = w.node.engine.decoded
            await w.begin_update()
            await asyncio.sleep(0.45)
            assert w.node.engine.decoded - before >= 40
            loaded = await w.scheduler.load()
            assert isinstance(loaded, Loaded)
            assert loaded.stage_seconds == pytest.approx(0.5) and loaded.pause_seconds == pytest.approx(0.02)
            sync = w.node.sync_clock.seconds()
            assert sync["transfer"] == pytest.approx(1.0) and sync["load"] == pytest.approx(0.04)
            assert w.node.metrics.value("segue_policy_version") == 2
            assert w.node.sync_metrics.sum("segue_weight_sync_seconds", phase="stage") == pytest.approx(1.0)
            assert w.node.sync_metrics.sum("segue_weight_sync_seconds", phase="load") == pytest.approx(0.04)

    run(main())


def test_turn_lets_turns_end_and_holds_new_ones() -> None:
    async def main() -> None:
        async with World(config(update={"inflight": "turn"}, rollout={"max_turn_tokens": 30}), policy=endless) as w:
            w.node.receiver.seconds = 0.0
            await w.lease(0, task=TASK)
            await asyncio.sleep(0.15)
            assert w.node.shell._gate.running == 1
            await w.lease(1, task=TASK)
            await w.begin_update()
            loaded = await w.scheduler.load()
            assert isinstance(loaded, Loaded) and 0.1 < loaded.drain_seconds < 0.3
            assert events(w)["Paused"] == 0
            first = [b for b in (await w.scheduler.finished(0)).bodies() if b.action_complete]
            assert set(first[0].log.versions[:-1].tolist()) == {1} and set(first[1].log.versions[:-1].tolist()) == {2}
            assert set((await w.scheduler.finished(1)).log().versions.tolist()) == {-1, 2}

    run(main())


def test_waiting_for_weights_is_not_charged_to_an_episode() -> None:
    async def main() -> None:
        cfg = config(update={"inflight": "turn"}, rollout={"max_turn_tokens": 900, "max_tokens": 8000, "wall_seconds": 20.0})

        def policy(request: GenerateRequest, index: int) -> int:
            return 20 if request.episode == 0 or index % 5 else 5

        async with World(cfg, policy=policy) as w:
            w.node.receiver.seconds = 0.0
            await w.lease(0, task=TASK)
            await asyncio.sleep(0.2)
            await w.begin_update(drain_seconds=8.0)
            await asyncio.sleep(0.01)
            await w.lease(1, task=TASK)
            record = await w.scheduler.finished(1)
            assert now() > 8.0 and record.finish is not None and record.finish.seconds < 1.0

    run(main())


@pytest.mark.parametrize("mode", ["recompute", "keep", "turn", "episode"])
@pytest.mark.parametrize("pause", [1.0, 5.0])
def test_an_engines_pause_is_not_charged_to_a_turn_under_way(mode: str, pause: float) -> None:
    """Frozen or stopped: the wall-time budget is the episode's, and an update is not its doing, however long."""

    async def main() -> None:
        cfg = config(
            update={"inflight": mode}, rollout={"max_turn_tokens": 4000, "max_tokens": 8000, "wall_seconds": 3.0, "max_turns": 1}
        )
        async with World(cfg, policy=endless) as w:
            w.node.receiver.seconds = 0.0
            await w.lease(0, task=TASK)
            w.node.engine.load_seconds = pause
            began, updates = now(), 2
            for _ in range(updates):
                await asyncio.sleep(0.5)
                await w.update(drain_seconds=0.2)
            record = await w.scheduler.finished(0)
            assert record.finish is not None and record.finish.outcome == Outcome.TRUNCATED_WALL
            assert record.finish.seconds == pytest.approx(3.0, abs=0.1)
            assert now() - began == pytest.approx(3.0 + updates * pause, abs=0.5), "the budget was used to its end, and no longer"
            assert sum(int(b.log.mask.sum()) for b in record.bodies()) == pytest.approx(300, abs=20), "at 10 ms a token"

    run(main())


def test_episode_lets_episodes_end_and_holds_new_leases() -> None:
    """Each episode has one version as long as the drain is patient enough."""

    async def main() -> None:
        async with World(in_mode("episode")) as w:
            w.node.receiver.seconds = 0.0
            await w.lease(0, task=TASK)
            await asyncio.sleep(0.2)
            await w.begin_update(drain_seconds=30.0)
            await asyncio.sleep(0.01)
            await w.lease(1, task=TASK)
            await asyncio.sleep(0.01)
            assert w.node.engine.version == 1 and len({r.episode for r in w.node.engine.requests}) == 1
            loaded = await w.scheduler.load()
            assert isinstance(loaded, Loaded) and loaded.drain_seconds < 1.0, (
                "as long as the episode needs, not as long as it may"
            )
            assert set((await w.scheduler.finished(0)).log().versions.tolist()) == {-1, 1}
            assert set((await w.scheduler.finished(1)).log().versions.tolist()) == {-1, 2}
            assert events(w)["Paused"] == 0

    run(main())


@pytest.mark.parametrize("mode", ["turn", "episode"])
def test_past_the_drains_patience_the_rest_is_interrupted(mode: str) -> None:
    async def main() -> None:
        async with World(config(update={"inflight": mode}, rollout=LONG), policy=endless) as w:
            w.node.receiver.seconds = 0.0
            await w.lease(0, task=TASK)
            await asyncio.sleep(0.2)
            loaded = await w.update(drain_seconds=0.3)
            assert isinstance(loaded, Loaded) and loaded.drain_seconds == pytest.approx(0.3, abs=0.02)
            await asyncio.sleep(0.2)
            assert w.scheduler.events.count(Paused(0, 1, "update")) == w.scheduler.events.count(Resumed(0, 1)) == 1

    run(main())


def test_admission_reopens_as_soon_as_the_update_is_over() -> None:
    """F50: whatever still runs."""

    async def main() -> None:
        async with World(config(update={"inflight": "episode"}, rollout=LONG), policy=endless) as w:
            w.node.receiver.seconds = 0.0
            await w.lease(0, task=TASK)
            await asyncio.sleep(0.1)
            await w.update(drain_seconds=0.1)
            await w.lease(1, task=TASK)
            await asyncio.sleep(0.2)
            assert {r.episode for r in w.node.engine.requests} == {0, 1}

    run(main())


# --- failures -----------------------------------------------------------------------------------------------------------


def test_a_failed_transfer_leaves_the_old_weights_serving() -> None:
    """F35."""

    async def main() -> None:
        async with World() as w:
            await w.lease(0, task=TASK)
            w.node.receiver.error = ValueError("bucket 3 has another checksum")
            failed = await w.update()
            assert isinstance(failed, LoadFailed) and not failed.fatal
            assert failed.reason == "version 2 did not arrive: bucket 3 has another checksum"
            assert w.node.engine.control[-1] == "resume" and w.node.engine.version == 1
            assert set((await w.scheduler.finished(0)).log().versions.tolist()) == {-1, 1}
            assert w.node.sync_metrics.value("segue_weight_sync_failures_total", phase="transfer") == 1
            w.node.receiver.error = None
            assert isinstance(await w.update(), Loaded)

    run(main())


def test_weights_that_do_not_fit_leave_the_old_ones_serving() -> None:
    async def main() -> None:
        async with World() as w:
            w.node.receiver.seconds = 0.0
            await w.lease(0, task=TASK)
            await until(lambda: w.node.engine.decoded > 1)
            w.node.engine.fail_load = ValueError("lm_head.weight is missing")
            failed = await w.update()
            assert isinstance(failed, LoadFailed) and not failed.fatal and "lm_head.weight is missing" in failed.reason
            record = await w.scheduler.finished(0)
            assert set(record.log().versions.tolist()) == {-1, 1}
            assert events(w)["Paused"] == events(w)["Resumed"] == 1
            assert w.node.sync_metrics.value("segue_weight_sync_failures_total", phase="load") == 1

    run(main())


def test_a_load_that_breaks_half_way_ends_the_node() -> None:
    async def main() -> None:
        async with World() as w:
            w.node.engine.fail_load = RuntimeError("out of memory")
            failed = await w.update()
            assert isinstance(failed, LoadFailed) and failed.fatal
            with pytest.raises(EngineDead, match="version 2 could not be loaded: out of memory"):
                await w.node.shell.run()
            assert w.node.engine.control[-1] == "load 2", "a half-loaded engine is not resumed"

    run(main())


def test_an_engine_that_does_not_become_idle_ends_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with World() as w:

            async def pause(mode: PauseMode, epoch: int) -> None:
                await asyncio.sleep(1e6)

            monkeypatch.setattr(w.node.engine, "pause", pause)
            failed = await w.update()
            assert isinstance(failed, LoadFailed) and failed.fatal
            with pytest.raises(EngineDead, match="did not become idle within 60 s"):
                await w.node.shell.run()

    run(main())


def test_weights_that_never_arrive_are_given_up_at_the_deadline() -> None:
    async def main() -> None:
        async with World() as w:
            w.node.receiver.seconds = 1e6
            began = now()
            failed = await w.update(deadline_seconds=20.0)
            assert isinstance(failed, LoadFailed) and not failed.fatal and "did not arrive within 20 s" in failed.reason
            assert now() - began == pytest.approx(20.0, abs=0.2) and w.node.receiver.cancelled == 1

    run(main())


def test_an_engine_that_can_be_given_no_weights_any_more_ends_the_node() -> None:
    """Nobody else would notice a node that has none yet: it would be tried again for ever."""

    async def main() -> None:
        async with World() as w:
            w.node.receiver.error = EngineDead("its worker process ended")
            failed = await w.update()
            assert isinstance(failed, LoadFailed) and failed.fatal
            with pytest.raises(EngineDead, match="version 2 could not be loaded: its worker process ended"):
                await w.node.shell.run()

    run(main())


def test_an_abandoned_update_discards_what_it_staged() -> None:
    async def main() -> None:
        async with World() as w:
            await w.lease(0, task=TASK)
            update = await w.begin_update()
            await asyncio.sleep(0.1)
            await w.scheduler.push(w.node.name, AbandonUpdate(update, "a member is missing"))
            await w.scheduler.finished(0)
            assert w.node.receiver.cancelled == 1 and w.node.engine.version == 1
            assert w.scheduler.loads == [], "an abandoned update has nothing to report"
            assert isinstance(await w.update(), Loaded)

    run(main())


def test_a_newer_update_takes_the_place_of_one_that_stages() -> None:
    async def main() -> None:
        async with World() as w:
            await w.begin_update()
            await asyncio.sleep(0.2)
            newer = await w.begin_update()
            loaded = await w.scheduler.load()
            assert isinstance(loaded, Loaded) and (loaded.update, loaded.version) == (newer, 3)
            assert w.node.receiver.cancelled == 1 and "load 2" not in w.node.engine.control

    run(main())


def test_a_newer_update_waits_for_one_that_loads() -> None:
    """One owner of the pause, one update at a time (F22)."""

    async def main() -> None:
        async with World() as w:
            w.node.receiver.seconds = 0.0
            await w.begin_update()
            await asyncio.sleep(0.01)
            assert w.node.engine._paused
            newer = await w.begin_update()
            loaded = await w.scheduler.load()
            while loaded.update != newer:
                loaded = await w.scheduler.load()
            assert w.node.engine.control[-6:] == ["pause abort", "load 2", "resume", "pause abort", "load 3", "resume"]

    run(main())


def test_of_many_updates_ordered_during_a_load_only_the_newest_follows() -> None:
    async def main() -> None:
        async with World() as w:
            w.node.receiver.seconds = 0.0
            await w.begin_update()
            await asyncio.sleep(0.01)
            assert w.node.engine._paused
            w.node.receiver.seconds = 0.3
            await w.begin_update()
            await w.begin_update()
            await asyncio.sleep(0.1)
            assert not w.node.engine._paused
            newest = await w.begin_update()
            while (await w.scheduler.load()).update != newest:
                pass
            await asyncio.sleep(5.0)
            assert [c for c in w.node.engine.control if c.startswith("load")] == ["load 1", "load 2", "load 5"]

    run(main())


def test_an_update_to_the_version_it_runs_needs_no_pause() -> None:
    async def main() -> None:
        async with World() as w:
            control = list(w.node.engine.control)
            loaded = await w.update(version=1)
            assert loaded == Loaded(2, 1, 0.5, 0.0, 0.0) and w.node.engine.control == control

    run(main())


def test_who_is_no_member_says_so() -> None:
    async def main() -> None:
        async with World() as w:
            w.node.shell._updater._name = "somebody"
            failed = await w.update()
            assert isinstance(failed, LoadFailed) and "no member of transfer 2" in failed.reason

    run(main())


# --- what happens inside a pause ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["drop", "park"])
def test_nothing_is_aborted_while_the_engine_is_paused(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """F23: under `keep` requests sit in the paused engine; who must go, goes after the resume. (The fake engine asserts it.)"""

    async def main() -> None:
        async with World(config(update={"inflight": "keep"}, rollout=LONG), policy=endless) as w:
            await w.lease(0, task=TASK)
            await asyncio.sleep(0.2)
            w.node.receiver.seconds = 0.0
            await w.begin_update()
            await asyncio.sleep(0.01)
            assert w.node.engine._paused and w.node.shell._gate.running == 1
            await w.scheduler.push(w.node.name, Drop(0, 1, "redundant") if order == "drop" else ParkOrder(0, 1))
            record = await w.scheduler.until(0, lambda r: not r.leased)
            assert (record.discarded, record.parked) == ((1, 0) if order == "drop" else (0, 1))
            assert isinstance(await w.scheduler.load(), Loaded)

    run(main())


def test_a_newer_attempt_that_comes_in_a_pause_waits_until_the_older_one_has_left() -> None:
    async def main() -> None:
        async with World(config(update={"inflight": "keep"}, rollout=LONG), policy=endless) as w:
            await w.lease(0, task=TASK)
            await asyncio.sleep(0.2)
            w.node.receiver.seconds, w.node.engine.load_seconds = 0.0, 2.0
            await w.begin_update()
            await asyncio.sleep(0.1)
            await w.lease(0)
            await asyncio.sleep(1.0)
            assert w.node.engine._paused and (0, 2, -1) not in w.pool.replies, "not even its environment is made"
            assert isinstance(await w.scheduler.load(), Loaded)
            await asyncio.sleep(0.5)
            assert [r.id for r in w.node.engine.requests] == ["0.1.1", "0.2.1"] and not w.scheduler.episodes[0].fails

    run(main())


def test_requests_in_flight_go_on_under_keep() -> None:
    """F24: N in flight before, N continue after; none is asked again."""

    async def main() -> None:
        async with World(config(update={"inflight": "keep"}, rollout=LONG), policy=endless) as w:
            for episode in range(5):
                await w.lease(episode, task=TASK)
            await asyncio.sleep(0.2)
            requests = len(w.node.engine.requests)
            await w.update()
            await asyncio.sleep(0.1)
            assert len(w.node.engine.requests) == requests == 5 and w.node.shell._gate.running == 5

    run(main())


def test_the_lineage_of_kept_kv_goes_on_across_turns() -> None:
    async def main() -> None:
        async with World(in_mode("keep")) as w:
            w.node.receiver.seconds = 0.0
            await w.lease(0, task=TASK)
            await asyncio.sleep(0.1)
            await w.update()
            await w.lease(1, task=TASK)
            old = (await w.scheduler.finished(0)).log()
            new = (await w.scheduler.finished(1)).log()
            assert set(old.versions.tolist()) == {-1, 1, 2} and set(old.kv_versions[old.mask == 1].tolist()) == {1}
            assert {r.lineage for r in w.node.engine.requests if r.episode == 0} == {1}
            assert set(new.kv_versions[new.mask == 1].tolist()) == {2}

    run(main())


def test_a_stop_string_that_began_before_the_interruption_still_ends_the_turn() -> None:
    """An engine may look for stop strings only in what it samples; the turn's earlier part is the node's to remember."""
    stop = "fox jumps over"
    ids = made.words().convert_tokens_to_ids(stop.split())
    filler = made.words().convert_tokens_to_ids("lazy")

    def policy(request: GenerateRequest, index: int) -> int:
        return int(ids[index - 10]) if 10 <= index < 13 else int(filler)

    async def main(wait: float) -> tuple[list[int], int]:
        async with World(config(rollout={"max_turn_tokens": 30}), policy=policy) as w:
            w.node.receiver.seconds = 0.0
            await w.lease(0, task=Task("task", "talk", 1, {"turns": 1, "stop": [stop]}))
            await asyncio.sleep(wait)
            await w.update()
            record = await w.scheduler.finished(0)
            assert record.bodies()[-2].action.endswith(stop)
            return record.log().tokens.tolist(), events(w)["Paused"]

    expected, _ = run(main(50.0))
    assert int(np.isin(expected, ids).sum()) == 3
    paused = 0
    for i in range(10):
        tokens, interrupted = run(main(0.14 + 0.01 * i))
        assert tokens == expected
        paused += interrupted
    assert paused >= 5


def test_a_request_that_read_old_kv_after_all_is_sampled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """F41, F44: a request that slipped into the engine just before a pause keeps the lineage it was given. Under `recompute` what
    it samples on old KV is thrown away, and counted."""

    async def main() -> None:
        async with World(config(rollout={"max_turn_tokens": 10}), policy=endless) as w:
            w.node.receiver.seconds = 0.0
            engine = w.node.engine
            generate = engine.generate

            async def late(request: GenerateRequest) -> AsyncIterator[Chunk]:
                """The engine takes a while before it knows the second request, as one that prepares a new stop string does."""
                if len(engine.requests) == 1:
                    await asyncio.sleep(0.03)
                async for chunk in generate(request):
                    yield chunk

            monkeypatch.setattr(engine, "generate", late)
            await w.lease(0, task=TASK)
            await until(lambda: len(engine.requests) == 1 and not w.node.shell._gate.running)
            await until(lambda: bool(w.node.shell._gate.running))
            await w.update()
            log = (await w.scheduler.finished(0)).log()
            assert np.array_equal(log.versions, log.kv_versions)
            assert [s.length for s in log.segments if s.author == 2] == [11] * 4
            assert w.node.metrics.value("segue_discarded_tokens_total", reason="stopped") > 0
            assert [r.lineage for r in engine.requests][:3] == [1, 1, 2]

    run(main())
