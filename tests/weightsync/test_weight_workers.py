"""Workers that receive for themselves: a node's `WorkersReceiver`, and the ends of its workers in threads of this process."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import torch
from weightsync_support import GENEROUS, Gauged, make_sender, transfer_to, weights

from segue.ports.engine import EngineDead
from segue.ports.transfer import Transfer, members_of, node_of
from segue.ports.weights import TransferFailed, WorkerWeights
from weightsync.group import BroadcastGroup
from weightsync.manifest import Layout, layout
from weightsync.receiver import TorchReceiver
from weightsync.sender import TorchSender
from weightsync.worker import WorkerEnd
from weightsync.workers import WorkersReceiver

EXPECTED = layout(weights(0))


class Engine:
    """`ranks` workers' ends, as the backend in vLLM makes them."""

    def __init__(self, ranks: int = 1, expected: Layout = EXPECTED) -> None:
        self.gauged = Gauged()
        self.ends: list[WorkerEnd] = []
        self.connected = asyncio.Event()
        self.receiver = WorkersReceiver("n0", self.connect, self.gauged.metrics, ranks=ranks, expected=expected)

    async def connect(self, info: dict[str, Any]) -> None:
        for end in self.ends:
            end.close()
        self.ends = [await asyncio.to_thread(self._end, info, member) for member in info["members"]]
        self.connected.set()

    def _end(self, info: dict[str, Any], member: str) -> WorkerEnd:
        expected = msgspec.convert(info["expected"], Layout)
        return WorkerEnd(info["socket"], member, lambda metrics: TorchReceiver(member, "gloo", "cpu", metrics, expected=expected))

    def close(self) -> None:
        self.receiver.close()
        for end in self.ends:
            end.close()


@asynccontextmanager
async def world(ranks: int = 1, expected: Layout = EXPECTED) -> AsyncIterator[tuple[TorchSender, Engine]]:
    sender, engine = make_sender(roll_call_seconds=1.0), Engine(ranks, expected)
    sender.publish(0, weights(0))
    try:
        async with asyncio.timeout(4 * GENEROUS):
            yield sender, engine
    finally:
        sender.close()
        engine.close()
        for thread in threading.enumerate():  # one that came back from C++ while the process exits would abort it
            if thread.name in ("weightsync-receive", "weightsync-send", "segue-weights"):
                await asyncio.to_thread(thread.join, GENEROUS)


async def both(sender: TorchSender, engine: Engine, transfer: Transfer) -> tuple[Any, WorkerWeights | str]:
    """The sender's result, and the handle or the sentence."""

    async def stage() -> WorkerWeights | str:
        try:
            return await engine.receiver.stage(transfer, 1)
        except TransferFailed as error:
            return str(error)

    return await asyncio.gather(sender.send(transfer), stage())


def check(end: WorkerEnd, transfer: int, step: int) -> None:
    tensors = dict(end.tensors(transfer))
    assert tensors.keys() == weights(step).keys()
    assert all(tensors[name].equal(tensor) for name, tensor in weights(step).items())


@pytest.mark.parametrize("ranks", [1, 2])
async def test_every_worker_holds_what_was_sent_and_the_node_a_handle(ranks: int) -> None:
    async with world(ranks) as (sender, engine):
        members = members_of("n0", ranks)
        for step in range(3):
            sender.publish(step, weights(step))
            result, handle = await both(sender, engine, transfer_to(sender.address, members, number=step, step=step))
            assert result.ok, result.reason
            assert isinstance(handle, WorkerWeights)
            assert (handle.version, handle.transfer, handle.manifest.step) == (100 + step, step, step)
            assert len(handle.manifest.checksums) == len(handle.manifest.buckets)
            with pytest.raises(AssertionError, match="in the engine's workers"):
                handle.tensors()
            for end in engine.ends:
                check(end, step, step)
        assert engine.gauged.metrics.value("segue_weight_sync_bytes_total") == ranks * 3 * result.bytes
        assert engine.gauged.metrics.value("segue_weight_sync_seconds", phase="transfer") == 3 * ranks


