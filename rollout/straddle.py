"""Stop strings that began before a turn was interrupted and are completed after it."""

from __future__ import annotations

from rollout.chat import ChatRenderer


class Straddle:
    """Finds a stop string that began in an earlier part of an interrupted turn: an engine may look only at what it sampled."""

    def __init__(self, renderer: ChatRenderer, before: list[int], stop: tuple[str, ...]) -> None:
        self._renderer, self._before, self._stop = renderer, before, stop
        text = renderer.text(before) if before and stop else ""
        self._length = len(text)
        self._begun = any(text.endswith(s[:i]) for s in stop for i in range(1, len(s)))

    def keep(self, piece: list[int], tokens: list[int]) -> int:
        """How many of `tokens` (sampled after `piece`) belong to the turn: all, or up to the one that completes a string."""
        if not self._begun:
            return len(tokens)
        for n in range(1, len(tokens) + 1):
            text = self._renderer.text([*self._before, *piece, *tokens[:n]])
            found = [text.find(s, max(0, self._length - len(s) + 1)) for s in self._stop]
            if any(0 <= at < self._length for at in found):
                return n
            if len(text) - self._length >= max(map(len, self._stop)):
                self._begun = False
                break
        return len(tokens)
