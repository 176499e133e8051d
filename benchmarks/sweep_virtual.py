"""The points of a sweep in virtual time: a scenario file, put at a point, played once per arm and seed.

Both ceilings belong to a point, not to an arm: generation alone has no updates and no age bound, so that arms do not differ; of
training alone on recorded batches the best arm's counts, because one that masks tokens would else lower its own ceiling.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from benchmarks.figures import Efficiency, Figures, Window, length_bias
from benchmarks.results_folder import Kept
from benchmarks.sweep_figures import Measured, Point, Seeded
from benchmarks.sweep_plan import Plan
from benchmarks.sweep_table import run_text
from benchmarks.tails import mean_of
from benchmarks.virtual.measure import generation_ceiling, measure, training_ceiling
from benchmarks.virtual.scenario import LearnerModel, World, build_world, load_world, merged, parse_sets
from benchmarks.virtual.world import quiet

_WARM_SHARE = 4
"""At least one in so many steps fills the pipeline: where episodes take many steps, the first batches hold short ones only."""


def setup(plan: Plan) -> dict[str, Any]:
    """What all arms share. Raises `UserError` for whatever is wrong with the scenario, an arm or the number of steps."""
    quiet()
    base = _world(plan, {}, 0)
    for point in plan.points:
        tables = plan.sweep.virtual(base, point)
        for arm in plan.arms:
            window_of(_world(plan, tables, 0, arm.tables(base.config, plan.redundancy)))
    scenario, config = base.scenario, base.config
    return {
        "scenario": {name: getattr(scenario, name) for name in ("name", "about", "source", "assumptions")},
        "batch_groups": config.batch.groups,
        "group_size": config.group.size,
        "episodes_in_flight": config.rollout.nodes * config.rollout.max_episodes,
        "nodes": config.rollout.nodes,
        "slots": config.rollout.slots,
        "steps": config.steps,
        "redundancy": plan.redundancy,
        "learner": "sized for each point" if plan.sized else "as given",
    }


def settings(plan: Plan) -> dict[str, Any]:
    """What the file, --set and --learner say."""
    world = _world(plan, {}, 0)
    learner = "sized for each point" if plan.sized else "as given"
    return {"learner": learner, "scenario": msgspec.to_builtins(world.scenario), "values": world.values}


class Played(msgspec.Struct, frozen=True):
    """One arm: its figures but for efficiency, what training alone makes of its batches (tokens per second), virtual seconds."""

    figures: Figures
    training: float
    seconds: float


def measure_seed(plan: Plan, point: Point, seed: int, kept: Kept) -> Seeded:
    """All arms at a point, with one seed."""
    quiet()
    base = _world(plan, {}, 0)
    tables = plan.sweep.virtual(base, point)
    here = _world(plan, tables, seed)
    name = f"{point.name}-seed{seed}"
    generation = kept.of(f"{name}-generation", float, partial(generation_ceiling, here))
    scale = learner_scale(here, generation) if plan.sized else 1.0
    sized = merged(tables, {"learner": _scaled(here.scenario.learner, scale)})
    population = batch_tokens(here)[0] / here.scenario.unit
    played: dict[str, Played] = {}
    for arm in plan.arms:
        world = _world(plan, sized, seed, arm.tables(base.config, plan.redundancy))
        said = partial(run_text, plan.sweep.symbol, point, arm.name, seed)
        played[arm.name] = kept.of(f"{name}-{arm.name}", Played, partial(_play, world, population, said))
    training = max(one.training for one in played.values())
    runs = {}
    for arm_name, one in played.items():
        efficiency = Efficiency(generation, training, one.figures.tokens_per_second)
        whole = msgspec.structs.replace(one.figures, efficiency=efficiency)
        runs[arm_name] = Measured(seed, whole, {"virtual_seconds": one.seconds})
    return Seeded(tables, runs, {"learner_scale": scale})


def _play(world: World, population: float, said: Callable[[Figures], str]) -> Played:
    window = window_of(world)
    figures, ran = measure(world, ceilings=False, window=window)
    bias = length_bias(ran.lines[window.warm : window.last], ran.lines, population)
    figures = msgspec.structs.replace(figures, length_bias=bias)
    print(said(figures), flush=True)
    return Played(figures, training_ceiling(world, ran.works[window.warm : window.last]), ran.seconds)


def window_of(world: World) -> Window:
    """The steps that count. Raises `UserError` when nothing is left of them."""
    window = Window.of(world.config.steps, world.config.staleness.max_age)
    return Window(max(window.warm, world.config.steps // _WARM_SHARE), window.last)


def batch_tokens(world: World) -> tuple[float, float]:
    """Mean tokens of an episode, sampled ones and all, as the workload's distributions have them."""
    names = ("turns", "prompt_tokens", "action_tokens", "observation_tokens")
    turns, prompt, action, observation = (mean_of(world, f"workload.{name}") for name in names)
    return turns * action, prompt + turns * action + (turns - 1.0) * observation


def learner_scale(world: World, generation: float) -> float:
    """By what to multiply the learner's times so that it alone trains as fast as generation alone samples."""
    config, learner = world.config, world.scenario.learner
    sampled, tokens = (config.batch.groups * config.group.size * count for count in batch_tokens(world))
    seconds = learner.step_seconds + learner.seconds_per_token * tokens + learner.gather_seconds
    return sampled / generation / seconds if seconds else 1.0


def _scaled(learner: LearnerModel, scale: float) -> dict[str, float]:
    names = ("step_seconds", "seconds_per_token", "gather_seconds")
    return {name: scale * getattr(learner, name) for name in names}


def _world(plan: Plan, tables: Mapping[str, Any], seed: int, arm: Mapping[str, Any] | None = None) -> World:
    """The scenario with, one over the other: --set, the seed and steps, the point's tables (made from those), the arm."""
    path = plan.source
    if not tables and arm is None:
        return load_world(path, _asked(plan, seed))
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    data = merged(merged(data, _asked(plan, seed)), tables)
    return build_world(merged(data, {"config": arm or {}}), str(path), path.parent)


def _asked(plan: Plan, seed: int) -> dict[str, Any]:
    config: dict[str, Any] = {"seed": seed} | ({"steps": plan.steps} if plan.steps is not None else {})
    return merged(parse_sets(plan.overrides), {"config": config})
