"""Keys and values in slots: one row per sequence, every row at a length of its own, read by any Hugging Face decoder.

A model asks three things of its surroundings: a `Cache` to store keys and values in, an attention function, and a mask
function. This module supplies all three; both functions are registered with transformers under the name `SLOTS`. Which rows a
forward pass is about, and at which positions, is its `Step`, set for the duration of the pass (per thread).

Shapes: S slots, N rows of a pass, Q new tokens per row, L key positions read, H key/value heads, G query heads per key/value
head, D head size. Each layer holds keys and values as [S, H, T + 1, D]. Column T takes the writes of padding and of rows that are
not part of the batch; nothing reads it, because a read covers columns [0, L) and L ≤ T.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

SLOTS = "segue_slots"
"""The name of this attention in a model's config."""


class Step:
    """What one forward pass is about.

    rows       int64 [N]     slot of each row
    positions  int64 [N, Q]  position of each new token; 0 for padding (a query that sees nothing would give NaN)
    columns    int64 [N, Q]  where its key and value are written; column T for padding
    length     L: keys at positions [0, length) are read, at least 1 + the largest position
    """

    __slots__ = ("columns", "length", "mask_positions", "rows", "span", "write_rows")

    def __init__(
        self, rows: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor, length: int, first: int | None
    ) -> None:
        """`first`: the rows are `first`, `first` + 1, … (then a read is a view and copies nothing); None: any rows."""
        self.rows = rows
        self.write_rows = rows[:, None]
        self.columns = columns
        self.length = length
        self.span = None if first is None else slice(first, first + len(rows))
        self.mask_positions = positions[:, None, :, None]

    def read(self, stored: torch.Tensor) -> torch.Tensor:
        """The rows' part of `stored` [S, H, T + 1, D], as [N, H, L, D]."""
        if self.span is not None:
            return stored[self.span, :, : self.length]
        return stored[:, :, : self.length].index_select(0, self.rows)


_local = threading.local()


@contextmanager
def running(step: Step) -> Iterator[None]:
    """Forward passes of this thread are about `step` until the context ends."""
    _local.step = step
    try:
        yield
    finally:
        _local.step = None


def _current() -> Step:
    step: Step | None = getattr(_local, "step", None)
    if step is None:
        raise RuntimeError(
            f"a model with {SLOTS} attention runs only inside the embedded engine: load it with 'sdpa' to train it"
        )
    return step


class SlotLayer(CacheLayerMixin):
    """The keys and values of one layer; allocated when the first pass shows how many heads of what size there are."""

    def __init__(self, slots: int, max_tokens: int, sliding: bool) -> None:
        super().__init__()
        self.is_sliding = sliding  # only tells the model's own code which of its masks belongs to this layer
        self._slots = slots
        self._columns = max_tokens + 1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        # zeros, not empty: what a mask hides is still multiplied by 0, and 0 · NaN is NaN
        def zeros(like: torch.Tensor) -> torch.Tensor:
            shape = (self._slots, like.shape[1], self._columns, like.shape[3])
            return torch.zeros(shape, dtype=like.dtype, device=like.device)

        self.keys, self.values = zeros(key_states), zeros(value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new keys and values [N, H, Q, D]; return all that the rows have, as [N, H, L, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        step = _current()
        self.keys[step.write_rows, :, step.columns] = key_states.transpose(1, 2)
        self.values[step.write_rows, :, step.columns] = value_states.transpose(1, 2)
        return step.read(self.keys), step.read(self.values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return _current().length, 0

    def get_seq_length(self) -> int:
        return 0  # positions are always given; there is no one length

    def get_max_length(self) -> int:
        return self._columns - 1


class SlotCache(Cache):
    """All layers. `copy` and `swap` move rows about between passes."""

    def __init__(self, config: Any, slots: int, max_tokens: int) -> None:
        kinds = DynamicCache(config=config).layers
        super().__init__(layers=[SlotLayer(slots, max_tokens, isinstance(kind, DynamicSlidingWindowLayer)) for kind in kinds])
        self.slots = slots
        self.max_tokens = max_tokens

    def _stored(self) -> Iterator[torch.Tensor]:
        for layer in self.layers:
            if layer.is_initialized:
                yield layer.keys
                yield layer.values

    def copy(self, source: int, target: int, length: int) -> None:
        """Row `target` gets the first `length` positions of row `source`."""
        for stored in self._stored():
            stored[target, :, :length] = stored[source, :, :length]

    def swap(self, a: int, b: int, length: int) -> None:
        """Rows `a` and `b` change places, as far as their first `length` positions go."""
        for stored in self._stored():
            kept = stored[a, :, :length].clone()
            stored[a, :, :length] = stored[b, :, :length]
            stored[b, :, :length] = kept

    def bytes(self) -> int:
        """Memory of all slots."""
        return sum(stored.nbytes for stored in self._stored())


def _slot_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., torch.Tensor],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor:
    """The additive mask [N, 1, Q, L] of the running step: 0 where the model's own `mask_function` allows a key, else the
    smallest number of `dtype`. The function (causal, sliding, chunked) is asked about true positions, row by row, so that the
    causal rule also hides whatever an earlier sequence left behind a row's end."""
    step = _current()
    rows = torch.arange(batch_size, device=device)[:, None, None, None]
    head = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=device)
    keys = torch.arange(kv_length, device=device)[None, None, None, :]
    allowed = mask_function(rows, head, step.mask_positions, keys)
    mask = torch.zeros((batch_size, 1, q_length, kv_length), dtype=dtype, device=device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)


def _slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of query [N, H·G, Q, D] over key and value [N, H, L, D]; the result is [N, Q, H·G, D].

    For one new token per row the G query heads of a key/value head take the place of the query positions, so that keys and values
    need not be repeated. What scaled_dot_product_attention cannot do (soft caps, attention sinks) goes to the model's own
    eager function.
    """
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        eager = sys.modules[type(module).__module__].eager_attention_forward
        result: tuple[torch.Tensor, torch.Tensor | None] = eager(
            module, query, key, value, attention_mask, scaling=scaling, dropout=0.0, **kwargs
        )
        return result
    if query.shape[2] == 1 and kwargs.get("position_bias") is None:
        rows, heads, _, size = query.shape
        grouped = query.reshape(rows, key.shape[1], -1, size)
        out = torch.nn.functional.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
        return out.reshape(rows, 1, heads, value.shape[3]), None
    out, weights = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    return out, weights


# Both or neither: with an attention alone transformers builds no mask at all, and every query would see every key.
AttentionInterface.register(SLOTS, _slot_attention)
AttentionMaskInterface.register(SLOTS, _slot_mask)
