"""Which models the embedded engine can run, and opening one.

It can run any Hugging Face causal LM whose whole memory of the past is one key and one value per token and layer, and whose
attention goes through transformers' attention interface. What is known not to be so is refused by name; then the opened model
must give the same log-probabilities through slots as in a plain forward pass, whatever its class says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging

from rollout.embedded.cache import SLOTS
from rollout.embedded.runner import Runner
from rollout.model_config import check_positions, first_line, meta_model, read_config
from segue.errors import UserError
from segue.model_folder import check_loaded

_REMEDY = "use a decoder-only model with plain attention (Llama, Qwen, Mistral, Gemma and the like) or engine = 'vllm'"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
_TOLERANCE = {8: 1e-3, 4: 1e-3, 2: 0.1}
"""Mean |Δ log-probability| in nats that is rounding, by bytes per number (measured: 2e-5 at most in float32; a wrong
mask gives 0.03 and more)."""


def _refuse(path: str, config: Any, why: str) -> UserError:
    return UserError(f"The embedded engine cannot run a model of type {config.model_type} ({path}), {why}: {_REMEDY}.")


def open_config(path: str, max_tokens: int) -> Any:
    """The config of a model folder, if the engine can run such a model. Raises `UserError`."""
    config = read_config(path)
    if getattr(config, "is_encoder_decoder", False):
        raise _refuse(path, config, "which is an encoder-decoder")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _refuse(path, config, "which is no causal language model")
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if getattr(kind, "_is_stateful", False):
        raise _refuse(path, config, "which has a recurrent state")
    text = config.get_text_config(decoder=True)
    kinds = {type(layer) for layer in DynamicCache(config=text).layers}
    if kinds - {DynamicLayer, DynamicSlidingWindowLayer}:
        named = sorted(set(getattr(text, "layer_types", None) or [k.__name__ for k in kinds]))
        raise _refuse(path, config, f"whose layers ({', '.join(named)}) keep more than one key and value per token")
    if not getattr(kind, "_supports_attention_backend", False):
        raise _refuse(path, config, "whose attention does not go through transformers' attention interface")
    check_positions(path, config, max_tokens)
    return config


def open_model(path: str, config: Any, dtype: str, device: str) -> torch.nn.Module:
    """The model in `path`, without gradients. A folder without weights gives random ones: nothing is sampled before a load.

    Raises `UserError`: it cannot be opened, or has some of its weights but not all.
    """
    if dtype not in _DTYPES:
        raise UserError(f"rollout.dtype = '{dtype}' is unknown: use one of {', '.join(_DTYPES)}.")
    options: dict[str, Any] = {"dtype": _DTYPES[dtype], "attn_implementation": SLOTS}
    report = None
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        if any(Path(path).glob("*.safetensors")) or any(Path(path).glob("pytorch_model*.bin")):
            options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
            model, report = AutoModelForCausalLM.from_pretrained(path, config=config, local_files_only=True, **options)
        else:
            model = AutoModelForCausalLM.from_config(config, **options)
    except (ValueError, OSError, RuntimeError, SafetensorError) as error:
        raise UserError(f"The model in {path} cannot be opened ({first_line(error)}): check the folder.") from None
    finally:
        if bars:
            logging.enable_progress_bar()
    if report is not None:
        check_loaded(path, [name for name, _ in model.named_children()], report)
    opened: torch.nn.Module = model.to(device).eval().requires_grad_(False)
    return opened


def meta_tensors(config: Any, dtype: str) -> dict[str, torch.Tensor]:
    """The named tensors that a model of this config has, on the meta device: names, shapes, dtypes and ties without memory."""
    tensors: dict[str, torch.Tensor] = meta_model(config, dtype).state_dict()
    return tensors


def open_runner(path: str, slots: int, max_tokens: int, dtype: str, device: str) -> Runner:
    """The model in `path`, checked, on `slots` slots of `max_tokens` tokens. Raises `UserError`."""
    config = open_config(path, max_tokens)
    runner = Runner(open_model(path, config, dtype, device), slots, max_tokens, device)
    check_runner(path, runner, dtype)
    return runner


def check_runner(path: str, runner: Runner, dtype: str) -> None:
    """Raises `UserError` if the model computes something else through slots than in a plain forward pass."""
    try:
        gap = runner.self_test()
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
        raise _refuse(path, runner.model.config, f"which cannot work on slots ({first_line(error)})") from error
    if not gap <= _TOLERANCE[_DTYPES[dtype].itemsize]:
        raise _refuse(path, runner.model.config, f"whose log-probabilities come out {gap:.2g} nats off on slots")


def open_tokenizer(path: str) -> Any:
    """The tokenizer in a model folder, or None if there is none."""
    folder = Path(path)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise UserError(f"The tokenizer in {path} cannot be opened ({first_line(error)}): check the folder.") from None
