"""Tensors handed over through a file in memory."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from rollout.vllm.handover import Handover, open_tensors

TENSORS = {
    "a": torch.arange(7.0),
    "b": torch.ones(3, 5, dtype=torch.bfloat16),
    "nothing": torch.zeros(0, 3),
    "turned": torch.arange(6.0).reshape(2, 3).T,
    "scalar": torch.tensor(4.0),
    "whole": torch.arange(5),
}


def test_everything_arrives_and_outlives_the_handover() -> None:
    handover = Handover(TENSORS)
    found = dict(open_tensors(handover.path, handover.size, handover.plan))
    handover.close()
    handover.close()
    assert list(found) == list(TENSORS)
    assert all(torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in TENSORS.items())
    assert not os.path.exists(handover.path) or "segue-weights" not in os.readlink(handover.path)


def test_another_process_can_read_it_and_change_nothing() -> None:
    handover = Handover(TENSORS)
    code = (
        "from rollout.vllm.handover import open_tensors\n"
        f"found = dict(open_tensors({handover.path!r}, {handover.size}, {handover.plan!r}))\n"
        "print(float(found['a'].sum()), found['b'].dtype)\n"
        "found['a'].zero_()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["21.0", "torch.bfloat16"], done.stderr
    assert torch.equal(dict(open_tensors(handover.path, handover.size, handover.plan))["a"], TENSORS["a"])
    handover.close()
