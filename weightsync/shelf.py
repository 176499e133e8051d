"""The sender's own copies of published weights: which are kept, which is being sent, and buffers that are used again.

The newest two publications are kept, besides those being sent; an older one also goes as soon as a newer one has been sent
completely. Two, because the scheduler may order the one before the newest while it has not heard of the newest yet. The buffers
of a version that went are taken for the next one: writing into memory for the first time is an order of magnitude slower than
writing again. Nobody but a transfer reads them, and a version in transfer is pinned.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from segue.ports.weights import Manifest, Probe
from weightsync.buckets import checksum, new_buckets, pack
from weightsync.manifest import bucket_offsets, build_manifest, layout, payload_bytes

KEPT = 2


class Kept:
    """The weights of one step in buckets. `manifest` has no checksums yet; `gather_seconds` is what copying them aside took."""

    def __init__(self, manifest: Manifest, buckets: list[torch.Tensor], gather_seconds: float) -> None:
        self.manifest = manifest
        self.buckets = buckets
        self.gather_seconds = gather_seconds
        self.nbytes = payload_bytes(manifest)
        self.pins = 0
        self._checksums: dict[int, int] = {}

    def checksum(self, bucket: int) -> int:
        """CRC-32 of a bucket, computed once. Two threads may both compute it; they get the same number."""
        if bucket not in self._checksums:
            self._checksums[bucket] = checksum(self.buckets[bucket])
        return self._checksums[bucket]

    def checksums(self) -> list[int]:
        """Of all buckets, in order."""
        return [self.checksum(bucket) for bucket in range(len(self.buckets))]


class Shelf:
    """Publications by step. `put` is called by the training thread, `pinned` by transfers."""

    def __init__(self, model: str, bucket_bytes: int, dtype: torch.dtype | None = None) -> None:
        self._model = model
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        self._lock = threading.Lock()
        self._kept: list[Kept] = []  # oldest first
        self._spare: list[torch.Tensor] = []

    def put(self, step: int, named: Mapping[str, torch.Tensor], probe: Probe | None = None) -> Kept:
        """Copy the weights of `step` aside. Publishing a step again (after a rollback) replaces it."""
        started = time.perf_counter()
        manifest = build_manifest(self._model, step, layout(named, self._dtype), self._bucket_bytes, probe)
        buckets = self._buffers(manifest)
        pack(manifest, named, buckets)
        kept = Kept(manifest, buckets, time.perf_counter() - started)
        with self._lock:
            stays = [one for one in self._kept if one.manifest.step != step] + [kept]
            self._retain(stays[-KEPT:])
        return kept

    def _buffers(self, manifest: Manifest) -> list[torch.Tensor]:
        sizes = [bucket_offsets(manifest, bucket)[1] for bucket in range(len(manifest.buckets))]
        with self._lock:
            spare, self._spare = self._spare, []
        if [buffer.numel() for buffer in spare] == sizes:
            return spare
        return new_buckets(manifest)

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
                        self._spare = kept.buckets

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
                self._spare = one.buckets
        self._kept = stays
