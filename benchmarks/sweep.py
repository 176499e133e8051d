"""A sweep: one quantity over some points, and at every point the same arms; on the console, in results.json, as plots and a page.

    python -m benchmarks.straggler [--real] [--points 1 5 20] [--arms sync async_recompute] [--repeats 3] [--out DIR] …

In virtual time (the default) a point is a scenario (`benchmarks.sweep_virtual`), for real a run of `segue train`
(`benchmarks.sweep_real`). Arms take turns at each point, and the arms of one repeat share their seed. Everything is written after
each point, and each run is kept as it ends: a sweep can be looked at while it goes on, and the same command goes on where one was
cut short.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from benchmarks import page, plots, result, sweep_table
from benchmarks.arms import chosen
from benchmarks.command import INTERRUPTED, Parser, sentence
from benchmarks.jobs import each
from benchmarks.results_folder import PAGE, RESULTS, Kept, claimed, earlier, left, refuse_whole
from benchmarks.sweep_figures import Point, Seeded, gathered, point_document
from benchmarks.sweep_plan import CONFIG, FOLDER, Plan, Sweep
from segue.errors import RunFailed, UserError
from segue.files import disk_errors, write_atomic

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
    parser.add_argument("--repeats", type=int, default=1, help="runs per arm and point, each with the next seed (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the first")
    parser.add_argument(
        "--steps",
        type=int,
        help="of every run (with --real: of asynchronous ones; others get the same window); default: the scenario's or config's",
    )
    parser.add_argument(
        "--redundancy", type=int, default=1, metavar="R", help="members that groups of redundant arms have more (default 1)"
    )
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="for all arms")
    out = "results, also of a call that was cut short: what they have is kept; default runs/bench-NAME-TIME"
    parser.add_argument("--out", type=Path, metavar="DIR", help=out)
    virtual = parser.add_argument_group("in virtual time")
    virtual.add_argument("--scenario", type=Path, metavar="FILE", help=f"default {sweep.scenario.relative_to(FOLDER.parent)}")
    virtual.add_argument("--learner", choices=("sized", "given"), help="its cost: sized for each point (default), or the file's")
    virtual.add_argument("--jobs", type=int, metavar="N", help="points and seeds played at once, a process each (default 1)")
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
    _check_sets(sweep, args)
    arms = chosen(args.arms)
    plots.require()
    return Plan(
        sweep=sweep,
        points=[Point(x, spread) for spread in spreads for x in xs if x or spread == spreads[0]],  # nothing has no spread
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


def _check_sets(sweep: Sweep, args: argparse.Namespace) -> None:
    """What points and arms decide is not for --set, which would be overruled or make points what they are not called."""
    config = "" if args.real else "config."
    for key in (item.partition("=")[0].strip() for item in args.overrides):
        for taken in sweep.varies_real if args.real else sweep.varies:
            if f"{key}.".startswith(f"{taken}.") or f"{taken}.".startswith(f"{key}."):
                options = "--points and --spreads" if sweep.spreads else "--points"
                raise UserError(f"--set {key} is what this sweep varies: choose {options}, and leave it out.")
        if key in (f"{config}mode", f"{config}update.inflight"):
            raise UserError(f"--set {key} is what arms differ in: choose --arms, and leave it out.")
        if key in (f"{config}{name}" for name in ("seed", "steps", "group.redundancy")):
            raise UserError(f"--set {key} has an option of its own: give --{key.rpartition('.')[2]} in its place.")


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
    """Has `setup`, `settings` and `measure_seed`."""
    return importlib.import_module("benchmarks.sweep_real" if real else "benchmarks.sweep_virtual")


def _packages(real: bool) -> tuple[str, ...]:
    """Whose versions decide figures."""
    return ("torch", "transformers", "ray") if real else ()


def settings(asked: Plan, where: Mapping[str, Any]) -> dict[str, Any]:
    """All that decides a point's figures: points of one file agree in it."""
    machine = {"machine": {key: where[key] for key in ("cpu", "cores")}, "ceilings": asked.ceilings} if asked.real else {}
    return {
        "time": "real" if asked.real else "virtual",
        "versions": result.versions(_packages(asked.real)),
        "arms": [arm.name for arm in asked.arms],
        "seeds": asked.seeds,
        "redundancy": asked.redundancy,
        **machine,
        **_kind(asked.real).settings(asked),
    }


