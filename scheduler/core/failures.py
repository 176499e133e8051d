"""Attempts that failed: another one, or the end of the episode; and tasks that keep failing.

Failures are typed. `infra`: the machinery; `env`: the environment; `data`: the task or its scorer. Each class has its own
budget of retries per episode. An attempt that got nowhere is tried again after a pause that doubles each time, so that an
env pool that is being restarted does not use up every budget in a second. A group that fails because of its task's environment
or data sets the task aside (quarantine); one that failed by machinery alone is issued again, a few times.
"""

from __future__ import annotations

from scheduler.core.commands import Fatal, Forget, Warn
from scheduler.core.episodes import Episode, Group
from scheduler.core.groups import RETRY, Groups
from scheduler.core.leases import Leases
from scheduler.core.tables import Tables
from segue.episode import DropReason, FailureClass, Purpose, State, Task

REISSUES = 2
"""How often in a row a task whose group was lost to the machinery is issued again before it is set aside like one that fails by
itself."""
MOVES = ("node_lost", "fenced")
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 2.0, 30.0
"""Before the first further attempt of a kind, and at most. With three retries and two further issues a task outlives an outage of
about 40 seconds."""
USELESS_LOG = ("checksum", "not_resumable")
"""Another attempt from the log would be wrong or fail in the same way: the node's record of the episode is not the log that was
accepted from it, so that what it sampled on is not what would be trained; or the environment can be neither restored nor replayed
(design.md §6)."""
RAISED = ("env_error", "data_error")
"""The environment raised: the env pool's log has the traceback."""
MAX_REASONS = 64
"""Reasons come from nodes; beyond so many different ones they are counted together."""
LEASED, PENDING = State.LEASED, State.PENDING


