"""What the runs of a sweep come to: a point's arms beside each other, as results.json has them. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from benchmarks.figures import Figures

BALANCED = (0.8, 1.25)
"""Generation's ceiling over training's, where a comparison is fair."""


class Point(msgspec.Struct, frozen=True):
    """Where a sweep measures: `x` on its axis; `spread` picks the panel, where a sweep has more than one."""

    x: float
    spread: float | None = None

    @property
    def name(self) -> str:
        """Of its files."""
        return f"x{self.x!r}" if self.spread is None else f"x{self.x!r}-spread{self.spread!r}"


class Measured(msgspec.Struct, frozen=True):
    """One run of one arm at one point. `more`: what only one of virtual and real knows."""

    seed: int
    figures: Figures
    more: dict[str, float] = {}


class Seeded(msgspec.Struct, frozen=True):
    """What one seed came to at a point: a run of every arm, what was set there, and notes (`learner_scale`, say)."""

    settings: dict[str, Any]
    runs: dict[str, Measured]
    more: dict[str, float] = {}


class At(msgspec.Struct, frozen=True):
    """A point that was measured: its runs by arm, what was set there, and notes for the file (`learner_scale`, say)."""

    point: Point
    settings: dict[str, Any]
    runs: dict[str, list[Measured]]
    more: dict[str, Any] = {}


def gathered(point: Point, seeds: Sequence[Seeded]) -> At:
    """A point of all its seeds; notes are medians."""
    runs = {name: [one.runs[name] for one in seeds] for name in seeds[0].runs}
    more = {key: statistics.median(one.more[key] for one in seeds) for key in seeds[0].more}
    return At(point, seeds[0].settings, runs, more)


def point_document(at: At) -> dict[str, Any]:
    """A point as results.json has it; `speedup` over sync of the same seed, where sync ran."""
    sync = at.runs.get("sync")
    told = {name: arm_document(runs, sync) for name, runs in at.runs.items()}
    document = {"x": at.point.x, "spread": at.point.spread, "settings": at.settings, **at.more, "arms": told}
    ceilings = [run.figures.efficiency for runs in at.runs.values() for run in runs if run.figures.efficiency is not None]
    if ceilings:
        balance = statistics.median(ceiling.balance for ceiling in ceilings)
        document["generation_ceiling"] = statistics.median(ceiling.generation_ceiling for ceiling in ceilings)
        document["training_ceiling"] = statistics.median(ceiling.training_ceiling for ceiling in ceilings)
        document["balance"] = balance
        document["balanced"] = BALANCED[0] <= balance <= BALANCED[1]
    return document


def arm_document(runs: Sequence[Measured], sync: Sequence[Measured] | None) -> dict[str, Any]:
    """An arm at a point: medians over its runs (the greatest age of all), and each run's figures."""
    figures = [run.figures for run in runs]

    def median(of: Callable[[Figures], float | None]) -> float | None:
        values = [value for value in map(of, figures) if value is not None]
        return statistics.median(values) if values else None

    speedups = [
        ours.figures.tokens_per_second / theirs.figures.tokens_per_second
        for ours, theirs in zip(runs, sync or (), strict=False)
        if theirs.figures.tokens_per_second > 0.0  # over no tokens at all there is none
    ]
    return {
        "window_steps": min(f.steps for f in figures),
        "tokens_per_second": median(lambda f: f.tokens_per_second),
        "speedup": statistics.median(speedups) if speedups else None,
        "speedups": speedups,
        "step_seconds": median(lambda f: f.step_seconds.mean),
        "step_seconds_max": max(f.step_seconds.max for f in figures),
        "idle_share": {role: statistics.median(f.idle_share[role] for f in figures) for role in figures[0].idle_share},
        "staleness_bound": figures[0].staleness.bound,
        "staleness_mean": median(lambda f: f.staleness.mean),
        "staleness_max": max((f.staleness.max for f in figures if f.staleness.max is not None), default=None),
        "reprefill_share": median(lambda f: f.reprefill_share),
        "wasted_share": median(lambda f: f.wasted.run_share),
        "length_bias": median(lambda f: f.length_bias),
        "env_failures": sum(f.env_failures for f in figures),
        "efficiency": median(lambda f: f.efficiency.value if f.efficiency else None),
        "efficiencies": [f.efficiency.value for f in figures if f.efficiency],
        **{key: statistics.median(run.more[key] for run in runs) for key in runs[0].more},
        "runs": [{"seed": run.seed, **run.more, "figures": msgspec.to_builtins(run.figures)} for run in runs],
    }
