"""Attention over packed rows: each trajectory attends to itself alone, without padding and without a [T × T] mask.

Registered with transformers under one name as attention function and as mask function. The mask function hands the model's own
mask rule (causal, sliding window, chunks) through to the attention function, which evaluates it on the positions *inside*
each trajectory; a plain causal rule becomes `is_causal`, so that nothing is materialised. Outside `packed_into` the model runs
transformers' own scaled-dot-product attention.

Position ids alone do not separate trajectories while a model keeps a cache: callers pass `use_cache=False`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "segue_packed"
"""What the functions are registered as; a model uses them after `set_attn_implementation(NAME)`."""

_lengths: ContextVar[tuple[int, ...] | None] = ContextVar("packed_lengths", default=None)


class PackedRule:
    """A layer type's mask rule together with the lengths of the row: what travels where a mask tensor would.

    It is made once per forward pass and layer type, and kept by the layers' arguments, so that a recomputation in the backward
    pass (gradient checkpointing) sees the same row.
    """

    def __init__(self, rule: Callable[..., Any], lengths: tuple[int, ...], device: torch.device) -> None:
        self.lengths = list(lengths)
        self._rule = rule
        self._device = device
        self._masks: dict[int, torch.Tensor | None] = {}

    def mask(self, n: int) -> torch.Tensor | None:
        """Boolean `[n, n]` (query, key) for a trajectory of n tokens; None where it is plainly causal."""
        if n not in self._masks:
            at = torch.arange(n, device=self._device)
            zero = torch.zeros((), dtype=torch.long, device=self._device)
            allowed = torch.broadcast_to(self._rule(zero, zero, at[:, None], at[None, :]), (n, n))
            causal = at[:, None] >= at[None, :]
            self._masks[n] = None if bool(torch.equal(allowed, causal)) else allowed
        return self._masks[n]


@contextlib.contextmanager
def packed_into(lengths: tuple[int, ...]) -> Iterator[None]:
    """Inside, a model with this attention reads its one row `[1, sum(lengths)]` as trajectories of these lengths."""
    token = _lengths.set(lengths)
    try:
        yield
    finally:
        _lengths.reset(token)


def _mask(*args: Any, **kwargs: Any) -> Any:
    lengths = _lengths.get()
    if lengths is None:
        return sdpa_mask(*args, **kwargs)
    return PackedRule(kwargs["mask_function"], lengths, torch.device(kwargs.get("device", "cpu")))


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`query` [1, heads, T, D], `key`/`value` [1, kv heads, T, D] → [1, T, heads, D]."""
    if not isinstance(attention_mask, PackedRule):
        assert _lengths.get() is None, "a layer did not ask for its mask: packing would be silently wrong"
        output: torch.Tensor = sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)[0]
        return output, None
    assert dropout == 0.0, "the learner trains without dropout: log-probabilities must be the engine's"
    if kwargs.get("position_bias") is not None:
        raise NotImplementedError("attention with a position bias")
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    lengths = attention_mask.lengths
    # `split`, not slices: the backward pass of a slice fills a whole [1, heads, T, D] for every trajectory.
    parts = [
        _plain(q, k, v, attention_mask.mask(n), scaling)
        if softcap is None and sinks is None
        else _spelled_out(q, k, v, attention_mask.mask(n), scaling, softcap, sinks)
        for n, q, k, v in zip(lengths, query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scaling: float | None) -> torch.Tensor:
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped)


def _spelled_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with what the fused kernels lack: soft-capped scores, and sinks (a learned extra logit per head)."""
    n, groups = q.shape[2], q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, dim=1).transpose(2, 3) * (scaling if scaling is not None else q.shape[-1] ** -0.5)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None:
        mask = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        extra = sinks.reshape(1, -1, 1, 1).expand(1, -1, n, 1).to(scores.dtype)
        scores = torch.cat([scores, extra], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)[..., :n]
    return weights @ v.repeat_interleave(groups, dim=1)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
