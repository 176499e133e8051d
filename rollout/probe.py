"""Whether an engine runs the weights that were published: what it and the learner make of the same tokens. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


class NotProven(Exception):
    """The engine holds other weights than it should, and must not serve."""


def largest_gap(engine: Sequence[float], learner: Sequence[float]) -> float:
    """Greatest |engine − learner| over log-probabilities in nats; infinite where they cannot be compared.

    Not comparable are different numbers of them, and NaN. Equal infinities (a token that cannot come) differ by 0.
    """
    if len(engine) != len(learner):
        return math.inf
    gaps = [0.0 if a == b else abs(a - b) for a, b in zip(engine, learner, strict=True)]
    return math.inf if any(map(math.isnan, gaps)) else max(gaps, default=math.inf)


def check_gap(node: str, version: int, gap: float, tolerance: float) -> None:
    """Raises `NotProven` with one sentence when `gap` is above `tolerance` (nats)."""
    if not gap <= tolerance:
        raise NotProven(
            f"{node} does not run the weights of version {version}: its log-probabilities of the probe differ from the learner's "
            f"by up to {gap:.3g} nats, where weightsync.probe_tolerance = {tolerance:g} allows for rounding"
        )
