"""Tensors into contiguous uint8 buckets, and aligned views back. One bucket is one broadcast and has one CRC-32."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch

from segue.ports.weights import Manifest
from weightsync.manifest import aligned, bucket_offsets, nbytes, torch_dtype


def new_bucket(manifest: Manifest, bucket: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """A fresh uint8 buffer for bucket number `bucket`, `[bytes]`; its contents are undefined.

    Receivers take a fresh one for every bucket of every version: a loader may keep views until a later bucket completes their
    layer, so a buffer may be written once only.
    """
    return torch.empty(bucket_offsets(manifest, bucket)[1], dtype=torch.uint8, device=device)


def new_buckets(manifest: Manifest) -> list[torch.Tensor]:
    """One host buffer per bucket for the sender's own copy; page-locked beside a GPU, where copies to and fro are then faster."""
    pinned = torch.cuda.is_available()
    sizes = [bucket_offsets(manifest, bucket)[1] for bucket in range(len(manifest.buckets))]
    return [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]


def pack(manifest: Manifest, named: Mapping[str, torch.Tensor], into: Sequence[torch.Tensor]) -> None:
    """Copy tensors into `into`, one buffer per bucket, cast to the manifest's dtypes. Padding becomes zero: it is checksummed."""
    assert len(into) == len(manifest.buckets)
    for bucket, buffer in enumerate(into):
        offsets, _ = bucket_offsets(manifest, bucket)
        for index, offset in zip(manifest.buckets[bucket], offsets, strict=True):
            spec = manifest.tensors[index]
            end = offset + nbytes(spec)
            _view(buffer, offset, manifest, index).copy_(named[spec.name].detach())
            buffer[end : aligned(end)].zero_()


def unpack(manifest: Manifest, buckets: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Views of the buckets under all names, in sending order, tied names (same view) last."""
    assert len(buckets) == len(manifest.buckets)
    tensors: dict[str, torch.Tensor] = {}
    for bucket, buffer in enumerate(buckets):
        offsets, size = bucket_offsets(manifest, bucket)
        assert buffer.dtype == torch.uint8 and buffer.numel() == size
        for index, offset in zip(manifest.buckets[bucket], offsets, strict=True):
            tensors[manifest.tensors[index].name] = _view(buffer, offset, manifest, index)
    for alias, name in manifest.aliases.items():
        tensors[alias] = tensors[name]
    return tensors


def _view(buffer: torch.Tensor, offset: int, manifest: Manifest, index: int) -> torch.Tensor:
    spec = manifest.tensors[index]
    dtype = torch_dtype(spec.dtype)
    size = nbytes(spec)
    if size == 0:
        return torch.empty(spec.shape, dtype=dtype, device=buffer.device)
    return buffer[offset : offset + size].view(dtype).view(spec.shape)


def checksum(buffer: torch.Tensor) -> int:
    """CRC-32 of a bucket. Releases the GIL while it computes, so that it can run beside a broadcast."""
    return zlib.crc32(memoryview(buffer.cpu().numpy()))
