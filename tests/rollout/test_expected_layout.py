"""What a receiver expects is known before any weights are: from the config alone, on the meta device."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from rollout.embedded.support import meta_tensors
from weightsync.manifest import layout

SMALL = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config])
def test_the_layout_of_a_config_is_that_of_its_model(tmp_path: Path, kind: type, tied: bool) -> None:
    config = kind(**SMALL, num_key_value_heads=2, tie_word_embeddings=tied)
    real = AutoModelForCausalLM.from_config(config)
    assert layout(meta_tensors(config, "float32")) == layout(real.state_dict(keep_vars=True))
