"""Policy losses per token: PPO with separate clip bounds, anchored on the proximal or on the behaviour policy."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from learner.corrections import decoupled_weight, importance_ratio, loglinear_proximal, masked_weight, truncated_weight
from segue.config.learner import LearnerConfig


@dataclass(frozen=True)
class TokenLoss:
    """All [n]: `loss` to minimise (has the gradient), `weight` in it, `log_rho` = p − b (l − b when anchored on b), `clipped`."""

    loss: torch.Tensor
    weight: torch.Tensor
    log_rho: torch.Tensor
    clipped: torch.Tensor


def ppo(log_ratio: torch.Tensor, advantage: torch.Tensor, clip_low: float, clip_high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """−min(rA, clip(r, 1 − ε_l, 1 + ε_h) A) with r = exp(log_ratio), and where the clip cuts the gradient; both [n].

    arXiv 1707.06347; ε_h > ε_l is clip-higher (2503.14476).
    """
    ratio = importance_ratio(log_ratio)
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.minimum(ratio * advantage, bounded * advantage)
    with torch.no_grad():
        clipped = ((advantage > 0) & (ratio > 1.0 + clip_high)) | ((advantage < 0) & (ratio < 1.0 - clip_low))
    return loss, clipped


def proximal_logprobs(
    config: LearnerConfig, logprobs: torch.Tensor, behaviour: torch.Tensor, ages: torch.Tensor, recomputed: torch.Tensor | None
) -> torch.Tensor | None:
    """p of algorithms.md §5, detached [n]; None when the ratio is anchored on the behaviour policy.

    Before the first optimizer step of a batch the current policy *is* the proximal one: `recomputed` is None then and p = sg(l).
    """
    if config.correction == "none":
        return None
    if config.minibatches > 1 and config.proximal == "loglinear":
        return loglinear_proximal(behaviour, logprobs, ages)
    return logprobs.detach() if recomputed is None else recomputed


def token_loss(
    config: LearnerConfig,
    logprobs: torch.Tensor,
    behaviour: torch.Tensor,
    advantage: torch.Tensor,
    proximal: torch.Tensor | None,
) -> TokenLoss:
    """The configured loss of n tokens. `logprobs` carries the gradient; all arguments float32 [n].

    "decoupled": exp(p − b) · PPO on p. "tis": min(exp(p − b), cap) · PPO on p. "mask": exp(p − b) · PPO on p where that weight is
    in its range, else 0. "none": PPO on b, which is the correction itself; a weight beside it would count twice: none is applied.
    """
    if config.correction == "none":
        assert proximal is None, "a PPO ratio on the behaviour policy takes no weight"
        log_ratio = logprobs - behaviour
        loss, clipped = ppo(log_ratio, advantage, config.clip_low, config.clip_high)
        return TokenLoss(loss, torch.ones_like(behaviour), log_ratio.detach(), clipped)
    assert proximal is not None and not proximal.requires_grad
    if config.correction == "decoupled":
        weight = decoupled_weight(proximal, behaviour)
    elif config.correction == "tis":
        weight = truncated_weight(proximal, behaviour, config.weight_cap)
    else:
        weight = masked_weight(proximal, behaviour, *config.mask_range)
    loss, clipped = ppo(logprobs - proximal, advantage, config.clip_low, config.clip_high)
    return TokenLoss(weight * loss, weight, proximal - behaviour, clipped)
