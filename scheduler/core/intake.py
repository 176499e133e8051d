"""What nodes say about episodes, checked before anything believes it: the attempt, the order of deltas, the stamps, the totals.

A message of an attempt that is over is refused. A delta must be the next one of its episode: earlier ones are ignored, a gap is
asked for again. A stamp that cannot be true, or totals that do not fit the accepted deltas, fail the attempt.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.core.batches import Batches
from scheduler.core.commands import Command, DropAttempt, Ignore, Refuse, Resend
from scheduler.core.episodes import Episode
from scheduler.core.evaluation import Evaluation
from scheduler.core.failures import RAISED, Failures, why
from scheduler.core.groups import Groups
from scheduler.core.leases import Leases
from scheduler.core.parking import Parking
from scheduler.core.tables import Tables
from segue.episode import FailureClass, Outcome, Purpose, State
from segue.metrics.vocabulary import PAUSE_REASONS
from segue.ports.rollout import DeltaHead, Discarded, Fail, Finish, Parked, Paused, Resumed, SliceUsed

LEASED = State.LEASED
ACCEPTED: tuple[Command, ...] = ()
OUTCOMES = frozenset(Outcome)
CLASSES = frozenset(FailureClass)


class Intake:
    """One method per message. `delta` is the busiest path of the scheduler: it settles nothing and allocates nothing."""

    def __init__(
        self,
        tables: Tables,
        leases: Leases,
        groups: Groups,
        failures: Failures,
        batches: Batches,
        parking: Parking,
        evaluation: Evaluation,
    ) -> None:
        self._t = tables
        self._live = tables.episodes.live
        self._steps = tables.versions
        self._leases = leases
        self._groups = groups
        self._failures = failures
        self._batches = batches
        self._parking = parking
        self._evaluation = evaluation
        self.tokens = 0
        self.eval_tokens = 0
        self.finished_at: float | None = None

    def delta(self, head: DeltaHead, now: float) -> Sequence[Command]:
        """Nothing if the delta is accepted: then its payload belongs to the log."""
        self._t.meter.operations += 1
        episode = self._live.get(head.episode)
        if episode is None or episode.attempt != head.attempt or episode.state is not LEASED:
            self._t.tally.count("refused", "stale_attempt")
            return (Refuse(head.episode, head.attempt),)
        if head.seq != episode.next_seq:
            return self._out_of_order(episode, head)
        if head.sampled and not self._stamp(episode, head.sampled):
            self._t.tally.count("refused", "corrupt")
            self._broken(episode, "bad_stamp")
            return (Refuse(head.episode, head.attempt),)
        episode.next_seq += 1
        episode.progress_at = now
        episode.partial = not (head.record or head.pending_action)
        if head.record:
            episode.turn = head.turn
            episode.reward += head.reward
        return ACCEPTED

    def _out_of_order(self, episode: Episode, head: DeltaHead) -> Sequence[Command]:
        if head.seq < episode.next_seq:
            self._t.tally.count("refused", "duplicate")
            return (Ignore(head.episode, head.seq),)
        self._t.tally.count("refused", "gap")
        return (Resend(head.episode, head.attempt, episode.next_seq),)

    def _stamp(self, episode: Episode, sampled: Sequence[tuple[int, int]]) -> bool:
        """Add sampled tokens by version. False if a version was never published, goes back, or has no tokens."""
        versions, counts = episode.versions, episode.counts
        last = versions[-1] if versions else -1
        known = self._steps
        tokens, newest = 0, last
        for version, count in sampled:
            if version < newest or count <= 0 or version not in known:
                return False
            newest = version
            tokens += count
        for version, count in sampled:
            if versions and versions[-1] == version:
                counts[-1] += count
            else:
                versions.append(version)
                counts.append(count)
        if last < 0:
            self._batches.began(episode, versions[0])
        if episode.group.purpose is Purpose.TRAIN:
            self.tokens += tokens
        else:
            self.eval_tokens += tokens
        return True

    # --- ends of attempts -----------------------------------------------------------------------------------------------

    def finish(self, event: Finish, now: float) -> None:
        """The episode ended by itself."""
        episode = self._current(event.episode, event.attempt)
        if episode is None or self._gap(episode, event.next_seq):
            return
        far = abs(event.reward - episode.reward) > 1e-6 * max(1.0, abs(episode.reward))
        if far or event.next_seq < episode.next_seq or event.outcome not in OUTCOMES:
            self._t.tally.count("refused", "corrupt")
            self._broken(episode, "bad_totals")
            return
        t = self._t
        self.finished_at = now
        episode.finish = event
        self._leases.release(episode)
        if episode.group.purpose is not Purpose.TRAIN:
            self._evaluation.finished(episode)
            return
        env = t.env
        t.tally.count("finished", env, event.outcome)
        t.observations.append(("segue_episode_duration_seconds", env, event.seconds))
        self._groups.member_finished(episode, now)
        if episode.group.complete:
            self._failures.outlived(episode.group)

    def fail(self, event: Fail, now: float) -> None:
        """The attempt failed."""
        episode = self._current(event.episode, event.attempt)
        if episode is not None:
            known = event.failure in CLASSES
            failure = FailureClass(event.failure) if known else FailureClass.INFRA
            self.attempt_failed(episode, failure, event.reason, now, event.detail)

    def attempt_failed(self, episode: Episode, failure: FailureClass, reason: str, now: float, detail: str = "") -> None:
        """The current attempt is over, for whatever reason."""
        again = self._failures.attempt_failed(episode, failure, reason, now, detail)
        if not again and episode.group.purpose is not Purpose.TRAIN:
            self._evaluation.failed(episode, failure, why(failure, reason, detail), reason in RAISED)

    def parked(self, event: Parked, now: float) -> None:
        """The node let go of the episode."""
        episode = self._current(event.episode, event.attempt)
        if episode is None or self._gap(episode, event.next_seq):
            return
        self._parking.parked(episode, event.seconds)

    def discarded(self, event: Discarded, now: float) -> None:
        """Expected after a drop; of a current attempt it means that the node does not have it."""
        episode = self._live.get(event.episode)
        if episode is not None and episode.attempt == event.attempt and episode.state is LEASED:
            self.attempt_failed(episode, FailureClass.INFRA, "discarded", now)

    def slice_used(self, event: SliceUsed, now: float) -> None:
        """Another slice, or a park."""
        episode = self._current(event.episode, event.attempt)
        if episode is not None:
            self._parking.slice_used(episode, self._groups.next_id)

    def paused(self, event: Paused, now: float) -> None:
        """Counted."""
        episode = self._current(event.episode, event.attempt)
        if event.reason not in PAUSE_REASONS:
            self._t.tally.count("refused", "unexpected")
        elif episode is not None and episode.group.purpose is Purpose.TRAIN:
            episode.interrupted = True
            self._t.tally.count("paused", event.reason)

    def resumed(self, event: Resumed, now: float) -> None:
        """Counted."""
        episode = self._current(event.episode, event.attempt)
        if episode is not None and episode.group.purpose is Purpose.TRAIN:
            episode.interrupted = False
            self._t.tally.count("resumed")

    # --- inside ---------------------------------------------------------------------------------------------------------

    def _current(self, episode_id: int, attempt: int) -> Episode | None:
        """The episode if this is its attempt and it is leased; else the message is refused."""
        self._t.meter.operations += 1
        episode = self._live.get(episode_id)
        if episode is not None and episode.attempt == attempt and episode.state is LEASED:
            return episode
        self._t.tally.count("refused", "stale_attempt")
        self._t.out.append(Refuse(episode_id, attempt))
        return None

    def _gap(self, episode: Episode, next_seq: int) -> bool:
        """The sender has deltas that we lack: ask for them; it will say again what it said now."""
        if next_seq <= episode.next_seq:
            return False
        self._t.tally.count("refused", "gap")
        self._t.out.append(Resend(episode.id, episode.attempt, episode.next_seq))
        return True

    def _broken(self, episode: Episode, reason: str) -> None:
        """The node's record of this attempt cannot be trusted: it stops, and the attempt counts as failed."""
        node = episode.node
        assert node is not None
        self._t.out.append(DropAttempt(node.name, node.session, episode.id, episode.attempt, reason))
        self._t.lost.append((episode, FailureClass.INFRA, reason))
