"""What stragglers cost: a sweep over how much longer a batch's longest episode is than the mean one.

    python -m benchmarks.straggler [--real] [--points 1 2 5 10 20] [--arms sync async_recompute …] [--out DIR]

A point is E[longest of a batch] / mean: in virtual time of an episode's turns, whose mean stays; with --real of an environment
step's latency (of the suite `latency`; a batch's steps are B · G · mean turns draws). What runs: `benchmarks.sweep`.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from benchmarks.command import ended
from benchmarks.suite_latency import mean_turns, suite_args, suite_latency
from benchmarks.sweep import run
from benchmarks.sweep_figures import Point
from benchmarks.sweep_plan import Sweep
from benchmarks.tails import with_heaviness
from benchmarks.virtual.distributions import Distribution
from benchmarks.virtual.scenario import World
from segue.config import Config

_LATENCY_SECONDS = 0.3
"""That of configs/latency.toml, where a config says nothing else."""


def virtual(world: World, point: Point) -> dict[str, Any]:
    """The turns of an episode with the point's tail."""
    config = world.config
    turns = world.scenario.workload.turns
    longest = min(turns.high or config.rollout.max_turns, config.rollout.max_turns)
    spec = msgspec.structs.replace(turns, high=float(longest))
    tail = with_heaviness(spec, point.x, config.batch.groups * config.group.size, f"--points {point.x:g}")
    return {"workload": {"turns": msgspec.to_builtins(tail)}}


def real(config: Config, point: Point, generation_seconds: float) -> list[str]:
    """The latency of a step with the point's tail."""
    args = suite_args(config)
    draws = round(config.batch.groups * config.group.size * mean_turns(args))
    mean = args.mean or _LATENCY_SECONDS
    tail = with_heaviness(Distribution(mean=mean), point.x, draws, f"--points {point.x:g}")
    return suite_latency(msgspec.structs.replace(tail, mean=mean))  # nothing is cut for real, so that its own mean is exact


SWEEP = Sweep(
    name="straggler",
    title="What stragglers cost",
    axis="longest of a batch ÷ mean",
    symbol="longest/mean",
    low=1.0,
    high=20.0,
    points=(1.0, 2.0, 5.0, 10.0, 20.0),
    points_real=(1.0, 5.0, 20.0),
    virtual=virtual,
    real=real,
    varies=("workload.turns.kind", "workload.turns.spread"),
    varies_real=("task.args.distribution", "task.args.spread"),
)


def main(arguments: list[str] | None = None) -> int:
    return run(SWEEP, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(ended(main))