class Failures:
    """Retries, quarantine, and starting from scratch as the last resort."""

    def __init__(self, tables: Tables, leases: Leases, groups: Groups, task_count: int) -> None:
        retries = tables.config.scheduler
        self._t = tables
        self._leases = leases
        self._groups = groups
        self._budget = {
            FailureClass.INFRA: retries.retries_infra,
            FailureClass.ENV: retries.retries_env,
            FailureClass.DATA: retries.retries_data,
        }
        self._max_quarantined = retries.max_quarantined
        self.task_count = task_count
        self.quarantined: dict[str, str] = {}
        self.strikes: dict[str, int] = {}
        self._reasons: set[str] = set()
        self._warned: set[tuple[str, str]] = set()

    def attempt_failed(self, episode: Episode, failure: FailureClass, reason: str, now: float, detail: str = "") -> bool:
        """The current attempt is over. True if there will be another; else the episode has failed for good."""
        assert episode.state is LEASED
        t = self._t
        episode.seconds += max(0.0, episode.progress_at - episode.leased_at)
        self._leases.release(episode)
        t.tally.count("attempts_failed", failure.value, self._known(reason))
        if episode.failures is None:
            episode.failures = dict.fromkeys(FailureClass, 0)
        episode.failures[failure] += 1
        used = episode.failures[failure]
        if used > self._budget[failure]:
            t.episodes.fail(episode, failure)
            t.out.append(Forget(episode.id))
            self._episode_failed(episode, failure, reason, now, detail)
            return False
        t.tally.count("retries", failure.value)
        if failure is FailureClass.ENV and used == self._budget[failure] and episode.lease_seq == episode.next_seq > 0:
            # The last retry, and the attempt did not get past the restore: its saved state may be what is broken.
            self._from_scratch(episode, reason)
        elif reason in USELESS_LOG:
            self._from_scratch(episode, reason)
        self._count_interruption(episode)
        episode.left = reason if reason in MOVES else "failed"
        t.episodes.move(episode, PENDING)
        if reason in MOVES or episode.lease_seq < episode.next_seq:
            self._wait(episode)
        else:
            pause = min(PAUSE_SECONDS * 2 ** (used - 1), LONGEST_PAUSE_SECONDS)
            episode.resting = True
            t.timers.arm(RETRY, episode.id, now + pause)
        return True

    def rested(self, episode_id: int) -> None:
        """The pause before another attempt is over."""
        episode = self._t.episodes.live.get(episode_id)
        if episode is not None and episode.resting:
            self._wait(episode)

    def _wait(self, episode: Episode) -> None:
        episode.resting = False
        self._t.waiting.push(episode)
        self._t.unplaced.append(episode)

    def _count_interruption(self, episode: Episode) -> None:
        """The lost attempt ended inside an action and did not say so: the next one goes on with it, and counts as `resumed`."""
        if episode.partial and not episode.interrupted and episode.group.purpose is Purpose.TRAIN:
            self._t.tally.count("paused", "migration")
        episode.interrupted = episode.partial

    def _known(self, reason: str) -> str:
        if len(self._reasons) < MAX_REASONS:
            self._reasons.add(reason)
        return reason if reason in self._reasons else "other"

    def _from_scratch(self, episode: Episode, reason: str) -> None:
        """Discard the log: short episodes survive this more often than long ones, so it is the last resort and counted."""
        t = self._t
        t.tally.count("regenerated", self._known(reason))
        t.tally.count("tokens_discarded", by=episode.sampled)
        t.out.append(Forget(episode.id))
        episode.next_seq = episode.lease_seq = 0
        episode.turn = -1
        episode.partial = False
        episode.reward = 0.0
        episode.seconds = 0.0
        episode.versions, episode.counts = [], []

    def _episode_failed(self, episode: Episode, failure: FailureClass, reason: str, now: float, detail: str) -> None:
        group = episode.group
        if group.purpose is not Purpose.TRAIN:
            return
        if failure is not FailureClass.INFRA:
            group.env_failures += 1
        self._groups.member_gone(episode, DropReason.GROUP_FAILED, now)
        if not group.open:
            self._group_failed(group, failure, reason, detail)
        elif group.complete:
            self.outlived(group)

    def outlived(self, group: Group) -> None:
        """The group came to its end: what its task's groups suffered before was chance, and does not add up over epochs."""
        self.strikes.pop(group.task.id, None)

    def _group_failed(self, group: Group, failure: FailureClass, reason: str, detail: str) -> None:
        """Too few members are left: the task is issued again, or set aside."""
        task = group.task
        if not group.env_failures:
            strikes = self.strikes.get(task.id, 0) + 1
            self.strikes[task.id] = strikes
            if strikes <= REISSUES:
                self._t.tally.count("tasks_reissued")
                self._groups.again.append(task)
                self._t.room = True
                return
        self._quarantine(task, failure, reason, detail)

    def _quarantine(self, task: Task, failure: FailureClass, reason: str, detail: str) -> None:
        t = self._t
        if task.id in self.quarantined:
            return
        last = why(failure, reason, detail)
        self.quarantined[task.id] = last
        t.tally.count("tasks_quarantined", t.env)
        self._warn(task, failure, reason, last)
        n = len(self.quarantined)
        users = failure is not FailureClass.INFRA
        mend = "mend the environment or its data" if users else "look into the logs of the run"
        if n >= self.task_count:
            what, remedy = f"All {self.task_count} tasks failed on every attempt, the last with {last}", mend
        elif n > self._max_quarantined:
            names = ", ".join(list(self.quarantined)[:3])
            what = f"{n} tasks failed on every attempt ({names}, …), the last with {last}"
            remedy = f"{mend}, or raise scheduler.max_quarantined"
        else:
            return
        if users:
            t.out.append(Fatal("scheduler", what, True, remedy, reason in RAISED))
        else:
            t.out.append(Fatal("scheduler", f"{what}: {remedy}."))

    def _warn(self, task: Task, failure: FailureClass, reason: str, last: str) -> None:
        """The first task of a reason in full; then how many they are, at powers of two."""
        n = len(self.quarantined)
        kind = (failure.value, self._known(reason))
        if kind not in self._warned:
            self._warned.add(kind)
            self._t.out.append(Warn(f"Task {task.id} failed on every attempt and is set aside: {last}."))
        elif n & (n - 1) == 0:
            self._t.out.append(Warn(f"{n} tasks are set aside by now, which failed on every attempt; the last: {last}."))


def why(failure: FailureClass, reason: str, detail: str) -> str:
    """A failure for the user to read, in half a sentence."""
    short = f"{failure.value}: {reason}"
    return f"{detail} ({short})" if detail else short
