"""Buckets handed over as they arrive: to a real embedded engine over real gloo groups, and what every failure leaves behind."""

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from weightsync_processes import deliver
from weightsync_support import (
    SOURCES,
    assert_weights,
    make_receiver,
    make_sender,
    make_source,
    publish_share,
    transfer_to,
    weights,
)

from rollout.embedded import EmbeddedEngine
from segue.clock import ThreadCompute
from segue.ports.engine import EngineDead, PauseMode
from segue.ports.weights import TransferFailed
from weightsync.arriving import Arriving
from weightsync.buckets import bucket_bytes
from weightsync.manifest import layout
from weightsync.receiver import TorchReceiver
from weightsync.sender import TorchSender

sys.path.append(str(Path(__file__).parents[1] / "rollout"))
from engine_models import prompt, reference_logprobs, save, tiny

torch.set_num_threads(1)


class Stream:
    """A sender and one receiver that does not stage."""

    def __init__(self, expected: Mapping[str, torch.Tensor] | None = None) -> None:
        self.sender: TorchSender = make_sender()
        self.receiver: TorchReceiver = make_receiver("n0", expected=None if expected is None else layout(expected))
        self.number = 0

    async def open(self, step: int, deadline_seconds: float = 30.0) -> tuple[Arriving, Any]:
        transfer = transfer_to(self.sender.address, ["n0"], self.number, step, self.number + 1, deadline_seconds)
        self.number += 1
        sending = asyncio.ensure_future(self.sender.send(transfer))
        return await self.receiver.open(transfer, 1), sending

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


@pytest.fixture
async def stream() -> AsyncIterator[Stream]:
    made = Stream()
    yield made
    made.close()


async def test_every_bucket_is_handed_over_once_and_verified_at_the_end(stream: Stream) -> None:
    for step in range(2):
        stream.sender.publish(step, weights(step))
        arriving, sending = await stream.open(step)
        assert arriving.version == 100 + step and arriving.manifest.checksums == []
        got: dict[str, torch.Tensor] = {}
        batches = 0
        async for tensors in arriving.buckets():
            assert not got.keys() & tensors.keys()
            got |= {name: tensor.clone() for name, tensor in tensors.items()}
            batches += 1
        assert (await sending).ok
        assert batches == len(arriving.manifest.buckets) == len(arriving.manifest.checksums) > 3
        assert got.keys() == weights(step).keys()
        assert all(torch.equal(got[name], tensor) for name, tensor in weights(step).items())


async def test_no_more_than_a_few_buckets_are_held_at_a_time(stream: Stream) -> None:
    """That is what it is for. Two under way, one that is loaded; the memory of older ones comes back."""
    stream.sender.publish(0, weights(0, layers=40))
    arriving, sending = await stream.open(0)
    seen: set[int] = set()
    async for tensors in arriving.buckets():
        seen |= {tensor.untyped_storage().data_ptr() for tensor in tensors.values() if tensor.numel()}
        del tensors
    assert (await sending).ok
    sizes = {bucket_bytes(arriving.manifest, number) for number in range(len(arriving.manifest.buckets))}
    assert len(seen) <= 4 * len(sizes) < len(arriving.manifest.buckets) / 2


async def test_a_damaged_bucket_is_found_when_all_are_in(stream: Stream) -> None:
    stream.sender.publish(0, weights(0))
    with stream.sender.shelf.pinned(0) as kept:
        assert kept is not None
        kept.checksums()
        kept.bucket(2)[5] ^= 1
    arriving, sending = await stream.open(0)
    count = 0
    with pytest.raises(TransferFailed, match="bucket 2 arrived damaged at n0"):
        async for _ in arriving.buckets():
            count += 1
    assert count == len(arriving.manifest.buckets) and not (await sending).ok


async def test_whoever_stops_in_the_middle_ends_the_transfer_and_misses_nobody(stream: Stream) -> None:
    stream.sender.publish(0, weights(0))
    arriving, sending = await stream.open(0)
    async for _ in arriving.buckets():
        break
    arriving.close()
    result = await sending
    assert not result.ok and result.missing == [] and "gave the transfer up" in result.reason
    stream.sender.publish(1, weights(1))
    arriving, sending = await stream.open(1)
    assert [len(tensors) > 0 async for tensors in arriving.buckets()] and (await sending).ok


async def test_a_loader_that_hangs_is_left_behind_at_the_deadline(stream: Stream) -> None:
    stream.sender.publish(0, weights(0))
    arriving, sending = await stream.open(0, deadline_seconds=2.0)
    with pytest.raises(TransferFailed):
        async for _ in arriving.buckets():
            await sending  # does not ask for the next one before everything is over
    assert not sending.result().ok


async def test_a_newer_transfer_supersedes_one_that_is_being_loaded(stream: Stream) -> None:
    stream.sender.publish(0, weights(0))
    arriving, sending = await stream.open(0)
    buckets = arriving.buckets()
    await anext(buckets)
    again, sending_again = await stream.open(0)
    with pytest.raises(TransferFailed, match="superseded by transfer 1"):
        await anext(buckets)
    assert [len(tensors) async for tensors in again.buckets()] and (await sending_again).ok
    assert not (await sending).ok


