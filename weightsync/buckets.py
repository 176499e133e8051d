"""Tensors into contiguous uint8 buckets, and aligned views back. One bucket is one broadcast and has one checksum."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch

from segue.ports.weights import Manifest
from weightsync.manifest import aligned, bucket_offsets, nbytes, torch_dtype

PIECE_ROWS, PIECE_WORDS = 32, 4096
"""A checksummed piece, 1 MiB: so many rows of so many 64-bit words."""
PIECE_BYTES = PIECE_ROWS * PIECE_WORDS * 8


def bucket_bytes(manifest: Manifest, bucket: int) -> int:
    """Bytes of bucket number `bucket`, padding included."""
    return bucket_offsets(manifest, bucket)[1]


def pack(manifest: Manifest, named: Mapping[str, torch.Tensor], into: Sequence[torch.Tensor | None]) -> None:
    """Copy tensors into `into`, one buffer per bucket, cast to the manifest's dtypes; where that is None, another source has the
    bucket. Padding becomes zero: it is checksummed."""
    assert len(into) == len(manifest.buckets)
    for bucket, buffer in enumerate(into):
        if buffer is None:
            continue
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
        tensors |= _untied(manifest, bucket, buffer)
    return tensors | _aliases(manifest, tensors)


def unpack_one(manifest: Manifest, bucket: int, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """Views of one bucket under all names of its tensors, in sending order, tied names (same view) last."""
    tensors = _untied(manifest, bucket, buffer)
    return tensors | _aliases(manifest, tensors)


def _untied(manifest: Manifest, bucket: int, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    offsets, size = bucket_offsets(manifest, bucket)
    assert buffer.dtype == torch.uint8 and buffer.numel() == size
    indices = manifest.buckets[bucket]
    return {
        manifest.tensors[index].name: _view(buffer, offset, manifest, index)
        for index, offset in zip(indices, offsets, strict=True)
    }


def _aliases(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {alias: tensors[name] for alias, name in manifest.aliases.items() if name in tensors}


def _view(buffer: torch.Tensor, offset: int, manifest: Manifest, index: int) -> torch.Tensor:
    spec = manifest.tensors[index]
    dtype = torch_dtype(spec.dtype)
    size = nbytes(spec)
    if size == 0:
        return torch.empty(spec.shape, dtype=dtype, device=buffer.device)
    return buffer[offset : offset + size].view(dtype).view(spec.shape)


def checksum(buffer: torch.Tensor) -> int:
    """The checksum of a bucket, on any device: the CRC-32 of sums over it.

    Of every whole MiB, seen as 32 rows of 4096 64-bit words, the 4096 column sums (modulo 2⁶⁴) go into the CRC; of what is left,
    the bytes themselves. So any damage is found with the certainty of a CRC-32, except words of the same MiB that lie a multiple
    of 32 KiB apart and change by amounts that cancel. One pass at the speed of memory: on a CPU five times as fast as the CRC-32
    of the bytes, and on a GPU only a 32nd crosses to the host. Releases the GIL, so that it can run beside a broadcast.
    """
    whole = buffer.numel() // PIECE_BYTES * PIECE_BYTES
    value = 0
    if whole and buffer.device.type != "cpu":
        sums = buffer[:whole].view(torch.int64).view(-1, PIECE_ROWS, PIECE_WORDS).sum(1)
        value = zlib.crc32(memoryview(sums.cpu().numpy()), value)
    elif whole:
        for piece in buffer[:whole].numpy().view(np.uint64).reshape(-1, PIECE_ROWS, PIECE_WORDS):
            value = zlib.crc32(memoryview(np.add.reduce(piece, axis=0)), value)
    return zlib.crc32(memoryview(buffer[whole:].cpu().numpy()), value)


def share_names(manifest: Manifest, buckets: Collection[int]) -> set[str]:
    """Names, tied ones included, of the tensors in `buckets`."""
    names = {manifest.tensors[index].name for bucket in buckets for index in manifest.buckets[bucket]}
    return names | {alias for alias, name in manifest.aliases.items() if name in names}
