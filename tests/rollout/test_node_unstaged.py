"""`weightsync.staging = "none"`: the transfer is inside the pause, and from the first bucket on there is no way back."""

from __future__ import annotations

import pytest
from fake_engine import FakeReceiver
from node_world import World, config, run, until

from segue.clock import now
from segue.config import Config
from segue.episode import Task
from segue.ports.engine import EngineDead
from segue.ports.rollout import Loaded, LoadFailed

TASK = Task("task", "talk", 5, {"turns": 4})


def unstaged(inflight: str = "recompute") -> Config:
    return config(weightsync={"staging": "none"}, update={"inflight": inflight, "drain_seconds": 5.0})


@pytest.mark.parametrize("mode", ["recompute", "keep", "turn", "episode"])
def test_the_engine_is_paused_before_the_transfer_and_goes_on_after_it(mode: str) -> None:
    async def main() -> None:
        async with World(unstaged(mode)) as w:
            w.node.receiver.seconds = 2.0
            await w.lease(0, task=TASK)
            await until(lambda: w.node.engine.decoded > 1)
            del w.node.engine.control[:]
            loaded = await w.update(drain_seconds=0.05)
            assert isinstance(loaded, Loaded) and loaded.version == w.node.engine.version == 2
            assert loaded.stage_seconds == 0.0 and loaded.pause_seconds > 2.0
            pause, *buckets, resume = w.node.engine.control
            assert pause.startswith("pause") and resume == "resume"
            assert buckets == [f"bucket {number} of 2" for number in range(4)]
            assert w.node.engine.scored[-1] == 2 and w.node.receiver.arriving.closed
            log = (await w.scheduler.finished(0)).log()
            log.validate()
            assert set(log.versions[log.mask == 1].tolist()) == {1, 2}
            metrics = w.node.sync_metrics
            assert metrics.value("segue_weight_sync_started_timestamp_seconds") == 0.0
            assert w.node.sync_clock.seconds()["transfer"] >= 2.0

    run(main())


def test_a_transfer_that_fails_before_its_first_bucket_leaves_the_old_weights_serving() -> None:
    async def main() -> None:
        async with World(unstaged()) as w:
            await w.lease(0, task=TASK)
            w.node.receiver.error = RuntimeError("n7 is silent")
            failed = await w.update()
            assert isinstance(failed, LoadFailed) and not failed.fatal
            assert failed.reason == "version 2 did not arrive: n7 is silent"
            assert w.node.engine.control[-1] == "resume" and w.node.engine.version == 1
            assert set((await w.scheduler.finished(0)).log().versions.tolist()) == {-1, 1}
            assert w.node.sync_metrics.value("segue_weight_sync_failures_total", phase="transfer") == 1
            w.node.receiver.error = None
            assert isinstance(await w.update(), Loaded)

    run(main())


def test_weights_that_do_not_fit_or_have_no_probe_leave_the_old_ones_serving() -> None:
    async def main() -> None:
        async with World(unstaged()) as w:
            w.node.engine.fail_load = ValueError("lm_head.weight is missing")
            failed = await w.update()
            assert isinstance(failed, LoadFailed) and not failed.fatal
            assert failed.reason == "lm_head.weight is missing" and w.node.receiver.arriving.closed
            w.node.engine.fail_load = None
            w.node.receiver.gap = None
            failed = await w.update()
            assert isinstance(failed, LoadFailed) and not failed.fatal and "came without a probe" in failed.reason
            assert w.node.receiver.arriving.closed and w.node.receiver.arriving.in_it == 0
            assert w.node.engine.version == 1 and w.node.engine.control[-1] == "resume"

    run(main())


@pytest.mark.parametrize("whose", ["transfer", "engine"])
def test_after_the_first_bucket_every_failure_ends_the_node(whose: str) -> None:
    """The sender, another member or the engine itself: what is in the engine is a mixture."""

    async def main() -> None:
        async with World(unstaged()) as w:
            if whose == "transfer":
                w.node.receiver.error, w.node.receiver.fails_at = RuntimeError("n7 is silent"), 1
            else:
                w.node.engine.fail_load = RuntimeError("out of memory")
            failed = await w.update()
            assert isinstance(failed, LoadFailed) and failed.fatal
            with pytest.raises(EngineDead, match=r"version 2 could not be loaded: .*(n7 is silent|out of memory)"):
                await w.node.shell.run()
            assert w.node.engine.control[-1] == "bucket 0 of 2", "a mixture is not resumed"
            assert w.node.sync_metrics.value("segue_weight_sync_failures_total", phase="load") == 1
            assert w.node.receiver.arriving.closed

    run(main())


def test_a_pause_may_last_as_long_as_transfer_and_update_together() -> None:
    """The transfer has its own deadline, which comes first; the engine's patience must not run out in the middle of it."""

    async def main() -> None:
        async with World(unstaged()) as w:
            w.node.receiver.seconds = 29.0  # of the 30 s of the transfer
            began = now()
            assert isinstance(await w.update(deadline_seconds=20.0), Loaded)
            assert now() - began > 29.0
            assert isinstance(w.node.receiver, FakeReceiver) and w.node.receiver.cancelled == 0

    run(main())
