"""The sender's own copies of published weights: which are kept, which is being sent, and buffers that are used again.

The newest two publications are kept, besides those being sent; an older one also goes as soon as a newer one has been sent
completely. Two, because the scheduler may order the one before the newest while it has not heard of the newest yet. The buffers
of a version that went are taken for the next one: writing into memory for the first time is an order of magnitude slower than
writing again. Nobody but a transfer reads them, and a version in transfer is pinned.

Where several learner ranks send, each has a shelf, which holds the buckets of its share alone: bucket i is with rank i mod R.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from segue.ports.weights import Manifest, Probe
from weightsync.buckets import bucket_bytes, checksum, pack, share_names
from weightsync.crew import Deadline
from weightsync.manifest import build_manifest, layout, payload_bytes

KEPT = 2


class Kept:
    """The weights of one step in buckets, None where another source has the bucket. `mine` are the numbers of those here.

    `manifest` has no checksums yet; `nbytes` are those of all buckets; `gather_seconds` is what copying them aside took.
    """

    def __init__(self, manifest: Manifest, buckets: Sequence[torch.Tensor | None], gather_seconds: float) -> None:
        self.manifest = manifest
        self.buckets = buckets
        self.mine = [number for number, bucket in enumerate(buckets) if bucket is not None]
        self.gather_seconds = gather_seconds
        self.nbytes = payload_bytes(manifest)
        self.pins = 0
        self._checksums: dict[int, int] = {}

    def bucket(self, number: int) -> torch.Tensor:
        """A bucket that is here, uint8 `[bytes]`."""
        bucket = self.buckets[number]
        assert bucket is not None, f"bucket {number} is with another source"
        return bucket

    def checksum(self, number: int) -> int:
        """Of a bucket, computed once. Two threads may both compute it; they get the same number."""
        if number not in self._checksums:
            self._checksums[number] = checksum(self.bucket(number))
        return self._checksums[number]

    def checksums(self) -> list[int]:
        """Of the buckets that are here, in order."""
        return [self.checksum(number) for number in self.mine]


class Shelf:
    """Publications by step. `put` is called by the training thread, `pinned` by transfers.

    `source` of `sources`: which share of the buckets is kept here.
    """

    def __init__(
        self, model: str, bucket_bytes: int, dtype: torch.dtype | None = None, *, source: int = 0, sources: int = 1
    ) -> None:
        assert 0 <= source < sources
        self._model = model
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        self._source, self._sources = source, sources
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._kept: list[Kept] = []  # oldest first
        self._spare: list[torch.Tensor | None] = []

    def share(self, named: Mapping[str, torch.Tensor]) -> set[str]:
        """Names of the tensors that `put` reads; the others may be on the meta device. `named` may be on it altogether."""
        manifest = self._manifest(0, named, None)
        return share_names(manifest, range(self._source, len(manifest.buckets), self._sources))

    def _manifest(self, step: int, named: Mapping[str, torch.Tensor], probe: Probe | None) -> Manifest:
        return build_manifest(self._model, step, layout(named, self._dtype), self._bucket_bytes, probe)

    def put(self, step: int, named: Mapping[str, torch.Tensor], probe: Probe | None = None) -> Kept:
        """Copy the weights of `step` aside. Publishing a step again (after a rollback) replaces it."""
        started = time.perf_counter()
        manifest = self._manifest(step, named, probe)
        buckets = self._buffers(manifest)
        pack(manifest, named, buckets)
        kept = Kept(manifest, buckets, time.perf_counter() - started)
        with self._lock:
            stays = [one for one in self._kept if one.manifest.step != step] + [kept]
            self._retain(stays[-KEPT:])
            self._arrived.notify_all()
        return kept

    def _buffers(self, manifest: Manifest) -> list[torch.Tensor | None]:
        """Buffers for this source's share; page-locked beside a GPU, where copies to and fro are then faster."""
        sizes = [
            bucket_bytes(manifest, number) if number % self._sources == self._source else None
            for number in range(len(manifest.buckets))
        ]
        with self._lock:
            spare, self._spare = self._spare, []
        if [None if buffer is None else buffer.numel() for buffer in spare] == sizes:
            return spare
        pinned = torch.cuda.is_available()
        return [None if size is None else torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]

    def wait_for(self, step: int, deadline: Deadline) -> bool:
        """Whether the weights of `step` are here by the deadline: ranks publish at the same time, but not at the same moment."""
        with self._lock:
            return self._arrived.wait_for(lambda: any(one.manifest.step == step for one in self._kept), deadline.left())

    @contextmanager
    def pinned(self, step: int) -> Iterator[Kept | None]:
        """The weights of `step`, unchanged inside the block even if newer ones arrive; None if they are not kept."""
        with self._lock:
            kept = next((one for one in self._kept if one.manifest.step == step), None)
            if kept is not None:
                kept.pins += 1
        try:
            yield kept
        finally:
            if kept is not None:
                with self._lock:
                    kept.pins -= 1
                    if kept not in self._kept and not kept.pins:
                        self._spare = list(kept.buckets)

    def sent(self, kept: Kept) -> None:
        """A complete transfer of these weights: publications before them are not needed any more."""
        with self._lock:
            if kept in self._kept:
                self._retain(self._kept[self._kept.index(kept) :])

    def steps(self) -> list[int]:
        """Steps whose weights can be sent, oldest publication first."""
        with self._lock:
            return [one.manifest.step for one in self._kept]

    def clear(self) -> None:
        """Let go of everything (what is being sent goes when its transfer ends)."""
        with self._lock:
            self._retain([])
            self._spare = []

    def _retain(self, stays: list[Kept]) -> None:
        for one in self._kept:
            if one not in stays and not one.pins:
                self._spare = list(one.buckets)
        self._kept = stays
