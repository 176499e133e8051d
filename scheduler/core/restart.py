"""The cut: what a checkpoint holds of the scheduler, and how a new core goes on from it.

What happens to each piece of state:
  counts, tally, version table, ids    saved
  tasks handed out and not trained     saved: issued again, oldest first, before the stream goes on
  episodes not trained                 lost: dropped as `shutdown` and counted in `episodes_lost`
  batches formed, trained, committed   all start at the step of the cut, so that admission has exactly the room it had with
                                       nothing in flight: no burst, no stall
  nodes, leases, evaluations           gone: nodes join again, the driver starts its evaluations again
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from segue.episode import DropReason, FailureClass, State, Task
from segue.wire import Message

if TYPE_CHECKING:
    from scheduler.core.core import SchedulerCore

RUNNING = (State.PENDING, State.LEASED, State.PARKED)
FINISHED = (State.ASSEMBLING, State.QUEUED, State.DELIVERED)


class CoreCut(Message, frozen=True):
    """The core's part of a checkpoint, taken right after step `step` − 1 was acknowledged."""

    step: int
    admitted: int
    counts: dict[str, int]
    dropped: dict[str, int]
    failed: dict[str, int]
    tokens: int
    tally: list[tuple[list[str], int]]
    outstanding: list[Task]
    versions: dict[int, int]
    next_version: int
    next_episode: int
    next_group: int
    next_transfer: int
    quarantined: dict[str, str]
    strikes: dict[str, int]


def cut(core: SchedulerCore) -> CoreCut:
    """Everything that `restore` needs."""
    table = core.tables.episodes
    return CoreCut(
        step=core.progress.trained,
        admitted=table.admitted,
        counts={state.value: count for state, count in table.counts.items()},
        dropped={f"{reason.value}|{stage}": count for (reason, stage), count in table.dropped.items()},
        failed={failure.value: count for failure, count in table.failed.items()},
        tokens=core.intake.tokens,
        tally=[(list(key), count) for key, count in sorted(core.tables.tally.items())],
        outstanding=outstanding(core),
        versions=core.tables.versions.table(),
        next_version=core.tables.versions.next_id,
        next_episode=table.next_id,
        next_group=core.groups.next_id,
        next_transfer=core.updates.next_transfer,
        quarantined=dict(core.failures.quarantined),
        strikes=dict(core.failures.strikes),
    )


def outstanding(core: SchedulerCore) -> list[Task]:
    """Tasks that were taken from the stream and are neither trained nor dropped, oldest first."""
    tasks: dict[int, Task] = {}
    for step in range(core.progress.trained, core.progress.formed):
        tasks.update((episode.group.id, episode.group.task) for episode in core.batches.kept[step].episodes)
    tasks.update((group.id, group.task) for group in core.groups.live.values())
    return [*(tasks[group] for group in sorted(tasks)), *core.groups.again, *core.admission.tasks]


def restore(core: SchedulerCore, cut: CoreCut, next_version: int) -> None:
    """See the module."""
    table, tally, progress = core.tables.episodes, core.tables.tally, core.progress
    assert table.admitted == 0 and progress.formed == 0, "only a new core can be restored"
    table.admitted = cut.admitted
    for state in State:
        table.counts[state] = cut.counts.get(state.value, 0)
    for reason, stage in table.dropped:
        table.dropped[reason, stage] = cut.dropped.get(f"{reason.value}|{stage}", 0)
    for failure in FailureClass:
        table.failed[failure] = cut.failed.get(failure.value, 0)
    tally.update({tuple(key): count for key, count in cut.tally})
    for states, stage in ((RUNNING, "rollout"), (FINISHED, "queue")):
        for state in states:
            lost = table.counts[state]
            table.counts[state] = 0
            table.counts[State.DROPPED] += lost
            table.dropped[DropReason.SHUTDOWN, stage] += lost
            tally.count("episodes_lost", stage, by=lost)
    table.next_id = cut.next_episode
    core.intake.tokens = cut.tokens
    core.groups.next_id = cut.next_group
    core.updates.next_transfer = cut.next_transfer
    core.failures.quarantined.update(cut.quarantined)
    core.failures.strikes.update(cut.strikes)
    core.admission.tasks.extend(cut.outstanding)
    core.tables.versions.restore(cut.versions, max(next_version, cut.next_version), cut.step)
    progress.formed = progress.trained = progress.committed = cut.step
    table.check()
