"""Small models and hand-made trajectories for the learner's tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from segue.trajectory import Author, TokenLog, concat, context, sampled


def tiny_lm(kind: str, seed: int = 0, vocabulary: int = 64, **extra: Any) -> PreTrainedModel:
    """A two-layer model of architecture `kind` with random weights large enough that attention matters."""
    sizes: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if kind == "gpt2":
        sizes = {"vocab_size": vocabulary, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
    torch.manual_seed(seed)
    lm: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**sizes, **extra}))
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
    return lm.eval()


def tiny_llama(seed: int = 0, vocabulary: int = 64, tied: bool = False) -> LlamaForCausalLM:
    """A two-layer Llama of 32 hidden units."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    lm = LlamaForCausalLM(config)
    return lm.eval()


def random_log(
    rng: np.random.Generator, turns: int = 2, versions: list[int] | None = None, vocabulary: int = 64, kept: bool = False
) -> TokenLog:
    """Prompt, then `turns` of a sampled action and an observation; each action's tokens cycle through `versions`."""
    versions = versions or [0]
    parts = [context([int(t) for t in rng.integers(3, vocabulary, int(rng.integers(3, 8)))], Author.USER, -1)]
    for turn in range(turns):
        n = int(rng.integers(2, 9))
        stamps = [versions[(turn + i) % len(versions)] for i in range(n)]
        tokens = [int(t) for t in rng.integers(3, vocabulary, n)]
        logprobs = [float(x) for x in -rng.uniform(0.1, 6.0, n)]
        parts.append(sampled(tokens, logprobs, stamps, [min(stamps)] * n if kept else stamps, turn))
        if turn < turns - 1 or rng.random() < 0.5:
            observation = [int(t) for t in rng.integers(3, vocabulary, int(rng.integers(1, 6)))]
            parts.append(context(observation, Author.OBSERVATION, turn))
    return concat(parts)
