"""Packing: trajectories laid end to end in rows without padding, rows dealt to ranks and micro-batches.

This is the one place where per-token fields are shifted against the logits: `logits[t − 1]` scores token t, so that a sampled
token at index t of its trajectory contributes the row position of t − 1 as `source`, and every field at t itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Row:
    """One micro-batch of one rank: packed trajectories, and everything about their n sampled tokens.

    tokens     int64 [T]  ids of all trajectories, end to end
    positions  int64 [T]  0, 1, … within each trajectory
    lengths    tokens of each trajectory; they sum to T
    source     int64 [n]  row position whose logits score the sampled token
    targets    int64 [n]  the sampled token itself
    sequence   int64 [n]  which trajectory it belongs to, numbered as the caller numbered them
    fields     each [n], whatever the caller gave per token
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    lengths: tuple[int, ...]
    source: torch.Tensor
    targets: torch.Tensor
    sequence: torch.Tensor
    fields: dict[str, torch.Tensor] = field(default_factory=dict)

    def _mapped(self, move: Any) -> Row:
        return replace(
            self,
            tokens=move(self.tokens),
            positions=move(self.positions),
            source=move(self.source),
            targets=move(self.targets),
            sequence=move(self.sequence),
            fields={name: move(value) for name, value in self.fields.items()},
        )

    def to(self, device: torch.device) -> Row:
        """On `device`; copies from pinned memory do not wait."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Row:
        """In page-locked memory, so that the copy to a GPU overlaps with what it computes."""
        return self._mapped(lambda tensor: tensor.pin_memory())


def useful_length(mask: Array) -> int:
    """How many of a trajectory's tokens matter: those up to its last sampled one; what follows is context of nothing."""
    sampled = np.flatnonzero(mask)
    return int(sampled[-1]) + 1 if len(sampled) else 0


def plan(lengths: Sequence[int], ranks: int, row_tokens: int) -> list[list[list[int]]]:
    """`[rank][row]` → indices into `lengths`: each index once, equally many rows on every rank (collectives must pair up).

    No row exceeds `row_tokens` unless a single trajectory does. Longest first onto the lightest row; then rows of like size go
    to the ranks at the same turn, so that no rank waits long for another. Ranks without work get an empty row.
    """
    assert ranks >= 1 and row_tokens >= 1
    total = sum(lengths)
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    per_rank = max(1, -(-total // (ranks * row_tokens)))
    while True:
        rows: list[list[int]] = [[] for _ in range(ranks * per_rank)]
        loads = [0] * len(rows)
        heap = [(0, i) for i in range(len(rows))]
        for index in order:
            load, lightest = heapq.heappop(heap)
            rows[lightest].append(index)
            loads[lightest] = load + lengths[index]
            heapq.heappush(heap, (loads[lightest], lightest))
        if all(load <= row_tokens or len(row) == 1 for load, row in zip(loads, rows, strict=True)):
            break
        per_rank += 1
    by_load = sorted(range(len(rows)), key=lambda i: (-loads[i], i))
    result: list[list[list[int]]] = [[] for _ in range(ranks)]
    for turn in range(per_rank):
        here = by_load[turn * ranks : (turn + 1) * ranks]
        for rank, index in enumerate(here if turn % 2 == 0 else reversed(here)):
            result[rank].append(sorted(rows[index]))
    return result


def pack(
    indices: Sequence[int],
    tokens: Sequence[Array],
    masks: Sequence[Array],
    fields: Mapping[str, Sequence[Array]] | None = None,
) -> Row:
    """One row out of the trajectories `indices`; `tokens[i]`, `masks[i]` and `fields[name][i]` have shape [T_i].

    Raises ValueError where a field's length differs from its trajectory's, and where a first token is marked as sampled (nothing
    precedes it, so no logits score it). Without trajectories the row is one masked token.
    """
    fields = fields or {}
    if not indices:
        empty = torch.zeros(0, dtype=torch.long)
        one = torch.zeros(1, dtype=torch.long)
        return Row(one, one, (1,), empty, empty, empty, {name: torch.zeros(0, dtype=torch.float32) for name in fields})
    starts = np.cumsum([0, *(len(tokens[i]) for i in indices)])
    source, targets, sequence = [], [], []
    taken: dict[str, list[Array]] = {name: [] for name in fields}
    for start, i in zip(starts, indices, strict=False):
        n = len(tokens[i])
        for name, column in [("mask", masks), *fields.items()]:
            if len(column[i]) != n:
                raise ValueError(f"trajectory {i}: {name} has {len(column[i])} entries for {n} tokens")
        if n and masks[i][0]:
            raise ValueError(f"trajectory {i} starts with a sampled token, which no context precedes")
        at = np.flatnonzero(masks[i])
        source.append(start + at - 1)
        targets.append(tokens[i][at])
        sequence.append(np.full(len(at), i))
        for name, column in fields.items():
            taken[name].append(column[i][at])
    return Row(
        tokens=_long([tokens[i] for i in indices]),
        positions=_long([np.arange(len(tokens[i])) for i in indices]),
        lengths=tuple(len(tokens[i]) for i in indices),
        source=_long(source),
        targets=_long(targets),
        sequence=_long(sequence),
        fields={name: torch.from_numpy(np.concatenate(parts)) for name, parts in taken.items()},
    )


def _long(parts: list[Array]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))
