"""A model of everything around the scheduler's core: nodes, learner, task stream; and the promises it must keep, checked on
the way.

The world keeps its own record of every token, attempt and batch, so that it can contradict the core.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from scheduler.core import SchedulerCore
from scheduler.core import commands as c
from scheduler.core import events as e
from scheduler.core.restart import CoreCut
from segue import wire
from segue.config import Config
from segue.config.root import resolve
from segue.episode import DropReason, State, Task
from segue.ports.rollout import DeltaHead, Discarded, Fail, Finish, Loaded, LoadFailed, Parked, SliceUsed
from segue.ports.transfer import Transfer, TransferResult


def make_config(**sections: Any) -> Config:
    """A small config; dotted keys as `batch__groups=2`."""
    data: dict[str, Any] = {
        "steps": 1000,
        "task": {"env": "latency", "train_tasks": 1000},
        "model": {"path": "somewhere"},
        "group": {"size": 2},
        "batch": {"groups": 2},
        "rollout": {"nodes": 2, "max_episodes": 4},
    }
    for key, value in sections.items():
        *parents, last = key.split("__")
        node = data
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    return resolve(data, "test.toml")


def task(index: int) -> Task:
    return Task(id=f"t{index}", env="latency", seed=index)


class ModelLease:
    """What a node knows of an attempt it runs."""

    def __init__(self, grant: c.Grant) -> None:
        self.grant = grant
        self.seq = grant.next_seq
        self.turn = grant.turn
        self.reward = 0.0
        self.park = False

    @property
    def key(self) -> tuple[int, int]:
        return self.grant.episode, self.grant.attempt


class ModelNode:
    """A rollout node's process; `version` is what its engine really runs."""

    def __init__(self, name: str, session: int, max_episodes: int) -> None:
        self.name = name
        self.session = session
        self.max_episodes = max_episodes
        self.version = -1
        self.leases: dict[int, ModelLease] = {}
        self.update: tuple[int, Transfer] | None = None
        self.fenced = False
        self.spent = (0.0, 0.0)


class LogEntry:
    """One accepted delta."""

    def __init__(self, head: DeltaHead) -> None:
        self.head = head


