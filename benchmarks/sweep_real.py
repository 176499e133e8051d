"""The points of a sweep for real: `segue train` on a config of the suite `latency`, once per arm and seed, watched from outside.

Both ceilings (`benchmarks.ceilings`) are measured once per point and seed, before the arms: two more runs. They are those of the
config as it is, asynchronous; arms share cores, batch and concurrency with them.
"""

from __future__ import annotations

import functools
import shutil
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from benchmarks import ceilings
from benchmarks.async_vs_sync import setup as shared_setup
from benchmarks.async_vs_sync import turn_seconds
from benchmarks.figures import Efficiency, Lines, Window, figures_of, length_bias, mean_length
from benchmarks.sweep import Plan
from benchmarks.sweep_figures import At, Measured, Point
from benchmarks.sweep_table import run_text
from benchmarks.watched import Watched, train
from segue.cluster.cores import cores_text
from segue.config import Config, load_config
from segue.errors import UserError

RUN_SECONDS = 1800.0


def setup(plan: Plan) -> dict[str, Any]:
    """What all arms share. Raises `UserError` for whatever is wrong with the config, an arm or the number of steps."""
    base = _config(plan, [])
    if base.task.env != "latency":
        raise UserError(f"{plan.source} trains on {base.task.env}: sweep a config whose task.env is 'latency'.")
    for point in plan.points:
        for arm in plan.arms:
            _arm(plan, base, [*plan.sweep.real(base, point, 1.0), *_lines(arm.tables(base, plan.redundancy))])
    return {**shared_setup(base), "cores": cores_text(base), "steps": base.steps, "redundancy": plan.redundancy}


def settings(plan: Plan) -> dict[str, Any]:
    """What the config and --set say."""
    return {"config": _config(plan, []).model_dump(mode="json")}


def measure_point(plan: Plan, point: Point) -> At:
    """Ceilings and all arms at a point, in turns: each seed once per arm."""
    base = _config(plan, [])
    generate = generation_seconds(plan) if plan.sweep.relative and point.x else 0.0
    settings = plan.sweep.real(base, point, generate)
    runs: dict[str, list[Measured]] = {arm.name: [] for arm in plan.arms}
    found: list[ceilings.Ceilings] = []
    for seed in plan.seeds:
        if plan.ceilings:
            found.append(_ceilings(plan, [*settings, f"seed={seed}"]))
        trained: dict[str, tuple[Lines, Window]] = {}
        for arm in plan.arms:
            overrides = [*settings, *_lines(arm.tables(base, plan.redundancy)), f"seed={seed}"]
            config, overrides = _arm(plan, base, overrides)
            window = Window.of(config.steps, config.staleness.max_age)
            watched = _train(plan, overrides, window)
            trained[arm.name] = watched.lines, window
            measured = _measured(watched, window, config, seed)
            runs[arm.name].append(_against(measured, found[-1]) if found else measured)
            print(run_text(plan.sweep.symbol, point, arm.name, seed, runs[arm.name][-1].figures), flush=True)
        for name, bias in length_biases(trained).items():
            runs[name][-1] = _with(runs[name][-1], length_bias=bias)
    more = {"generation_seconds": generate} if generate else {}
    for name in ("generation_idle_share", "training_wait_share", "repeating_share") if found else ():
        more[name] = statistics.median(getattr(each, name) for each in found)
    return At(point, {"overrides": settings}, runs, more)


def length_biases(trained: Mapping[str, tuple[Lines, Window]]) -> dict[str, float | None]:
    """By arm: mean length of the trained episodes of its window over that of all episodes, which the synchronous arm trains: it
    drops none. Nothing where that did not run: then arms are compared with themselves, which hides what redundancy does."""
    if "sync" not in trained:
        return {}
    population = mean_length(trained["sync"][0])
    return {name: length_bias(lines[window.warm : window.last], lines, population) for name, (lines, window) in trained.items()}


def _arm(plan: Plan, base: Config, overrides: list[str]) -> tuple[Config, list[str]]:
    """An arm's config and overrides, with as many steps as its age bound needs for a window as long as the config's own."""
    bound = _config(plan, overrides).staleness.max_age
    steps = Window.of(base.steps, base.staleness.max_age).steps(bound)
    return _config(plan, more := [*overrides, f"steps={steps}"]), more


def _ceilings(plan: Plan, overrides: list[str]) -> ceilings.Ceilings:
    """Raises `RunFailed`, whose run directory then stays."""
    folder = Path(tempfile.mkdtemp(prefix="segue-ceilings-"))
    found = ceilings.measure(plan.source, _all(plan, overrides), folder)
    shutil.rmtree(folder, ignore_errors=True)
    print(
        f"seed {overrides[-1].partition('=')[2]}: generation alone {found.generation:,.0f}, training alone {found.training:,.0f} "
        f"tokens/s (nodes idle {found.generation_idle_share:.0%}; learner waited {found.training_wait_share:.1%})",
        flush=True,
    )
    return found


def _against(measured: Measured, found: ceilings.Ceilings) -> Measured:
    return _with(measured, efficiency=Efficiency(found.generation, found.training, measured.figures.tokens_per_second))


def _with(measured: Measured, **figures: Any) -> Measured:
    return msgspec.structs.replace(measured, figures=msgspec.structs.replace(measured.figures, **figures))


@functools.cache
def _generation_seconds(source: Path, overrides: tuple[str, ...]) -> float:
    folder = Path(tempfile.mkdtemp(prefix="segue-sweep-"))
    seconds = ceilings.generation_seconds(source, overrides, folder)
    shutil.rmtree(folder, ignore_errors=True)
    return seconds


def generation_seconds(plan: Plan) -> float:
    """Mean seconds that sampling an action takes while all slots decode; measured once per sweep."""
    if plan.generation_seconds is not None:
        return plan.generation_seconds
    return _generation_seconds(plan.source, tuple(_all(plan, [])))


def _measured(watched: Watched, window: Window, config: Config, seed: int) -> Measured:
    before, after = watched.scrapes[window.warm], watched.scrapes[window.last]
    sampled = float(watched.summary["tokens"]["generated"])
    figures = figures_of(watched.lines, before, after, window, config.staleness.max_age, sampled=sampled)
    generate, latency = turn_seconds(before, after)
    return Measured(seed, figures, {"turn_generate_seconds": generate, "env_step_seconds": latency})


def _train(plan: Plan, overrides: list[str], window: Window) -> Watched:
    return _watch(plan.source, _all(plan, overrides), window)


def _watch(source: Path, overrides: list[str], window: Window) -> Watched:
    """Raises `RunFailed`, whose run directory then stays."""
    folder = Path(tempfile.mkdtemp(prefix="segue-sweep-"))
    watched = train(source, folder / "run", overrides, {window.warm, window.last}, RUN_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
    return watched


def _config(plan: Plan, overrides: list[str]) -> Config:
    return load_config(plan.source, _all(plan, overrides))


def _all(plan: Plan, overrides: list[str]) -> list[str]:
    steps = [f"steps={plan.steps}"] if plan.steps is not None else []
    return [*plan.overrides, *steps, *overrides]


def _lines(tables: Mapping[str, Any], parents: str = "") -> list[str]:
    """Nested tables as overrides."""
    lines: list[str] = []
    for key, value in tables.items():
        if isinstance(value, Mapping):
            lines += _lines(value, f"{parents}{key}.")
        else:
            lines.append(f"{parents}{tomli_w.dumps({key: value}).strip().replace(' = ', '=', 1)}")
    return lines
