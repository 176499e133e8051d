"""The points of a sweep for real: `segue train` on a config of the suite `latency`, once per arm and seed, watched from outside.

Efficiency is left out: its ceilings need a learner that is a sink, and one that trains recorded batches; a real run has neither.
Once it has, an `Efficiency` in what `_measured` makes is all that table, plots and page need. Processes are placed by the system:
no key of a config pins a role to cores.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.async_vs_sync import setup as shared_setup
from benchmarks.async_vs_sync import turn_seconds
from benchmarks.figures import Window, figures_of
from benchmarks.sweep import At, Measured, Plan, Point
from benchmarks.watched import Watched, train
from segue.config import Config, load_config
from segue.errors import UserError

RUN_SECONDS = 1800.0
_FIRST_STEPS = 14
"""Of the run that measures what sampling an action takes."""


def setup(plan: Plan) -> dict[str, Any]:
    """What all arms share. Raises `UserError` for whatever is wrong with the config, an arm or the number of steps."""
    base = _config(plan, [])
    if base.task.env != "latency":
        raise UserError(f"{plan.source} trains on {base.task.env}: sweep a config whose task.env is 'latency'.")
    for point in plan.points:
        for arm in plan.arms:
            settings = [*plan.sweep.real(base, point, 1.0), *_lines(arm.tables(base, plan.redundancy))]
            config = _config(plan, settings)
            Window.of(config.steps, config.staleness.max_age)
    return {**shared_setup(base), "steps": base.steps, "redundancy": plan.redundancy}


def measure_point(plan: Plan, point: Point) -> At:
    """All arms at a point, in turns: each seed once per arm."""
    base = _config(plan, [])
    generate = generation_seconds(plan) if plan.sweep.relative else 0.0
    settings = plan.sweep.real(base, point, generate)
    runs: dict[str, list[Measured]] = {arm.name: [] for arm in plan.arms}
    for seed in plan.seeds:
        for arm in plan.arms:
            overrides = [*settings, *_lines(arm.tables(base, plan.redundancy)), f"seed={seed}"]
            config = _config(plan, overrides)
            window = Window.of(config.steps, config.staleness.max_age)
            runs[arm.name].append(_measured(_train(plan, overrides, window), window, config, seed))
    return At(point, {"overrides": settings}, runs, {"generation_seconds": generate} if generate else {})


@functools.cache
def _generation_seconds(source: Path, overrides: tuple[str, ...]) -> float:
    config = load_config(source, list(overrides))
    window = Window.of(config.steps, config.staleness.max_age)
    watched = _watch(source, list(overrides), window)
    return turn_seconds(watched.scrapes[window.warm], watched.scrapes[window.last])[0]


def generation_seconds(plan: Plan) -> float:
    """Mean seconds that sampling an action takes, in an asynchronous run of the config as it is; measured once per command."""
    return _generation_seconds(plan.source, (*plan.overrides, 'mode="async"', f"steps={max(_FIRST_STEPS, plan.steps or 0)}"))


def _measured(watched: Watched, window: Window, config: Config, seed: int) -> Measured:
    before, after = watched.scrapes[window.warm], watched.scrapes[window.last]
    sampled = float(watched.summary["tokens"]["generated"])
    figures = figures_of(watched.lines, before, after, window, config.staleness.max_age, sampled=sampled)
    generate, latency = turn_seconds(before, after)
    return Measured(seed, figures, {"turn_generate_seconds": generate, "env_step_seconds": latency})


def _train(plan: Plan, overrides: list[str], window: Window) -> Watched:
    steps = [f"steps={plan.steps}"] if plan.steps is not None else []
    return _watch(plan.source, [*plan.overrides, *steps, *overrides], window)


def _watch(source: Path, overrides: list[str], window: Window) -> Watched:
    """Raises `RunFailed`, whose run directory then stays."""
    folder = Path(tempfile.mkdtemp(prefix="segue-sweep-"))
    watched = train(source, folder / "run", overrides, {window.warm, window.last}, RUN_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
    return watched


def _config(plan: Plan, overrides: list[str]) -> Config:
    steps = [f"steps={plan.steps}"] if plan.steps is not None else []
    return load_config(plan.source, [*plan.overrides, *steps, *overrides])


def _lines(tables: Mapping[str, Any], parents: str = "") -> list[str]:
    """Nested tables as overrides."""
    lines: list[str] = []
    for key, value in tables.items():
        if isinstance(value, Mapping):
            lines += _lines(value, f"{parents}{key}.")
        else:
            lines.append(f"{parents}{tomli_w.dumps({key: value}).strip().replace(' = ', '=', 1)}")
    return lines
