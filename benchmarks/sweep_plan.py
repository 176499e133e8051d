"""What a sweep is, and what was asked of one: what its two kinds, virtual and real, share with `benchmarks.sweep`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.arms import Arm
from benchmarks.sweep_figures import Point
from benchmarks.virtual.scenario import World
from segue.config import Config

FOLDER = Path(__file__).resolve().parent
CONFIG = FOLDER.parent / "configs" / "balanced.toml"


class Sweep(msgspec.Struct, frozen=True):
    """What a benchmark sweeps.

    axis, symbol      of the points, in words with their unit, and in short
    low, high         the points allowed
    points, spreads   by default; no spreads: one panel
    relative          points are in times of sampling an action, which a real sweep then measures first
    varies            keys of a scenario that a point decides, `varies_real` those of a config: --set may not
    virtual           tables over a scenario that put it at a point
    real              overrides of a config that put it at a point; the last argument is the seconds that sampling an action takes
    """

    name: str
    title: str
    axis: str
    symbol: str
    low: float
    high: float
    points: tuple[float, ...]
    points_real: tuple[float, ...]
    virtual: Callable[[World, Point], dict[str, Any]]
    real: Callable[[Config, Point, float], list[str]]
    varies: tuple[str, ...]
    varies_real: tuple[str, ...]
    relative: bool = False
    spreads: tuple[float, ...] = ()
    spread_limits: tuple[float, float] = (0.0, 0.0)
    spread_label: str = ""

    @property
    def scenario(self) -> Path:
        """Of the points in virtual time."""
        return FOLDER / "scenarios" / f"{self.name}.toml"


class Plan(msgspec.Struct, frozen=True):
    """What was asked for, checked."""

    sweep: Sweep
    points: list[Point]
    arms: list[Arm]
    seeds: list[int]
    overrides: list[str]
    steps: int | None
    redundancy: int
    source: Path
    sized: bool = True
    ceilings: bool = True
    real: bool = False
    jobs: int = 1
