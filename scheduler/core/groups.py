"""Groups: opened with all their members, complete when every member ended, and then either ready for a batch or dropped.

A group ships with at least `group.min_valid` valid members: finished with an outcome that the learner does not keep out of the
loss (`learner.mask_outcomes`); the others ship along. As soon as it cannot reach that any more it is dropped, so
that its place is free at once.

With redundancy a training group begins with G + r members and is complete as soon as G are valid: these ship, the others are
dropped as `redundant`, wherever they are. Events come one at a time, so "the first G" has no ties; those of one exchange come in
the order in which the node said them. Where fewer than G can become valid, the rule above goes on: at the end of its last member
the group ships, filled up to G with members that are not valid, first finished first. Failed attempts are tried again
whatever the others do: an attempt goes on from its log and costs little, and a failure that took a member's place would make long
episodes, which meet more failures, even rarer.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque

from scheduler.core.commands import Forget, Warn
from scheduler.core.episodes import Episode, Group
from scheduler.core.leases import Leases
from scheduler.core.tables import Tables
from segue.episode import DropReason, Purpose, State, Task

SAME_REWARD = 1e-8
"""Rewards of a group that differ by less have no spread (docs/algorithms.md §2)."""
WARN_DROPPED = 100
"""So many groups in a row that give nothing to train, and then each time twice as many, are worth a warning."""
RETRY = "retry"
"""Timer of an episode that rests after a failed attempt (`failures`)."""
LEASED, ASSEMBLING, QUEUED = State.LEASED, State.ASSEMBLING, State.QUEUED


class Groups:
    """All groups that are not in a batch yet. `live` counts them for admission."""

    def __init__(self, tables: Tables, leases: Leases) -> None:
        config = tables.config
        self._t = tables
        self._leases = leases
        self._size = config.group.size
        self._members = config.group.members
        self._min_valid = config.group.needed
        self._masked = frozenset(config.learner.mask_outcomes)
        self._filter = config.group.filter_zero_variance
        self._batch = config.batch.groups
        self._temperature = config.rollout.temperature
        self._nearly = max(1, self._size // 4)
        self.next_id = 0
        self.live: dict[int, Group] = {}
        self.ready: list[tuple[int, Group]] = []
        self.again: deque[Task] = deque()
        self.redundant_episodes = 0
        self.redundant_tokens = 0
        """Of this life: members dropped because G others were valid, and the tokens in their logs."""
        self._dropped_in_a_row = 0
        self._warn_at = WARN_DROPPED

    def open(self, task: Task, floor: int, now: float) -> Group:
        """Admit G + r episodes of a task."""
        group = Group(self._new_id(), task, self._size, Purpose.TRAIN, floor, self._temperature, now)
        episodes = self._t.episodes
        group.members = [episodes.admit(group, member) for member in range(self._members)]
        group.running = len(group.members)
        self.live[group.id] = group
        self._t.meter.operations += 1
        self._t.tally.count("admitted", self._t.env, by=group.running)
        return group

    def open_eval(self, task: Task, run: str, floor: int, temperature: float, now: float) -> Group:
        """One evaluation episode; it is not among the live groups, and runs before training episodes."""
        group = Group(self._new_id(), task, 1, Purpose.EVAL, floor, temperature, now)
        group.rank = group.id - (1 << 30)
        group.run = run
        group.members = [self._t.episodes.admit(group, 0)]
        group.running = 1
        return group

    def _new_id(self) -> int:
        self.next_id += 1
        return self.next_id - 1

    # --- members ending -------------------------------------------------------------------------------------------------

    def member_finished(self, episode: Episode, now: float) -> None:
        """The episode, released and with its `finish` set, waits for its group."""
        group = episode.group
        self._t.episodes.move(episode, ASSEMBLING)
        group.running -= 1
        group.ended.append(episode)
        group.valid += self._is_valid(episode)
        self._settle(group, DropReason.GROUP_FAILED, now)

    def member_gone(self, episode: Episode, reason: DropReason, now: float) -> None:
        """The episode failed for good or was dropped; if the group falls with it, the others are dropped for `reason`."""
        group = episode.group
        if episode.finish is None:
            group.running -= 1
        else:
            group.valid -= self._is_valid(episode)
        if group.open:
            self._settle(group, reason, now)

    def _is_valid(self, episode: Episode) -> bool:
        return episode.finish is not None and episode.finish.outcome not in self._masked

    def drop_member(self, episode: Episode, reason: DropReason, now: float) -> None:
        """End one episode of a group, wherever it is; the others go on if they can make a group without it."""
        self._end(episode, reason)
        self.member_gone(episode, reason, now)

    def _settle(self, group: Group, reason: DropReason, now: float) -> None:
        if group.valid + group.running < self._min_valid:
            if reason is DropReason.GROUP_FAILED and group.purpose is Purpose.TRAIN:
                self._count_dropped(self._too_few(group))
            self.drop(group, reason)
        elif group.complete:
            pass
        elif not group.running or group.valid >= group.size:
            self._complete(group, now)
        elif min(group.running, group.size - group.valid) <= self._nearly and group.valid and group.rank == group.id:
            # Nearly finished: as urgent as the groups one batch older, so that its last members are not left behind.
            group.rank = group.id - self._batch
            for member in group.members:
                if member.stamp:
                    self._t.waiting.push(member)

    def _complete(self, group: Group, now: float) -> None:
        t = self._t
        group.complete = True
        self._drop_surplus(group)
        finished = [m.finish for m in group.members if m.state is ASSEMBLING and m.finish is not None]
        env = t.env
        t.tally.count("groups_finished", env)
        if len(finished) > 1:
            t.observations.append(("segue_group_completion_cv", env, _spread([f.seconds for f in finished])))
        rewards = [f.reward for f in finished if f.outcome not in self._masked]
        if max(rewards) - min(rewards) < SAME_REWARD:
            t.tally.count("groups_zero_variance", env)
            if self._filter:
                self._count_dropped(
                    "all their rewards are equal: check the task's difficulty or set group.filter_zero_variance = false"
                )
                self.drop(group, DropReason.ZERO_VARIANCE)
                return
        self._dropped_in_a_row, self._warn_at = 0, WARN_DROPPED
        for member in group.members:
            if member.state is ASSEMBLING:
                t.episodes.move(member, QUEUED)
        group.queued_at = now
        heapq.heappush(self.ready, (group.id, group))
        t.meter.operations += 1 + len(self.ready).bit_length()

    def _drop_surplus(self, group: Group) -> None:
        """End the members that the group does without: G ship, the valid ones first, then the others, first finished first."""
        ended = [member for member in group.ended if member.state is ASSEMBLING]
        ended.sort(key=self._is_valid, reverse=True)  # stable
        kept = {member.id for member in ended[: group.size]}
        group.ended = []
        for member in group.members:
            if member.id not in kept and member.state not in _OVER:
                group.running -= member.finish is None
                self.redundant_episodes += 1
                self.redundant_tokens += member.sampled
                self._end(member, DropReason.REDUNDANT)

    def _count_dropped(self, why: str) -> None:
        self._dropped_in_a_row += 1
        if self._dropped_in_a_row >= self._warn_at:
            self._warn_at *= 2
            self._t.out.append(Warn(f"{self._dropped_in_a_row} groups in a row were dropped; the last because {why}."))

    def _too_few(self, group: Group) -> str:
        """Why too few members of a group can be trained."""
        outcomes = Counter(str(m.finish.outcome) for m in group.members if m.finish is not None and not self._is_valid(m))
        ended = ", ".join(f"{n} with {outcome}" for outcome, n in sorted(outcomes.items()))
        return (
            f"fewer than group.min_valid = {self._min_valid} of its members can be trained"
            + (f" ({ended} have an outcome that learner.mask_outcomes keeps out)" if ended else " (the others failed)")
            + ": look at segue_episodes_finished_total and segue_episodes_failed_total, and raise what cuts episodes short"
        )

    # --- groups ending --------------------------------------------------------------------------------------------------

    def drop(self, group: Group, reason: DropReason) -> None:
        """End the group and all its members that have not ended; its place in admission is free at once."""
        for member in group.members:
            if member.state not in _OVER:
                self._end(member, reason)
        self._t.tally.count("groups_dropped", reason.value)
        group.members, group.ended = [], []
        self.leave(group)

    def leave(self, group: Group) -> None:
        """The group is over, or in a batch: it no longer counts as live."""
        group.open = False
        self.live.pop(group.id, None)
        self._t.meter.operations += 1
        self._t.room = True

    def _end(self, member: Episode, reason: DropReason) -> None:
        if member.state is LEASED:
            self._leases.withdraw(member, reason.value)
        if member.resting:
            member.resting = False
            self._t.timers.disarm(RETRY, member.id)
        self._t.waiting.remove(member)
        self._t.episodes.drop(member, reason)
        if member.group.purpose is Purpose.TRAIN and member.sampled:
            self._t.tally.count("tokens_dropped", reason.value, by=member.sampled)
        self._t.out.append(Forget(member.id))


_OVER = (State.DROPPED, State.FAILED, State.TRAINED)


def _spread(values: list[float]) -> float:
    """Coefficient of variation: standard deviation over mean; 0 for values that are all 0."""
    mean = sum(values) / len(values)
    if mean <= 0.0:
        return 0.0
    return math.sqrt(sum((v - mean) ** 2 for v in values) / len(values)) / mean