@pytest.mark.parametrize("broken", [False, True])
async def test_without_staging_buckets_arrive_as_they_are_loaded(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever loads them hears of damage before the end."""
    async with world(2) as (sender, engine):
        members = members_of("n0", 2)
        begin = BroadcastGroup.begin

        def damaging(group: BroadcastGroup, bucket: torch.Tensor, *args: Any) -> Any:
            damaged = bucket.clone()
            if group.rank == 0 and broken:
                damaged[3] ^= 1
                return begin(group, damaged, *args)
            return begin(group, bucket, *args)

        monkeypatch.setattr(BroadcastGroup, "begin", damaging)
        transfer = transfer_to(sender.address, members, number=0, step=0)
        sending = asyncio.ensure_future(sender.send(transfer))
        handle = await engine.receiver.open(transfer, 1)
        assert handle.seconds == transfer.deadline_seconds and handle.manifest.checksums == []

        def load(end: WorkerEnd) -> dict[str, torch.Tensor]:
            return {name: tensor.clone() for name, tensor in end.tensors(0)}

        loads = [asyncio.to_thread(load, end) for end in engine.ends]
        ends = await asyncio.gather(*loads, return_exceptions=True)
        result = await sending
        assert result.ok is not broken
        for end in ends:
            if broken:
                assert isinstance(end, TransferFailed)
            else:
                assert isinstance(end, dict) and end.keys() == weights(0).keys()
                assert all(end[name].equal(tensor) for name, tensor in weights(0).items())
        handle.close()
        monkeypatch.undo()
        again, staged = await both(sender, engine, transfer_to(sender.address, members, number=1, step=0))
        assert again.ok and isinstance(staged, WorkerWeights)


async def test_a_load_that_waits_for_a_bucket_ends_with_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process's main thread must not be left waiting for what nobody hands over any more."""
    begin, submit = BroadcastGroup.begin, asyncio.run_coroutine_threadsafe
    halted, asked, asks = threading.Event(), threading.Event(), itertools.count(1)
    sent = itertools.count()

    def halting(group: BroadcastGroup, *args: Any) -> Any:
        if group.rank == 0 and next(sent) == 1:
            assert halted.wait(GENEROUS)
        return begin(group, *args)

    def asking(*args: Any) -> Any:
        future = submit(*args)
        if next(asks) == 2:
            asked.set()
        return future

    monkeypatch.setattr(BroadcastGroup, "begin", halting)
    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", asking)
    async with world() as (sender, engine):
        transfer = transfer_to(sender.address, ["n0"], number=0, step=0)
        sending = asyncio.ensure_future(sender.send(transfer))
        handle = await engine.receiver.open(transfer, 1)
        load = asyncio.ensure_future(asyncio.to_thread(lambda: list(engine.ends[0].tensors(0))))
        assert await asyncio.to_thread(asked.wait, GENEROUS)
        await asyncio.to_thread(engine.ends[0].close)
        with pytest.raises(TransferFailed, match="n0 was closed while weights arrived"):
            await load
        handle.close()
        halted.set()
        assert not (await sending).ok


def test_names_of_members() -> None:
    assert members_of("rollout-3", 1) == ["rollout-3"]
    assert members_of("rollout-3", 2) == ["rollout-3/0", "rollout-3/1"]
    assert [node_of(member) for member in ("rollout-3", "rollout-3/1")] == ["rollout-3"] * 2


async def test_other_shapes_are_one_sentence_and_nothing_is_sent() -> None:
    other = layout({**weights(0), "layers.2.a": weights(0)["layers.2.a"].T})
    async with world(expected=other) as (sender, engine):
        result, sentence = await both(sender, engine, transfer_to(sender.address, ["n0"], number=0, step=0))
        assert not result.ok and result.missing == ["n0"] and result.bytes == 0
        assert isinstance(sentence, str) and "\n" not in sentence
        assert "layers.2.a as float32[33, 40] where the model has float32[40, 33]" in sentence


async def test_what_nobody_wants_any_more_is_let_go() -> None:
    """A handle that was dropped, a staging that was cancelled: neither can be loaded, and the next transfer is as good."""
    async with world() as (sender, engine):
        _, handle = await both(sender, engine, transfer_to(sender.address, ["n0"], number=0, step=0))
        assert isinstance(handle, WorkerWeights)
        del handle
        gc.collect()
        cancelled = asyncio.ensure_future(
            engine.receiver.stage(transfer_to(sender.address, ["n0"], number=1, step=0), 1)  # nobody sends it
        )
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        result, handle = await both(sender, engine, transfer_to(sender.address, ["n0"], number=2, step=0))
        assert result.ok and isinstance(handle, WorkerWeights)
        with pytest.raises(RuntimeError, match="does not hold the weights of transfer 0"):
            engine.ends[0].tensors(0)


async def test_a_newer_transfer_takes_the_place_of_one_that_waits() -> None:
    async with world() as (sender, engine):
        old = asyncio.ensure_future(engine.receiver.stage(transfer_to(sender.address, ["n0"], number=1, step=0), 1))
        await asyncio.sleep(0)
        result, handle = await both(sender, engine, transfer_to(sender.address, ["n0"], number=2, step=0))
        assert result.ok and isinstance(handle, WorkerWeights)
        with pytest.raises(TransferFailed, match="superseded by transfer 2"):
            await old
        check(engine.ends[0], 2, 0)
        with pytest.raises(TransferFailed, match="stale"):
            await engine.receiver.stage(transfer_to(sender.address, ["n0"], number=1, step=0), 1)


async def test_a_worker_that_ends_or_cannot_be_reached_is_a_sentence() -> None:
    async with world(2) as (sender, engine):
        members = members_of("n0", 2)
        waiting = asyncio.ensure_future(engine.receiver.stage(transfer_to(sender.address, members, number=0, step=0), 1))
        await engine.connected.wait()
        await asyncio.to_thread(engine.ends[1].close)
        with pytest.raises(EngineDead, match="n0/1 is gone: its worker process ended"):
            await waiting
        with pytest.raises(EngineDead, match="n0/1 is gone"):
            await engine.receiver.stage(transfer_to(sender.address, members, number=1, step=0), 1)


async def test_silence_ends_with_the_deadline() -> None:
    async with world() as (sender, engine):
        await both(sender, engine, transfer_to(sender.address, ["n0"], number=0, step=0))
        frozen = threading.Event()
        engine.ends[0]._loop.call_soon_threadsafe(frozen.wait)
        late = transfer_to(sender.address, ["n0"], number=1, step=0, deadline_seconds=0.3)
        with pytest.raises(TransferFailed, match=r"n0 did not receive version 100 .*: no word by the deadline of 0.3 s from n0"):
            await engine.receiver.stage(late, 1)
        frozen.set()
