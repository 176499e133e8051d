"""Episodes that left this node and may come back: parked ones, and those whose attempt failed.

The scheduler leases them where they were, if it can; until then the engine may keep their KV, where nobody else needs the room.
So the engine is told to forget them only when they have not come back for long: after `most` others have left.
"""

from __future__ import annotations

from collections.abc import Callable


class Departed:
    """Forgets the oldest beyond `most`; and at once whoever left for good. `forget(episode)` tells the engine."""

    def __init__(self, most: int, forget: Callable[[int], None]) -> None:
        self._most = most
        self._forget = forget
        self._left: dict[int, None] = {}

    def left(self, episode: int, for_good: bool) -> None:
        """An episode is no longer run here."""
        if for_good:
            self._left.pop(episode, None)
            self._forget(episode)
            return
        self._left[episode] = None
        if len(self._left) > self._most:
            oldest = next(iter(self._left))
            del self._left[oldest]
            self._forget(oldest)

    def back(self, episode: int) -> None:
        """It is leased here again."""
        self._left.pop(episode, None)
