"""What environment latency costs: a sweep over the mean time of an environment step, for several spreads.

    python -m benchmarks.env_latency [--real] [--points 0 1 2 5 10] [--spreads 0 1] [--arms sync async_recompute …] [--out DIR]

A point is the mean latency of a step over the time that sampling an action takes: in virtual time that of a mean action while all
slots decode, with --real as measured in a first run. The spread is sigma of the logarithm, 0: all steps take the same time; at
point 0, where there is nothing to spread, the first of them stands for all.
What runs: `benchmarks.sweep`.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from benchmarks.command import ended
from benchmarks.suite_latency import suite_latency
from benchmarks.sweep import run
from benchmarks.sweep_figures import Point
from benchmarks.sweep_plan import Sweep
from benchmarks.tails import mean_of
from benchmarks.virtual.distributions import Distribution
from benchmarks.virtual.scenario import World
from segue.config import Config


def turn_seconds(world: World) -> float:
    """Seconds that sampling a mean action takes while all slots decode, without KV and prefill."""
    engine, slots = world.scenario.engine, world.config.rollout.slots
    return mean_of(world, "workload.action_tokens") * (engine.decode_seconds + engine.decode_seconds_per_request * slots)


def virtual(world: World, point: Point) -> dict[str, Any]:
    """Environment steps with the point's mean and spread."""
    return {"env": {"step_seconds": msgspec.to_builtins(_latency(point, turn_seconds(world)))}}


def real(config: Config, point: Point, generation_seconds: float) -> list[str]:
    """The same of the suite `latency`."""
    return suite_latency(_latency(point, generation_seconds))


def _latency(point: Point, generation_seconds: float) -> Distribution:
    mean, spread = point.x * generation_seconds, point.spread or 0.0
    if not mean or not spread:
        return Distribution(kind="constant", mean=mean)
    return Distribution(kind="lognormal", mean=mean, spread=spread)


SWEEP = Sweep(
    name="env_latency",
    title="What environment latency costs",
    axis="mean latency of a step ÷ generation time of a turn",
    symbol="latency/generation",
    low=0.0,
    high=10.0,
    points=(0.0, 1.0, 2.0, 5.0, 10.0),
    points_real=(0.0, 5.0),
    virtual=virtual,
    real=real,
    varies=("env.step_seconds",),
    varies_real=("task.args.distribution", "task.args.mean", "task.args.spread"),
    relative=True,
    spreads=(0.0, 1.0),
    spread_limits=(0.0, 3.0),
    spread_label="σ of log latency",
)


def main(arguments: list[str] | None = None) -> int:
    return run(SWEEP, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(ended(main))
