"""Finished episodes as something to read: a sample of them goes to the run directory's `trajectories/`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollout.chat import ChatRenderer
from rollout.log import EpisodeLog
from segue.ports.scheduler import Finish, Lease

SPACING_SECONDS = 2.0
"""At most one episode in so long: a busy node finishes dozens a second, and nobody reads them all."""

Save = Callable[[Callable[[], dict[str, Any]]], object]
"""`segue.rundir.SampledTrajectories.save`: writes what the callable returns, if any are to be kept."""


class Transcripts:
    """Saves one finished episode now and then."""

    def __init__(self, save: Save, renderer: ChatRenderer) -> None:
        self._save = save
        self._renderer = renderer
        self._next = float("-inf")

    def finished(self, lease: Lease, log: EpisodeLog, finish: Finish, now: float) -> None:
        """An episode ended."""
        if now >= self._next:
            self._next = now + SPACING_SECONDS
            self._save(lambda: transcript(lease, log, finish, self._renderer))


def transcript(lease: Lease, log: EpisodeLog, finish: Finish, renderer: ChatRenderer) -> dict[str, Any]:
    """What was asked, said, answered and rewarded. `text` is the whole context as the policy saw it."""
    turns = [
        {"turn": record.turn, "action": record.action, "reward": record.reward, "info": record.info}
        for record in log.records
        if record.turn >= 0
    ]
    return {
        "episode": lease.episode,
        "attempt": lease.attempt,
        "group": lease.group,
        "member": lease.member,
        "purpose": lease.purpose,
        "task": lease.task.id,
        "env": lease.task.env,
        "outcome": finish.outcome,
        "reward": finish.reward,
        "seconds": finish.seconds,
        "tokens": len(log.tokens),
        "sampled": log.sampled,
        "sampled_by_version": {str(version): n for version, n in sorted(log.by_version.items())},
        "turns": turns,
        "text": renderer.text(log.tokens),
    }