def measure_seed(asked: Plan, point: Point, seed: int, out: Path) -> Seeded:
    """One seed of a point; runs are kept in `out` as they end."""
    found: Seeded = _kind(asked.real).measure_seed(asked, point, seed, Kept(out))
    return found


def measure(asked: Plan, known: Sequence[Mapping[str, Any]], out: Path) -> Generator[list[dict[str, Any]], None, None]:
    """All points so far, in order, each time that one more is there; first those that were known."""
    done: dict[Point, dict[str, Any]] = {point_of(document): dict(document) for document in known}
    order = sorted({*done, *asked.points}, key=lambda point: (point.spread or 0.0, point.x))
    work = [(asked, point, seed, out) for point in asked.points if point not in done for seed in asked.seeds]
    if asked.jobs > 1:
        work.sort(key=lambda item: -item[1].x)  # the dearest begin first
    yield [done[point] for point in order if point in done]
    found: dict[Point, dict[int, Seeded]] = {point: {} for point in asked.points}
    with contextlib.closing(each(measure_seed, work, asked.jobs)) as measured:
        for place, seeded in measured:
            _, point, seed, _ = work[place]
            found[point][seed] = seeded
            if len(found[point]) == len(asked.seeds):
                done[point] = point_document(gathered(point, [found[point][seed] for seed in asked.seeds]))
                print(sweep_table.point_text(asked.sweep.symbol, done[point]), flush=True)
                yield [done[point] for point in order if point in done]


def point_of(document: Mapping[str, Any]) -> Point:
    """The point of an entry of results.json."""
    return Point(document["x"], document["spread"])


def _look(found: Mapping[str, Any]) -> None:
    """Read of an earlier results.json what going on reads."""
    bool(found["machine"]["quiet"])
    for document in found["points"]:
        msgspec.convert({"x": document["x"], "spread": document["spread"]}, Point)
        document["arms"].items()


def run(sweep: Sweep, about: str | None, arguments: Sequence[str] | None = None) -> int:
    """A whole sweep; the exit code."""
    args = parser(sweep, about).parse_args(arguments)
    where = result.machine()
    out = args.out or Path("runs") / f"bench-{sweep.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    told: dict[str, Any] = {}
    try:
        asked = plan(sweep, args)
        with claimed(out):
            shared = _kind(asked.real).setup(asked)
            same = settings(asked, where)
            before = earlier(out, sweep.name, same, _look) or {"points": [], "machine": where}
            if set(asked.points) <= set(map(point_of, before["points"])):
                refuse_whole(out)
            if not before["machine"]["quiet"]:
                where = before["machine"]  # rates of a machine that was busy are among the figures
            with contextlib.closing(measure(asked, before["points"], out)) as measured:
                for points in measured:
                    told = _document(asked, args, where, shared, same, points)
                    _write(told, out)
    except (RunFailed, UserError) as error:
        print(sentence(error), file=sys.stderr)
        if told:
            print(_left(told, out), file=sys.stderr)
        return 1 if isinstance(error, RunFailed) else 2
    except KeyboardInterrupt:
        print(f"Interrupted. {_left(told, out)}", file=sys.stderr)
        return INTERRUPTED
    print(f"{out}/{PAGE} has the figures and plots, {out}/{RESULTS} everything.")
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
    packages = (*_packages(asked.real), "matplotlib")
    return result.document(sweep.name, figures, seeds=asked.seeds, arguments=vars(args), packages=packages, where=where)


def _write(told: Mapping[str, Any], out: Path) -> None:
    """results.json comes last: what it has is not drawn again by a later call. Raises `RunFailed` where the disk is full."""
    if told["points"]:
        with disk_errors(out):
            drawn = plots.draw(told, out)
        write_atomic(out / PAGE, page.build(told, drawn).encode())
    result.write(out / RESULTS, told)
    for point in map(point_of, told["points"]):
        Kept(out).drop(f"{point.name}-seed*")


def _left(told: Mapping[str, Any], out: Path) -> str:
    """What there is of a sweep that was cut short."""
    return left(out, len(told["points"]) if told else 0, "point", len(Kept(out).names("*")), "run")
