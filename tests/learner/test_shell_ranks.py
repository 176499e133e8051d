"""Shells of two ranks, each a process: they train, save, stop and fail together."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from learner_data import tiny_llama
from safetensors.torch import load_file
from test_ranks import HERE, free_port

from learner.checkpoints import model_folder, open_checkpoint
from segue.rundir import RunDir


def run_shells(world: int, model: Path, run_dir: Path, plan: str) -> list[tuple[int, str]]:
    """Exit code and last line of every rank."""
    port = free_port()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "shell_ranks.py"), str(rank), str(world), str(port), str(model), str(run_dir), plan],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    results = []
    for process in ranks:
        said, errors = process.communicate(timeout=180)
        results.append((process.returncode, (said.strip().splitlines() or errors.strip().splitlines() or [""])[-1]))
    return results


@pytest.mark.processes
@pytest.mark.full
def test_two_shells_train_and_save_what_one_does(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny_llama(seed=1).save_pretrained(model)
    assert run_shells(1, model, tmp_path / "one", "all") == [(0, "version 6")]
    assert run_shells(2, model, tmp_path / "two", "all") == [(0, "version 6")] * 2  # rank 1 hears it from rank 0
    weights = []
    for name in ("one", "two"):
        path = RunDir(tmp_path / name).latest_checkpoint().path
        assert open_checkpoint(path).cut() == b"cut of 5"
        weights.append(load_file(model_folder(path) / "model.safetensors"))
    for key, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][key], tensor, atol=5e-3, rtol=0)  # Adam turns rounding into small steps


@pytest.mark.processes
def test_a_stop_that_reaches_one_rank_ends_all_at_the_same_step(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny_llama(seed=1).save_pretrained(model)
    first, second = run_shells(2, model, tmp_path / "run", "stop")
    assert first == second and first[0] == 0
    trained = int(first[1].removeprefix("version "))
    assert 1 <= trained < 6
    assert RunDir(tmp_path / "run").latest_checkpoint().path.name == f"step_{trained}"


@pytest.mark.processes
def test_a_rank_that_dies_ends_the_others(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny_llama(seed=1).save_pretrained(model)
    first, second = run_shells(2, model, tmp_path / "run", "die")
    assert second[0] == 9
    assert first[0] == 1 and "lost the other ranks" in first[1], first
