"""A sweep: one quantity over some points, and at every point the same arms; on the console, in results.json, as plots and a page.

    python -m benchmarks.straggler [--real] [--points 1 5 20] [--arms sync async_recompute] [--repeats 3] [--out DIR] …

In virtual time (the default) a point is a scenario (`benchmarks.sweep_virtual`), for real a run of `segue train`
(`benchmarks.sweep_real`). Arms take turns at each point, and the arms of one repeat share their seed.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import page, plots, result, sweep_table
from benchmarks.arms import Arm, chosen
from benchmarks.figures import Figures
from benchmarks.virtual.scenario import World
from segue.config import Config
from segue.errors import RunFailed, UserError

FOLDER = Path(__file__).resolve().parent
BALANCED = (0.8, 1.25)
"""Generation's ceiling over training's, where a comparison is fair."""


class Point(msgspec.Struct, frozen=True):
    """Where a sweep measures: `x` on its axis; `spread` picks the panel, where a sweep has more than one."""

    x: float
    spread: float | None = None


class Measured(msgspec.Struct, frozen=True):
    """One run of one arm at one point. `more`: what only one of virtual and real knows."""

    seed: int
    figures: Figures
    more: dict[str, float] = {}


class At(msgspec.Struct, frozen=True):
    """A point that was measured: its runs by arm, what was set there, and notes for the file (`learner_scale`, say)."""

    point: Point
    settings: dict[str, Any]
    runs: dict[str, list[Measured]]
    more: dict[str, Any] = {}


class Sweep(msgspec.Struct, frozen=True):
    """What a benchmark sweeps.

    axis, symbol      of the points, in words with their unit, and in short
    low, high         the points allowed
    points, spreads   by default; no spreads: one panel
    relative          points are in times of sampling an action, which a real sweep then measures first
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
    out: Path
    source: Path
    sized: bool
    ceilings: bool = True


# --- asking -----------------------------------------------------------------------------------------------------------------


