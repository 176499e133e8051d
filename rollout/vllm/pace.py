"""How a step's seconds divide between filling contexts and decoding, where one step does both. Pure.

A step that fills P context tokens and samples in R rows is taken to last a + b·P + c·R seconds. The three are fitted by least
squares to the steps so far, older ones counting less (by half after `HALF_LIFE` steps), none of them negative. A step without
rows is all prefill, one without context tokens all decoding, and of one with both the prefill's share is b·P out of what the
fit says: the fixed part a goes to decoding, which would have paid it anyway. So the two always sum to the seconds measured, and
an error of the fit moves seconds of mixed steps only. docs/reprefill.md says how large that error is.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np

HALF_LIFE = 500
"""Steps. Speeds drift with the length of contexts; a step in hundreds is mixed."""
REFIT = 8
"""Steps after which a fit is made anew, if it is needed."""

Vector = list[float]


class Pace:
    """Told of each step; asked for the prefill's share of one."""

    def __init__(self) -> None:
        self._decay = 0.5 ** (1.0 / HALF_LIFE)
        self._xx = [[0.0] * 3 for _ in range(3)]
        self._xy = [0.0] * 3
        self._fit: Vector = [0.0, 0.0, 0.0]
        self._age = REFIT

    def observe(self, seconds: float, prefill: int, rows: int) -> None:
        """A step took so long."""
        x = (1.0, float(prefill), float(rows))
        for i in range(3):
            self._xy[i] = self._xy[i] * self._decay + x[i] * seconds
            for j in range(3):
                self._xx[i][j] = self._xx[i][j] * self._decay + x[i] * x[j]
        self._age += 1

    def prefill_seconds(self, seconds: float, prefill: int, rows: int) -> float:
        """What of a step's seconds its `prefill` context tokens took."""
        if not prefill or not rows:
            return seconds if prefill else 0.0
        if self._age >= REFIT:
            self._fit, self._age = nonnegative(self._xx, self._xy), 0
        fixed, per_token, per_row = self._fit
        filling, other = per_token * prefill, fixed + per_row * rows
        if filling + other <= 0.0:  # nothing is known yet
            return seconds * prefill / (prefill + rows)
        return seconds * filling / (filling + other)


def nonnegative(xx: list[Vector], xy: Vector) -> Vector:
    """The x ≥ 0 that minimises xᵀ·xx·x − 2·xyᵀ·x, by trying which of its components are zero."""
    best, least = [0.0] * len(xy), 0.0
    scale = np.sqrt(np.maximum(np.diag(xx), 1e-300))  # tokens are thousands where rows are a few
    gram, target = np.array(xx) / np.outer(scale, scale), np.array(xy) / scale
    for size in range(1, len(xy) + 1):
        for chosen in combinations(range(len(xy)), size):
            some = list(chosen)
            part = np.linalg.lstsq(gram[np.ix_(some, some)], target[some], rcond=1e-9)[0]
            if part.min() < 0.0:
                continue
            value = -float(part @ target[some])  # at a minimum xᵀ·xx·x is xyᵀ·x
            if value < least:
                best, least = [0.0] * len(xy), value
                for x, i in zip(part, some, strict=True):
                    best[i] = float(x / scale[i])
    return best
