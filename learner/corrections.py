"""Importance weights and proximal policies for tokens sampled under older weights. Everything here is detached.

Three log-probabilities of a sampled token, all float32 [n] (algorithms.md §1): `b` as the engine sampled it, `p` under the
proximal policy (the weights before the batch's first optimizer step), `l` under the weights being trained. Within a batch of
several optimizer steps only `l` moves; `b`, `p` and so the weight exp(p − b) stay (the log-linear p̂ follows `l` by its α).
"""

from __future__ import annotations

import torch

LOG_LIMIT = 20.0
"""Log-ratios are clamped to ± this before exp, so that a weight is at most e²⁰ and never infinite."""


def importance_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp of a log-ratio [n], clamped to ±20. Detach its input for a weight; leave the gradient for a PPO ratio."""
    return torch.exp(log_ratio.clamp(-LOG_LIMIT, LOG_LIMIT))


def decoupled_weight(p: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """w = sg(exp(p − b)) of decoupled PPO (arXiv 2110.00641, 2505.24298), [n]."""
    return importance_ratio((p - b).detach())


def truncated_weight(p: torch.Tensor, b: torch.Tensor, cap: float) -> torch.Tensor:
    """Token-level truncated importance sampling: min(exp(p − b), cap), [n]."""
    return decoupled_weight(p, b).clamp(max=cap)


def masked_weight(p: torch.Tensor, b: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """exp(p − b) where it lies in [low, high], else 0: the token mask of IcePop (arXiv 2510.18855), [n]."""
    weight = decoupled_weight(p, b)
    return torch.where((weight >= low) & (weight <= high), weight, torch.zeros_like(weight))


def loglinear_proximal(b: torch.Tensor, current: torch.Tensor, ages: torch.Tensor) -> torch.Tensor:
    """p̂ = b + α (l − b) with l = `current`, detached, without a forward pass (arXiv 2512.06547), [n].

    α = clamp((k − v)/((k + 1) − v), 0, 1) with k the step being trained, k + 1 the one being made, v the step that sampled the
    token, so age = k − v; α = 0 for a token of the step being made (age −1).
    """
    age = ages.to(b.dtype)
    alpha = torch.where(age < 0, torch.zeros_like(age), age / (age + 1.0).clamp(min=1.0)).clamp(0.0, 1.0)
    return b + alpha * (current.detach() - b)
