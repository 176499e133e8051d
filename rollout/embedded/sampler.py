"""Sampling by inverse CDF with one uniform number per token, taken from a counter: the noise of a token depends on the episode's
seed and the token's number alone, never on the batch it is sampled in, and an interrupted episode goes on with the noise it
would have had.
"""

from __future__ import annotations

import torch

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def _mix(x: int) -> int:
    """The output function of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014, fig. 14)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def uniforms(seed: int, offset: int, count: int) -> list[float]:
    """Numbers `offset`, …, `offset + count − 1` of the stream of `seed`, each in (0, 1).

    SplitMix64 by random access: output k from state s is mix(s + (k + 1) · γ). The seed is mixed first, so that the streams of
    neighbouring seeds do not overlap. 32 bits each, shifted by half a unit: never 0 and never so close to 1 that the product with
    a total of probabilities would round up to that total.
    """
    stream = stream_of(seed)
    return [uniform(stream, number) for number in range(offset, offset + count)]


def stream_of(seed: int) -> int:
    """What `uniform` takes in place of a seed."""
    return _mix(seed & _MASK)


def uniform(stream: int, number: int) -> float:
    """One number of a stream. Whole-number arithmetic: for one number NumPy takes thirty times as long."""
    return ((_mix((stream + (number + 1) * _GOLDEN) & _MASK) >> 32) + 0.5) * 2.0**-32


def log_probabilities(logits: torch.Tensor, temperature: torch.Tensor | None = None) -> torch.Tensor:
    """log softmax(logits / temperature) [N, V] in float32 at least, in nats; None: temperature 1."""
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    return torch.log_softmax(logits if temperature is None else logits / temperature, dim=-1)


def sample(
    logits: torch.Tensor, temperature: torch.Tensor | None, greedy: torch.Tensor | None, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row, and its log-probability under the distribution it was drawn from, softmax(logits / temperature).

    logits       [N, V] float
    temperature  [N, 1], all > 0 (1 for greedy rows); None if all are 1
    greedy       [N] bool: take the likeliest token (the lowest id among equals); None if no row is greedy
    uniform      [N] float64 in (0, 1)
    Returns tokens [N] int64 and log-probabilities [N], in nats.
    """
    logprobs = log_probabilities(logits, temperature)
    # float64, because over a large vocabulary float32 sums lose the tail
    cdf = torch.cumsum(logprobs.exp(), dim=-1, dtype=torch.float64)
    # the first index whose sum exceeds the target has a probability above 0 by construction
    tokens = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True).clamp_(max=logits.shape[-1] - 1)
    if greedy is not None:
        tokens = torch.where(greedy[:, None], logits.argmax(dim=-1, keepdim=True), tokens)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]
