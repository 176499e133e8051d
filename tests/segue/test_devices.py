"""GPUs are shared out by what the machine has."""

from __future__ import annotations

from typing import Any

import pytest

from segue.cluster.devices import gpus_here, with_devices
from segue.config import Config
from segue.config.root import resolve
from segue.errors import UserError


def config(**cluster: Any) -> Config:
    return resolve({"steps": 1, "task": {"env": "latency"}, "warmstart": {}, "cluster": cluster}, "test")  # 2 nodes, 1 rank


@pytest.mark.parametrize(("gpus", "share", "backend"), [(0, 0.0, "gloo"), (1, 0.33, "gloo"), (3, 1.0, "nccl"), (8, 1.0, "nccl")])
def test_nodes_and_ranks_get_equal_shares_and_nccl_only_whole_gpus(gpus: int, share: float, backend: str) -> None:
    result = with_devices(config(), gpus)
    assert (result.rollout.gpus, result.learner.gpus, result.weightsync.backend) == (share, share, backend)


def test_every_worker_of_an_engine_gets_a_gpu_of_its_own() -> None:
    engine = {"engine": "vllm", "engine_args": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}}
    two_by_four = config().model_copy(update={"rollout": config().rollout.model_copy(update=engine)})
    result = with_devices(two_by_four, 9)
    assert (result.rollout.gpus, result.learner.gpus, result.weightsync.backend) == (4.0, 1.0, "nccl")
    with pytest.raises(UserError, match=r"2 rollout nodes of 4 workers each .* need 9 GPUs, and this machine has 8: lower"):
        with_devices(two_by_four, 8)


def test_what_the_config_says_stands() -> None:
    assert with_devices(config(device="cpu"), 8) == config(device="cpu")


def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(UserError, match="no GPU"):
        with_devices(config(device="cuda"), 0)


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("-1", 0), ("0", 1), ("0,3", 2), ("GPU-1a,GPU-2b", 2)])
def test_visible_devices_are_counted(monkeypatch: pytest.MonkeyPatch, visible: str, count: int) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus_here() == count
