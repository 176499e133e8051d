"""The scheduler's core: events in, commands out. No I/O, no threads, no wall clock: `now` is handed in and never goes back.

One event at a time. The part that it concerns changes the tables; then what follows from it is settled in one fixed order:
lost attempts, nodes that left, batches, updates, free places, episodes that began to wait, new groups, tasks. See `tables`
for why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from scheduler.core import restart
from scheduler.core.admission import Admission
from scheduler.core.batches import Batches
from scheduler.core.commands import Command, Fatal, StopNodes
from scheduler.core.evaluation import EvalRun, Evaluation
from scheduler.core.events import (
    BatchesCommitted,
    BatchTaken,
    BatchTrained,
    EvalStarted,
    Event,
    FromNode,
    LearnerRewound,
    NodeHeard,
    NodeJoined,
    NodeLost,
    NodeSpent,
    SendFailed,
    StopRequested,
    TasksArrived,
    TrainingOpened,
    WeightsReady,
)
from scheduler.core.failures import Failures
from scheduler.core.groups import RETRY, Groups
from scheduler.core.intake import Intake
from scheduler.core.leases import LEASE, PROGRESS, Leases
from scheduler.core.parking import Parking
from scheduler.core.progress import Progress
from scheduler.core.rests import REST
from scheduler.core.tables import Tables
from scheduler.core.updates import ROUND, Updates
from segue.config import Config
from segue.episode import DropReason, State
from segue.ports.rollout import DeltaHead, Discarded, Fail, Finish, Loaded, LoadFailed, Parked, Paused, Resumed, SliceUsed
from segue.ports.transfer import TransferResult

NODES = "nodes"


class SchedulerCore:
    """The state machine of design.md §5, put together from its parts.

    `task_count` is how many different tasks the stream has.
    The parts are public for reading: reports, metrics and tests look at them; only events change them.
    """

    def __init__(self, config: Config, task_count: int | None = None) -> None:
        t = self.tables = Tables(config)
        self._sync = config.mode == "sync"
        # The driver replaces nodes, and ends the run where it cannot: this is how long that may take, and then a little.
        cluster = config.cluster
        self._alone_seconds = cluster.silence_seconds + cluster.absence_seconds + cluster.start_seconds
        self.progress = Progress()
        self.leases = Leases(t)
        self.groups = Groups(t, self.leases)
        self.failures = Failures(t, self.leases, self.groups, task_count or config.task.train_tasks)
        self.admission = Admission(t, self.leases, self.groups, self.failures, self.progress)
        self.batches = Batches(t, self.groups, self.progress)
        self.updates = Updates(t, self.leases, self._pressing)
        self.parking = Parking(t, self.leases)
        self.evaluation = Evaluation(t, self.leases, self.groups)
        self.intake = Intake(t, self.leases, self.groups, self.failures, self.batches, self.parking, self.evaluation)
        self._handlers: dict[type, Callable[[Any, float], object]] = {
            Finish: self.intake.finish,
            Fail: self.intake.fail,
            Parked: self.intake.parked,
            Discarded: self.intake.discarded,
            SliceUsed: self.intake.slice_used,
            Paused: self.intake.paused,
            Resumed: self.intake.resumed,
            NodeJoined: self._node_joined,
            NodeLost: self._node_lost,
            FromNode: self._from_node,
            TransferResult: self.updates.result,
            SendFailed: lambda e, now: self.updates.send_failed(e.transfer, e.reason, now),
            WeightsReady: lambda e, now: self.updates.published(e.step, e.address, self.progress.trained),
            TasksArrived: lambda e, now: self.admission.arrived(e.tasks),
            TrainingOpened: self._training_opened,
            EvalStarted: lambda e, now: self.evaluation.start(e.name, e.tasks, e.temperature, now),
            BatchTaken: lambda e, now: self.batches.taken(e.step),
            BatchTrained: self._batch_trained,
            BatchesCommitted: lambda e, now: self.batches.committed(e.step),
            LearnerRewound: self._learner_rewound,
            StopRequested: self._stop,
        }

    # --- the machine ----------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> Sequence[Command]:
        """Take in one event. Raises `CallRefused`, with nothing changed, when the learner reports what cannot be.

        For a `DeltaHead`, no command at all means that it was accepted.
        """
        if type(event) is DeltaHead:
            commands = self.intake.delta(event, now)
            return commands if not self.tables.lost else [*commands, *self._settle(now)]
        if type(event) is NodeHeard:  # renews leases, and nothing follows from that
            self._node_heard(event, now)
            return ()
        if type(event) is NodeSpent:  # comes with every exchange; nothing follows unless it lets an update go out
            self._node_spent(event, now)
            return self._settle(now) if self.tables.standing else ()
        self._handlers[type(event)](event, now)
        return self._settle(now)

    def next_deadline(self) -> float | None:
        """When `tick` is due; None if nothing is timed."""
        return self.tables.timers.next()

    def tick(self, now: float) -> Sequence[Command]:
        """Act on every deadline that has passed."""
        for kind, key in self.tables.timers.due(now):
            if kind == PROGRESS:
                self.leases.stalled(int(key), now)
            elif kind == LEASE:
                self.leases.expire(str(key), now)
            elif kind == RETRY:
                self.failures.rested(int(key))
            elif kind == ROUND:
                self.updates.expired(int(key), now)
            elif kind == REST:
                self.updates.rested(str(key))
            else:
                assert kind == NODES
                self._alone()
        return self._settle(now)

    def _settle(self, now: float) -> list[Command]:
        t = self.tables
        while t.lost or t.left:
            lost, t.lost = t.lost, []
            for episode, failure, reason in lost:
                if episode.state is State.LEASED:
                    self.intake.attempt_failed(episode, failure, reason, now)
            left, t.left = t.left, []
            for node in left:
                self.updates.left(node, now)
        self.batches.form(now)
        while t.standing:
            t.standing = False
            self._standing(now)
        if t.freed:
            freed, t.freed = t.freed, []
            for node in freed:
                node.freed = False
                self.admission.fill(node, now)
        if t.unplaced:
            unplaced, t.unplaced = t.unplaced, []
            for episode in unplaced:
                if episode.stamp:
                    self.leases.place(episode, now)
        if t.room:
            t.room = False
            self.admission.fill_all(now)
        self.admission.request()
        if self.updates.held and self._pressing():
            self._standing(now)
        out, t.out = t.out, []
        return out

    def _standing(self, now: float) -> None:
        """A node came, went or loaded, or a version was published."""
        t = self.tables
        t.waiting.everywhere = min(t.nodes.oldest(), self.updates.oldest_coming())
        self.updates.advance(now)
        if self._sync:
            held = not self.updates.complete()
            t.room = t.room or (self.admission.held and not held)
            self.admission.held = held
        if len(t.nodes) or t.stopped:
            t.timers.disarm(NODES, 0)
        elif t.tally["joined",]:  # until the first one is there, the driver watches the start
            t.timers.arm(NODES, 0, now + self._alone_seconds)

    # --- events of no single part ---------------------------------------------------------------------------------------

    def _node_joined(self, event: NodeJoined, now: float) -> None:
        self.leases.join(event.node, event.session, event.max_episodes, now)

    def _node_heard(self, event: NodeHeard, now: float) -> None:
        node = self.tables.nodes.get(event.node, event.session)
        if node is not None:
            self.leases.heard(node, now)

    def _node_spent(self, event: NodeSpent, now: float) -> None:
        if self.tables.nodes.get(event.node, event.session) is not None:
            self.updates.spent(event.node, event.session, event.tokens, event.seconds, now)

    def _node_lost(self, event: NodeLost, now: float) -> None:
        node = self.tables.nodes.get(event.node, event.session)
        if node is not None:
            self.leases.fence(node, "silent", now)

    def _from_node(self, event: FromNode, now: float) -> None:
        node = self.tables.nodes.get(event.node, event.session)
        if node is None:
            self.tables.tally.count("refused", "stale_session")
        elif isinstance(event.report, Loaded):
            loading = self.updates.loaded(node, event.report, now)
            if loading:
                self.admission.share(node, loading)
        else:
            assert isinstance(event.report, LoadFailed)
            self.updates.load_failed(node, event.report, now)

    def _training_opened(self, event: TrainingOpened, now: float) -> None:
        self.progress.steps = max(self.progress.steps, event.steps)
        self.tables.room = True

    def _batch_trained(self, event: BatchTrained, now: float) -> None:
        if self.batches.trained(event.step):
            t = self.tables
            in_use = [group.floor for group in (*self.groups.live.values(), *self.evaluation.running())]
            in_use += [kept.plan.versions[0] for kept in self.batches.kept.values()]
            in_use += [t.nodes.oldest(), self.updates.oldest_coming()]
            t.meter.operations += len(in_use)
            t.versions.forget(min(in_use), self.progress.formed - self.tables.config.staleness.max_age)

    def _learner_rewound(self, event: LearnerRewound, now: float) -> None:
        self.batches.rewind(event.step)
        self.tables.versions.rollback(event.step)
        self.batches.ages_changed()
        self.tables.standing = self.tables.room = True

    def _stop(self, event: StopRequested, now: float) -> None:
        t = self.tables
        if t.stopped:
            return
        t.stopped = event.reason or "stopped"
        for group in [*self.groups.live.values(), *self.evaluation.running()]:
            self.groups.drop(group, DropReason.SHUTDOWN)
        self.batches.stop()
        t.standing = True
        t.out.append(StopNodes([(node.name, node.session) for node in t.nodes], t.stopped))

    def _alone(self) -> None:
        fences = ", ".join(f"{name} ({reason})" for name, reason in sorted(self.tables.fences.items()))
        last = f"; fenced last: {fences}: see the nodes' logs" if fences else ""
        self.tables.out.append(
            Fatal("rollout", f"No rollout node has been heard of for {self._alone_seconds:g} s, so nothing can go on{last}.")
        )

    def _pressing(self) -> bool:
        """Whether something waits for newer weights than the nodes have: an evaluation, an episode that must not go back to older
        ones, or the learner, whose next batch needs groups that may not begin under these (a node has room, and all that may
        begin has begun)."""
        t, progress = self.tables, self.progress
        if t.waiting.beyond(max(t.nodes.running, default=0)):
            return True
        return progress.formed == progress.trained and self.admission.open(None) and t.nodes.least_loaded(0) is not None

    # --- for the shell --------------------------------------------------------------------------------------------------

    @property
    def operations(self) -> int:
        """Heap and table operations so far (see `meter`)."""
        return self.tables.meter.operations

    def version_steps(self, versions: Sequence[int]) -> dict[int, int]:
        """The step of each of these versions, as it is now (a rollback changes it)."""
        return {version: self.tables.versions.step(version) for version in versions}

    def eval_run(self, name: str) -> EvalRun | None:
        """The state of an evaluation."""
        return self.evaluation.runs.get(name)

    def waits_for(self) -> str:
        """Why the scheduler is idle: `wait_prompts` when groups could begin and no task is there, else `wait_capacity`."""
        return "wait_prompts" if self.admission.waiting_for_tasks else "wait_capacity"

    def cut(self) -> restart.CoreCut:
        """What a checkpoint must hold of this core."""
        return restart.cut(self)

    def restore(self, cut: restart.CoreCut, next_version: int) -> None:
        """Take over from a checkpoint; `next_version` is above every version id ever given out. Before any event."""
        restart.restore(self, cut, next_version)
