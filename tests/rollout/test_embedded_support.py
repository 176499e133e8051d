"""Which models run, and exactly; which are refused, in one sentence that names the type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_models import SIZES, VOCAB, prompt, reference_logprobs, tiny
from transformers import AutoConfig

from rollout.embedded.cache import SLOTS
from rollout.embedded.runner import Runner
from rollout.embedded.sequence import Sequence
from rollout.embedded.support import check_runner, open_config, open_model, open_tokenizer
from segue.errors import UserError
from segue.ports.engine import GenerateRequest

torch.set_num_threads(1)
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
RUN: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 5},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 5},
    "gemma3_text": {"head_dim": 8, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {},
    "olmo2": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "cohere2": {"head_dim": 8, "sliding_window": 5},
    "llama4_text": {
        "head_dim": 8,
        "attention_chunk_size": 5,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 48,
        "no_rope_layers": [1, 0],
    },
    "granite": {},
    "smollm3": {},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "decoder_sparse_step": 1, **MOE},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "sliding_window": 5, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        **MOE,
    },
}


def on_slots(model: Any, slots: int) -> Runner:
    model.set_attn_implementation(SLOTS)
    return Runner(model, slots, 64, "cpu")


def sequence(tokens: list[int], seed: int) -> Sequence:
    return Sequence(GenerateRequest(str(seed), tokens, 30, 1.0, (), (), seed, 0, 0, seed, 0, 0), seed)


def worst_gap(kind: str, options: dict[str, Any], dtype: torch.dtype) -> float:
    """Rows of different lengths, joining late, in used slots, with a hole between: the largest |Δ log-probability| against a
    plain forward pass over each finished sequence."""
    model = tiny(3, kind, dtype, **options)
    truth = tiny(3, kind, dtype, **options)
    if dtype == torch.float64:
        truth.set_attn_implementation("sdpa")  # the eager one takes its softmax in float32
    runner = on_slots(model, 5)
    runner.prefill([(row, 0, prompt(90 + row, 40)) for row in range(5)])  # what others left behind
    rows: list[Sequence | None] = [sequence(prompt(1, 12), 1), None, sequence(prompt(2, 3), 2)]
    runner.prefill([(row, 0, s.tokens[:-1]) for row, s in enumerate(rows) if s is not None])
    given: list[tuple[Sequence, list[float]]] = [(s, []) for s in rows if s is not None]
    batch = runner.batch(rows)
    for step in range(9):
        if step == 4:  # one joins, with a prefix copied from a row that has grown
            late = sequence([*given[0][0].tokens[:14], 5, 6, 7], 3)
            with torch.inference_mode():
                runner.cache.copy(0, 4, 14)
            runner.prefill([(4, 14, late.tokens[14:-1])])
            given.append((late, []))
            rows = [*rows, None, late]
            batch = runner.batch(rows)
        tokens, logprobs, *_ = runner.decode(batch, batch.uniform())
        for s, token, logprob in zip(rows, tokens, logprobs, strict=True):
            if s is not None:
                s.append(token, logprob, 0)
                next(record for other, record in given if other is s).append(logprob)
    worst = 0.0
    for s, logprobs in given:
        expected = reference_logprobs(truth, s.tokens, len(s.tokens) - len(logprobs))
        worst = max(worst, *[abs(a - b) for a, b in zip(logprobs, expected, strict=True)])
    return worst


@pytest.mark.parametrize("kind", RUN)
def test_slots_compute_what_a_plain_forward_pass_does(kind: str) -> None:
    assert worst_gap(kind, RUN[kind], torch.float32) < 5e-5


@pytest.mark.parametrize("kind", RUN)
def test_and_so_does_scoring_which_leaves_the_slots_as_they_are(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = on_slots(tiny(3, kind, **RUN[kind]), 2)
    runner.prefill([(row, 0, prompt(90 + row, 40)) for row in range(2)])
    stored = [(layer.keys.clone(), layer.values.clone()) for layer in runner.cache.layers]
    for rows in (64, 7):  # in one pass and in several
        monkeypatch.setattr("rollout.embedded.runner.SCORE_ROWS", rows)
        tokens = prompt(5, 40)
        expected = reference_logprobs(tiny(3, kind, **RUN[kind]), tokens, 1)
        assert runner.score(tokens) == pytest.approx(expected, abs=5e-5, rel=0)
    for layer, (keys, values) in zip(runner.cache.layers, stored, strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_and_in_double_precision_to_the_last_digits(kind: str) -> None:
    assert worst_gap(kind, RUN[kind], torch.float64) < 1e-14


def test_long_prefill_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.embedded.runner.PREFILL_TOKENS", 7)
    assert worst_gap("llama", {}, torch.float32) < 5e-5
    assert worst_gap("mistral", {"sliding_window": 5}, torch.float32) < 5e-5


LINEAR = {
    "head_dim": 8,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "num_experts": 4,
    "shared_expert_intermediate_size": 16,
    **MOE,
}


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        ("falcon", {}, "attention interface"),
        ("mamba", {"state_size": 4}, "recurrent"),
        ("rwkv", {}, "recurrent"),
        ("qwen3_next", LINEAR, "recurrent"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "conv"),
        ("minimax", {}, "linear_attention"),
        ("t5", {}, "encoder-decoder"),
        ("vit", {}, "no causal language model"),
    ],
)
def test_models_that_need_more_than_keys_and_values_are_refused_by_name(
    tmp_path: Path, kind: str, options: dict[str, Any], why: str
) -> None:
    AutoConfig.for_model(kind, **{**SIZES, **options}).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=rf"type {kind} .*{why}.*: use a decoder-only model") as error:
        open_config(str(tmp_path), 64)
    assert str(error.value).count(". ") == 0 and "\n" not in str(error.value)


def test_a_model_that_computes_something_else_on_slots_is_refused(tmp_path: Path) -> None:
    """BERT passes for a causal model by its class, but sees the future unless told otherwise."""
    options = {**SIZES, "max_position_embeddings": 64}
    config = AutoConfig.for_model("bert", **options)
    config.save_pretrained(tmp_path)
    runner = on_slots(tiny(1, "bert", **options), 4)
    with pytest.raises(UserError, match=r"type bert .*nats off on slots"):
        check_runner(str(tmp_path), runner, "float32")


def test_the_self_test_passes_what_runs_and_leaves_the_model_on_slots() -> None:
    for slots in (1, 4):
        runner = on_slots(tiny(1), slots)
        check_runner("folder", runner, "float32")
        assert runner.model.config._attn_implementation == SLOTS


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_half_precision_passes_its_own_self_test(kind: str, dtype: str) -> None:
    runner = on_slots(tiny(1, kind, getattr(torch, dtype), **RUN[kind]), 4)
    check_runner("folder", runner, dtype)
    assert runner.cache.layers[0].keys.dtype == getattr(torch, dtype)


def test_bad_folders_are_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere is no model folder .*set model\.path"):
        open_config(str(tmp_path / "nowhere"), 64)
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(UserError, match="transformers knows"):
        open_config(str(tmp_path), 64)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="transformers knows"):
        open_config(str(tmp_path), 64)


def test_more_tokens_than_positions_is_a_sentence(tmp_path: Path) -> None:
    AutoConfig.for_model("llama", **SIZES).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"rollout\.max_tokens = 257 is more than the 256 positions"):
        open_config(str(tmp_path), 257)


def test_a_dtype_nobody_knows_and_weights_that_do_not_open(tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama", **SIZES)
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"rollout\.dtype = 'float7'"):
        open_model(str(tmp_path), config, "float7", "cpu")
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(UserError, match="cannot be opened"):
        open_model(str(tmp_path), config, "float32", "cpu")


def test_a_folder_without_weights_gives_the_architecture(tmp_path: Path) -> None:
    AutoConfig.for_model("llama", **SIZES).save_pretrained(tmp_path)
    model = open_model(str(tmp_path), open_config(str(tmp_path), 64), "bfloat16", "cpu")
    parameter = next(model.parameters())
    assert parameter.dtype == torch.bfloat16 and not parameter.requires_grad
    assert Runner(model, 1, 8, "cpu").vocabulary == VOCAB
    assert open_tokenizer(str(tmp_path)) is None


def test_outside_the_engine_such_a_model_does_not_run() -> None:
    """It would find no mask: better an error than a model that sees the future."""
    model = tiny(1)
    model.set_attn_implementation(SLOTS)
    with pytest.raises(RuntimeError, match="only inside the embedded engine"):
        model(input_ids=torch.tensor([[1, 2, 3]]))
