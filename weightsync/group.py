"""The broadcast group: a torch.distributed process group of its own, with no default group behind it. It has one source, which
is its rank 0; where several learner ranks send, each has a group of its own with all members, and their broadcasts overlap.

A group is owned by the thread that uses it (`Groups.take` hands it out, `Groups.keep` takes it back), so that collectives of one
group can never interleave. A group whose transfer failed is not given back: its connections close with it, which ends the waits
of its peers too.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from segue.errors import UserError
from segue.ports.transfer import Transfer
from weightsync.crew import Deadline

BACKENDS = ("gloo", "nccl")
_WATCHDOG_SLACK = 60.0
"""Seconds by which NCCL's own watchdog comes after our deadline: ours reports and goes on, that one ends the process."""


class GroupError(Exception):
    """The group could not be built, or broke in a collective."""


class BroadcastGroup:
    """Rank 0, source number `source`, broadcasts buckets to all members. `members[i]` has rank i + 1; `rank` is our own."""

    def __init__(self, group: int, source: int, members: Sequence[str], rank: int, backend: Any, device: torch.device) -> None:
        self.group = group
        self.source = source
        self.members = tuple(members)
        self.rank = rank
        self.device = device
        self._backend = backend

    def begin(self, bucket: torch.Tensor, deadline: Deadline) -> Any:
        """Start to broadcast `bucket`, uint8 `[bytes]` on the group's device; returns what `finish` waits for.

        Several may be under way; they go in the order in which they began. `bucket` must live until `finish` has returned.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = _span(deadline.left() + (_WATCHDOG_SLACK if self.device.type == "cuda" else 0.0))
        try:
            return self._backend.broadcast([bucket], options)
        except RuntimeError as error:
            raise GroupError(_brief(error)) from error

    def finish(self, work: Any, deadline: Deadline) -> None:
        """Wait until that bucket is complete here. Raises `GroupError` at the deadline or when a peer is gone."""
        try:
            work.wait(_span(deadline.left()))
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
        except RuntimeError as error:
            raise GroupError(_brief(error)) from error

    def close(self) -> None:
        """Leave. gloo closes its connections with the last reference; NCCL must be told."""
        backend, self._backend = self._backend, None
        if backend is not None and self.device.type == "cuda":
            backend.abort()


def group_prefix(group: int, transfer: int) -> str:
    """Under which the members of the groups that are built for `transfer` meet."""
    return f"group/{group}/{transfer}"


def device_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Work on a GPU inside the block goes to a stream of its own, beside what the engine or the learner computes there."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


def build_group(
    backend: str,
    store: dist.Store,
    transfer: Transfer,
    *,
    source: int,
    rank: int,
    host: str,
    device: torch.device,
    deadline: Deadline,
) -> BroadcastGroup:
    """Meet all members under a prefix that only this transfer uses. Raises `GroupError` when they are not there by the deadline.

    `host` is the address under which the others reach this process (gloo).
    """
    prefixed = dist.PrefixStore(f"{group_prefix(transfer.group, transfer.transfer)}/{source}", store)
    world = len(transfer.members) + 1
    try:
        if backend == "gloo":
            made: Any = _gloo(prefixed, rank, world, host, deadline)
        else:
            made = _nccl(prefixed, rank, world, device, deadline)
    except RuntimeError as error:
        raise GroupError(_brief(error)) from error
    return BroadcastGroup(transfer.group, source, transfer.members, rank, made, device)


def _gloo(store: dist.Store, rank: int, world: int, host: str, deadline: Deadline) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = _span(deadline.left())
    options._threads = 1  # one broadcast at a time; the other cores belong to the engine or the learner
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return dist.ProcessGroupGloo(store, rank, world, options)


def _nccl(store: dist.Store, rank: int, world: int, device: torch.device, deadline: Deadline) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _span(deadline.left() + _WATCHDOG_SLACK)
    made = dist.ProcessGroupNCCL(store, rank, world, options)
    made.eager_connect_single_device(device)
    return made


def check_backend(backend: str) -> None:
    """Raises `UserError` when this torch cannot do `backend`."""
    if backend not in BACKENDS:
        raise UserError(f"weightsync.backend = {backend!r} is unknown: use one of {', '.join(BACKENDS)}.")
    if backend == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
        raise UserError("weightsync.backend = 'nccl' needs a GPU and a torch built with NCCL: use 'gloo' on this machine.")


class Groups:
    """The groups this process holds and no thread is using, by group id and source. A member belongs to the groups of one id at a
    time: keeping one ends those of other ids that it shares a member with."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], BroadcastGroup] = {}
        self._lock = threading.Lock()
        self._closed = False

    def take(self, group: int, source: int, members: Sequence[str]) -> BroadcastGroup | None:
        """The group of that id, source and members, which the caller owns from now on; None if it must be built."""
        with self._lock:
            held = self._held.pop((group, source), None)
        if held is not None and held.members != tuple(members):
            held.close()
            return None
        return held

    def keep(self, group: BroadcastGroup) -> None:
        """Give a group back after a transfer that succeeded."""
        ended: list[BroadcastGroup] = []
        with self._lock:
            if self._closed:
                ended.append(group)
            else:
                shared = [
                    key
                    for key, held in self._held.items()
                    if held.group != group.group and set(held.members) & set(group.members)
                ]
                ended += [self._held.pop(key) for key in shared]
                self._held[group.group, group.source] = group
        for one in ended:
            one.close()

    def close(self) -> None:
        """End all held groups, and every one that is given back later."""
        with self._lock:
            self._closed = True
            ended = list(self._held.values())
            self._held.clear()
        for one in ended:
            one.close()


def _span(seconds: float) -> timedelta:
    return timedelta(seconds=max(0.001, seconds))


def _brief(error: BaseException) -> str:
    """The first sentence of a gloo or NCCL message, without its source path."""
    line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    text = line.split("] ", 1)[1] if line.startswith("[/") and "] " in line else line
    return text.split(". ")[0].rstrip(".")[:200]
