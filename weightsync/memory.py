"""Memory for buckets. Host memory is used again, but only once nobody holds a view of it any more.

A loader may keep views of one bucket until a later bucket completes their layer, or for ever: so no buffer is written again while
a view of it lives. Memory whose last view has gone comes back to its arena: writing into fresh pages is several times slower than
writing into pages that are mapped. Page-locked and device memory have that from torch's own caching allocators.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterable

import numpy as np
import torch

_ALIGNMENT = 4096
"""Bytes: buffers begin on a page."""


class Arena:
    """Host buffers. What is spare stays mapped until `keep` or `clear` says that it is not needed."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a buffer may come back by garbage collection, inside `take` of the same thread
        self._spare: dict[int, list[np.ndarray]] = {}
        self._wanted: Counter[int] | None = None

    def take(self, size: int) -> torch.Tensor:
        """A uint8 buffer `[size]` that nobody else has a view of; its contents are undefined."""
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        with self._lock:
            spare = self._spare.get(size)
            memory = spare.pop() if spare else None
        if memory is None:
            whole = np.empty(size + _ALIGNMENT, dtype=np.uint8)
            start = -whole.ctypes.data % _ALIGNMENT
            memory = whole[start : start + size]
        lent = memory.view()  # an object of its own: torch holds it until the last view of the tensor has gone
        weakref.finalize(lent, self._back, memory).atexit = False
        return torch.from_numpy(lent)

    def keep(self, sizes: Iterable[int]) -> None:
        """From now on as many spare buffers are kept as `sizes` has, of those sizes; the others go."""
        with self._lock:
            self._wanted = Counter(sizes)
            for size, spare in list(self._spare.items()):
                del spare[self._wanted[size] :]

    def clear(self) -> None:
        """Let go of all spare buffers, and of those that come back."""
        self.keep([])

    def spare_bytes(self) -> int:
        """Bytes of buffers that nobody uses."""
        with self._lock:
            return sum(size * len(spare) for size, spare in self._spare.items())

    def _back(self, memory: np.ndarray) -> None:
        with self._lock:
            spare = self._spare.setdefault(memory.size, [])
            if self._wanted is None or len(spare) < self._wanted[memory.size]:
                spare.append(memory)


class Landing:
    """Where a received bucket goes: the broadcast writes it on `device`, and it rests on `rest`.

    device   of the broadcast: "cpu" for gloo, a GPU for NCCL
    rest     where staged buckets wait for the engine (default: where they arrive)
    pinned   host memory is page-locked: the engine is on a GPU
    """

    def __init__(self, device: torch.device, rest: torch.device | None = None, pinned: bool = False) -> None:
        self.device = device
        self.rest = rest or device
        self.arena = Arena()
        self._pinned = pinned

    @property
    def works_on(self) -> torch.device:
        """Where collectives, copies and checksums are queued: the GPU, if there is one at either end."""
        return self.device if self.device.type == "cuda" else self.rest

    def buffer(self, size: int) -> torch.Tensor:
        """What a broadcast may write, uint8 `[size]`."""
        if self.device.type != "cpu":
            return torch.empty(size, dtype=torch.uint8, device=self.device)
        if self._pinned:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return self.arena.take(size)

    def land(self, bucket: torch.Tensor) -> torch.Tensor:
        """The same bytes where they rest. On a GPU the copy is queued on the current stream."""
        if self.device == self.rest:
            return bucket
        if self.rest.type == "cpu":
            host = torch.empty(bucket.numel(), dtype=torch.uint8, pin_memory=True)
            host.copy_(bucket, non_blocking=True)
            torch.cuda.current_stream(self.device).synchronize()  # it is checksummed here, and `bucket` goes
            return host
        return bucket.to(self.rest, non_blocking=True)
