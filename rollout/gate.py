"""Who may start generating now. The node's update procedure closes the gate from the outside in and opens it again.

A request goes through the gate in the same step of the event loop in which the engine gets it, so that no request slips into an
engine that is being paused. Levels, each letting through less:

    OPEN      everything
    LEASES    episodes that have generated under their lease before; new leases wait (`episode` drains)
    TURNS     requests that go on with a turn that was interrupted; new turns wait (`turn` drains)
    CLOSED    nothing
"""

from __future__ import annotations

import asyncio
import enum

from segue.clock import now


class Level(enum.IntEnum):
    OPEN = 0
    LEASES = 1
    TURNS = 2
    CLOSED = 3


class Passage(enum.IntEnum):
    """What a request is; it passes at levels up to its number."""

    LEASE = Level.OPEN
    TURN = Level.LEASES
    CONTINUE = Level.TURNS


class Gate:
    """`running` requests are in the engine now; `episodes` have generated under their lease and not ended."""

    def __init__(self) -> None:
        self.level = Level.CLOSED
        self.running = 0
        self.episodes = 0
        self._closed = 0.0
        self._closed_at: float | None = None
        self._changed: asyncio.Future[None] | None = None

    def set(self, level: Level) -> None:
        """Change the level; whoever waits looks again."""
        if level == self.level:
            return
        if self._closed_at is not None:
            self._closed += now() - self._closed_at
        self._closed_at = now() if level is Level.CLOSED else None
        self.level = level
        self._notify()

    @property
    def closed_seconds(self) -> float:
        """Seconds that it has been closed, the time before it first opened left out: as long the engine was paused."""
        return self._closed + (now() - self._closed_at if self._closed_at is not None else 0.0)

    def admits(self, passage: Passage) -> bool:
        return int(self.level) <= int(passage)

    def changed(self) -> asyncio.Future[None]:
        """Done at the next change of level or of the counts. Shared: never cancel it (wait for it with `asyncio.wait`)."""
        if self._changed is None or self._changed.done():
            self._changed = asyncio.get_running_loop().create_future()
        return self._changed

    def enter(self, first: bool) -> None:
        """A request goes in (`first`: the first one of its lease)."""
        self.running += 1
        self.episodes += first

    def leave(self) -> None:
        """A request came out."""
        self.running -= 1
        self._notify()

    def ended(self) -> None:
        """An episode that had entered is over."""
        self.episodes -= 1
        self._notify()

    async def drained(self, episodes: bool) -> None:
        """Return when no request is running (`episodes`: no episode either). The caller sets the deadline."""
        while self.running or (episodes and self.episodes):
            await asyncio.shield(self.changed())

    def _notify(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)
