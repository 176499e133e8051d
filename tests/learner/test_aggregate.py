"""Aggregation: what a token's loss is divided by, over the whole optimizer step."""

from __future__ import annotations

import numpy as np
import pytest

from learner.aggregate import Aggregation, token_scales


@pytest.mark.parametrize(("aggregation", "expected"), [("token", 0.2), ("trajectory", 0.5), ("constant", 0.1)])
def test_vectors(aggregation: Aggregation, expected: float) -> None:
    scales = token_scales([2, 8], aggregation, constant_length=10)
    losses = [np.ones(2), np.zeros(8)]
    assert sum(float((s * x).sum()) for s, x in zip(scales, losses, strict=True)) == pytest.approx(expected)


@pytest.mark.parametrize("aggregation", ["token", "trajectory", "constant"])
def test_rejecting_half_the_tokens_halves_an_equal_valued_loss(aggregation: Aggregation) -> None:
    """Denominators count m and not mq: refusing tokens shrinks the step."""
    scales = token_scales([4, 4], aggregation, constant_length=4)
    whole = sum(float(s * 4) for s in scales)
    halved = sum(float(s * 2) for s in scales)
    assert halved == pytest.approx(whole / 2)


def test_trajectories_without_sampled_tokens_do_not_count() -> None:
    assert token_scales([0, 5], "trajectory").tolist() == [0.0, 0.2]
    assert token_scales([0, 5], "constant", 10).tolist() == [0.0, 0.1]
    assert token_scales([0, 0], "token").tolist() == [0.0, 0.0]
    assert token_scales([], "trajectory").tolist() == []
