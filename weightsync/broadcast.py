"""What both ends of a transfer share: its deadlines, how many buckets are under way, and how a source sends its own.

Two buckets are under way at a time, so that the wire does not wait for whoever allocates, copies to the device, or checksums.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from weightsync.crew import Deadline
from weightsync.group import BroadcastGroup, GroupError, device_stream
from weightsync.shelf import Kept

IN_FLIGHT = 2
"""Buckets of one source that are under way at a time."""


def deadlines(seconds: float, roll_call_seconds: float) -> tuple[Deadline, Deadline]:
    """`(soft, hard)` of a transfer that has `seconds`: collectives and waits end at `soft`, so that a roll call fits before
    `hard`, and `hard` leaves the thread time to hand over its result before the event loop gives it up."""
    hard = Deadline(seconds - min(0.5, 0.05 * seconds))
    return hard.sooner(min(roll_call_seconds, 0.2 * seconds)), hard


def broadcast_share(
    kept: Kept, group: BroadcastGroup, soft: Deadline, left: threading.Event, sent: Callable[[int], None]
) -> None:
    """Broadcast the buckets that this source has, in order, and compute their checksums meanwhile.

    While bucket i is on its way, the next one is copied to the group's device and queued behind it, and i is checksummed. `sent`
    is called with the bytes of each that has arrived everywhere. Raises `GroupError`.
    """
    under_way: deque[tuple[torch.Tensor, Any]] = deque()

    def finish() -> None:
        data, work = under_way.popleft()
        group.finish(work, soft)
        sent(data.numel())

    with device_stream(group.device):
        for number in kept.mine:
            if left.is_set():
                raise GroupError("it was given up by those who wait for it")
            host = kept.bucket(number)
            if not host.numel():
                continue
            data = host.to(group.device, non_blocking=True)
            under_way.append((data, group.begin(data, soft)))
            if len(under_way) == IN_FLIGHT:
                finish()
            kept.checksum(number)
        while under_way:
            finish()
