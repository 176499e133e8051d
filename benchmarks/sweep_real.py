"""The points of a sweep for real: `segue train` on a config of the suite `latency`, once per arm and seed, watched from outside.

Both ceilings (`benchmarks.ceilings`) are measured once per point and seed, before the arms: two more runs. They are those of the
config as it is, asynchronous; arms share cores, batch and concurrency with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
import tomli_w

from benchmarks import ceilings
from benchmarks.async_vs_sync import setup as shared_setup
from benchmarks.async_vs_sync import turn_seconds
from benchmarks.figures import Efficiency, Window, figures_of, mean_length
from benchmarks.results_folder import Kept
from benchmarks.suite_latency import deadlines
from benchmarks.sweep_figures import Measured, Point, Seeded
from benchmarks.sweep_plan import Plan
from benchmarks.sweep_table import point_name, run_text
from benchmarks.watched import Watched, scratch, train
from segue.cluster.cores import cores_text
from segue.config import Config, load_config
from segue.errors import UserError

RUN_SECONDS = 4 * 3600.0
"""Of one run: a synchronous one with heavy tails takes minutes per step. A run that is stuck ends by its own deadlines."""


def setup(plan: Plan) -> dict[str, Any]:
    """What all arms share. Raises `UserError` for whatever is wrong with the config, an arm or the number of steps."""
    base = _config(plan, [])
    if base.task.env != "latency":
        raise UserError(f"{plan.source} trains on {base.task.env}: sweep a config whose task.env is 'latency'.")
    if base.rollout.engine != "embedded" and (plan.ceilings or plan.sweep.relative):
        raise UserError(
            f"{plan.source} sets rollout.engine = '{base.rollout.engine}', and generation alone is measured with the embedded "
            "engine: leave it out, or sweep straggler with --no-ceilings."
        )
    for point in plan.points:
        for arm in plan.arms:
            _arm(plan, base, [*_at(plan, base, point, 1.0), *_lines(arm.tables(base, plan.redundancy))])
    return {**shared_setup(base), "cores": cores_text(base), "steps": base.steps, "redundancy": plan.redundancy}


def settings(plan: Plan) -> dict[str, Any]:
    """What the config and --set say."""
    return {"config": _config(plan, []).model_dump(mode="json")}


class Ran(msgspec.Struct, frozen=True):
    """One run of one arm: its figures but for efficiency and length bias; mean tokens of trained episodes, of the window and of
    all (0: there are none)."""

    measured: Measured
    length: float
    length_of_all: float


def measure_seed(plan: Plan, point: Point, seed: int, kept: Kept) -> Seeded:
    """Both ceilings and then all arms at a point, with one seed."""
    base = _config(plan, [])
    generate = kept.of("generation-seconds", float, partial(generation_seconds, plan)) if plan.sweep.relative and point.x else 0.0
    here = _at(plan, base, point, generate)
    name, own = f"{point.name}-seed{seed}", f"seed={seed}"
    where = point_name(plan.sweep.symbol, {"x": point.x, "spread": point.spread})
    found = kept.of(f"{name}-ceilings", ceilings.Ceilings, partial(_ceilings, plan, [*here, own])) if plan.ceilings else None
    runs: dict[str, Ran] = {}
    for arm in plan.arms:
        overrides = [*here, *_lines(arm.tables(base, plan.redundancy)), own]
        said = partial(_said, plan, point, arm.name, found)
        runs[arm.name] = kept.of(
            f"{name}-{arm.name}", Ran, partial(_run, plan, base, overrides, seed, f"  {where}, seed {seed}, {arm.name} …", said)
        )
    more = {"generation_seconds": generate} if generate else {}
    for key in ("generation_idle_share", "training_wait_share", "repeating_share", "unknown_share") if found else ():
        more[key] = getattr(found, key)
    population = runs["sync"].length_of_all if "sync" in runs else 0.0
    return Seeded({"overrides": here}, {arm: _whole(ran, found, population) for arm, ran in runs.items()}, more)


def _at(plan: Plan, base: Config, point: Point, generate: float) -> list[str]:
    """The overrides that put the config at a point."""
    here = plan.sweep.real(base, point, generate)
    return [*here, *deadlines(_config(plan, here))]


def _run(plan: Plan, base: Config, overrides: list[str], seed: int, starting: str, said: Callable[[Measured], str]) -> Ran:
    """One run; `starting` is printed before it, what `said` makes of it after."""
    config, overrides = _arm(plan, base, overrides)
    window = Window.of(config.steps, config.staleness.max_age)
    print(starting, flush=True)
    watched = _train(plan, overrides, window)
    measured = _measured(watched, window, config, seed)
    print(said(measured), flush=True)
    return Ran(measured, mean_length(watched.lines[window.warm : window.last]), mean_length(watched.lines))


def _said(plan: Plan, point: Point, arm: str, found: ceilings.Ceilings | None, measured: Measured) -> str:
    return run_text(plan.sweep.symbol, point, arm, measured.seed, _against(measured, found).figures)


def _whole(ran: Ran, found: ceilings.Ceilings | None, population: float) -> Measured:
    """With what other runs of its seed say: its efficiency, and how long its trained episodes are against all episodes, which the
    synchronous arm trains: it drops none. Where that did not run, arms are compared with themselves, which hides what redundancy
    does."""
    whole = population or ran.length_of_all
    return _with(_against(ran.measured, found), length_bias=ran.length / whole if ran.length and whole else None)


def _arm(plan: Plan, base: Config, overrides: list[str]) -> tuple[Config, list[str]]:
    """An arm's config and overrides, with as many steps as its age bound needs for a window as long as the config's own."""
    bound = _config(plan, overrides).staleness.max_age
    steps = Window.of(base.steps, base.staleness.max_age).steps(bound)
    return _config(plan, more := [*overrides, f"steps={steps}"]), more


def _ceilings(plan: Plan, overrides: list[str]) -> ceilings.Ceilings:
    print("generation alone, then training alone …", flush=True)
    with scratch("ceilings") as folder:
        found = ceilings.measure(plan.source, _all(plan, overrides), folder)
    print(
        f"seed {overrides[-1].partition('=')[2]}: generation alone {found.generation:,.0f}, training alone {found.training:,.0f} "
        f"tokens/s (nodes idle {found.generation_idle_share:.0%}; learner waited {found.training_wait_share:.1%}; "
        f"{found.unknown_share:.0%} of the repeated turns were others)",
        flush=True,
    )
    return found


def _against(measured: Measured, found: ceilings.Ceilings | None) -> Measured:
    if found is None:
        return measured
    return _with(measured, efficiency=Efficiency(found.generation, found.training, measured.figures.tokens_per_second))


def _with(measured: Measured, **figures: Any) -> Measured:
    return msgspec.structs.replace(measured, figures=msgspec.structs.replace(measured.figures, **figures))


def generation_seconds(plan: Plan) -> float:
    """Mean seconds that sampling an action takes while all slots decode; measured once per sweep."""
    print("how long sampling an action takes …", flush=True)
    with scratch("sweep") as folder:
        seconds = ceilings.generation_seconds(plan.source, tuple(_all(plan, [])), folder)
    print(f"how long sampling an action takes: {seconds:.3f} s", flush=True)
    return seconds


def _measured(watched: Watched, window: Window, config: Config, seed: int) -> Measured:
    before, after = watched.scrapes[window.warm], watched.scrapes[window.last]
    sampled = float(watched.summary["tokens"]["generated"])
    figures = figures_of(watched.lines, before, after, window, config.staleness.max_age, sampled=sampled)
    generate, latency = turn_seconds(before, after)
    return Measured(seed, figures, {"turn_generate_seconds": generate, "env_step_seconds": latency})


def _train(plan: Plan, overrides: list[str], window: Window) -> Watched:
    with scratch("sweep") as folder:
        return train(plan.source, folder / "run", _all(plan, overrides), {window.warm, window.last}, RUN_SECONDS)


def _config(plan: Plan, overrides: list[str]) -> Config:
    return load_config(plan.source, _all(plan, overrides))


def _all(plan: Plan, overrides: list[str]) -> list[str]:
    steps = [f"steps={plan.steps}"] if plan.steps is not None else []
    return ["eval.tasks=0", *plan.overrides, *steps, *overrides]


def _lines(tables: Mapping[str, Any], parents: str = "") -> list[str]:
    """Nested tables as overrides."""
    lines: list[str] = []
    for key, value in tables.items():
        if isinstance(value, Mapping):
            lines += _lines(value, f"{parents}{key}.")
        else:
            lines.append(f"{parents}{tomli_w.dumps({key: value}).strip().replace(' = ', '=', 1)}")
    return lines
