"""How heavy a tail is: the longest of a batch's n draws over their mean, E[max of n] / mean, and the log-normal that has it."""

from __future__ import annotations

import msgspec

from benchmarks.virtual.distributions import Distribution, Draws
from benchmarks.virtual.scenario import World, distributions
from segue.errors import UserError

_POINTS = 1000
_SPREAD_MAX = 6.0
_HALVINGS = 24
_MEAN_ROUNDS = 6


def mean_of(world: World, name: str) -> float:
    """The mean of one of a scenario's distributions, cuts included; `name` is its path, for instance "workload.turns"."""
    return Draws(dict(distributions(world.scenario))[name], 0, world.values.get(name, ())).mean(_POINTS)


def longest(spec: Distribution, n: int, points: int = _POINTS) -> float:
    """E[longest of n draws], cuts included: the mean of the quantiles of the n-th power of a uniform number."""
    draws = Draws(spec, 0)
    return sum(draws.quantile(((i + 0.5) / points) ** (1.0 / n)) for i in range(points)) / points


def heaviness(spec: Distribution, n: int) -> float:
    """E[longest of n draws] over the mean of a draw, cuts included."""
    return longest(spec, n) / Draws(spec, 0).mean(_POINTS)


def with_heaviness(spec: Distribution, target: float, n: int, what: str) -> Distribution:
    """A log-normal with `spec`'s mean, shares, `low` and `high` whose heaviness is `target`; a constant for 1.

    Raises `UserError` naming `what` where its cut, or n draws, allow no such tail.
    """
    flat = msgspec.structs.replace(spec, kind="constant", spread=0.0)
    if target <= 1.0:
        return flat
    low, high = 0.0, _SPREAD_MAX
    best = reached = 1.0
    # The heaviness rises with the spread, up to a spread from which on n draws see too little of the tail.
    grid = [_SPREAD_MAX * (i + 1) / 24 for i in range(24)]
    for spread in grid:
        reached = heaviness(_lognormal(spec, spread), n)
        best = max(best, reached)
        if reached >= target:
            high = spread
            break
        low = spread
    else:
        raise UserError(
            f"{what}: the longest of {n} cannot be {target:g} times the mean ({best:.1f} is the most): use larger batches, a "
            "higher bound, or a lower point."
        )
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if heaviness(_lognormal(spec, middle), n) < target:
            low = middle
        else:
            high = middle
    return _lognormal(spec, high)


def _lognormal(spec: Distribution, spread: float) -> Distribution:
    """With the mean that `spec` has, cuts included."""
    made = msgspec.structs.replace(spec, kind="lognormal", spread=spread)
    for _ in range(_MEAN_ROUNDS):
        made = msgspec.structs.replace(made, mean=made.mean * spec.mean / Draws(made, 0).mean(_POINTS))
    return made
