"""The rows of the published tables: a scenario file each (`benchmarks/scenarios/paper/`), and one arm of a row played.

A synchronous step begins and ends with nothing in flight, so that all steps but the first are measured; the window of
asynchronous arms is that of the sweeps. "Faster" is what the papers mean by it: a step of the same batch in less time.
"""

from __future__ import annotations

import difflib
import statistics
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.barrier import Barrier, BarrierWorkers
from benchmarks.figures import Figures, Window
from benchmarks.sweep_virtual import window_of
from benchmarks.virtual.measure import measure, training_ceiling
from benchmarks.virtual.published import PaperArm, Published
from benchmarks.virtual.scenario import World, build_world, load_world, merged
from benchmarks.virtual.world import Wrap, quiet
from envpool.workers import Workers
from segue.errors import UserError

FOLDER = Path(__file__).resolve().parent / "scenarios" / "paper"


class Row(msgspec.Struct, frozen=True):
    """A scenario file with a `[paper]` table, checked. `overrides` are nested tables over every arm."""

    path: Path
    world: World
    overrides: dict[str, Any] = {}

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def paper(self) -> Published:
        assert self.world.scenario.paper is not None, "rows have one"
        return self.world.scenario.paper

    def arm(self, name: str) -> PaperArm:
        """By its name."""
        return next(arm for arm in self.paper.arms if arm.name == name)

    def arm_world(self, arm: PaperArm) -> World:
        """The scenario as this arm runs it. Raises `UserError`."""
        data = merged(tomllib.loads(self.path.read_text(encoding="utf-8")), arm.tables)
        return build_world(merged(data, self.overrides), f"{self.path} (arm {arm.name})", self.path.parent)


class Played(msgspec.Struct, frozen=True):
    """One arm that was played. Seconds are virtual but for `cpu_seconds`; lengths in tokens, ages in versions.

    training_step_seconds  what training a batch takes, gathering the weights included: no step can be shorter
    start_age              mean, from the start of an episode's generation to its training
    """

    arm: str
    step_seconds: float
    training_step_seconds: float
    start_age: float
    mean_length: float
    longest_length: float
    figures: Figures
    virtual_seconds: float
    cpu_seconds: float
    warnings: list[str]


def load_rows(only: Sequence[str] | None, overrides: Mapping[str, Any], folder: Path = FOLDER) -> list[Row]:
    """The rows named (None: all), checked with all of their arms. Raises `UserError`."""
    names = sorted(path.stem for path in folder.glob("*.toml"))
    if not names:
        raise UserError(f"There are no published rows in {folder}: run the benchmark from a checkout of the repository.")
    if only is not None and not only:
        raise UserError(f"--only names no row: name some of {', '.join(names)}, or leave it out.")
    for name in only or ():
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise UserError(f"There is no published row {name}{hint}: name some of {', '.join(names)}.")
    rows = [load_row(folder / f"{name}.toml", overrides) for name in names if only is None or name in only]
    return sorted(rows, key=lambda row: row.paper.table)


def load_row(path: Path, overrides: Mapping[str, Any] | None = None) -> Row:
    """One row. Raises `UserError` for whatever is wrong with the file or one of its arms."""
    world = load_world(path, overrides)
    if world.scenario.paper is None:
        raise UserError(f"{path} has no [paper] table: add what was published, or run it with python -m benchmarks.virtual.")
    row = Row(path, world, dict(overrides or {}))
    for arm in row.paper.arms:
        _check_arm(row, arm)
    return row


def _check_arm(row: Row, arm: PaperArm) -> None:
    world = row.arm_world(arm)
    config, where = world.config, f"{row.path} (arm {arm.name})"
    window(world)
    bound = row.paper.bound
    if arm.kind != "beyond" and config.staleness.max_age > bound:
        raise UserError(
            f"{where} sets staleness.max_age = {config.staleness.max_age} above paper.bound = {bound}: lower it, or make the arm "
            "one of kind 'beyond'."
        )
    batch = config.batch.groups * config.group.members
    places = config.rollout.nodes * min(config.rollout.max_episodes, config.rollout.slots)
    if arm.barrier and (config.mode != "sync" or places < batch):
        raise UserError(
            f"{where} has a barrier, which needs mode = 'sync' and a place for each of its {batch} episodes, not {places} in "
            f"mode '{config.mode}': correct the arm."
        )


def window(world: World) -> Window:
    """The steps that count. Raises `UserError` when none is left."""
    config = world.config
    if config.mode != "sync":
        return window_of(world)
    if config.steps < 2:
        raise UserError(f"{config.steps} steps leave nothing to measure behind the first: use 2 or more.")
    return Window(1, config.steps)


def play_arm(row: Row, arm: PaperArm) -> Played:
    """Play an arm. Raises `RunFailed` when the run fails."""
    quiet()
    world = row.arm_world(arm)
    steps, began = window(world), time.process_time()
    figures, ran = measure(world, ceilings=False, window=steps, wrap=_wrap(world) if arm.barrier else None)
    works, unit = ran.works[steps.warm : steps.last], world.scenario.unit
    trained = sum(work.stats["tokens_trained"] for work in works) * unit / len(works)
    generated = sum(work.stats["tokens_generated"] for work in works)
    return Played(
        arm=arm.name,
        step_seconds=figures.step_seconds.mean,
        training_step_seconds=trained / training_ceiling(world, works) if trained else 0.0,
        start_age=statistics.mean(age for work in works for age in work.starts),
        mean_length=unit * generated / sum(work.stats["trajectories"] for work in works),
        longest_length=float(unit * max(work.longest for work in works)),
        figures=figures,
        virtual_seconds=ran.seconds,
        cpu_seconds=time.process_time() - began,
        warnings=ran.warnings,
    )


def _wrap(world: World) -> Wrap:
    config = world.config
    barrier = Barrier(config.batch.groups * config.group.members)

    def wrap(workers: Workers) -> Workers:
        return BarrierWorkers(workers, barrier)

    return wrap


def cost(row: Row, arm: PaperArm) -> float:
    """About how many turns an arm plays: what a schedule of arms needs to know."""
    world = row.arm_world(arm)
    config = world.config
    return config.steps * config.batch.groups * config.group.members * max(1.0, world.scenario.workload.turns.mean)
