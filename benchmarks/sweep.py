"""A sweep: one quantity over some points, and at every point the same arms; on the console, in results.json, as plots and a page.

    python -m benchmarks.straggler [--real] [--points 1 5 20] [--arms sync async_recompute] [--repeats 3] [--out DIR] …

In virtual time (the default) a point is a scenario (`benchmarks.sweep_virtual`), for real a run of `segue train`
(`benchmarks.sweep_real`). Arms take turns at each point, and the arms of one repeat share their seed. Everything is written after
each point, so that a sweep can be looked at while it goes on, and gone on with (`--resume`) where it was cut short.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from benchmarks import page, plots, result, sweep_table
from benchmarks.arms import Arm, chosen
from benchmarks.command import INTERRUPTED, Parser
from benchmarks.jobs import each
from benchmarks.results_folder import RESULTS, claimed, earlier
from benchmarks.sweep_figures import Point, point_document
from benchmarks.virtual.scenario import World
from segue.build import git_sha
from segue.config import Config
from segue.errors import RunFailed, UserError
from segue.files import disk_errors

FOLDER = Path(__file__).resolve().parent
CONFIG = FOLDER.parent / "configs" / "balanced.toml"


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
    """What was asked for, checked. `generation_seconds`: that of an earlier call of a sweep that is gone on with."""

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
    generation_seconds: float | None = None


# --- asking -----------------------------------------------------------------------------------------------------------------


def parser(sweep: Sweep, about: str | None) -> argparse.ArgumentParser:
    """The command line of a sweep."""
    parser = Parser(sweep.name.replace("_", "-"), about)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--virtual", dest="real", action="store_false", help="in virtual time (default)")
    kind.add_argument("--real", action="store_true", help="whole runs on this machine")
    parser.set_defaults(real=False)
    points = f"{sweep.axis}; default {_several(sweep.points)}, with --real {_several(sweep.points_real)}"
    parser.add_argument("--points", nargs="*", type=float, metavar="X", help=points)
    if sweep.spreads:
        parser.add_argument(
            "--spreads", nargs="*", type=float, metavar="S", help=f"{sweep.spread_label}; default {_several(sweep.spreads)}"
        )
    parser.add_argument("--arms", nargs="*", metavar="ARM", help="default: all (benchmarks/arms.py)")
    parser.add_argument("--repeats", type=int, default=1, help="runs per arm and point, each with the next seed")
    parser.add_argument("--seed", type=int, default=0, help="of the first")
    parser.add_argument("--steps", type=int, help="of every run; default: the scenario's or config's")
    parser.add_argument("--redundancy", type=int, default=1, metavar="R", help="members that groups of redundant arms have more")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="for all arms")
    parser.add_argument("--out", type=Path, metavar="DIR", help="results; default runs/bench-NAME-TIME")
    parser.add_argument("--resume", action="store_true", help="keep the points that DIR has, and measure those that are missing")
    virtual = parser.add_argument_group("in virtual time")
    virtual.add_argument("--scenario", type=Path, metavar="FILE", help=f"default {sweep.scenario.relative_to(FOLDER.parent)}")
    virtual.add_argument("--learner", choices=("sized", "given"), help="its cost: sized for each point (default), or the file's")
    virtual.add_argument("--jobs", type=int, metavar="N", help="points played at once, a process each (default 1)")
    real = parser.add_argument_group("with --real")
    real.add_argument("--config", type=Path, metavar="FILE", help=f"default {CONFIG.relative_to(FOLDER.parent)}")
    real.add_argument("--no-ceilings", action="store_true", help="no efficiency: two runs less per point and seed")
    return parser


def plan(sweep: Sweep, args: argparse.Namespace) -> Plan:
    """Check what was asked for, before anything runs. Raises `UserError`."""
    _check_kind(args)
    default = sweep.points_real if args.real else sweep.points
    xs = _values(default if args.points is None else args.points, "--points", sweep.low, sweep.high)
    spreads: Sequence[float | None] = (None,)
    if sweep.spreads:
        asked = sweep.spreads if args.spreads is None else args.spreads
        spreads = _values(asked, "--spreads", *sweep.spread_limits)
    for name, least in (("repeats", 1), ("redundancy", 1), ("seed", 0), ("steps", 1), ("jobs", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise UserError(f"--{name} {value} is too low: give {least} or more.")
    arms = chosen(args.arms)
    plots.require()
    return Plan(
        sweep=sweep,
        points=[Point(x, spread) for spread in spreads for x in xs],
        arms=arms,
        seeds=[args.seed + repeat for repeat in range(args.repeats)],
        overrides=list(args.overrides),
        steps=args.steps,
        redundancy=args.redundancy,
        source=(args.config or CONFIG) if args.real else (args.scenario or sweep.scenario),
        sized=args.learner != "given",
        ceilings=not args.no_ceilings,
        real=args.real,
        jobs=args.jobs or 1,
    )


def _check_kind(args: argparse.Namespace) -> None:
    """What belongs to the other kind of sweep would be ignored."""
    others = ("scenario", "learner", "jobs") if args.real else ("config", "no_ceilings")
    for name in others:
        if getattr(args, name):
            option, remedy = name.replace("_", "-"), "leave one of the two out" if args.real else "add --real, or leave it out"
            where = "in virtual time, not for --real" if args.real else "with --real"
            raise UserError(f"--{option} is for sweeps {where}: {remedy}.")
    if args.resume and args.out is None:
        raise UserError("--resume goes on in a folder: name it with --out.")


def _values(values: Sequence[float], option: str, low: float, high: float) -> list[float]:
    if not values:
        raise UserError(f"{option} names no value: give some between {low:g} and {high:g}, or leave it out.")
    for value in values:
        if not (math.isfinite(value) and low <= value <= high):
            raise UserError(f"{option} {value:g} is out of range: give values between {low:g} and {high:g}.")
    return sorted(set(values))


def _several(values: Sequence[float]) -> str:
    return " ".join(f"{value:g}" for value in values)


# --- running ----------------------------------------------------------------------------------------------------------------


def _kind(real: bool) -> ModuleType:
    """Has `setup`, `settings` and `measure_point`."""
    return importlib.import_module("benchmarks.sweep_real" if real else "benchmarks.sweep_virtual")


def settings(asked: Plan, where: Mapping[str, Any]) -> dict[str, Any]:
    """All that decides a point's figures: points of one file agree in it."""
    machine = {"machine": {key: where[key] for key in ("cpu", "cores")}, "ceilings": asked.ceilings} if asked.real else {}
    return {
        "time": "real" if asked.real else "virtual",
        "commit": git_sha(),
        "arms": [arm.name for arm in asked.arms],
        "seeds": asked.seeds,
        "redundancy": asked.redundancy,
        **machine,
        **_kind(asked.real).settings(asked),
    }


