"""Counting what the core does: the tally of everything that happened, and the meter of what it cost."""

from __future__ import annotations

from collections import defaultdict


class Meter:
    """Heap and table operations so far: one per table access, and the depth of the heap per push or pop.

    The benchmark divides it by events at 1,000 and 100,000 live episodes; it must not grow faster than log n.
    """

    __slots__ = ("operations",)

    def __init__(self) -> None:
        self.operations = 0


class Tally(defaultdict[tuple[str, ...], int]):
    """How often each thing happened, by name and labels. It only grows; the shell exports what was added since it last looked."""

    def __init__(self) -> None:
        super().__init__(int)

    def count(self, *key: str, by: int = 1) -> None:
        self[key] += by

    def under(self, name: str) -> dict[str, int]:
        """`{label: count}` of all keys `(name, label)`; further labels are joined with "|"."""
        return {"|".join(key[1:]): value for key, value in sorted(self.items()) if key[0] == name}
