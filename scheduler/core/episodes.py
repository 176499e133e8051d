"""Episodes and groups as the core knows them, and the table that says where every episode is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.core.meter import Meter
from segue.episode import DropReason, FailureClass, Purpose, State, Task
from segue.ports.rollout import Finish
from segue.trajectory import NO_VERSION

if TYPE_CHECKING:
    from scheduler.core.nodes import Node

STATES = tuple(State)


class Group:
    """The episodes of one task. `size` is G, how many of them ship at most; a training group has r members more
    (`group.redundancy`). `running` members may still finish, `valid` ones have, with an outcome that is not masked; `ended` has
    the finished ones in the order in which they did. `complete` once G are valid, or none is running.

    `floor` is the oldest version on which a member may begin; `rank` orders leases (lower first);
    `home` is the node of the first lease, where the common prompt is. `open` until it is dropped or in a batch. An
    evaluation's group has one member.
    """

    __slots__ = (
        "complete",
        "ended",
        "env_failures",
        "floor",
        "home",
        "id",
        "members",
        "open",
        "opened_at",
        "purpose",
        "queued_at",
        "rank",
        "run",
        "running",
        "size",
        "task",
        "temperature",
        "valid",
    )

    def __init__(self, id: int, task: Task, size: int, purpose: Purpose, floor: int, temperature: float, now: float) -> None:
        self.id = id
        self.task = task
        self.size = size
        self.purpose = purpose
        self.floor = floor
        self.temperature = temperature
        self.rank = id
        self.members: list[Episode] = []
        self.ended: list[Episode] = []
        self.running = 0
        self.valid = 0
        self.env_failures = 0
        self.open = True
        self.complete = False
        self.home: Node | None = None
        self.run = ""
        self.opened_at = now
        self.queued_at = now


class Episode:
    """One attempt at a task, as far as the scheduler needs to know it; its payloads are in the queue.

    `versions` and `counts` say how many tokens were sampled under which version, ascending. `failures` counts failed attempts by
    class, `stamp` marks the place in the waiting heaps (0: in none), `seconds` is the wall time of attempts that ended; while it
    is `resting` after a failed attempt it waits for nothing but time. The log ends inside an action while it is `partial`;
    `interrupted` says that its request was counted as paused and has not gone on.
    """

    __slots__ = (
        "attempt",
        "counts",
        "failures",
        "finish",
        "group",
        "home",
        "id",
        "interrupted",
        "lease_seq",
        "leased_at",
        "left",
        "member",
        "next_seq",
        "node",
        "parking",
        "partial",
        "progress_at",
        "resting",
        "reward",
        "seconds",
        "stamp",
        "state",
        "turn",
        "versions",
    )

    def __init__(self, id: int, group: Group, member: int) -> None:
        self.id = id
        self.group = group
        self.member = member
        self.state = State.PENDING
        self.attempt = 0
        self.node: Node | None = None
        self.home: Node | None = None
        self.left = ""
        self.next_seq = 0
        self.lease_seq = 0
        self.turn = -1
        self.reward = 0.0
        self.versions: list[int] = []
        self.counts: list[int] = []
        self.failures: dict[FailureClass, int] | None = None
        self.finish: Finish | None = None
        self.leased_at = 0.0
        self.progress_at = 0.0
        self.seconds = 0.0
        self.stamp = 0
        self.parking = False
        self.resting = False
        self.partial = False
        self.interrupted = False

    @property
    def last_version(self) -> int:
        """The version of the last sampled token; an episode only moves to nodes at this version or a newer one."""
        return self.versions[-1] if self.versions else NO_VERSION

    @property
    def floor(self) -> int:
        """The oldest version on which this episode may go on."""
        return max(self.group.floor, self.last_version)

    @property
    def prefix_home(self) -> Node | None:
        """The node that has computed the KV of its prefix: where it ran last, or, before it began, where its group did."""
        return self.home if self.next_seq else self.group.home

    @property
    def sampled(self) -> int:
        """Sampled tokens in its log."""
        return sum(self.counts)


class EpisodeTable:
    """Every episode that is not over yet by id, and how many are in each state.

    `admitted` = the sum of `counts` at all times. Evaluation episodes are counted apart, in `eval_counts`.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self.live: dict[int, Episode] = {}
        self.admitted = 0
        self.counts: dict[State, int] = dict.fromkeys(STATES, 0)
        self.eval_admitted = 0
        self.eval_counts: dict[State, int] = dict.fromkeys(STATES, 0)
        self.dropped: dict[tuple[DropReason, str], int] = {(r, s): 0 for r in DropReason for s in ("rollout", "queue")}
        self.failed: dict[FailureClass, int] = dict.fromkeys(FailureClass, 0)
        self.transitions = 0
        self.next_id = 0

    def admit(self, group: Group, member: int) -> Episode:
        """A new episode, pending."""
        episode = Episode(self.next_id, group, member)
        self.next_id += 1
        self.live[episode.id] = episode
        if group.purpose is Purpose.TRAIN:
            self.admitted += 1
            self.counts[State.PENDING] += 1
        else:
            self.eval_admitted += 1
            self.eval_counts[State.PENDING] += 1
        self.transitions += 1
        self._meter.operations += 2
        return episode

    def move(self, episode: Episode, state: State) -> None:
        """The one place where an episode changes its state."""
        counts = self.counts if episode.group.purpose is Purpose.TRAIN else self.eval_counts
        counts[episode.state] -= 1
        counts[state] += 1
        episode.state = state
        self.transitions += 1
        self._meter.operations += 2

    def drop(self, episode: Episode, reason: DropReason) -> None:
        """End an episode that could have been trained."""
        if episode.group.purpose is Purpose.TRAIN:
            self.dropped[reason, "rollout" if episode.finish is None else "queue"] += 1
        self.move(episode, State.DROPPED)
        self.forget(episode)

    def fail(self, episode: Episode, failure: FailureClass) -> None:
        """End an episode whose retries are used up."""
        if episode.group.purpose is Purpose.TRAIN:
            self.failed[failure] += 1
        self.move(episode, State.FAILED)
        self.forget(episode)

    def forget(self, episode: Episode) -> None:
        """No message can concern it any more."""
        self._meter.operations += 1
        self.live.pop(episode.id, None)

    def check(self) -> None:
        """The counts add up (design.md §4.4)."""
        counts = self.counts
        assert self.admitted == sum(counts.values()), (self.admitted, counts)
        assert min(counts.values()) >= 0, counts
        assert counts[State.DROPPED] == sum(self.dropped.values()), (counts, self.dropped)
        assert counts[State.FAILED] == sum(self.failed.values()), (counts, self.failed)
        assert self.eval_admitted == sum(self.eval_counts.values()), (self.eval_admitted, self.eval_counts)
