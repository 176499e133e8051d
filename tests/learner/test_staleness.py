"""Ages are differences of steps; what is over age is masked, dropped or (waived) trained; promise 2 is asserted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.staleness import OverAge, assert_bound, keep_mask, token_ages

STEPS = {0: 0, 1: 1, 2: 2, 7: 2, 9: 4}  # version 7 names the weights of step 2 again, after a rollback


def test_ages_count_steps_and_not_version_ids() -> None:
    versions = np.array([-1, 9, 7, 2, 0, -1])
    mask = np.array([0, 1, 1, 1, 1, 0])
    assert token_ages(versions, mask, STEPS, 4).tolist() == [0, 0, 2, 2, 4, 0]


def test_a_stamp_that_cannot_be_true_is_refused() -> None:
    with pytest.raises(ValueError, match="weight version 3 has no step"):
        token_ages(np.array([3]), np.array([1]), STEPS, 4)
    with pytest.raises(ValueError, match="after the step 3"):
        token_ages(np.array([9]), np.array([1]), STEPS, 3)


@pytest.mark.parametrize(
    ("over_age", "expected"), [("mask", [0, 1, 1, 0, 0]), ("drop", [0, 0, 0, 0, 0]), ("train", [0, 1, 1, 1, 0])]
)
def test_policies_for_tokens_over_age(over_age: OverAge, expected: list[int]) -> None:
    ages, mask = np.array([0, 0, 2, 3, 0]), np.array([0, 1, 1, 1, 0])
    keep = keep_mask(ages, mask, 2, over_age)
    assert keep.tolist() == expected
    assert_bound(ages, keep, 2, over_age)


def test_dropping_spares_trajectories_within_the_bound() -> None:
    assert keep_mask(np.array([0, 2, 1]), np.array([0, 1, 1]), 2, "drop").tolist() == [0, 1, 1]


def test_the_bound_is_asserted() -> None:
    ages = np.array([0, 3])
    with pytest.raises(AssertionError, match=r"age 3 would be trained, over staleness\.max_age = 2"):
        assert_bound(ages, np.array([0, 1]), 2, "mask")
    assert_bound(ages, np.array([0, 0]), 2, "mask")


@given(
    st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.booleans()), max_size=20),
    st.integers(4, 9),
    st.integers(0, 5),
    st.sampled_from(["mask", "drop", "train"]),
)
def test_a_loop_agrees(tokens: list[tuple[int, bool]], step: int, bound: int, over_age: OverAge) -> None:
    mask = np.array([int(m) for _, m in tokens], dtype=np.uint8)
    ages = token_ages(np.array([v if m else -1 for v, m in tokens], dtype=np.int32), mask, STEPS, step)
    keep = keep_mask(ages, mask, bound, over_age)
    anything_old = any(m and step - STEPS[v] > bound for v, m in tokens)
    for t, (version, m) in enumerate(tokens):
        old = step - STEPS[version] > bound
        want = m and {"mask": not old, "drop": not anything_old, "train": True}[over_age]
        assert keep[t] == int(want)
        assert ages[t] == (step - STEPS[version] if m else 0)
    assert_bound(ages, keep, bound, over_age)
