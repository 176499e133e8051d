"""The suite `latency` in a sweep for real: the overrides that put its steps at a point, and deadlines that no draw reaches."""

from __future__ import annotations

from benchmarks.virtual.distributions import Distribution, Draws
from envpool.args import parse_args
from envpool.suites.latency import LatencyArgs
from segue.config import Config

_RARE = 1e-9
"""One draw in so many may be above a deadline."""
_DAY = 86400.0


def suite_latency(spec: Distribution) -> list[str]:
    """The overrides with which the suite draws its steps from it."""
    return [
        f'task.args.distribution="{spec.kind}"',
        f"task.args.mean={spec.mean}",
        f"task.args.spread={spec.spread}",
    ]


def suite_args(config: Config) -> LatencyArgs:
    """Its `[task.args]`, checked. Raises `UserError`."""
    return parse_args("latency", config.task.args, LatencyArgs)


def mean_turns(args: LatencyArgs) -> float:
    """Of an episode."""
    if not args.turns_mean:
        return (args.turns_min + args.turns_max) / 2
    goes_on = max(0.0, 1.0 - 1.0 / args.turns_mean)
    return args.turns_min + sum(goes_on**turn for turn in range(args.turns_min, args.turns_max))


def deadlines(config: Config) -> list[str]:
    """The overrides that leave time for any draw and any episode. A call above its deadline fails in every attempt, and its
    worker is ended with all its environments: the sweep would measure that."""
    args = suite_args(config)
    kind, mean, spread = args.distribution, args.mean, args.spread
    longest = Draws(Distribution(kind=kind, mean=mean, spread=spread), 0).quantile(1.0 - _RARE) if mean else 0.0
    step = min(_DAY, max(config.envpool.step_seconds, longest))
    wall = min(_DAY, max(config.rollout.wall_seconds, args.turns_max * longest))
    return [f"envpool.step_seconds={step}", f"rollout.wall_seconds={wall}"]
