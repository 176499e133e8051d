"""The values of a registry: what a histogram observed, and handles on single series, found once and written often."""

from __future__ import annotations

import itertools
import math
import threading
from bisect import bisect_left
from dataclasses import dataclass, field

Key = tuple[str, ...]
"""The label values of a series, in the order of declaration."""


@dataclass
class Observed:
    """Counts per bucket (the last one is beyond all edges), and the sum of what was observed."""

    edges: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.edges) + 1)

    def observe(self, value: float, count: int) -> None:
        self.counts[bisect_left(self.edges, value)] += count
        self.sum += value * count

    def cumulative(self) -> list[tuple[str, int]]:
        totals = itertools.accumulate(self.counts)
        return list(zip([*map(_edge, self.edges), "+Inf"], totals, strict=True))


def _edge(value: float) -> str:
    return repr(float(value))


class Writes:
    """The lock that every write takes, and how many there were."""

    __slots__ = ("count", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0


class Counter:
    """One series of a counter, found once and counted often."""

    __slots__ = ("_key", "_name", "_series", "_writes")

    def __init__(self, name: str, series: dict[Key, float], key: Key, writes: Writes) -> None:
        self._name = name
        self._series = series
        self._key = key
        self._writes = writes

    def add(self, value: float = 1.0) -> None:
        """Count `value` more. Raises ValueError if it is negative or not a number."""
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{self._name} is a counter: it cannot grow by {value}")
        with self._writes.lock:
            self._series[self._key] += value
            self._writes.count += 1


class Gauge:
    """One series of a gauge."""

    __slots__ = ("_key", "_series", "_writes")

    def __init__(self, series: dict[Key, float], key: Key, writes: Writes) -> None:
        self._series = series
        self._key = key
        self._writes = writes

    def set(self, value: float) -> None:
        with self._writes.lock:
            self._series[self._key] = float(value)
            self._writes.count += 1


class Histogram:
    """One series of a histogram."""

    __slots__ = ("_histogram", "_name", "_writes")

    def __init__(self, name: str, histogram: Observed, writes: Writes) -> None:
        self._name = name
        self._histogram = histogram
        self._writes = writes

    def observe(self, value: float) -> None:
        """Observe one value. Raises ValueError on NaN and infinity."""
        if not math.isfinite(value):
            raise ValueError(f"{self._name}: an observation of {value}")
        with self._writes.lock:
            self._histogram.observe(float(value), 1)
            self._writes.count += 1
