"""From per-token losses to one loss: what each token's loss is divided by.

Denominators are sums over the whole optimizer step, all ranks and micro-batches together, and use the mask m, not what staleness
kept of it: refusing tokens shrinks the step instead of inflating the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

Array = np.ndarray[Any, Any]
Aggregation = Literal["token", "trajectory", "constant"]


def token_scales(sampled: Sequence[int], aggregation: Aggregation, constant_length: int = 0) -> Array:
    """The factor on every token loss of each trajectory, float64 [N]; `sampled` counts its tokens with m = 1.

    The loss of an optimizer step is Σ scale · q · ℓ over all tokens with m = 1. token: 1/Σm (arXiv 2503.14476). trajectory:
    1/(N Σ_t m). constant: 1/(N L) (2503.20783). N counts trajectories with at least one sampled token; the others' scale is 0.
    """
    counts = np.asarray(sampled, dtype=np.float64)
    present = counts > 0
    n = int(present.sum())
    if n == 0:
        return np.zeros(len(counts))
    if aggregation == "token":
        return np.where(present, 1.0 / counts.sum(), 0.0)
    if aggregation == "constant":
        assert constant_length > 0, "refused at start-up"
        return np.where(present, 1.0 / (n * constant_length), 0.0)
    return np.where(present, 1.0 / (n * np.maximum(counts, 1.0)), 0.0)