def measure_point(asked: Plan, point: Point) -> dict[str, Any]:
    """A point as results.json has it."""
    return point_document(_kind(asked.real).measure_point(asked, point))


def measure(asked: Plan, known: Sequence[Mapping[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """All points so far, in order, each time that one more is there; first those that were known, if any were."""
    done: dict[Point, dict[str, Any]] = {Point(point["x"], point["spread"]): dict(point) for point in known}
    order = sorted({*done, *asked.points}, key=lambda point: (point.spread or 0.0, point.x))

    def so_far() -> list[dict[str, Any]]:
        return [done[point] for point in order if point in done]

    if done:
        yield so_far()
    missing = [point for point in asked.points if point not in done]
    if asked.jobs > 1:
        missing.sort(key=lambda point: -point.x)  # the dearest begin first
    for place, document in each(measure_point, [(asked, point) for point in missing], asked.jobs):
        done[missing[place]] = document
        print(sweep_table.point_text(asked.sweep.symbol, document), flush=True)
        yield so_far()


def run(sweep: Sweep, about: str | None, arguments: Sequence[str] | None = None) -> int:
    """A whole sweep; the exit code."""
    args = parser(sweep, about).parse_args(arguments)
    where = result.machine()
    out = args.out or Path("runs") / f"bench-{sweep.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    told: dict[str, Any] = {}
    try:
        asked = plan(sweep, args)
        with claimed(out, args.resume):
            shared = _kind(asked.real).setup(asked)
            same = settings(asked, where)
            before = earlier(out, sweep.name, same) or {}
            if before and not before["machine"]["quiet"]:
                where = before["machine"]  # rates of a machine that was busy are among the figures
            known = before.get("points", [])
            seconds = next((point["generation_seconds"] for point in known if "generation_seconds" in point), None)
            asked = msgspec.structs.replace(asked, generation_seconds=seconds)
            for points in measure(asked, known):
                told = _document(asked, args, where, shared, same, points)
                _write(told, out)
    except (RunFailed, UserError) as error:
        print(error, file=sys.stderr)
        _say_what_is_left(told, out)
        return 1 if isinstance(error, RunFailed) else 2
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        _say_what_is_left(told, out)
        return INTERRUPTED
    print(f"{out}/index.html has the figures and plots, {out}/{RESULTS} everything.")
    if args.real and (note := result.busy(where)):
        print(note)
    return 0


def _document(
    asked: Plan,
    args: argparse.Namespace,
    where: Mapping[str, Any],
    shared: Mapping[str, Any],
    same: Mapping[str, Any],
    points: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """All of results.json."""
    sweep = asked.sweep
    there = {(point["x"], point["spread"]) for point in points}
    figures = {
        "time": same["time"],
        "title": sweep.title,
        "sweep": {"axis": sweep.axis, "symbol": sweep.symbol, "spread_label": sweep.spread_label},
        "setup": dict(shared),
        "settings": dict(same),
        "arms": {arm.name: {"about": arm.about} for arm in asked.arms},
        "points": list(points),
        "missing": [{"x": p.x, "spread": p.spread} for p in asked.points if (p.x, p.spread) not in there],
    }
    packages = ("torch", "transformers", "ray", "matplotlib") if asked.real else ("matplotlib",)
    return result.document(sweep.name, figures, seeds=asked.seeds, arguments=vars(args), packages=packages, where=where)


def _write(told: Mapping[str, Any], out: Path) -> None:
    """Raises `RunFailed` where the disk takes no more."""
    result.write(out / RESULTS, told)
    with disk_errors(out):
        drawn = plots.draw(told, out)
        (out / "index.html").write_text(page.build(told, drawn), encoding="utf-8")


def _say_what_is_left(told: Mapping[str, Any], out: Path) -> None:
    if told:
        count = len(told["points"])
        print(
            f"{out} has the {count} point{'s' * (count != 1)} that {'were' if count != 1 else 'was'} done: the same command with "
            f"--out {out} --resume goes on.",
            file=sys.stderr,
        )
