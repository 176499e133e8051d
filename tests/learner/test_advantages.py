"""Advantages: the vectors of algorithms.md §9, a loop per estimator, and the edge cases that are easy to get wrong."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.advantages import Estimator, group_advantages

ESTIMATORS: tuple[Estimator, ...] = ("grpo", "dr_grpo", "rloo")


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("grpo", [1.41421, 0, 0, -1.41421]),
        ("dr_grpo", [0.5, 0, 0, -0.5]),
        ("rloo", [0.666667, 0, 0, -0.666667]),
    ],
)
def test_example_2(estimator: Estimator, expected: list[float]) -> None:
    result = group_advantages([1, 0.5, 0.5, 0], [7, 7, 7, 7], estimator)
    np.testing.assert_allclose(result.values, expected, atol=1e-5)  # sample σ would give ±1.22474
    assert result.reward_std == pytest.approx(0.353553, abs=1e-5)


def test_seed_001() -> None:
    np.testing.assert_allclose(group_advantages([1.0, 0.5, 0.5], [0, 1, 1], "reinforce").values, [1.0, 0.5, 0.5])
    np.testing.assert_allclose(group_advantages([1, 0, 0.65], [0, 0, 0], "dr_grpo").values, [0.45, -0.55, 0.10], atol=1e-9)


def test_shuffled_groups_of_three_and_four() -> None:
    """F14: groups that lost members are told apart by id; slicing every G rows would mix prompts."""
    groups = [2, 1, 2, 1, 1, 2, 2]
    rewards = [1.0, 3.0, 0.0, 5.0, 7.0, 0.0, 1.0]
    values = group_advantages(rewards, groups, "grpo").values
    np.testing.assert_allclose(values[[0, 2, 5, 6]], [1, -1, -1, 1], atol=1e-4)
    np.testing.assert_allclose(values[[1, 3, 4]], [-1.224745, 0, 1.224745], atol=1e-4)


def test_zero_variance_is_exactly_zero_despite_float_noise() -> None:
    rewards = np.full(7, 0.7, dtype=np.float32)
    naive = (rewards - rewards.mean()) / (rewards.std() + np.float32(1e-6))
    assert abs(float(naive[0])) > 0.01  # what a division makes of seven equal float32 rewards
    for estimator in ESTIMATORS:
        result = group_advantages([float(r) for r in rewards], [0] * 7, estimator)
        assert (result.values == 0.0).all()
        assert (result.zero_variance, result.single_member) == (1, 0)


def test_one_valid_member_has_no_baseline() -> None:
    for estimator in ESTIMATORS:
        result = group_advantages([1.0, 0.0, 2.0, 4.0], [0, 1, 1, 0], estimator, [True, True, True, False])
        assert result.values[0] == 0.0  # verl leaves A = R
        assert result.values[3] == 0.0
        assert result.single_member == 1


def test_invalid_members_are_in_neither_mean_nor_deviation() -> None:
    """F69: a failure is not a reward of 0."""
    values = group_advantages([1.0, 0.0, float("nan"), 0.0], [0] * 4, "grpo", [True, True, False, False]).values
    np.testing.assert_allclose(values, [1, -1, 0, 0], atol=1e-4)
    with pytest.raises(ValueError, match="not a finite number"):
        group_advantages([1.0, float("nan")], [0, 0], "grpo")


@given(
    data=st.lists(st.tuples(st.integers(0, 4), st.floats(-5, 5, width=32), st.booleans()), min_size=1, max_size=30),
    estimator=st.sampled_from(["grpo", "dr_grpo", "rloo"]),
)
def test_a_loop_agrees(data: list[tuple[int, float, bool]], estimator: Estimator) -> None:
    groups, rewards, valid = [g for g, _, _ in data], [r for _, r, _ in data], [v for _, _, v in data]
    got = group_advantages(rewards, groups, estimator, valid).values
    for i, (group, reward, ok) in enumerate(data):
        own = [r for g, r, v in data if g == group and v]
        if not ok or len(own) < 2 or max(own) - min(own) < 1e-8:
            assert got[i] == 0.0
            continue
        mean = sum(own) / len(own)
        sigma = (sum((r - mean) ** 2 for r in own) / len(own)) ** 0.5
        others = (sum(own) - reward) / (len(own) - 1)
        want = {"grpo": (reward - mean) / (sigma + 1e-6), "dr_grpo": reward - mean, "rloo": reward - others}[estimator]
        assert got[i] == pytest.approx(want, abs=1e-6, rel=1e-6)
