"""The model of a folder as vLLM will hold it: its config, and what its KV takes. Does without vLLM."""

from __future__ import annotations

from typing import Any

import torch

from rollout.model_config import check_positions, read_config

HEAD_SIZES_ON_CPU = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def open_config(path: str, max_tokens: int) -> Any:
    """The config of a model folder. Raises `UserError` where there is none or contexts are longer than the model's positions."""
    config = read_config(path)
    check_positions(path, config, max_tokens)
    return config


def head_size(config: Any) -> int:
    """Width of an attention head."""
    text = config.get_text_config(decoder=True)
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def kv_bytes_per_token(config: Any, dtype: str) -> int:
    """Bytes that the keys and values of one token take, over all layers."""
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * head_size(config) * getattr(torch, dtype).itemsize)
