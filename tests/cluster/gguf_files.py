"""A tiny GGUF file: a Llama with tied embeddings, a byte-level tokenizer and a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

WIDTH, HEADS, INNER = 32, 2, 48
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def ROWS(seed: int) -> Any:
    """The embedding's rows."""
    return np.random.default_rng(seed).normal(0, 0.1, (len(SPECIAL) + 256 + 1, WIDTH)).astype(np.float32)


def write_gguf(path: Path, seed: int, architecture: str = "llama") -> None:
    """Write the file; equal seeds give equal files."""
    import gguf
    from tokenizers import pre_tokenizers

    rng = np.random.default_rng(seed + 1)
    writer = gguf.GGUFWriter(str(path), architecture)
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    writer.add_tensor("token_embd.weight", ROWS(seed))
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        writer.add_tensor(f"blk.0.{name}.weight", rng.normal(0, 0.1, (WIDTH, WIDTH)).astype(np.float32))
    for name, shape in (("ffn_gate", (INNER, WIDTH)), ("ffn_up", (INNER, WIDTH)), ("ffn_down", (WIDTH, INNER))):
        writer.add_tensor(f"blk.0.{name}.weight", rng.normal(0, 0.1, shape).astype(np.float32))
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
