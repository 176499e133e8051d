"""Tensors from the node to vLLM's workers, through a file in memory without a name: it goes with the last process that has it.

The workers open it through the node's own file descriptor (`/proc/PID/fd/N`): nothing is left behind, however the node ends.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

ALIGNMENT = 64

Plan = list[list[Any]]
"""[name, dtype, shape, offset in bytes] of each tensor"""


class Handover:
    """`path`, `size` and `plan` are what a worker needs; close it once they have loaded."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.plan: Plan = []
        at = 0
        for name, tensor in tensors.items():
            self.plan.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), at])
            at += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        self.size = max(at, 1)
        self._fd = os.memfd_create("segue-weights", os.MFD_CLOEXEC)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        try:
            os.ftruncate(self._fd, self.size)
            with mmap.mmap(self._fd, self.size) as mapping:
                _fill(mapping, tensors, self.plan)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Idempotent; mappings that are still used stay valid."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _fill(mapping: mmap.mmap, tensors: Mapping[str, torch.Tensor], plan: Plan) -> None:
    buffer = torch.frombuffer(mapping, dtype=torch.uint8)
    for tensor, (_, _, _, at) in zip(tensors.values(), plan, strict=True):
        _view(buffer, tensor.dtype, list(tensor.shape), at).copy_(tensor.detach())
    del buffer  # else the mapping cannot be closed


def _view(buffer: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], at: int) -> torch.Tensor:
    count = 1
    for size in shape:
        count *= size
    if count == 0:
        return torch.empty(list(shape), dtype=dtype)
    return buffer[at : at + count * dtype.itemsize].view(dtype).view(list(shape))


def open_tensors(path: str, size: int, plan: Sequence[Sequence[Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """In a worker: views of the file, as (name, tensor). Writing into them changes nothing for others."""
    fd = os.open(path, os.O_RDONLY)
    try:
        mapping = mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
    finally:
        os.close(fd)
    buffer = torch.frombuffer(mapping, dtype=torch.uint8)
    for name, dtype, shape, at in plan:
        yield name, _view(buffer, getattr(torch, dtype), shape, at)
