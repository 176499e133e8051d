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


def run_ranks(world: int, model: Path, out: Path, sections: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """What each rank found under each section."""
    port = free_port()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
    commands = [
        [sys.executable, str(HERE / "two_ranks.py"), str(rank), str(world), str(port), str(model), str(out), json.dumps(sections)]
        for rank in range(world)
    ]
    ranks = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for command in commands]
    for process in ranks:
        _, errors = process.communicate(timeout=180)
        assert process.returncode == 0, errors
    return [torch.load(out / f"{world}-{rank}.pt", weights_only=True) for rank in range(world)]


@pytest.mark.processes
def test_two_ranks_with_uneven_micro_batches_equal_one_rank(tmp_path: Path) -> None:
    tiny_llama(seed=1).save_pretrained(tmp_path / "model")
    sections: list[dict[str, Any]] = [{}, {"aggregation": "token", "minibatches": 2}]
    (alone,) = run_ranks(1, tmp_path / "model", tmp_path, [{**section, "pack_tokens": 4096} for section in sections])
    both = run_ranks(2, tmp_path / "model", tmp_path, [{**section, "pack_tokens": 64} for section in sections])
    for one, first, second in zip(alone, *both, strict=True):
        assert max(len(micros) for step in first["rows"] for micros in step) >= 3, "not several micro-batches"
        assert first["rows"] != second["rows"], "not uneven"
        for rank in (first, second):
            assert len(rank["gradients"]) == len(one["gradients"])
            for got, want in zip(rank["gradients"], one["gradients"], strict=True):
                torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-3)
            for name, want in one["weights"].items():
                torch.testing.assert_close(rank["weights"][name], want, atol=1e-4, rtol=1e-3)
            for got, want in zip(rank["stats"], one["stats"], strict=True):
                assert got == pytest.approx(want, rel=1e-3, abs=1e-5, nan_ok=True)
