"""The learning rate as a function of the step alone: a resumed run needs no state to go on with it."""

from __future__ import annotations

import math

from segue.config.learner import LearnerConfig


def learning_rate(config: LearnerConfig, step: int, steps: int) -> float:
    """Rate of training step `step` (0-based) of `steps`: linear warm-up, then constant, or down to 0 (linear, cosine)."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    left = min(1.0, max(0.0, (steps - step) / max(1, steps - config.warmup_steps)))
    if config.lr_schedule == "linear":
        return config.lr * left
    if config.lr_schedule == "cosine":
        return config.lr * 0.5 * (1.0 - math.cos(math.pi * left))
    return config.lr
