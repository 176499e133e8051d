"""What weight updates cost in re-prefill: tokens and engine seconds over the run, and their share of rollout time in a window.

A node says with every exchange how many tokens it computed again because of weight updates, and how long that took, in all
since its process began (`rollout.ledger`). Rollout time is the time that nodes are there, whatever they do: an idle node's
second counts, because what it computes again delays nobody. One node that is always busy and one that never is have the same
share of each other.
"""

from __future__ import annotations

from collections import deque

from scheduler.core.meter import Meter

BUCKETS = 32
"""In a window: what is older than the window leaves in so many pieces."""


class Bill:
    """Totals of the run, and the window. `window` in seconds."""

    def __init__(self, meter: Meter, window: float) -> None:
        self._meter = meter
        self._window = window
        self._said: dict[str, tuple[int, float, float, float]] = {}  # session, when, tokens, seconds
        self._buckets: deque[list[float]] = deque()  # when it began, re-prefill seconds, rollout seconds
        self._again = self._there = 0.0  # of the buckets together
        self.tokens = 0
        self.seconds = 0.0

    def said(self, node: str, session: int, tokens: float, seconds: float, now: float) -> None:
        """A node's totals. They begin anew with its process, and a session alone does not tell whether that did."""
        self._meter.operations += 1
        before = self._said.get(node)
        self._said[node] = (session, now, tokens, seconds)
        if before is None or tokens < before[2] or seconds < before[3]:
            added, spent = tokens, seconds
        else:
            added, spent = tokens - before[2], seconds - before[3]
        there = now - before[1] if before is not None and before[0] == session else 0.0
        self.tokens += int(added)
        self.seconds += spent
        buckets = self._buckets
        if not buckets or now - buckets[-1][0] >= self._window / BUCKETS:
            buckets.append([now, 0.0, 0.0])
        buckets[-1][1] += spent
        buckets[-1][2] += there
        self._again += spent
        self._there += there

    def share(self, now: float) -> float:
        """Of the rollout time in the window, what was spent on contexts that weight updates had dropped. 0 without any time."""
        buckets = self._buckets
        while buckets and buckets[0][0] <= now - self._window:
            self._meter.operations += 1
            _, again, there = buckets.popleft()
            self._again -= again
            self._there -= there
        if not buckets:
            self._again = self._there = 0.0  # what rounding left
        return max(0.0, self._again) / self._there if self._there > 0.0 else 0.0
