"""Packing: whatever goes in comes out, bit for bit, and a loader may keep what it got."""

import struct
import zlib

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from segue.ports.weights import Manifest
from weightsync.buckets import PIECE_BYTES, bucket_bytes, checksum, pack, unpack, unpack_one
from weightsync.manifest import ALIGNMENT, bucket_offsets, build_manifest, layout

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int16, torch.uint8, torch.bool]


def new_buckets(manifest: Manifest) -> list[torch.Tensor]:
    return [torch.empty(bucket_bytes(manifest, number), dtype=torch.uint8) for number in range(len(manifest.buckets))]


@st.composite
def named_tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Random bits in random shapes (zero-size, scalar and odd ones included) and dtypes."""
    named = {}
    for number in range(draw(st.integers(0, 8))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=7))
        count = int(np.prod(shape)) * dtype.itemsize
        raw = np.frombuffer(draw(st.binary(min_size=count, max_size=count)), dtype=np.uint8).copy()
        if dtype is torch.bool:
            raw &= 1
        flat = torch.from_numpy(raw).view(dtype) if count else torch.empty(0, dtype=dtype)
        named[f"layers.{number // 2}.{number}"] = flat.view(shape)
    return named


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


@given(named=named_tensors(), bucket_bytes=st.integers(1, 300))
def test_round_trip(named: dict[str, torch.Tensor], bucket_bytes: int) -> None:
    manifest = build_manifest("policy", 0, layout(named), bucket_bytes)
    buckets = new_buckets(manifest)
    for bucket in buckets:
        bucket.fill_(0xA5)  # what was in the memory before must not matter
    pack(manifest, named, buckets)
    out = unpack(manifest, buckets)
    assert out.keys() == named.keys()
    for name, tensor in named.items():
        assert out[name].dtype == tensor.dtype and out[name].shape == tensor.shape
        assert bits(out[name]) == bits(tensor)
    again = new_buckets(manifest)
    pack(manifest, named, again)
    assert [checksum(bucket) for bucket in buckets] == [checksum(bucket) for bucket in again]  # padding included


@given(named=named_tensors(), bucket_bytes=st.integers(1, 300))
def test_the_bytes_of_a_bucket_are_the_tensors_one_after_the_other(named: dict[str, torch.Tensor], bucket_bytes: int) -> None:
    manifest = build_manifest("policy", 0, layout(named), bucket_bytes)
    buckets = new_buckets(manifest)
    pack(manifest, named, buckets)
    for number, members in enumerate(manifest.buckets):
        slow = b""
        for index in members:
            raw = bits(named[manifest.tensors[index].name])
            slow += raw + bytes(-len(raw) % ALIGNMENT)
        assert buckets[number].numpy().tobytes() == slow
        assert len(slow) == bucket_offsets(manifest, number)[1]
        assert checksum(buckets[number]) == zlib.crc32(slow)


def test_strided_and_cast_tensors_are_packed_by_value() -> None:
    wide = torch.arange(24, dtype=torch.float32).reshape(4, 6) / 7
    named = {"turned": wide.T, "stepped": wide[::2, ::3], "ids": torch.arange(3)}
    manifest = build_manifest("policy", 0, layout(named, torch.bfloat16), 1 << 20)
    buckets = new_buckets(manifest)
    pack(manifest, named, buckets)
    out = unpack(manifest, buckets)
    assert torch.equal(out["turned"], wide.T.to(torch.bfloat16))
    assert torch.equal(out["stepped"], wide[::2, ::3].to(torch.bfloat16))
    assert torch.equal(out["ids"], torch.arange(3))


def test_tied_names_are_the_same_memory() -> None:
    weight = torch.rand(5, 4)
    named = {"embed": weight, "head": weight}
    manifest = build_manifest("policy", 0, layout(named), 1 << 20)
    buckets = new_buckets(manifest)
    pack(manifest, named, buckets)
    out = unpack(manifest, buckets)
    assert out["embed"].data_ptr() == out["head"].data_ptr() and torch.equal(out["head"], weight)


def test_packing_copies() -> None:
    """The training thread may go on as soon as the weights are packed."""
    weight = torch.ones(8, requires_grad=True)
    manifest = build_manifest("policy", 0, layout({"w": weight}), 1 << 20)
    buckets = new_buckets(manifest)
    pack(manifest, {"w": weight}, buckets)
    with torch.no_grad():
        weight.zero_()
    assert torch.equal(unpack(manifest, buckets)["w"], torch.ones(8))


def test_one_bucket_is_unpacked_as_the_whole_is() -> None:
    weight = torch.rand(5, 4)
    named = {"embed": weight, "head": weight, "layers.0": torch.rand(7)}
    manifest = build_manifest("policy", 0, layout(named), 64)
    buckets = new_buckets(manifest)
    pack(manifest, named, buckets)
    apart = [unpack_one(manifest, number, bucket) for number, bucket in enumerate(buckets)]
    assert [set(tensors) for tensors in apart] == [{"embed", "head"}, {"layers.0"}]
    for tensors in apart:
        assert all(torch.equal(tensor, named[name]) for name, tensor in tensors.items())


def slow_checksum(data: bytes) -> int:
    """Word by word: of each MiB the sums of the words that lie 32 KiB apart, then what is left as it is."""
    value, at = 0, 0
    while len(data) - at >= PIECE_BYTES:
        words = struct.unpack_from(f"<{PIECE_BYTES // 8}Q", data, at)
        sums = [sum(words[column::4096]) % 2**64 for column in range(4096)]
        value, at = zlib.crc32(struct.pack("<4096Q", *sums), value), at + PIECE_BYTES
    return zlib.crc32(data[at:], value)


@pytest.mark.parametrize("extra", [0, 64, 4096 * 8])
def test_checksums_are_those_of_a_slow_loop_and_see_a_changed_bit_a_swap_and_a_shift(extra: int) -> None:
    size = 2 * PIECE_BYTES + extra
    data = torch.from_numpy(np.random.default_rng(extra).integers(0, 256, size, dtype=np.uint8))
    right = checksum(data)
    assert right == slow_checksum(data.numpy().tobytes())
    for at in (0, 12345, PIECE_BYTES, size - 1):
        changed = data.clone()
        changed[at] ^= 1 << at % 8
        assert checksum(changed) != right
    swapped = data.clone()  # two pages, then two whole pieces
    swapped[:4096], swapped[4096:8192] = data[4096:8192], data[:4096]
    assert checksum(swapped) != right
    turned = torch.cat([data[PIECE_BYTES : 2 * PIECE_BYTES], data[:PIECE_BYTES], data[2 * PIECE_BYTES :]])
    assert checksum(turned) != right
    assert checksum(data.roll(8)) != right


def test_a_loader_may_keep_tensors_of_an_earlier_bucket() -> None:
    """F38: buckets smaller than a layer; the loader collects a layer's tensors over several buckets before it copies any."""
    named = {f"layers.{layer}.{part}": torch.full((50,), 10.0 * layer + part) for layer in range(3) for part in range(4)}
    manifest = build_manifest("policy", 0, layout(named), 300)  # one tensor per bucket
    source = new_buckets(manifest)
    pack(manifest, named, source)
    assert len(source) == 12
    received = new_buckets(manifest)  # all held at once, as a loader may
    for bucket, data in zip(received, source, strict=True):
        bucket.copy_(data)
    assert len({bucket.data_ptr() for bucket in received}) == len(received)
    kept = unpack(manifest, received)
    for name, tensor in named.items():
        assert torch.equal(kept[name], tensor)
