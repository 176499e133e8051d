"""The comparison itself: what is a gap, and what cannot be compared."""

from __future__ import annotations

import math

import pytest

from rollout.probe import NotProven, check_gap, largest_gap

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("engine", "learner", "gap"),
    [
        ([-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0], 0.0),
        ([-1.0, -2.0, -3.0], [-1.5, -2.0, -5.0], 2.0),
        ([-5.0], [-3.0], 2.0),
        ([-INF, -1.0], [-INF, -1.25], 0.25),
        ([-INF], [-1.0], INF),
        ([NAN, -1.0], [-1.0, -1.0], INF),
        ([-1.0, -1.0], [-1.0, NAN], INF),
        ([NAN], [NAN], INF),
        ([-1.0], [-1.0, -1.0], INF),
        ([], [], INF),
    ],
)
def test_the_largest_gap(engine: list[float], learner: list[float], gap: float) -> None:
    assert largest_gap(engine, learner) == gap


@pytest.mark.parametrize(("gap", "proven"), [(0.0, True), (1e-3, True), (1.001e-3, False), (INF, False), (NAN, False)])
def test_a_gap_above_the_tolerance_proves_nothing(gap: float, proven: bool) -> None:
    if proven:
        check_gap("rollout-1", 7, gap, 1e-3)
        return
    with pytest.raises(NotProven, match=r"rollout-1 does not run the weights of version 7.* nats, .* = 0\.001"):
        check_gap("rollout-1", 7, gap, 1e-3)
