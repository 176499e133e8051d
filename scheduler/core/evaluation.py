"""Evaluation: episodes of purpose `eval`, which bypass admission, the age limit and the queue, and are counted apart."""

from __future__ import annotations

from scheduler.core.commands import EvalDone, Forget
from scheduler.core.episodes import Episode, Group
from scheduler.core.groups import Groups
from scheduler.core.leases import Leases
from scheduler.core.tables import Tables
from segue.episode import FailureClass, State, Task

RUNNING = (State.PENDING, State.LEASED, State.PARKED)


class EvalRun:
    """One evaluation: `success` and `rewards` have one entry per finished episode, in the order in which they finished.

    `example` says why the last one failed, `users` whether that is the user's to mend, `raised` whether the user's code raised.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.failed = 0
        self.example = ""
        self.users = self.raised = False
        self.success: list[float] = []
        self.rewards: list[float] = []
        self.groups: list[Group] = []

    @property
    def finished(self) -> int:
        return len(self.rewards)

    @property
    def done(self) -> bool:
        return self.finished + self.failed >= self.n


class Evaluation:
    """All evaluations by name."""

    def __init__(self, tables: Tables, leases: Leases, groups: Groups) -> None:
        self._t = tables
        self._leases = leases
        self._groups = groups
        self.runs: dict[str, EvalRun] = {}

    def start(self, name: str, tasks: list[Task], temperature: float, now: float) -> None:
        """One episode per task, on the newest version published by now or a newer one. A known name is not started again."""
        if name in self.runs:
            self._t.tally.count("refused", "duplicate")
            return
        run = self.runs[name] = EvalRun(len(tasks))
        floor = max(0, self._t.versions.newest)
        for task in tasks:
            group = self._groups.open_eval(task, name, floor, temperature, now)
            run.groups.append(group)
            self._leases.place(group.members[0], now)
        if run.done:
            self._t.out.append(EvalDone(name))

    def finished(self, episode: Episode) -> None:
        """The episode, released and with its `finish` set, counts for its run: `info["success"]` if given, else reward > 0."""
        finish = episode.finish
        assert finish is not None
        run = self.runs[episode.group.run]
        run.rewards.append(finish.reward)
        run.success.append(finish.info.get("success", float(finish.reward > 0)))
        self._t.episodes.move(episode, State.DELIVERED)
        self._t.episodes.forget(episode)
        self._t.tally.count("eval_episodes", "finished")
        self._t.out.append(Forget(episode.id))
        self._check(episode.group.run, run)

    def failed(self, episode: Episode, failure: FailureClass, why: str, raised: bool) -> None:
        """The episode failed for good."""
        run = self.runs[episode.group.run]
        run.failed += 1
        run.example, run.users, run.raised = why, failure is not FailureClass.INFRA, raised
        self._t.tally.count("eval_episodes", "failed")
        self._check(episode.group.run, run)

    def running(self) -> list[Group]:
        """The groups whose episode has neither finished nor failed."""
        groups = [group for run in self.runs.values() for group in run.groups]
        return [group for group in groups if group.members and group.members[0].state in RUNNING]

    def _check(self, name: str, run: EvalRun) -> None:
        if run.done:
            run.groups = []
            self._t.out.append(EvalDone(name))
