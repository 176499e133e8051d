"""What the config says about the embedded engine, for all who build one: a run, and a benchmark that records what it samples."""

from __future__ import annotations

from typing import Any

from segue.config import Config


def settings(config: Config) -> dict[str, Any]:
    """Keyword arguments of `EmbeddedEngine`: all but what belongs to a node (device, compute, tokenizer)."""
    return {
        "slots": config.rollout.slots,
        "idle_slots": config.rollout.idle_slots,
        "max_tokens": config.rollout.max_tokens,
        "dtype": config.rollout.dtype,
        "decode_cost": config.serial.decode_seconds,
        "prefill_cost_per_token": config.serial.prefill_seconds_per_token,
    }
