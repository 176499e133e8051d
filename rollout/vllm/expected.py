"""The model of a folder as vLLM will hold it: its config, its named tensors, and what its KV takes. Does without vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from segue.errors import UserError

HEAD_SIZES_ON_CPU = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def open_config(path: str, max_tokens: int) -> Any:
    """The config of a model folder. Raises `UserError` where there is none or contexts are longer than the model's positions."""
    if not (Path(path) / "config.json").is_file():
        raise UserError(f"{path} is no model folder (it has no config.json): set model.path to a Hugging Face model folder.")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__).rstrip(".:")
        raise UserError(f"{path}/config.json is not a model config that transformers knows ({first}): correct it.") from None
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if positions is not None and positions < max_tokens:
        raise UserError(
            f"rollout.max_tokens = {max_tokens} is more than the {positions} positions of the model in {path}: lower it."
        )
    return config


def meta_model(config: Any, dtype: str) -> torch.nn.Module:
    """The model on the meta device: names, shapes, dtypes and ties without memory."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.tie_weights()
    opened: torch.nn.Module = model
    return opened


def head_size(config: Any) -> int:
    """Width of an attention head."""
    text = config.get_text_config(decoder=True)
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def kv_bytes_per_token(config: Any, dtype: str) -> int:
    """Bytes that the keys and values of one token take, over all layers."""
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * head_size(config) * getattr(torch, dtype).itemsize)
