"""The sender's copies: what is kept, what goes, and that nothing in transfer changes."""

import pytest
import torch

from weightsync.buckets import checksum, unpack
from weightsync.shelf import Shelf


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((100,), float(value)), "b": torch.full((3,), float(value))}


def value_of(shelf: Shelf, step: int) -> float:
    with shelf.pinned(step) as kept:
        assert kept is not None
        return float(unpack(kept.manifest, [kept.bucket(number) for number in kept.mine])["a"][0])


def test_the_newest_two_are_kept() -> None:
    shelf = Shelf("policy", 128)
    for step in range(4):
        shelf.put(step, weights(step))
    assert shelf.steps() == [2, 3]
    assert value_of(shelf, 2) == 2.0 and value_of(shelf, 3) == 3.0
    with shelf.pinned(1) as gone:
        assert gone is None


def test_a_sent_version_stays_until_a_newer_one_is_sent() -> None:
    shelf = Shelf("policy", 128)
    first = shelf.put(0, weights(0))
    shelf.sent(first)
    assert shelf.steps() == [0]
    second = shelf.put(1, weights(1))
    assert shelf.steps() == [0, 1]
    shelf.sent(second)
    assert shelf.steps() == [1]
    shelf.sent(first)  # a late transfer of what is not kept any more
    assert shelf.steps() == [1]


def test_what_is_being_sent_stays_unchanged_while_newer_ones_arrive() -> None:
    shelf = Shelf("policy", 128)
    shelf.put(0, weights(0))
    with shelf.pinned(0) as kept:
        assert kept is not None
        before = kept.checksums()
        for step in range(1, 6):
            shelf.put(step, weights(step))
        assert [checksum(kept.bucket(number)) for number in kept.mine] == before
    assert shelf.steps() == [4, 5] and value_of(shelf, 5) == 5.0


def test_publishing_a_step_again_replaces_it() -> None:
    shelf = Shelf("policy", 128)
    shelf.put(7, weights(1))
    shelf.put(7, weights(2))
    assert shelf.steps() == [7] and value_of(shelf, 7) == 2.0


def test_buffers_are_used_again_once_nobody_reads_them() -> None:
    shelf = Shelf("policy", 128)
    addresses = []
    for step in range(5):
        kept = shelf.put(step, weights(step))
        addresses.append(kept.bucket(0).data_ptr())
        shelf.sent(kept)
    assert len(set(addresses)) == 2  # the version that is kept, and the one that is being written
    assert value_of(shelf, 4) == 4.0


def test_another_layout_gets_buffers_of_its_own_size() -> None:
    shelf = Shelf("policy", 128)
    for step in range(3):
        shelf.put(step, weights(step))
    larger = {"a": torch.ones(500)}
    shelf.put(3, larger)
    assert value_of(shelf, 3) == 1.0


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_manifest_says_what_is_sent(dtype: torch.dtype | None) -> None:
    kept = Shelf("policy", 128, dtype).put(11, weights(1))
    assert kept.manifest.model == "policy" and kept.manifest.step == 11 and kept.manifest.what == "full"
    assert {spec.dtype for spec in kept.manifest.tensors} == {"float32" if dtype is None else "bfloat16"}
    assert kept.nbytes == sum(kept.bucket(number).numel() for number in kept.mine)
