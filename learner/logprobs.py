"""Log-probabilities and entropies of sampled tokens, computed in chunks so that no [tokens × vocabulary] array is ever held."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

Head = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states [n, H] → logits [n, V]."""


def chunked_logprobs(
    hidden: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor, head: Head, chunk_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy of its distribution, in nats, both float32 [n].

    hidden [n, H], targets int64 [n], temperature float [n] (above 0): the distribution is softmax(head(hidden) / temperature), as
    the engine sampled it. The entropy is over the full vocabulary and carries no gradient. At most `chunk_tokens` rows of logits
    exist at a time: with several chunks each is computed again in the backward pass.
    """
    if len(targets) <= chunk_tokens:
        return _chunk(hidden, targets, temperature, head)
    logprobs, entropies = [], []
    for h, y, t in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), temperature.split(chunk_tokens), strict=True):
        if torch.is_grad_enabled():
            logprob, entropy = checkpoint(_chunk, h, y, t, head, use_reentrant=False, preserve_rng_state=False)
        else:
            logprob, entropy = _chunk(h, y, t, head)
        logprobs.append(logprob)
        entropies.append(entropy)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk(
    hidden: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor, head: Head
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = head(hidden).float() / temperature[:, None]
    every = torch.log_softmax(logits, dim=-1)
    with torch.no_grad():
        # exp(−inf)·−inf would be NaN: a masked vocabulary entry has probability 0 and adds nothing.
        entropy = -(every.exp() * every.clamp_min(torch.finfo(every.dtype).min)).sum(dim=-1)
    return every.gather(1, targets[:, None]).squeeze(1), entropy