def parser(sweep: Sweep, about: str | None) -> argparse.ArgumentParser:
    """The command line of a sweep."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--virtual", dest="real", action="store_false", help="in virtual time (default)")
    kind.add_argument("--real", action="store_true", help="whole runs on this machine")
    parser.set_defaults(real=False)
    parser.add_argument("--points", nargs="*", type=float, metavar="X", help=f"{sweep.axis}; default {_several(sweep.points)}")
    if sweep.spreads:
        parser.add_argument(
            "--spreads", nargs="*", type=float, metavar="S", help=f"{sweep.spread_label}; default {_several(sweep.spreads)}"
        )
    parser.add_argument("--arms", nargs="*", metavar="ARM", help="default: all (benchmarks/arms.py)")
    parser.add_argument("--repeats", type=int, default=1, help="runs per arm and point, each with the next seed")
    parser.add_argument("--seed", type=int, default=0, help="of the first")
    parser.add_argument("--steps", type=int, help="of every run; default: the scenario's or config's")
    parser.add_argument("--redundancy", type=int, default=1, metavar="R", help="members that groups of redundant arms have more")
    parser.add_argument("--learner", choices=("sized", "given"), default="sized", help="in virtual time: sized for each point")
    parser.add_argument(
        "--no-ceilings", action="store_true", help="real runs without efficiency: two runs less per point and seed"
    )
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="for all arms")
    parser.add_argument("--scenario", type=Path, default=sweep.scenario, help="of virtual time")
    parser.add_argument("--config", type=Path, default=FOLDER.parent / "configs" / "balanced.toml", help="of real runs")
    parser.add_argument("--out", type=Path, metavar="DIR", help="results; default runs/bench-NAME-TIME")
    return parser


def plan(sweep: Sweep, args: argparse.Namespace) -> Plan:
    """Check what was asked for, before anything runs. Raises `UserError`."""
    default = sweep.points_real if args.real else sweep.points
    xs = _values(default if args.points is None else args.points, "--points", sweep.low, sweep.high)
    spreads: Sequence[float | None] = (None,)
    if sweep.spreads:
        asked = sweep.spreads if args.spreads is None else args.spreads
        spreads = _values(asked, "--spreads", *sweep.spread_limits)
    for name, least in (("repeats", 1), ("redundancy", 1), ("seed", 0)):
        if getattr(args, name) < least:
            raise UserError(f"--{name} {getattr(args, name)} is too low: give {least} or more.")
    if args.steps is not None and args.steps < 1:
        raise UserError(f"--steps {args.steps} is too low: give 1 or more.")
    out = args.out or Path("runs") / f"bench-{sweep.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    arms = chosen(args.arms)
    plots.require()
    claim(out)
    return Plan(
        sweep=sweep,
        points=[Point(x, spread) for spread in spreads for x in xs],
        arms=arms,
        seeds=[args.seed + repeat for repeat in range(args.repeats)],
        overrides=list(args.overrides),
        steps=args.steps,
        redundancy=args.redundancy,
        out=out,
        source=args.config if args.real else args.scenario,
        sized=args.learner == "sized",
        ceilings=not args.no_ceilings,
    )


def _values(values: Sequence[float], option: str, low: float, high: float) -> list[float]:
    if not values:
        raise UserError(f"{option} names no value: give some between {low:g} and {high:g}, or leave it out.")
    for value in values:
        if not (math.isfinite(value) and low <= value <= high):
            raise UserError(f"{option} {value:g} is out of range: give values between {low:g} and {high:g}.")
    return sorted(set(values))


def claim(out: Path) -> None:
    """A results folder that nobody uses. Raises `UserError`."""
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"{out} exists already and is not an empty folder: give --out another name, or remove it.")
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out} cannot be made ({error.strerror}): give --out another name.") from None


def _several(values: Sequence[float]) -> str:
    return " ".join(f"{value:g}" for value in values)


# --- telling ----------------------------------------------------------------------------------------------------------------


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
        ours.figures.tokens_per_second / theirs.figures.tokens_per_second for ours, theirs in zip(runs, sync or (), strict=False)
    ]
    return {
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
        "efficiency": median(lambda f: f.efficiency.value if f.efficiency else None),
        **{key: statistics.median(run.more[key] for run in runs) for key in runs[0].more},
        "runs": [{"seed": run.seed, **run.more, "figures": msgspec.to_builtins(run.figures)} for run in runs],
    }


def sweep_document(plan: Plan, kind: str, setup: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of results.json."""
    sweep = plan.sweep
    return {
        "time": kind,
        "title": sweep.title,
        "sweep": {"axis": sweep.axis, "symbol": sweep.symbol, "spread_label": sweep.spread_label},
        "setup": dict(setup),
        "arms": {arm.name: {"about": arm.about} for arm in plan.arms},
        "points": list(points),
    }


# --- running ----------------------------------------------------------------------------------------------------------------


def run(sweep: Sweep, about: str | None, arguments: Sequence[str] | None = None) -> int:
    """A whole sweep; the exit code."""
    args = parser(sweep, about).parse_args(arguments)
    where = result.machine()
    try:
        asked = plan(sweep, args)
        if args.real:
            from benchmarks.sweep_real import measure_point, setup
        else:
            from benchmarks.sweep_virtual import measure_point, setup
        shared = setup(asked)
        packages = ("torch", "transformers", "ray", "matplotlib") if args.real else ("matplotlib",)
        points: list[dict[str, Any]] = []
        document: dict[str, Any] = {}
        for point in asked.points:
            points.append(point_document(measure_point(asked, point)))
            print(sweep_table.point_text(sweep.symbol, points[-1]), flush=True)
            figures = sweep_document(asked, "real" if args.real else "virtual", shared, points)
            document = result.document(
                sweep.name, figures, seeds=asked.seeds, arguments=vars(args), packages=packages, where=where
            )
            result.write(asked.out / "results.json", document)  # after every point: a long sweep may be stopped
        drawn = plots.draw(document, asked.out)
        (asked.out / "index.html").write_text(page.build(document, drawn), encoding="utf-8")
    except (RunFailed, UserError) as error:
        print(error, file=sys.stderr)
        return 1 if isinstance(error, RunFailed) else 2
    except KeyboardInterrupt:
        print("Interrupted; results.json has the points that were done.", file=sys.stderr)
        return 130
    print(f"{asked.out}/index.html has the figures and plots, {asked.out}/results.json everything.")
    if args.real and not where["quiet"]:
        print(f"note: the machine was busy before the first run (load {where['load_at_start']}); ratios hold, rates do not.")
    return 0
