"""Group-relative advantages. One number per trajectory; it is broadcast onto the tokens that the policy sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Array = np.ndarray[Any, Any]
Estimator = Literal["grpo", "dr_grpo", "rloo", "reinforce"]

DELTA = 1e-6
"""Added to σ in grpo (arXiv 2402.03300)."""
SAME = 1e-8
"""Rewards closer than this have no variance: A is exactly 0, by this test and not by a division."""


@dataclass(frozen=True)
class GroupAdvantages:
    """`values` float64 [n], 0 where not valid. Counts of groups, and mean over groups of population σ of valid rewards."""

    values: Array
    groups: int
    zero_variance: int
    single_member: int
    reward_std: float


def group_advantages(
    rewards: Sequence[float], groups: Sequence[int], estimator: Estimator, valid: Sequence[bool] | None = None
) -> GroupAdvantages:
    """Advantages of n trajectories with returns `rewards` [n], grouped by id (never by position), over their valid members.

    grpo (R − μ)/(σ + δ) with population σ (arXiv 2402.03300); dr_grpo R − μ (2503.20783); rloo R − mean of the others
    (2402.14740). A group without variance or with one valid member gets 0. reinforce is R itself (Williams 1992), and needs no
    other members. Raises ValueError on a reward that is not finite.
    """
    r = np.asarray(rewards, dtype=np.float64)
    ids = np.asarray(groups)
    ok = np.ones(len(r), dtype=bool) if valid is None else np.asarray(valid, dtype=bool)
    if not len(r) == len(ids) == len(ok):
        raise ValueError(f"{len(r)} rewards, {len(ids)} group ids and {len(ok)} validity marks")
    if not np.isfinite(r[ok]).all():
        raise ValueError("a reward is not a finite number")
    values = np.zeros(len(r))
    zero_variance = single = 0
    deviations: list[float] = []
    for group in dict.fromkeys(ids.tolist()):
        members = np.flatnonzero((ids == group) & ok)
        if len(members) == 0:
            continue
        own = r[members]
        if estimator == "reinforce":
            values[members] = own
        if np.ptp(own) < SAME:
            zero_variance += 1
            single += len(members) == 1
            deviations.append(0.0)
            continue
        deviations.append(float(own.std()))
        if estimator == "reinforce":
            continue
        centred = own - own.mean()
        if estimator == "grpo":
            values[members] = centred / (own.std() + DELTA)
        elif estimator == "dr_grpo":
            values[members] = centred
        else:
            values[members] = centred * len(own) / (len(own) - 1)
    std = float(np.mean(deviations)) if deviations else 0.0
    return GroupAdvantages(values, len(deviations), zero_variance, single, std)
