"""Tiny random models for engine tests, the weights of their versions, and what a plain forward pass says about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from segue.ports.weights import Manifest, Probe, TensorSpec

VOCAB = 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def tiny(seed: int, kind: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A random model of a Hugging Face type, its weights large enough that contexts matter."""
    config = AutoConfig.for_model(kind, **{**SIZES, **options})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, 0.25)
    return model


def save(model: Any, folder: Path) -> str:
    """The model's folder, which the engine opens."""
    model.save_pretrained(folder)
    return str(folder)


class Staged:
    """Weights as a receiver hands them over. `change` may edit what arrives before the manifest is made."""

    def __init__(
        self, version: int, tensors: dict[str, torch.Tensor], manifest: Manifest | None = None, probe: Probe | None = None
    ) -> None:
        self.version = version
        self._tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        specs = [TensorSpec(name, list(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()]
        self.manifest = manifest or Manifest("full", "tiny", 0, version, specs, [list(range(len(specs)))], [0], probe=probe)

    def tensors(self) -> dict[str, torch.Tensor]:
        return self._tensors


def named(model: Any, aliases: bool = False) -> dict[str, torch.Tensor]:
    """The parameters by name, tied ones once or (`aliases`) under each of their names."""
    return {name: p.data for name, p in model.named_parameters(remove_duplicate=not aliases)}


def reference_logprobs(model: Any, tokens: list[int], start: int, temperature: float = 1.0) -> list[float]:
    """Log-probability of each of `tokens[start:]` given all before it, in one forward pass without cache, mask or batch."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, start - 1 : -1]
        logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
        taken = logprobs.gather(1, torch.tensor(tokens[start:])[:, None])[:, 0]
    return [float(x) for x in taken]


def reference_kept(models: list[tuple[Any, int]], tokens: list[int], start: int, temperature: float = 1.0) -> list[float]:
    """The same when KV is kept across updates: `models` is [(model, how many positions it computed)], in order; the token after
    a position is judged by the model that computed the position."""
    cache: Any = None
    rows = []
    at = 0
    with torch.inference_mode():
        for model, count in models:
            if cache is None:
                cache = DynamicCache(config=model.config)
            ids = torch.tensor([tokens[at : at + count]])
            where = torch.arange(at, at + count)[None]
            rows.append(model(input_ids=ids, position_ids=where, past_key_values=cache, use_cache=True).logits[0])
            at += count
        logprobs = torch.log_softmax(torch.cat(rows)[start - 1 : len(tokens) - 1] / (temperature or 1.0), dim=-1)
        taken = logprobs.gather(1, torch.tensor(tokens[start:])[:, None])[:, 0]
    return [float(x) for x in taken]


def prompt(seed: int, length: int) -> list[int]:
    """`length` random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [int(t) for t in torch.randint(0, VOCAB, (length,), generator=generator)]


def probe_of(model: Any, tokens: list[int]) -> Probe:
    """The probe of a model's weights, as a learner publishes it."""
    return Probe(tokens, reference_logprobs(model, tokens, 1))
