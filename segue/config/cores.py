"""Keys that pin processes to CPU cores, by the numbers that Linux gives them."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator


def _cores(value: list[int]) -> list[int]:
    if any(core < 0 for core in value):
        raise ValueError("must be a list of core numbers, the first of which is 0")
    if len(set(value)) < len(value):
        raise ValueError("must be a list that names no core twice")
    return value


def _some(value: list[int]) -> list[int]:
    if not value:
        raise ValueError("must be a list of at least one core")
    return _cores(value)


Cores = Annotated[list[int], AfterValidator(_cores)]
"""Of one process; [] for those of `cluster.cores`."""

CoresEach = tuple[Annotated[list[int], AfterValidator(_some)], ...]
"""One list per process of a role, taken in turn where there are fewer lists than processes."""
