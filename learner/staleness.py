"""The age of tokens, and what happens to those over age. Ages count steps: the step the batch trains at − the version's step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

Array = np.ndarray[Any, Any]
OverAge = Literal["mask", "drop", "train"]


def token_ages(versions: Array, mask: Array, version_steps: Mapping[int, int], step: int) -> Array:
    """Age of every sampled token, int32 [T]; 0 where mask is 0. `step` is the step the batch trains at.

    Raises ValueError on a version without a known step, or from a step after `step`: such a stamp cannot be true.
    """
    ages = np.zeros(len(versions), dtype=np.int32)
    sampled = mask == 1
    for version in np.unique(versions[sampled]):
        made = version_steps.get(int(version))
        if made is None:
            raise ValueError(f"weight version {version} has no step")
        if made > step:
            raise ValueError(f"weight version {version} is of step {made}, after the step {step} it would be trained at")
        ages[sampled & (versions == version)] = step - made
    return ages


def keep_mask(ages: Array, mask: Array, max_age: int, over_age: OverAge) -> Array:
    """q of algorithms.md §5, uint8 [T]: which sampled tokens may carry a gradient; 0 where mask is 0.

    `mask` refuses tokens over age, `drop` the whole trajectory with one, `train` none.
    """
    keep: Array = (mask == 1).astype(np.uint8)
    old = (mask == 1) & (ages > max_age)
    if over_age == "mask":
        keep[old] = 0
    elif over_age == "drop" and old.any():
        keep[:] = 0
    return keep


def assert_bound(ages: Array, keep: Array, max_age: int, over_age: OverAge) -> None:
    """Promise 2 (design.md §4): no token that trains is over age. `train` waives it."""
    if over_age != "train" and keep.any():
        oldest = int(ages[keep == 1].max())
        assert oldest <= max_age, f"a token of age {oldest} would be trained, over staleness.max_age = {max_age}"
