"""The config of a model folder, and the model it describes without memory: what both engines need before they open one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from segue.errors import UserError


def read_config(path: str) -> Any:
    """The config of a model folder. Raises `UserError` where there is none that transformers knows."""
    if not (Path(path) / "config.json").is_file():
        raise UserError(f"{path} is no model folder (it has no config.json): set model.path to a Hugging Face model folder.")
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise UserError(
            f"{path}/config.json is not a model config that transformers knows ({first_line(error)}): correct it."
        ) from None


def check_positions(path: str, config: Any, max_tokens: int) -> None:
    """Raises `UserError` where contexts are longer than the model's positions."""
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if positions is not None and positions < max_tokens:
        raise UserError(
            f"rollout.max_tokens = {max_tokens} is more than the {positions} positions of the model in {path}: lower it."
        )


def meta_model(config: Any, dtype: str) -> torch.nn.Module:
    """The model on the meta device: names, shapes, dtypes and ties without memory. `dtype` is torch's name."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.tie_weights()
    opened: torch.nn.Module = model
    return opened


def first_line(error: BaseException) -> str:
    """What an error says first, for the middle of a sentence."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__).rstrip(".:")
