"""No node serves weights that it has not proved to be the published ones (F37, F40): within the pause, after every load."""

from __future__ import annotations

import asyncio

import pytest
from fake_engine import FakeEngine, FakeReceiver
from node_world import World, config, renderer, run

from segue.config import Config
from segue.episode import Task
from segue.ports.engine import EngineDead, GenerateRequest
from segue.ports.rollout import Loaded, LoadFailed

MODES = ["recompute", "keep", "turn", "episode"]
TASK = Task("task", "talk", 5, {"turns": 4})


def endless(request: GenerateRequest, index: int) -> int:
    return 20 + index % 7


def probing(**keys: object) -> Config:
    return config(weightsync=keys)


@pytest.mark.parametrize("mode", MODES)
def test_every_load_is_proved_before_the_engine_goes_on(mode: str) -> None:
    """Within the pause (the fake engine asserts it), at the price of one score, which is measured."""

    async def main() -> None:
        async with World(config(update={"inflight": mode})) as w:
            node = w.node
            node.receiver.seconds, node.engine.score_seconds = 0.0, 0.03
            await w.lease(0, task=TASK)
            for version, gap in ((2, 2e-4), (3, 1e-4)):
                node.receiver.gap = gap
                await asyncio.sleep(0.1)
                loaded = await w.update()
                assert isinstance(loaded, Loaded) and loaded.pause_seconds == pytest.approx(0.05)
                assert node.engine.scored == list(range(1, version + 1))
                assert node.metrics.value("segue_weight_probe_gap_nats") == pytest.approx(gap)
            assert node.metrics.value("segue_weight_probe_gap_max_nats") == pytest.approx(2e-4)
            sync = node.sync_metrics
            assert sync.value("segue_weight_sync_seconds", phase="probe") == 3
            assert sync.sum("segue_weight_sync_seconds", phase="probe") == pytest.approx(0.06)
            assert sync.sum("segue_weight_sync_seconds", phase="load") == pytest.approx(0.06)
            assert sync.value("segue_weight_sync_failures_total", phase="probe") == 0
            await w.scheduler.finished(0)

    run(main())


@pytest.mark.parametrize("mode", MODES)
def test_an_engine_that_runs_other_weights_never_serves_them(mode: str) -> None:
    """It said that it had loaded. Nothing is sampled any more, and the node ends with the reason."""

    async def main() -> None:
        cfg = config(update={"inflight": mode}, rollout={"max_turn_tokens": 100, "max_tokens": 2000})
        async with World(cfg, policy=endless) as w:
            node = w.node
            node.receiver.seconds = 0.0
            await w.lease(0, task=TASK)
            await asyncio.sleep(0.2)
            node.engine.forgets_to_load = True
            failed = await w.update(drain_seconds=0.1)
            assert isinstance(failed, LoadFailed) and failed.fatal and failed.version == 2
            assert failed.reason == (
                "rollout-0 does not run the weights of version 2: its log-probabilities of the probe differ from the learner's "
                "by up to 1 nats, where weightsync.probe_tolerance = 0.001 allows for rounding"
            )
            sampled = node.engine.decoded
            with pytest.raises(
                EngineDead, match="version 2 could not be loaded: rollout-0 does not run the weights of version 2"
            ):
                await node.shell.run()
            assert node.engine.control[-1] == "load 2" and node.engine._paused, "it was resumed"
            assert node.sync_metrics.value("segue_weight_sync_failures_total", phase="probe") == 1
            assert node.metrics.value("segue_weight_probe_gap_nats") == 1.0
            await w.begin_update()
            await asyncio.sleep(1.0)
            assert node.engine.control[-1] == "load 2", "a later update opened it again"
            assert node.engine.decoded == sampled

    run(main())


def test_the_first_weights_are_proved_too() -> None:
    async def main() -> None:
        async with World(nodes=0) as w:
            engine, receiver = FakeEngine(endless, renderer().text), FakeReceiver(0.0)
            engine.forgets_to_load = True
            node = await w.add_node("rollout-0", engine=engine, receiver=receiver)
            assert engine.control == ["pause abort", "load 1"]
            with pytest.raises(EngineDead, match="does not run the weights of version 1"):
                await node.shell.run()

    run(main())


@pytest.mark.parametrize(
    ("gap", "keys", "loads"),
    [
        (0.9e-3, {}, True),
        (1.1e-3, {}, False),
        (-1.1e-3, {}, False),
        (1.1e-3, {"probe_tolerance": 2e-3}, True),
        (1.1e-3, {"probe_tokens": 0}, True),
        (None, {"probe_tokens": 0}, True),
        (float("nan"), {"probe_tolerance": 1e9}, False),
    ],
)
def test_the_tolerance_decides(gap: float | None, keys: dict[str, object], loads: bool) -> None:
    async def main() -> None:
        async with World(probing(**keys)) as w:
            w.node.receiver.gap = gap
            answer = await w.update()
            assert isinstance(answer, Loaded) == loads
            assert isinstance(answer, Loaded) or answer.fatal
            assert (w.node.engine.scored == []) == (keys.get("probe_tokens") == 0)

    run(main())


def test_coarse_precisions_have_a_tolerance_of_their_own() -> None:
    async def main() -> None:
        async with World(config(rollout={"dtype": "bfloat16"})) as w:
            w.node.receiver.gap = 0.4
            assert isinstance(await w.update(), Loaded)
            w.node.receiver.gap = 1.1
            assert isinstance(await w.update(), LoadFailed)

    run(main())


def test_weights_without_the_probe_that_was_asked_for_leave_the_old_ones_serving() -> None:
    async def main() -> None:
        async with World() as w:
            w.node.receiver.gap = None
            failed = await w.update()
            assert isinstance(failed, LoadFailed) and not failed.fatal
            assert failed.reason == "version 2 came without a probe, which weightsync.probe_tokens asks for"
            assert w.node.engine.version == 1 and "load 2" not in w.node.engine.control
            assert w.node.sync_metrics.value("segue_weight_sync_failures_total", phase="probe") == 1

    run(main())


def test_an_engine_that_does_not_score_in_time_ends_the_node() -> None:
    async def main() -> None:
        async with World() as w:
            w.node.engine.score_seconds = 1e6
            failed = await w.update(deadline_seconds=20.0)
            assert isinstance(failed, LoadFailed) and failed.fatal
            with pytest.raises(EngineDead, match="did not score the probe within 20 s"):
                await w.node.shell.run()
            assert w.node.engine.control[-1] == "load 2"
            assert w.node.sync_metrics.value("segue_weight_sync_failures_total", phase="probe") == 1

    run(main())


def test_what_breaks_after_the_pause_is_counted_by_its_phase() -> None:
    async def main() -> None:
        async with World() as w:
            w.node.engine.fail_load = RuntimeError("out of memory")
            assert isinstance(await w.update(), LoadFailed)
            assert w.node.sync_metrics.value("segue_weight_sync_failures_total", phase="load") == 1

    run(main())
