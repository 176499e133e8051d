"""Two real gloo ranks with uneven micro-batches train like one rank: gradients, weights and statistics."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_data import tiny_llama

HERE = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_ranks(world: int, model: Path, out: Path, section: dict[str, Any]) -> list[dict[str, Any]]:
    port = free_port()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
    commands = [
        [sys.executable, str(HERE / "two_ranks.py"), str(rank), str(world), str(port), str(model), str(out), json.dumps(section)]
        for rank in range(world)
    ]
    ranks = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for command in commands]
    for process in ranks:
        _, errors = process.communicate(timeout=180)
        assert process.returncode == 0, errors
    return [torch.load(out / f"{world}-{rank}.pt", weights_only=True) for rank in range(world)]


@pytest.mark.processes
@pytest.mark.parametrize("section", [{}, {"aggregation": "token", "minibatches": 2}], ids=["one step", "two steps"])
def test_two_ranks_with_uneven_micro_batches_equal_one_rank(tmp_path: Path, section: dict[str, Any]) -> None:
    tiny_llama(seed=1).save_pretrained(tmp_path / "model")
    (alone,) = run_ranks(1, tmp_path / "model", tmp_path, {**section, "pack_tokens": 4096})
    both = run_ranks(2, tmp_path / "model", tmp_path, {**section, "pack_tokens": 64})
    live = [max(len(micros) for micros in step) for step in both[0]["rows"]]
    assert max(live) >= 3, "not several micro-batches"
    assert both[0]["rows"] != both[1]["rows"], "not uneven"
    for rank in both:
        assert len(rank["gradients"]) == len(alone["gradients"])
        for got, want in zip(rank["gradients"], alone["gradients"], strict=True):
            torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-3)
        for name, want in alone["weights"].items():
            torch.testing.assert_close(rank["weights"][name], want, atol=1e-4, rtol=1e-3)
        for got, want in zip(rank["stats"], alone["stats"], strict=True):
            assert got == pytest.approx(want, rel=1e-3, abs=1e-5, nan_ok=True)
