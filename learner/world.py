"""The torch.distributed world of the learner ranks: FSDP2 shards over it, and ranks agree over it."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

from segue.errors import RunFailed


def join_world(rank: int, world: int, address: str, seconds: float, cuda: bool = False) -> None:
    """Meet the other ranks at `address` ("host:port", where rank 0 listens) and make the default process group.

    nccl on GPUs, gloo on CPUs (with `cuda` both, for tensors on either side). Every later collective fails after `seconds`.
    Raises `RunFailed` when the ranks have not met by then.
    """
    host, _, port = address.rpartition(":")
    timeout = datetime.timedelta(seconds=seconds)
    try:
        store = dist.TCPStore(host, int(port), world, is_master=rank == 0, timeout=timeout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo", store=store, rank=rank, world_size=world, timeout=timeout
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise RunFailed(
            f"learner-{rank}", f"The {world} learner ranks did not meet at {address} within {seconds:g} s: look at their logs."
        ) from error


def alone() -> None:
    """A world of one without any address, for mixed precision on a single rank."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def any_rank(flag: bool) -> bool:
    """Whether any rank says so. A collective; with one rank its own word."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return flag
    said = torch.tensor([int(flag)], dtype=torch.int32)
    dist.all_reduce(said, op=dist.ReduceOp.MAX)
    return bool(said.item())


def from_first(value: int) -> int:
    """Rank 0's value on every rank. A collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    box = torch.tensor([value], dtype=torch.int64)
    dist.broadcast(box, src=0)
    return int(box.item())


def leave_world() -> None:
    """Give the process group up; no collective, so that a rank may leave after others died."""
    if dist.is_initialized():
        dist.destroy_process_group()
