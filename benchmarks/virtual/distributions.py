"""Random numbers without state: a draw is a function of its keys alone, so that no draw depends on what was drawn before it, on
which node or in which attempt it was made, and all arms of a benchmark meet the same lengths and latencies.

A value is the quantile of a normal deviate that may be made of three parts: one that all members of a group share, one that all
turns of an episode share, and the draw's own (a Gaussian copula). Whatever the shares, the distribution of a single draw is as
stated.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Literal

import msgspec

_MASK = (1 << 64) - 1
_NORMAL = NormalDist()
_ROOT_2 = math.sqrt(2.0)
_BELOW_1 = 1.0 - 2.0**-53

Kind = Literal["constant", "uniform", "gaussian", "lognormal", "pareto", "empirical"]


class Distribution(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One distribution of a scenario.

    kind           constant; uniform (from `low` to `high`); gaussian; lognormal; pareto (Lomax: begins at 0, heavy tail);
                   empirical (values of `file`, interpolated)
    mean           of all but uniform and empirical; exact before `low` and `high` cut
    spread         gaussian: standard deviation; lognormal: sigma of the logarithm; pareto: the tail index, above 1
    file           empirical: numbers, one per line, beside the scenario file
    negatives      of a gaussian that stands for a time or a length: `clip` makes them 0 (the mean rises a little), `redraw` takes
                   the distribution above 0 only (it rises more)
    low, high      what is drawn outside is moved to them; high = 0: no upper bound
    group_share    share of the variance (of the normal deviate) that all members of a group have in common
    episode_share  share that all turns of an episode have in common, beside the group's
    """

    kind: Kind = "constant"
    mean: float = 0.0
    spread: float = 0.0
    file: str = ""
    negatives: Literal["clip", "redraw"] = "clip"
    low: float = 0.0
    high: float = 0.0
    group_share: float = 0.0
    episode_share: float = 0.0

    def fault(self) -> str:
        """What is wrong with it, as the end of a sentence that begins with its name; "" if nothing is."""
        if self.kind == "empirical":
            if not self.file:
                return "is empirical and names no file: set its file"
        elif not (math.isfinite(self.mean) and self.mean >= 0.0):
            return f"has mean = {self.mean:g}: set it to 0 or more"
        if not (math.isfinite(self.spread) and self.spread >= 0.0):
            return f"has spread = {self.spread:g}: set it to 0 or more"
        if self.kind == "uniform" and self.high <= self.low:
            return f"is uniform between low = {self.low:g} and high = {self.high:g}: set high above low"
        if self.kind == "pareto" and self.spread <= 1.0:
            return f"is a pareto with spread = {self.spread:g}, which has no mean: set the tail index above 1"
        if not 0.0 <= self.low < math.inf or (self.high and self.high < self.low):
            return f"has low = {self.low:g} and high = {self.high:g}: set 0 <= low <= high, or high = 0 for no bound"
        shares = (self.group_share, self.episode_share)
        if min(shares) < 0.0 or sum(shares) > 1.0:
            return f"has shares of the variance {shares[0]:g} and {shares[1]:g}: none may be negative, nor their sum above 1"
        return ""


class Draws:
    """A distribution ready to draw from. `values` are an empirical one's; `stream` keeps several apart under equal keys."""

    def __init__(self, spec: Distribution, stream: int, values: Sequence[float] = ()) -> None:
        self.spec = spec
        self._stream = stream
        self._values = sorted(values)
        assert (spec.kind == "empirical") == bool(self._values), spec
        self._high = spec.high or math.inf
        self._group = math.sqrt(spec.group_share)
        self._episode = math.sqrt(spec.episode_share)
        self._own = math.sqrt(max(0.0, 1.0 - spec.group_share - spec.episode_share))
        self._constant = spec.kind == "constant" or (spec.kind not in ("uniform", "empirical") and spec.mean == 0.0)

    def draw(self, group: int, episode: int, turn: int) -> float:
        """The value for one turn of one episode; `episode` names it across the whole run."""
        if self._constant:
            return self._cut(self.spec.mean)
        own = uniform(self._stream, group, episode, turn + 2)
        if self._own == 1.0:
            return self.quantile(own)
        z = self._own * _NORMAL.inv_cdf(own)
        if self._group:
            z += self._group * _NORMAL.inv_cdf(uniform(self._stream, group, 0, 0))
        if self._episode:
            z += self._episode * _NORMAL.inv_cdf(uniform(self._stream, group, episode, 1))
        return self.quantile(min(_BELOW_1, max(1e-300, 0.5 * math.erfc(-z / _ROOT_2))))

    def quantile(self, u: float) -> float:
        """The value that a share `u` of all draws does not exceed, 0 < u < 1."""
        spec = self.spec
        mean, spread = spec.mean, spec.spread
        if self._constant:
            value = mean
        elif spec.kind == "uniform":
            value = spec.low + u * (spec.high - spec.low)
        elif spec.kind == "gaussian":
            if spread == 0.0:
                value = mean
            else:
                if spec.negatives == "redraw":
                    below = _NORMAL.cdf(-mean / spread)
                    u = min(_BELOW_1, below + u * (1.0 - below))
                value = max(0.0, mean + spread * _NORMAL.inv_cdf(u))
        elif spec.kind == "lognormal":
            value = mean * math.exp(spread * _NORMAL.inv_cdf(u) - 0.5 * spread * spread)
        elif spec.kind == "pareto":
            value = mean * (spread - 1.0) * (math.pow(1.0 - u, -1.0 / spread) - 1.0)
        else:
            at = u * (len(self._values) - 1)
            i = min(int(at), len(self._values) - 1)
            j = min(i + 1, len(self._values) - 1)
            value = self._values[i] + (at - i) * (self._values[j] - self._values[i])
        return self._cut(value)

    def mean(self, points: int = 20_000) -> float:
        """The mean of what is drawn, cuts included: midpoints of `points` equal shares."""
        return sum(self.quantile((i + 0.5) / points) for i in range(points)) / points

    def _cut(self, value: float) -> float:
        low, high = self.spec.low, self._high
        return low if value < low else high if value > high else value


def uniform(a: int, b: int, c: int, d: int) -> float:
    """A number in (0, 1) that looks random and depends on nothing but the four keys (splitmix64 over them)."""
    return ((_mixed(_begun(a, b, c), d) >> 11) + 0.5) * 2.0**-53


@functools.lru_cache(maxsize=1 << 16)
def _begun(a: int, b: int, c: int) -> int:
    """The state after three keys, which all turns of an episode have in common."""
    return _mixed(_mixed(_mixed(0x9E3779B97F4A7C15, a), b), c)


def _mixed(h: int, key: int) -> int:
    h = ((h ^ key) + 0x9E3779B97F4A7C15) & _MASK
    h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & _MASK
    return h ^ (h >> 31)
