"""Batches: formed from ready groups for a target step, taken, trained, committed.

The batch of step k is formed when at most `data.prefetch` formed batches are untrained and B groups are ready, oldest groups
first. The age of a token is k − the step of its version. Over-age policies: `mask` leaves the episode in (the learner masks
the tokens; its reward stays in the baseline) and drops a group only if no trainable token is left in it; `drop` drops
episodes with an over-age token, also while they run, as soon as no coming batch could take them; `train` takes everything.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from scheduler.core.commands import BatchPlan, FormBatch, GroupPlan, MemberPlan, ReleaseBatch
from scheduler.core.episodes import Episode, Group
from scheduler.core.groups import Groups
from scheduler.core.progress import Progress
from scheduler.core.tables import Tables
from scheduler.errors import CallRefused
from segue.episode import DropReason, Purpose, State

DELIVERED, TRAINED, QUEUED = State.DELIVERED, State.TRAINED, State.QUEUED


class Kept(NamedTuple):
    """A formed batch, until it is committed."""

    plan: BatchPlan
    episodes: list[Episode]


class Batches:
    """Everything between a ready group and a committed batch. `kept` are the batches not yet committed, by step."""

    def __init__(self, tables: Tables, groups: Groups, progress: Progress) -> None:
        config = tables.config
        self._t = tables
        self._groups = groups
        self._progress = progress
        self._size = config.batch.groups
        assert config.data.prefetch is not None, "a resolved config"
        self._prefetch = config.data.prefetch
        self._max_age = config.staleness.max_age
        self._policy = config.staleness.over_age
        self._masked = frozenset(config.learner.mask_outcomes)
        self._picked: list[Group] = []
        self.kept: dict[int, Kept] = {}
        self._oldest: list[tuple[int, int, Episode]] = []  # (step of its first token, id): only for the policy "drop"

    # --- ages -----------------------------------------------------------------------------------------------------------

    def began(self, episode: Episode, version: int) -> None:
        """The episode's first token was sampled: from now on it can go over age."""
        if self._policy == "drop" and episode.group.purpose is Purpose.TRAIN:
            heapq.heappush(self._oldest, (self._t.versions.step(version), episode.id, episode))
            self._t.meter.operations += 1 + len(self._oldest).bit_length()

    def ages(self, group: Group, step: int) -> tuple[int, int]:
        """(trainable, over-age) sampled tokens of the group's members in a batch of `step`.

        Members with an outcome that the learner keeps out of the loss have neither.
        """
        step_of, limit = self._t.versions.step, self._max_age
        trainable = over = 0
        self._t.meter.operations += len(group.members)
        for member in group.members:
            if member.state is QUEUED and member.finish is not None and member.finish.outcome not in self._masked:
                for version, count in zip(member.versions, member.counts, strict=True):
                    if step - step_of(version) <= limit:
                        trainable += count
                    else:
                        over += count
        return trainable, over

    def drop_over_age(self, now: float) -> None:
        """Policy `drop`: end the episodes whose first token is too old for the next batch, wherever they are."""
        t, limit = self._t, self._progress.formed - self._max_age
        heap = self._oldest
        while heap and heap[0][0] < limit:
            _, _, episode = heapq.heappop(heap)
            t.meter.operations += 1 + len(heap).bit_length()
            group = episode.group
            if not group.open or episode.state in (State.FAILED, State.DROPPED) or not episode.versions:
                continue
            step = t.versions.step(episode.versions[0])
            if step >= limit:  # it began anew from scratch
                heapq.heappush(heap, (step, episode.id, episode))
                continue
            self._groups.drop_member(episode, DropReason.STALE, now)

    def ages_changed(self) -> None:
        """A rollback made versions older: judge anew what was judged by their steps."""
        step_of = self._t.versions.step
        self._oldest = [(step_of(e.versions[0]), e.id, e) for _, _, e in self._oldest if e.group.open and e.versions]
        heapq.heapify(self._oldest)
        for group in self._picked:
            heapq.heappush(self._groups.ready, (group.id, group))
        self._picked = []

    @property
    def ready(self) -> int:
        """Finished groups that wait for a batch."""
        return sum(group.open for _, group in self._groups.ready) + sum(group.open for group in self._picked)

    # --- forming --------------------------------------------------------------------------------------------------------

    def form(self, now: float) -> None:
        """Form every batch that can be formed."""
        progress, ready = self._progress, self._groups.ready
        self.drop_over_age(now)
        while progress.formed - progress.trained <= self._prefetch:
            if len(self._picked) + len(ready) < self._size:
                return
            while ready and len(self._picked) < self._size:
                _, group = heapq.heappop(ready)
                self._t.meter.operations += 1 + len(ready).bit_length()
                if group.open and self._has_trainable(group):
                    self._picked.append(group)
            if len(self._picked) < self._size:
                return
            self._form(now)
            self.drop_over_age(now)

    def _has_trainable(self, group: Group) -> bool:
        trainable, over = self.ages(group, self._progress.formed)
        if trainable or (over and self._policy == "train"):
            return True
        self._groups.drop(group, DropReason.STALE if over else DropReason.GROUP_FAILED)
        return False

    def _form(self, now: float) -> None:
        t, progress = self._t, self._progress
        step = progress.formed
        chosen = sorted(self._picked, key=lambda group: group.id)
        self._picked = []
        plans: list[GroupPlan] = []
        episodes: list[Episode] = []
        versions: set[int] = set()
        trainable = over = 0
        for group in chosen:
            fresh, old = self.ages(group, step)
            trainable += fresh
            over += old
            members: list[MemberPlan] = []
            for member in group.members:
                if member.state is not QUEUED:
                    continue
                finish = member.finish
                assert finish is not None
                versions.update(member.versions)
                episodes.append(member)
                members.append(MemberPlan(member.id, member.member, finish.outcome, finish.reward, finish.seconds, finish.info))
            plans.append(GroupPlan(group.id, group.task.id, group.size, members))
            t.observations.append(("segue_queue_wait_seconds", "ready", now - group.queued_at))
            group.members = []
            self._groups.leave(group)
        plan = BatchPlan(step, plans, sorted(versions), trainable, over)
        self.kept[step] = Kept(plan, episodes)
        progress.formed += 1
        t.meter.operations += 1
        t.tally.count("batches_formed")
        t.tally.count("tokens_over_age", by=over)
        t.out.append(FormBatch(plan))

    # --- what the learner does with them --------------------------------------------------------------------------------

    def taken(self, step: int) -> None:
        """The batch is on its way to the learner; asking again changes nothing."""
        if not self._progress.trained <= step < self._progress.formed:
            raise CallRefused(
                f"batch {step} cannot be taken: {self._progress.trained} are trained, {self._progress.formed} formed"
            )
        for episode in self.kept[step].episodes:
            if episode.state is QUEUED:
                self._t.episodes.move(episode, DELIVERED)

    def trained(self, step: int) -> bool:
        """The batch is trained. False if that was known already."""
        progress, t = self._progress, self._t
        if step < progress.trained:
            t.tally.count("refused", "duplicate")
            return False
        if step > progress.trained or step >= progress.formed:
            raise CallRefused(f"step {step} is reported trained, but the next one is {progress.trained} of {progress.formed}")
        episodes = self.kept[step].episodes
        if any(episode.state is not DELIVERED for episode in episodes):
            raise CallRefused(f"step {step} is reported trained, but its batch was never taken")
        for episode in episodes:
            t.episodes.move(episode, TRAINED)
            t.episodes.forget(episode)
        t.tally.count("episodes_trained", by=len(episodes))
        progress.trained += 1
        t.room = True
        return True

    def committed(self, step: int) -> None:
        """All batches below `step` are in a checkpoint: they will never be trained again."""
        progress = self._progress
        if step > progress.trained:
            raise CallRefused(f"{step} steps are reported committed, but only {progress.trained} are trained")
        while progress.committed < step:
            episodes = self.kept.pop(progress.committed).episodes
            self._t.out.append(ReleaseBatch(progress.committed, [episode.id for episode in episodes]))
            progress.committed += 1

    def stop(self) -> None:
        """Groups chosen or ready for a batch that will not be formed are gone."""
        self._picked = []

    def rewind(self, step: int) -> None:
        """The learner lost what it trained after `step`: those batches are to be trained again, in order."""
        progress = self._progress
        if not progress.committed <= step <= progress.trained:
            raise CallRefused(f"no way back to step {step}: {progress.committed} are committed, {progress.trained} trained")
        for trained in range(step, progress.trained):
            for episode in self.kept[trained].episodes:
                self._t.episodes.move(episode, QUEUED)
        self._t.tally.count("batches_rewound", by=progress.trained - step)
        progress.trained = step
