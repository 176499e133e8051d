"""How a step's seconds divide between filling contexts and decoding, where one step does both. Pure.

A step that fills P context tokens and samples in R rows is taken to last a + b·P + c·R seconds. The three are fitted by least
squares to the steps so far, older ones counting less (by half after `HALF_LIFE` steps), none of them negative. A step without
rows is all prefill, one without context tokens all decoding, and of one with both the prefill's share is b·P out of what the
fit says: the fixed part a goes to decoding, which would have paid it anyway. So the two always sum to the seconds measured, and
an error of the fit moves seconds of mixed steps only. docs/reprefill.md says how large that error is.
"""

from __future__ import annotations

from itertools import combinations

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
    for size in range(1, len(xy) + 1):
        for chosen in combinations(range(len(xy)), size):
            part = _solve([[xx[i][j] for j in chosen] for i in chosen], [xy[i] for i in chosen])
            if part is None or min(part) < 0.0:
                continue
            value = -sum(x * xy[i] for x, i in zip(part, chosen, strict=True))  # at a minimum xᵀ·xx·x is xyᵀ·x
            if value < least:
                best, least = [0.0] * len(xy), value
                for x, i in zip(part, chosen, strict=True):
                    best[i] = x
    return best


def _solve(a: list[Vector], b: Vector) -> Vector | None:
    """Gauss with pivots; None for a matrix that is singular, or nearly so."""
    n = len(b)
    rows = [[*row, y] for row, y in zip(a, b, strict=True)]
    scale = [max(abs(rows[i][i]), 1e-300) for i in range(n)]
    for k in range(n):
        pivot = max(range(k, n), key=lambda i: abs(rows[i][k]))
        rows[k], rows[pivot] = rows[pivot], rows[k]
        if abs(rows[k][k]) <= 1e-9 * scale[k]:
            return None
        for i in range(k + 1, n):
            factor = rows[i][k] / rows[k][k]
            rows[i] = [x - factor * y for x, y in zip(rows[i], rows[k], strict=True)]
    x = [0.0] * n
    for k in reversed(range(n)):
        x[k] = (rows[k][n] - sum(rows[k][j] * x[j] for j in range(k + 1, n))) / rows[k][k]
    return x
