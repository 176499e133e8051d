"""The engine benchmark compares equals: both arms sample the same tokens from the same noise."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks import engine


async def test_both_arms_do_the_same_work(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    args = argparse.Namespace(
        pairs=2, sequences=4, context=20, new=12, hidden=32, layers=2, head_size=16, kv_heads=1, vocabulary=50, seed=1
    )
    model = engine.build(args, str(tmp_path))
    result = await engine.measure(args, model, str(tmp_path))
    assert result["equal_tokens_share"] == 1.0
    assert result["logprob_gap_max"] < 1e-4
    assert len(result["pairs"]) == 2 and result["ratio_min"] <= result["ratio_to_hf"] <= result["ratio_max"]