class World:
    """Drives a core. Every event goes through `send`, which carries out the commands and checks the promises."""

    def __init__(self, config: Config, task_count: int | None = None, auto_tasks: bool = True) -> None:
        self.config = config
        self.core = SchedulerCore(config, task_count)
        self.task_count = task_count or config.task.train_tasks
        self.now = 0.0
        self.auto_tasks = auto_tasks
        self.wanted_tasks = 0
        self.stream = itertools.count()
        self.handed_out: list[str] = []
        self.nodes: dict[str, ModelNode] = {}
        self.sessions: dict[str, int] = {}
        self.transfers: list[Transfer] = []
        self.steps: dict[int, int] = {}
        self.logs: dict[int, list[LogEntry]] = {}
        self.finishes: dict[int, Finish] = {}
        self.ended: dict[int, list[int]] = {}
        """Finished episodes of each group, in the order in which they were accepted."""
        self.rewards: dict[int, float] = {}
        self.groups: dict[int, list[int]] = {}
        self.member_of: dict[int, int] = {}
        self.plans: dict[int, c.BatchPlan] = {}
        self.delivered_groups: set[int] = set()
        self.released: set[int] = set()
        self.trained = 0
        self.rewound = False
        self.committed = 0
        self.published = -1
        self.warnings: list[str] = []
        self.fatals: list[c.Fatal] = []
        self.evals_done: list[str] = []
        self.history: list[e.Event] = []
        self.trace: list[str] = []
        self.started_on: dict[int, set[int]] = {}
        self.served = 0
        self.held = -1
        """An episode that `serve` leaves alone: a straggler."""
        self.stopped = False
        self.broken = False
        self.cut: CoreCut | None = None

    # --- sending --------------------------------------------------------------------------------------------------------

    def send(self, event: e.Event) -> Sequence[c.Command]:
        out = self.core.handle(event, self.now)
        if isinstance(event, DeltaHead) and not out:
            self._accepted(event)
        if isinstance(event, (DeltaHead, Finish, Fail, Parked, Discarded, SliceUsed, TransferResult, e.FromNode)):
            self.history.append(event)
        self._carry_out(out)
        return out

    def advance(self, seconds: float) -> None:
        """Let time pass, acting on every deadline on the way."""
        end = self.now + seconds
        while (due := self.core.next_deadline()) is not None and due <= end:
            self.now = max(self.now, due)
            self._carry_out(self.core.tick(self.now))
        self.now = end

    def _carry_out(self, out: Sequence[c.Command]) -> None:
        before, self.broken = self.broken, True
        self._carry(out)
        self.broken = before

    def _carry(self, out: Sequence[c.Command]) -> None:
        for command in out:
            self.trace.append(repr(command))
            handler: Callable[[Any], None] | None = getattr(self, f"_on_{type(command).__name__.lower()}", None)
            if handler is not None:
                handler(command)
        self.check()
        while self.auto_tasks and self.wanted_tasks and not self.stopped:
            self.give_tasks()

    def give_tasks(self) -> None:
        count, self.wanted_tasks = self.wanted_tasks, 0
        tasks = [task(next(self.stream) % self.task_count) for _ in range(count)]
        self.handed_out += [t.id for t in tasks]
        self.send(e.TasksArrived(tasks))

    # --- commands -------------------------------------------------------------------------------------------------------

    def _session(self, name: str, session: int) -> ModelNode | None:
        node = self.nodes.get(name)
        return node if node is not None and node.session == session else None

    def _on_grant(self, grant: c.Grant) -> None:
        log = self.logs.setdefault(grant.episode, [])
        assert grant.next_seq == len(log), "the snapshot is the whole accepted log"
        versions = [v for entry in log for v, _ in entry.head.sampled]
        records = [entry.head.turn for entry in log if entry.head.record]
        assert grant.turn == (records[-1] if records else -1)
        self.member_of[grant.episode] = grant.group
        if grant.episode not in self.groups.setdefault(grant.group, []):
            self.groups[grant.group].append(grant.episode)
        node = self._session(grant.node, grant.session)
        core_node = self.core.tables.nodes.get(grant.node, grant.session)
        if core_node is not None:
            assert core_node.version >= max(versions, default=0), "versions within a trajectory never decrease"
            if not log and grant.purpose == "train":
                self.started_on.setdefault(grant.group, set()).add(core_node.version)
        if node is not None and not node.fenced:
            assert all(grant.attempt > lease.grant.attempt for k, lease in node.leases.items() if k == grant.episode)
            node.leases[grant.episode] = ModelLease(grant)
            node.leases[grant.episode].reward = sum(entry.head.reward for entry in log)

    def _on_dropattempt(self, drop: c.DropAttempt) -> None:
        node = self._session(drop.node, drop.session)
        if node is not None and drop.episode in node.leases and node.leases[drop.episode].grant.attempt == drop.attempt:
            del node.leases[drop.episode]

    def _on_parkattempt(self, park: c.ParkAttempt) -> None:
        node = self._session(park.node, park.session)
        if node is not None and park.episode in node.leases:
            node.leases[park.episode].park = True

    def _on_forget(self, forget: c.Forget) -> None:
        self.logs[forget.episode] = []

    @property
    def sending(self) -> Transfer | None:
        """The oldest transfer that the sender has not answered for."""
        return self.transfers[0] if self.transfers else None

    def _on_begintransfer(self, begin: c.BeginTransfer) -> None:
        waited_for = self.core.updates.rounds
        self.transfers = [one for one in self.transfers if one.transfer in waited_for] + [begin.transfer]
        assert begin.transfer.version == self.core.tables.versions.newest
        for name, session in begin.nodes:
            node = self._session(name, session)
            if node is not None:
                node.update = (begin.update, begin.transfer)

    def _on_abandon(self, abandon: c.Abandon) -> None:
        node = self._session(abandon.node, abandon.session)
        if node is not None and node.update is not None and node.update[0] == abandon.update:
            node.update = None

    def _on_fence(self, fence: c.Fence) -> None:
        node = self._session(fence.node, fence.session)
        if node is not None:
            node.fenced = True

    def _on_needtasks(self, need: c.NeedTasks) -> None:
        self.wanted_tasks += need.count

    def _on_warn(self, warn: c.Warn) -> None:
        self.warnings.append(warn.sentence)

    def _on_fatal(self, fatal: c.Fatal) -> None:
        self.fatals.append(fatal)

    def _on_evaldone(self, done: c.EvalDone) -> None:
        assert done.name not in self.evals_done
        self.evals_done.append(done.name)

    def _on_releasebatch(self, release: c.ReleaseBatch) -> None:
        assert release.step < self.committed
        plan = self.plans[release.step]
        assert release.episodes == [m.episode for g in plan.groups for m in g.members]
        self.released.add(release.step)

    def _on_formbatch(self, form: c.FormBatch) -> None:
        plan, bound, policy = form.plan, self.config.staleness.max_age, self.config.staleness.over_age
        assert plan.step == len(self.plans), "batches are formed for steps 0, 1, 2, …"
        assert plan.step - self.trained <= (self.config.data.prefetch or 0)
        assert len(plan.groups) == self.config.batch.groups
        ids = [group.group for group in plan.groups]
        assert ids == sorted(set(ids)), "groups are unique and oldest first"
        assert not self.delivered_groups & set(ids), "nothing is delivered twice"
        self.delivered_groups |= set(ids)
        trainable = over = 0
        versions = set()
        for group in plan.groups:
            valid = [member for member in group.members if member.outcome not in self.config.learner.mask_outcomes]
            assert self.config.group.needed <= len(valid) and len(group.members) <= group.size
            assert group.size == self.config.group.size
            if policy != "drop":
                assert {member.episode for member in group.members} == self.first(group.group)
            fresh = 0
            for member in group.members:
                assert self.member_of[member.episode] == group.group, "members belong to their group (F14)"
                finish, log = self.finishes[member.episode], self.logs[member.episode]
                assert finish.next_seq == len(log), "only acknowledged deltas are delivered"
                assert member.reward == finish.reward
                for version, count in (pair for entry in log for pair in entry.head.sampled):
                    versions.add(version)
                    if member not in valid:
                        continue
                    if plan.step - self.steps[version] <= bound:
                        fresh += count
                    else:
                        over += count
            trainable += fresh
            assert fresh or policy == "train", "a group without a trainable token is dropped before its batch is formed"
        assert (plan.trainable, plan.over_age) == (trainable, over)
        assert set(plan.versions) == versions
        if policy == "drop":
            assert over == 0
        if bound == 0 and not self.rewound:
            assert over == 0
            assert all(len(self.started_on[group.group]) == 1 for group in plan.groups), "one version per group"
        self.plans[plan.step] = plan

    def first(self, group: int) -> set[int]:
        """Who should ship: the first G that are valid; where they are fewer, filled up with the first of the others."""
        masked, ended = self.config.learner.mask_outcomes, self.ended[group]
        valid = [episode for episode in ended if self.finishes[episode].outcome not in masked]
        assert len(valid) <= self.config.group.size, "what finishes after the first G is refused"
        others = [episode for episode in ended if episode not in valid]
        return {*valid, *others[: self.config.group.size - len(valid)]}

    # --- what the model nodes do ----------------------------------------------------------------------------------------

    def join(self, name: str, max_episodes: int | None = None) -> ModelNode:
        self.sessions[name] = self.sessions.get(name, 0) + 1
        node = ModelNode(name, self.sessions[name], max_episodes or self.config.rollout.max_episodes)
        self.nodes[name] = node
        self.send(e.NodeJoined(name, node.session, node.max_episodes, node.max_episodes))
        return node

    def delta(self, node: ModelNode, lease: ModelLease, tokens: int = 1, record: bool = True, reward: float = 0.0) -> None:
        sampled = ((node.version, tokens),) if tokens else ()
        turn = lease.turn + 1 if record else lease.turn
        head = DeltaHead(
            episode=lease.grant.episode,
            attempt=lease.grant.attempt,
            seq=lease.seq,
            turn=turn,
            sampled=sampled,
            record=record,
            reward=reward,
        )
        lease.seq += 1
        lease.turn = turn
        lease.reward += reward
        self.send(head)

    def _accepted(self, head: DeltaHead) -> None:
        log = self.logs[head.episode]
        assert head.seq == len(log), "accepted in order, once"
        log.append(LogEntry(head))

    def finish(self, node: ModelNode, lease: ModelLease, outcome: str = "terminated", seconds: float = 1.0) -> None:
        node.leases.pop(lease.grant.episode, None)
        finish = Finish(
            episode=lease.grant.episode,
            attempt=lease.grant.attempt,
            next_seq=lease.seq,
            outcome=outcome,
            turns=lease.turn + 1,
            reward=lease.reward,
            checksum=0,
            seconds=seconds,
            info={"success": float(lease.reward > 0)},
        )
        episode = self.core.tables.episodes.live.get(finish.episode)
        if episode is not None and episode.attempt == finish.attempt and episode.state is State.LEASED:
            self.finishes[finish.episode] = finish
            self.ended.setdefault(lease.grant.group, []).append(finish.episode)
        self.send(finish)

    def fail(self, node: ModelNode, lease: ModelLease, failure: str = "infra", reason: str = "crashed", detail: str = "") -> None:
        node.leases.pop(lease.grant.episode, None)
        self.send(Fail(lease.grant.episode, lease.grant.attempt, failure, reason, detail))

    def park(self, node: ModelNode, lease: ModelLease) -> None:
        node.leases.pop(lease.grant.episode, None)
        self.send(Parked(lease.grant.episode, lease.grant.attempt, lease.seq, 1.0))

    def load(self, node: ModelNode) -> None:
        assert node.update is not None
        update, transfer = node.update
        node.update = None
        node.version = transfer.version
        self.send(e.FromNode(node.name, node.session, Loaded(update, transfer.version, 0.1, 0.2, 0.3)))

    def load_fails(self, node: ModelNode, fatal: bool = False) -> None:
        assert node.update is not None
        update, transfer = node.update
        node.update = None
        self.send(e.FromNode(node.name, node.session, LoadFailed(update, transfer.version, "no memory", fatal)))

    def sent(self, ok: bool = True, missing: list[str] | None = None) -> None:
        assert self.sending is not None
        transfer = self.transfers.pop(0)
        reason = "" if ok else "a member is missing"
        self.send(TransferResult(transfer.version, transfer.transfer, ok, missing or [], reason, 100, 0.1, 0.2))

    def rest(self, seconds: float = 31.0) -> None:
        """Time passes with every node heard of: failed attempts are tried again."""
        end = self.now + seconds
        while self.now < end:
            for node in self.nodes.values():
                self.heard(node)
            self.advance(min(1.0, end - self.now))

    def heard(self, node: ModelNode) -> None:
        self.send(e.NodeHeard(node.name, node.session))

    def spend(self, node: ModelNode, tokens: float, seconds: float) -> None:
        """The node says that it computed so much more again because of updates."""
        node.spent = node.spent[0] + tokens, node.spent[1] + seconds
        self.heard(node)
        self.send(e.NodeSpent(node.name, node.session, *node.spent))

    # --- what the learner does ------------------------------------------------------------------------------------------

    def publish(self) -> None:
        self.send(e.WeightsReady(self.trained, "here:1"))
        self._learn_version()
        self.published = self.trained

    def _learn_version(self) -> None:
        newest = self.core.tables.versions.newest
        self.steps[newest] = self.trained

    def take(self) -> None:
        self.send(e.BatchTaken(self.trained))

    def train(self) -> None:
        self.trained += 1
        self.send(e.BatchTrained(self.trained - 1))
        self.cut = wire.decode(wire.encode(self.core.cut()), CoreCut)

    def commit(self) -> None:
        self.committed = self.trained
        self.send(e.BatchesCommitted(self.committed))

    def rewind(self, step: int) -> None:
        """The learner is restored at an earlier step."""
        self.rewound = True
        self.trained = step
        self.published = -1
        self.steps = {version: min(old, step) for version, old in self.steps.items()}
        self.send(e.LearnerRewound(step))

    def crash_and_resume(self) -> None:
        """The whole run dies and goes on from the cut of the last trained step; beside it only the version ledger survives."""
        assert self.cut is not None
        step, lives = self.cut.step, self.core
        self.core = SchedulerCore(self.config, self.task_count)
        self.core.restore(self.cut, lives.tables.versions.next_id)
        self.nodes.clear()
        self.transfers.clear()
        self.wanted_tasks = 0
        for record in (self.logs, self.history, self.finishes, self.ended, self.groups, self.member_of, self.started_on):
            record.clear()
        self.plans = {k: plan for k, plan in self.plans.items() if k < step}
        self.delivered_groups = {group.group for plan in self.plans.values() for group in plan.groups}
        self.trained = self.committed = step
        self.published = -1
        self.steps = {version: min(old, step) for version, old in self.steps.items()}
        self.evals_done.clear()
        self.send(e.TrainingOpened(self.config.steps))

    def update_all(self) -> None:
        """Publish, send, and let every node load."""
        self.publish()
        self.settle_updates()

    def settle_updates(self) -> None:
        while self.sending is not None:
            self.sent()
            for node in list(self.nodes.values()):
                if node.update is not None and not node.fenced:
                    self.load(node)

    def one_step(self) -> None:
        """Finish the oldest running groups until a batch is there, and train it; the rest keeps running, nothing is published."""
        while self.trained not in self.plans:
            pairs = [(node, lease) for node in self.nodes.values() for lease in node.leases.values()]
            node, lease = min(pairs, key=lambda pair: (pair[1].grant.group, pair[1].grant.member))
            self.delta(node, lease, reward=float(lease.grant.member) - lease.reward)
            self.finish(node, lease)
        self.take()
        self.train()

    # --- the promises ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """What must hold after every event."""
        core = self.core
        table = core.tables.episodes
        table.check()
        states = [episode.state for episode in table.live.values() if episode.group.purpose == "train"]
        for state in (State.PENDING, State.LEASED, State.PARKED, State.ASSEMBLING, State.QUEUED, State.DELIVERED):
            assert states.count(state) <= table.counts[state]
        for state in (State.PENDING, State.LEASED, State.PARKED, State.ASSEMBLING):
            assert states.count(state) == table.counts[state], state
        progress = core.progress
        assert progress.committed <= progress.trained <= progress.formed
        assert progress.formed - progress.trained <= (self.config.data.prefetch or 0) + 1 or self.rewound
        if not self.stopped:
            assert table.eval_counts[State.DROPPED] == 0, "evaluation has no age limit and no queue"
            ended = sum(run.finished + run.failed for run in core.evaluation.runs.values())
            assert ended + len(core.evaluation.running()) == sum(run.n for run in core.evaluation.runs.values())
        used = {v for episode in table.live.values() for v in episode.versions}
        used |= {v for kept in core.batches.kept.values() for v in kept.plan.versions}
        used |= {node.version for node in core.tables.nodes if node.version >= 0}
        assert core.version_steps(list(used)) == {version: self.steps[version] for version in used}
        leased = 0
        for node in core.tables.nodes:
            assert len(node.leased) <= node.max_episodes
            leased += len(node.leased)
            for episode in node.leased.values():
                assert episode.state is State.LEASED and episode.node is node
        assert leased == table.counts[State.LEASED] + table.eval_counts[State.LEASED]
        waiting = [episode for episode in table.live.values() if episode.state in (State.PENDING, State.PARKED)]
        assert all(bool(episode.stamp) != episode.resting for episode in waiting)
        waiting = [episode for episode in waiting if not episode.resting]
        assert core.tables.waiting.count == len(waiting)
        assert core.tables.parks_ordered == sum(episode.parking for episode in table.live.values())
        self.check_groups()
        self.check_admission()
        self.check_no_idle(waiting)
        self.check_held()

    def check_groups(self) -> None:
        """Members run until G are valid, and not a moment longer; without redundancy nobody is ever dropped for it."""
        core, size = self.core, self.config.group.size
        for group in core.groups.live.values():
            running = sum(member.state in (State.PENDING, State.LEASED, State.PARKED) for member in group.members)
            kept = sum(member.state in (State.ASSEMBLING, State.QUEUED) for member in group.members)
            assert group.running == running and group.valid <= size and len(group.members) == self.config.group.members
            assert group.complete == (not running)
            assert group.valid < size or group.complete
            assert not group.complete or kept <= size
        redundant = sum(n for (reason, _), n in core.tables.episodes.dropped.items() if reason is DropReason.REDUNDANT)
        assert redundant == 0 or self.config.group.redundancy

    def check_admission(self) -> None:
        core = self.core
        progress, live = core.progress, len(core.groups.live)
        open_groups = {ep.group.id for ep in core.tables.episodes.live.values() if ep.group.open and ep.group.purpose == "train"}
        assert open_groups == set(core.groups.live)
        batch, bound = self.config.batch.groups, self.config.staleness.max_age
        newest = max((step for step in self.steps.values()), default=0)
        assert batch * progress.formed + live <= (bound + newest + 1) * batch or self.rewound
        assert live + batch * (progress.formed - progress.trained) <= self.config.queue.groups or self.rewound
        if progress.steps and not self.stopped:
            assert batch * progress.formed + live <= progress.steps * batch

    def check_no_idle(self, waiting: list[Any]) -> None:
        """Free places are filled as long as somebody may take them (F47, F50)."""
        core = self.core
        kept = [node for node in core.tables.nodes if node.quota is not None]
        assert not kept or any(round.expecting for round in core.updates.rounds.values()), "shares are kept for somebody"
        for node in core.tables.nodes:
            if node.serving and node.has_room:
                assert not any(episode.floor <= node.version for episode in waiting)
                assert not core.admission.open(node)

    def check_held(self) -> None:
        """A version is held back only under a budget, and only while the nodes are less than η steps behind the learner's."""
        core = self.core
        if not core.updates.held:
            return
        running = [self.steps[node.version] for node in core.tables.nodes if node.version >= 0]
        behind = self.steps.get(core.tables.versions.newest, self.trained) - min(running)
        assert self.config.update.policy == "budget" and 0 < behind < self.config.staleness.max_age
        assert not core._pressing(), "nobody waits for it"

    # --- fairness -------------------------------------------------------------------------------------------------------

    def differing(self, episode: int) -> float:
        """Rewards that differ within every group: how many members have finished."""
        return float(sum(member in self.finishes for member in self.groups[self.member_of[episode]]))

    def serve(self, rewards: Callable[[int], float] | None = None) -> bool:
        """Answer one thing that is outstanding, fairly. False if nothing is."""
        if self.wanted_tasks:
            self.give_tasks()
            return True
        for node in list(self.nodes.values()):
            if node.fenced or self.core.tables.nodes.get(node.name, node.session) is None:
                self.join(node.name, node.max_episodes)
                return True
        if self.sending is not None:
            self.sent()
            return True
        for node in self.nodes.values():
            if node.update is not None:
                self.load(node)
                return True
        self.served += 1
        nodes_first = self.served % 8 > 0
        return (nodes_first and self._serve_node(rewards)) or self._serve_learner() or self._serve_node(rewards)

    def _serve_node(self, rewards: Callable[[int], float] | None) -> bool:
        for node in self.nodes.values():
            for lease in node.leases.values():
                if lease.grant.episode != self.held:
                    self._run(node, lease, rewards or self.differing)
                    return True
        return False

    def _serve_learner(self) -> bool:
        if self.trained in self.plans and self.trained < self.core.progress.formed:
            self.take()
            self.train()
            return True
        if self.published != self.trained:
            self.publish()
            return True
        return False

    def _run(self, node: ModelNode, lease: ModelLease, rewards: Callable[[int], float]) -> None:
        if lease.park:
            self.park(node, lease)
            return
        if node.version < 0:
            node.leases.pop(lease.grant.episode)
            self.send(Discarded(*lease.key))
            return
        reward = rewards(lease.grant.episode) - lease.reward
        self.delta(node, lease, tokens=2, reward=reward)
        if node.leases.get(lease.grant.episode) is lease:
            self.finish(node, lease)

    def drain(self, steps: int, limit: int = 5000, **kwargs: Any) -> None:
        """Serve fairly until `steps` more batches are trained; anything else is a stall."""
        target = min(self.trained + steps, self.config.steps)
        troubled = self.core.updates.barren > 0
        if not self.nodes:
            self.join("rollout-0")
        for _ in range(limit):
            if self.trained >= target:
                return
            if not self.serve(**kwargs):
                before = self.now, len(self.trace)
                for node in self.nodes.values():
                    self.heard(node)
                due = self.core.next_deadline()
                self.advance(max(0.0, due - self.now) if due is not None else 0.0)
                assert before != (self.now, len(self.trace)), self.describe()
            if self.fatals:
                # Broken transfers in a row may end the run, but only if some were broken before the course became fair.
                assert troubled and all(fatal.part == "weightsync" for fatal in self.fatals), self.fatals
                return
        raise AssertionError(f"no batch in {limit} fair steps: {self.describe()}")

    def tally(self, *key: str) -> int:
        """How often the core has counted this."""
        return self.core.tables.tally[key]

    def describe(self) -> str:
        core = self.core
        return (
            f"stalled at step {self.trained}: counts {core.tables.episodes.counts}, live groups {len(core.groups.live)}, "
            f"ready {len(core.groups.ready)}, nodes {[(n.name, n.version, len(n.leased)) for n in core.tables.nodes]}"
        )
