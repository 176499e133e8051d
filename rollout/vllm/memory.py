"""Whether a machine without a GPU can hold a model and its KV. On a GPU vLLM measures it itself and takes what is left."""

from __future__ import annotations

import torch

from segue.errors import UserError

GB = 1 << 30


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of a model's parameters (on any device, meta too), tied ones once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())


def check_memory(path: str, *, weights: int, kv: int, total: int, staged: bool) -> None:
    """Raises `UserError` if the weights, twice where they are `staged` beside the old, and KV are more than the machine has.

    All in bytes. Other processes, other nodes among them, take their share too: what passes here may still be too much.
    """
    if (1 + staged) * weights + kv > total:
        again = ", as much again while new weights come in (weightsync.staging = 'none' spares that)" if staged else ""
        raise UserError(
            f"The model in {path} takes {weights / GB:.1f} GB{again}, and KV memory another {kv / GB:.1f} GB, but this machine "
            f"has {total / GB:.1f} GB: use a smaller model, or lower "
            "rollout.engine_args.kv_cache_memory_bytes, rollout.slots or rollout.max_tokens."
        )
