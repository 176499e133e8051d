"""Going on from a checkpoint: the cut, what is lost and counted, admission without burst or stall, versions."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from core_world import World, make_config, task
from shell_world import ShellWorld, run

from scheduler.core import events as e
from scheduler.core.restart import CoreCut
from scheduler.ids import VersionLedger
from scheduler.shell import ShellCut
from segue import wire
from segue.episode import State
from segue.errors import RunFailed, WireError
from segue.ports import learner as learner_port


async def first_life(folder: Path, steps: int, cut_at: int) -> ShellWorld:
    """Train `steps` steps with a cut at `cut_at`, then die with everything in flight."""
    world = ShellWorld(folder, steps=100)
    world.learner.cut_every = cut_at
    await world.start()
    await world.learner.train(steps)
    await world.stop()
    return world


def test_f90_admission_has_the_room_it_had_no_burst_and_no_stall(tmp_path: Path) -> None:
    async def course() -> None:
        first = await first_life(tmp_path, 7, 6)
        world = ShellWorld(tmp_path, steps=100, cut=first.learner.cuts[6], first_step=6)
        await world.start()
        await world.learner.publish()
        await asyncio.sleep(2.0)
        bound, batch = world.config.staleness.max_age, world.config.batch.groups
        core = world.shell.core
        places = sum(node.places for node in world.nodes)
        assert len(core.groups.live) == min((bound + 1) * batch, places // world.config.group.size)
        await world.learner.train(12)
        assert [b.step for b in world.learner.batches] == list(range(6, 12))
        await world.stop()

    run(course)


def test_f91_a_resume_begins_with_a_publish_and_needs_nothing_else(tmp_path: Path) -> None:
    """Nothing is admitted before the restored weights are there, and everything is after."""

    async def course() -> None:
        first = await first_life(tmp_path, 4, 4)
        world = ShellWorld(tmp_path, steps=100, cut=first.learner.cuts[4], first_step=4)
        await world.start()
        await asyncio.sleep(5.0)
        assert not world.shell.core.groups.live
        await world.learner.publish()
        await asyncio.sleep(2.0)
        assert world.shell.core.groups.live
        await world.stop()

    run(course)


def test_f93_version_ids_are_never_reused_even_those_after_the_cut(tmp_path: Path) -> None:
    async def course() -> None:
        first = await first_life(tmp_path, 9, 6)
        assert first.learner.versions == list(range(10))
        world = ShellWorld(tmp_path, steps=100, cut=first.learner.cuts[6], first_step=6)
        await world.start()
        await world.learner.train(8)
        assert min(world.learner.versions) >= 10
        assert world.learner.versions == sorted(set(world.learner.versions))
        await world.stop()
        without_checkpoint = ShellWorld(tmp_path, steps=100)
        await without_checkpoint.start()
        await without_checkpoint.learner.publish()
        assert without_checkpoint.learner.versions[0] > max(world.learner.versions)
        await without_checkpoint.stop()

    run(course)


def test_f92_every_task_handed_out_is_trained_dropped_or_issued_again(tmp_path: Path) -> None:
    """None lost, none twice: over both lives the stream is trained like one without an interruption, but for the order."""

    async def course() -> None:
        first = await first_life(tmp_path, 8, 6)
        cut = wire.decode(first.learner.cuts[6], ShellCut)
        trained = Counter(group.task for batch in first.learner.batches[:6] for group in batch.groups)
        outstanding = [t.id for t in cut.core.outstanding]
        taken = sum(trained.values()) + len(outstanding)
        stream = ShellWorld(tmp_path / "stream", steps=1).shell._stream
        whole = [t.id for t in stream.take(200)]
        assert Counter(whole[:taken]) == trained + Counter(outstanding)

        world = ShellWorld(tmp_path, steps=100, cut=first.learner.cuts[6], first_step=6)
        await world.start()
        await world.learner.train(16)
        issued = [group.task for batch in world.learner.batches for group in batch.groups]
        live = [group.task.id for group in world.shell.core.groups.live.values()]
        kept = [g.task for p in world.shell.core.batches.kept.values() if p.plan.step >= 16 for g in p.plan.groups]
        known = Counter(issued) + Counter(live) + Counter(kept) + Counter(t.id for t in world.shell.core.admission.tasks)
        assert known + trained == Counter(whole[: sum(known.values()) + sum(trained.values())])
        await world.stop()

    run(course)


def test_lost_episodes_are_counted_and_the_counts_still_add_up(tmp_path: Path) -> None:
    async def course() -> None:
        first = await first_life(tmp_path, 5, 5)
        cut = wire.decode(first.learner.cuts[5], ShellCut).core
        running = sum(cut.counts[s.value] for s in (State.PENDING, State.LEASED, State.PARKED))
        finished = sum(cut.counts[s.value] for s in (State.ASSEMBLING, State.QUEUED, State.DELIVERED))
        assert running and finished
        world = ShellWorld(tmp_path, steps=100, cut=first.learner.cuts[5], first_step=5)
        await world.start()
        status = await world.status()
        assert status["counts"]["episodes_lost"] == {"rollout": running, "queue": finished}
        assert status["episodes"]["admitted"] == cut.admitted == sum(status["episodes"]["states"].values())
        assert status["episodes"]["dropped"] == {"shutdown|rollout": running, "shutdown|queue": finished}
        assert status["tokens_generated"] == cut.tokens
        assert (status["trained"], status["committed"], status["batches_formed"]) == (5, 5, 5)
        await world.learner.train(8)
        world.shell.core.tables.episodes.check()
        await world.stop()

    run(course)


def test_the_cut_is_that_of_its_acknowledgement_also_when_the_report_is_repeated(tmp_path: Path) -> None:
    async def course() -> None:
        world = ShellWorld(tmp_path, steps=100)
        world.learner.cut_every = 3
        await world.start()
        await world.learner.train(3)
        await asyncio.sleep(3.0)
        report = learner_port.TrainedReport(2, {}, [], cut=True)
        reply = wire.decode(await world.shell.handle("trained", wire.encode(report)), learner_port.TrainedReply)
        assert reply.cut == world.learner.cuts[3]
        await world.stop()

    run(course)


def test_a_second_resume_from_a_resumed_run(tmp_path: Path) -> None:
    async def course() -> None:
        cut, step = (await first_life(tmp_path, 4, 4)).learner.cuts[4], 4
        versions: list[int] = []
        for _ in range(3):
            world = ShellWorld(tmp_path, steps=100, cut=cut, first_step=step)
            world.learner.cut_every = 2
            await world.start()
            await world.learner.train(step + 3)
            versions += world.learner.versions
            step += 2
            cut = world.learner.cuts[step]
            await world.stop()
        assert versions == sorted(set(versions))

    run(course)


def test_a_damaged_cut_or_ledger_is_a_typed_error(tmp_path: Path) -> None:
    async def course() -> None:
        world = ShellWorld(tmp_path, steps=100)
        with pytest.raises(WireError):
            world.shell.restore(b"not a cut")
        ledger = tmp_path / "journal" / "next_version"
        ledger.parent.mkdir()
        ledger.write_text("seven")
        with pytest.raises(RunFailed, match="next_version"):
            VersionLedger(ledger).next_id()

    run(course)


def test_the_ledger_reads_back_what_it_reserved(tmp_path: Path) -> None:
    ledger = VersionLedger(tmp_path / "journal" / "next_version")
    assert ledger.next_id() == 0
    ledger.reserve(3)
    assert VersionLedger(tmp_path / "journal" / "next_version").next_id() == 3


# --- the core's part --------------------------------------------------------------------------------------------------


def world_with_cut() -> tuple[World, CoreCut]:
    world = World(make_config())
    world.join("rollout-0")
    world.update_all()
    world.send(e.TrainingOpened(100))
    world.drain(3)
    for _ in range(5):
        world.serve()
    return world, wire.decode(wire.encode(world.core.cut()), CoreCut)


def test_outstanding_tasks_come_oldest_first_and_before_new_ones() -> None:
    world, cut = world_with_cut()
    second = World(make_config())
    second.core.restore(cut, next_version=50)
    second.trained = second.committed = cut.step
    second.join("rollout-0", max_episodes=64)
    second.send(e.TrainingOpened(100))
    second.plans = {step: world.plans[step] for step in range(cut.step)}
    second.update_all()
    assert second.core.tables.versions.newest == 50
    opened = [group.task for group in second.core.groups.live.values()]
    assert opened[: len(cut.outstanding)] == cut.outstanding[: len(opened)]
    second.drain(3)


def test_a_rollback_takes_the_steps_of_abandoned_versions_back() -> None:
    """design.md §5: tokens of abandoned versions take the smaller of their step and s; their batches train again in order."""
    world = World(make_config(steps=50))
    world.join("rollout-0")
    world.send(e.TrainingOpened(50))
    world.drain(6)
    assert world.core.progress.committed == 0
    newest = world.core.tables.versions.newest
    before = world.core.version_steps(range(newest + 1))
    world.rewind(2)
    after = world.core.version_steps(range(newest + 1))
    assert after == {version: min(step, 2) for version, step in before.items()}
    world.update_all()
    assert world.core.tables.versions.newest == newest + 1
    assert world.core.version_steps([newest + 1]) == {newest + 1: 2}
    assert world.tally("batches_rewound") == 4
    world.drain(10)
    assert world.trained == 12


def test_after_a_rollback_old_nodes_begin_only_what_they_can_still_sample_in_time() -> None:
    """A node that never got past step 0 must not begin groups whose tokens would be over age, again and again."""
    world = World(make_config(steps=50, batch__groups=1, staleness__max_age=2))
    node = world.join("rollout-0", 2)
    world.update_all()
    world.send(e.TrainingOpened(50))
    for _ in range(3):
        world.one_step()
        world.published = world.trained
    world.rewind(1)
    assert node.version == 0 and world.core.progress.formed == 3
    assert not world.core.groups.live, "step 3 needs weights of step 1 at least, and the node has step 0"
    world.drain(6)


def test_there_is_no_way_back_behind_a_commit() -> None:
    world = World(make_config(steps=50))
    world.join("rollout-0")
    world.send(e.TrainingOpened(50))
    world.drain(4)
    world.commit()
    with pytest.raises(ValueError, match="no way back"):
        world.core.handle(e.LearnerRewound(3), world.now)


def test_quarantined_tasks_stay_aside_after_a_resume() -> None:
    world = World(make_config(scheduler__retries_data=0, group__min_valid=2))
    world.join("rollout-0")
    world.update_all()
    world.send(e.TrainingOpened(10))
    node = world.nodes["rollout-0"]
    lease = next(iter(node.leases.values()))
    world.fail(node, lease, "data", "no answer")
    bad = lease.grant.task.id
    assert list(world.core.failures.quarantined) == [bad]
    second = World(make_config())
    second.core.restore(world.core.cut(), 10)
    before = len(second.core.admission.tasks)
    second.core.handle(e.TasksArrived([lease.grant.task, task(500)]), 0.0)
    assert [t.id for t in list(second.core.admission.tasks)[before:]] == ["t500"]
