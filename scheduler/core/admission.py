"""Admission: when a new group may begin, and on which node.

With B groups per batch, η = `staleness.max_age` and s the step of a node's weights, a group may begin on that node while

    B · formed + live < (η + s + 1) · B

where `formed` batches have been formed and `live` groups are not in one yet. If groups were trained in the order of their
admission, this one would be trained at step k = ⌊(B · formed + live) / B⌋, so the rule says k − s ≤ η: its tokens are within
the bound when they are trained. Equivalently s ≥ k − η, which is what `floor` returns as a version, and what holds for every
member of the group that begins later on another node. Groups that finish out of order may be trained later; that is what the
check of ages at batch formation is for.

Admission is also the only place where back-pressure acts: it reserves a place in the queue for the group, and never starts
more groups than the remaining steps need. In sync mode it waits until every node runs the newest weights.
"""

from __future__ import annotations

from collections import deque

from scheduler.core.commands import NeedTasks
from scheduler.core.failures import Failures
from scheduler.core.groups import Groups
from scheduler.core.leases import Leases
from scheduler.core.nodes import Node
from scheduler.core.progress import Progress
from scheduler.core.tables import Tables
from segue.episode import Task


class Admission:
    """Opens groups. `tasks` were taken from the stream and not admitted yet."""

    def __init__(self, tables: Tables, leases: Leases, groups: Groups, failures: Failures, progress: Progress) -> None:
        config = tables.config
        self._t = tables
        self._leases = leases
        self._groups = groups
        self._failures = failures
        self._progress = progress
        self._batch = config.batch.groups
        self._max_age = config.staleness.max_age
        self._queue_groups = config.queue.groups
        self.tasks: deque[Task] = deque()
        self._requested = 0
        self.held = False

    def wanted(self) -> int:
        """How many more groups the queue and the remaining steps have room for, whatever the nodes run."""
        progress, live = self._progress, len(self._groups.live)
        steps = (progress.steps - progress.formed) * self._batch - live
        queue = self._queue_groups - live - (progress.formed - progress.trained) * self._batch
        return max(0, min(steps, queue))

    def floor(self) -> int:
        """The oldest version on which the next group may begin."""
        position = self._batch * self._progress.formed + len(self._groups.live)
        return self._t.versions.at_least(position // self._batch - self._max_age)

    def open(self, node: Node | None) -> bool:
        """May a group begin now (on this node)? Counts the tasks at hand."""
        if self.held or self._t.stopped or not (self._groups.again or self.tasks) or self.wanted() <= 0:
            return False
        return node is None or (node.version >= self.floor() and node.quota != 0)

    def share(self, node: Node, loading: int) -> None:
        """The node has loaded while `loading` others still do: it may begin its share of the groups that may begin now.

        Without that the first node to load would take all of them, because what is admitted at each step often fits only the
        newest weights. The others' shares are kept until they have loaded or were fenced, or the update is over.
        """
        progress, batch = self._progress, self._batch
        ahead = (self._max_age + self._t.versions.step(node.version) + 1) * batch
        groups = min(self.wanted(), ahead - batch * progress.formed - len(self._groups.live))
        node.quota = -(-max(0, groups) // (loading + 1))
        self._t.sharing.append(node)

    def admit(self, node: Node, now: float) -> None:
        """Open a group and lease its members, the first of them to `node`."""
        if node.quota:
            node.quota -= 1
        task = (self._groups.again or self.tasks).popleft()
        group = self._groups.open(task, self.floor(), now)
        self._leases.grant(group.members[0], node, now)
        for member in group.members[1:]:
            self._leases.place(member, now)

    def arrived(self, tasks: list[Task]) -> None:
        """Tasks from the stream; those set aside are passed over."""
        self._requested = max(0, self._requested - len(tasks))
        for task in tasks:
            if task.id in self._failures.quarantined:
                self._t.tally.count("tasks_passed_over")
            else:
                self.tasks.append(task)
        self._t.room = True

    def request(self) -> None:
        """Ask for tasks when a group could begin and none is at hand. What was asked for is never asked for again."""
        if self.held or self._t.stopped or self.tasks or self._groups.again or self._requested:
            return
        count = min(self.wanted(), self._batch)
        if count > 0 and len(self._failures.quarantined) < self._failures.task_count:
            self._requested = count
            self._t.out.append(NeedTasks(count))

    @property
    def waiting_for_tasks(self) -> bool:
        """A group could begin, and the stream has not delivered its task yet."""
        return self._requested > 0 and self._t.nodes.least_loaded(self.floor()) is not None

    # --- filling free places --------------------------------------------------------------------------------------------

    def fill(self, node: Node, now: float) -> None:
        """Give the free places of one node away."""
        while node.serving and node.has_room:
            may_open = self.open(node)
            episode = self._leases.choose(node, may_open, self._groups.next_id)
            if episode is not None:
                self._leases.grant(episode, node, now)
            elif may_open:
                self.admit(node, now)
            else:
                return

    def fill_all(self, now: float) -> None:
        """Open groups wherever there is room for them."""
        while self.open(None):
            floor = self.floor()
            node = self._t.nodes.least_loaded(floor)
            if node is not None and node.quota == 0:
                others = (n for n in self._t.sharing if n.quota and n.serving and n.has_room and n.version >= floor)
                node = next(others, None)
            if node is None:
                return
            self.admit(node, now)
