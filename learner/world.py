"""The torch.distributed world of the learner ranks: FSDP2 shards over it, and ranks agree over it."""

from __future__ import annotations

import contextlib
import datetime
import socket
from collections.abc import Iterator

import torch
import torch.distributed as dist

from segue.errors import RunFailed


def join_world(rank: int, world: int, address: str, meet_seconds: float, collective_seconds: float, cuda: bool = False) -> None:
    """Meet the other ranks at `address` ("host:port", where rank 0 listens) and make the default process group.

    nccl on GPUs, gloo on CPUs (with `cuda` both, for tensors on either side). Every later collective fails after
    `collective_seconds`. Raises `RunFailed` when the ranks have not met after `meet_seconds`.
    """
    host, _, port = address.rpartition(":")
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    patience = datetime.timedelta(seconds=meet_seconds)
    try:
        if rank == 0:
            # A socket of our own: the store's would listen on all interfaces.
            listener = socket.create_server((host, int(port)))
            store = dist.TCPStore(host, int(port), world, True, patience, master_listen_fd=listener.detach())
        else:
            store = dist.TCPStore(host, int(port), world, False, patience)
        limit = datetime.timedelta(seconds=collective_seconds)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    except (dist.DistError, RuntimeError, OSError) as error:
        raise RunFailed(
            f"learner-{rank}",
            f"The {world} learner ranks did not meet at {address} within {meet_seconds:g} s: look at their logs.",
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


def text_from_first(text: str) -> str:
    """Rank 0's text on every rank. A collective."""
    data = text.encode()
    box = torch.zeros(from_first(len(data)), dtype=torch.uint8)
    if dist.is_initialized() and dist.get_world_size() > 1:
        if dist.get_rank() == 0:
            box.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(box, src=0)
        return bytes(box.tolist()).decode()
    return text


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Around work with collectives: raises `RunFailed` when another rank is dead or late. Other errors pass."""
    try:
        yield
    except RuntimeError as error:
        # gloo raises bare RuntimeErrors, which name it (as a path of its source).
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        rank = dist.get_rank() if dist.is_initialized() else 0
        why = str(error).splitlines()[0]
        raise RunFailed(f"learner-{rank}", f"Learner rank {rank} lost the other ranks ({why}): look at their logs.") from error


def leave_world() -> None:
    """Give the process group up; no collective, so that a rank may leave after others died."""
    if dist.is_initialized():
        dist.destroy_process_group()