async def test_what_cannot_be_compared_while_it_arrives_is_refused() -> None:
    """The model ties two names that are sent apart: staged weights are compared, here only one is there at a time."""
    stream = Stream(expected=weights(0))
    stream.sender.publish(0, weights(0) | {"head.weight": weights(0)["head.weight"].clone()})
    with pytest.raises(TransferFailed, match=r"which weightsync\.staging = 'none' cannot compare"):
        await stream.open(0)
    stream.close()


async def test_several_sources_arrive_in_the_order_of_the_buckets() -> None:
    sender, source, receiver = make_sender(sources=SOURCES), make_source(), make_receiver("n0")
    serving = asyncio.ensure_future(source.serve(sender.address))
    for rank in (sender, source):
        publish_share(rank, 0)
    transfer = transfer_to(sender.address, ["n0"], 0, 0)
    sending = asyncio.ensure_future(sender.send(transfer))
    arriving = await receiver.open(transfer, 1)
    names = [name async for tensors in arriving.buckets() for name in tensors if name not in arriving.manifest.aliases]
    assert (await sending).ok and names == [spec.name for spec in arriving.manifest.tensors]
    result, [staged] = await deliver(sender, [receiver], transfer_to(sender.address, ["n0"], 1, 0))  # the same groups
    assert result.ok and not isinstance(staged, str)
    assert_weights(staged, 0)
    source.close()
    sender.close()
    receiver.close()
    await serving


# --- with an engine -----------------------------------------------------------------------------------------------------

PROBE = prompt(3, 40)


class Loading:
    """An embedded engine with weights of step 0, paused, and a sender of the steps after it."""

    def __init__(self, folder: Path, tied: bool) -> None:
        self.models = {step: tiny(step, tie_word_embeddings=tied) for step in range(3)}
        self.stream = Stream(expected=self.named(0))
        self.compute = ThreadCompute("engine")
        self.engine = EmbeddedEngine(
            save(self.models[0], folder), slots=2, max_tokens=64, dtype="float32", device="cpu", compute=self.compute
        )

    def named(self, step: int) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = self.models[step].state_dict()
        return found

    async def start(self) -> None:
        await self.engine.start()
        await self.engine.pause(PauseMode.ABORT, 1)
        await self.load(0)

    async def load(self, step: int) -> None:
        self.stream.sender.publish(step, self.named(step))
        arriving, sending = await self.stream.open(step)
        await self.engine.load_arriving(arriving)
        assert (await sending).ok and self.engine.version == 100 + step

    async def check(self, step: int) -> None:
        expected = reference_logprobs(self.models[step], PROBE, 1)
        assert await self.engine.score(PROBE) == pytest.approx(expected, abs=1e-4)

    async def stop(self) -> None:
        await self.engine.stop()
        self.compute.close()
        self.stream.close()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("staging", ["device", "host", "none"])
async def test_every_way_of_staging_loads_exactly_what_was_published(staging: str, tied: bool, tmp_path: Path) -> None:
    made = Loading(tmp_path, tied)
    await made.start()
    await made.check(0)
    for step in (1, 2):
        if staging == "none":
            await made.load(step)
        else:
            receiver = TorchReceiver("n0", "gloo", "cpu", make_receiver("n0")._metrics, staging=staging)
            made.stream.sender.publish(step, made.named(step))
            transfer = transfer_to(made.stream.sender.address, ["n0"], 10 + step, step, group=10 + step)
            result, [staged] = await deliver(made.stream.sender, [receiver], transfer)
            assert result.ok and not isinstance(staged, str)
            await made.engine.load(100 + step, staged)
            receiver.close()
        await made.check(step)
    await made.stop()


async def test_a_transfer_that_breaks_in_the_middle_ends_the_engine(tmp_path: Path) -> None:
    made = Loading(tmp_path, tied=False)
    await made.start()
    made.stream.sender.publish(1, made.named(1))
    arriving, sending = await made.stream.open(1)
    buckets = arriving.buckets

    async def breaking() -> AsyncIterator[dict[str, torch.Tensor]]:
        async for tensors in buckets():
            yield tensors
            made.stream.sender.close()  # after the first bucket is in
            raise TransferFailed("the store of the weight sender is gone")

    arriving.buckets = breaking  # type: ignore[method-assign]
    with pytest.raises(EngineDead, match="loading version 101 ended half way: TransferFailed: the store"):
        await made.engine.load_arriving(arriving)
    assert not (await sending).ok
    with pytest.raises(EngineDead):
        await made.engine.score(PROBE)
    await made.stop()


async def test_weights_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    made = Loading(tmp_path, tied=False)
    await made.start()
    made.stream.receiver.close()
    made.stream.receiver = make_receiver("n0")  # one that knows no layout: the engine itself must see it
    made.stream.sender.publish(1, made.named(1) | {"model.norm.weight": torch.ones(7)})
    arriving, sending = await made.stream.open(1)
    with pytest.raises(ValueError, match=r"version 101 have model.norm.weight of shape \[7\]"):
        await made.engine.load_arriving(arriving)
    assert not (await sending).ok and made.engine.version == 100
    await made.check(0)
    await made.load(2)
    await made.check(2)
    await made.stop()
