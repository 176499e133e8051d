"""What goes wrong on the way of weights into vLLM: before the swap the old ones serve on, after it nothing serves."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import torch
from engine_contract import DEADLINE, Consumer, ask, close, run
from engine_models import named, prompt, reference_logprobs, save, tiny
from vllm_harness import EXTENSION, MAX_TOKENS, SIZES, Cores, Progress, VllmHarness, model_of
from vllm_weights import SentReceiver

from rollout.vllm.leftovers import shared_memory_of
from segue.ports.engine import EngineDead, PauseMode
from segue.ports.transfer import Transfer, members_of
from segue.ports.weights import Probe, TransferFailed
from weightsync.group import BroadcastGroup
from weightsync.manifest import layout

pytestmark = [
    pytest.mark.processes,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
BEYOND = 600.0
"""Seconds of a deadline that no test sees: what must end before ends by itself."""


@pytest_asyncio.fixture(loop_scope="session")
async def harness(cores: Cores) -> AsyncIterator[VllmHarness]:
    harness = VllmHarness(cores)
    yield harness
    await harness.close()


def published(tied: bool = False) -> Callable[[int], tuple[dict[str, torch.Tensor], Probe | None]]:
    return lambda version: (named(model_of(version, tied)), None)


@contextmanager
def receiving(engine: Any, tied: bool = False, **options: Any) -> Iterator[SentReceiver]:
    receiver = SentReceiver("n0", engine, published(tied), **options)
    try:
        yield receiver
    finally:
        receiver.close()


def transfer(number: int, version: int = 1) -> Transfer:
    return Transfer(version, version, number, number, ["n0"], "", 30.0)


async def swap(harness: VllmHarness, engine: Any, version: int, staged: Any) -> None:
    epoch = harness.epoch()
    await engine.pause(PauseMode.ABORT, epoch)
    await engine.load(version, staged)
    await engine.resume(epoch)


async def serves(harness: VllmHarness, engine: Any, version: int, tied: bool = False) -> None:
    """What it samples now is of these weights, and says so."""
    assert engine.version == version
    context = prompt(500, 12)
    got = await run(engine, ask(context, lineage=version))
    assert set(got.versions) == {version}
    close(got.logprobs, reference_logprobs(harness.reference(version, tied), context + got.tokens, len(context)))


class Hold:
    """Stops the sender, in this process, before its third bucket."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._loop = asyncio.get_running_loop()
        self.reached = asyncio.Event()
        self.go = threading.Event()
        begin, count = BroadcastGroup.begin, 0

        def holding(group: Any, *args: Any) -> Any:
            nonlocal count
            count += 1
            if count == 3:
                self._loop.call_soon_threadsafe(self.reached.set)
                assert self.go.wait(BEYOND)
            return begin(group, *args)

        monkeypatch.setattr(BroadcastGroup, "begin", holding)


async def test_weights_are_staged_beside_decoding_and_swapped_in_a_pause(
    harness: VllmHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers sit in a broadcast, and steps go on; what is staged changes nothing before it is loaded."""
    engine: Any = await harness.engine()
    progress = Progress(engine, await harness.cores.get(False))
    hold = Hold(monkeypatch)
    async with asyncio.timeout(DEADLINE):
        with receiving(engine) as receiver:
            staging = asyncio.ensure_future(receiver.stage(transfer(1), 1))
            await hold.reached.wait()
            consumers = [Consumer(engine, ask(prompt(501 + i, 9), max_tokens=100)) for i in range(3)]
            await progress.more(60)
            assert not staging.done()
            hold.go.set()
            staged = await staging
            assert receiver.result is not None and receiver.result.ok
            for consumer in consumers:
                got = await consumer.task
                close(got.logprobs, reference_logprobs(harness.reference(0), consumer.request.tokens + got.tokens, 9))
            await serves(harness, engine, 0)
            await swap(harness, engine, 1, staged)
            await serves(harness, engine, 1)


@pytest.mark.parametrize("tied", [False, True])
async def test_without_staging_buckets_are_loaded_as_they_arrive(harness: VllmHarness, tied: bool) -> None:
    """F38: the transfer is in the pause; loaders keep views of one bucket while the next ones come."""
    engine: Any = await harness.engine(tied=tied)
    async with asyncio.timeout(DEADLINE):
        with receiving(engine, tied=tied) as receiver:
            for version in (1, 2):
                epoch = harness.epoch()
                await engine.pause(PauseMode.FREEZE, epoch)
                await engine.load_arriving(await receiver.open(transfer(version, version), 1))
                await engine.resume(epoch)
                await serves(harness, engine, version, tied)
            await receiver.settled()


async def test_other_shapes_are_one_sentence_before_anything_is_sent(harness: VllmHarness) -> None:
    """F35: the old weights, and their version, serve on."""
    engine: Any = await harness.engine()
    good = named(model_of(0, False))
    name = "model.layers.1.mlp.down_proj.weight"
    with receiving(engine, expected=layout({**good, name: good[name][:-1]})) as receiver:
        with pytest.raises(TransferFailed) as refused:
            await receiver.stage(transfer(1), 1)
        assert f"{name} as float32[64, 48] where the model has float32[63, 48]" in str(refused.value)
        assert "\n" not in str(refused.value)
        assert receiver.result is not None and (receiver.result.missing, receiver.result.bytes) == (["n0"], 0)
    await serves(harness, engine, 0)


async def test_a_bucket_that_is_damaged_on_the_way_is_not_loaded(harness: VllmHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """F35: the old weights serve on, and the same members may try again."""
    engine: Any = await harness.engine()
    with receiving(engine) as receiver, monkeypatch.context() as patch:
        begin = BroadcastGroup.begin

        def damaging(group: Any, bucket: torch.Tensor, *args: Any) -> Any:
            damaged = bucket.clone()
            damaged[7] ^= 1
            return begin(group, damaged, *args)

        patch.setattr(BroadcastGroup, "begin", damaging)
        with pytest.raises(TransferFailed, match="n0"):
            await receiver.stage(transfer(1), 1)
        assert receiver.result is not None and not receiver.result.ok and receiver.result.missing == []
        patch.undo()
        await serves(harness, engine, 0)
        await swap(harness, engine, 1, await receiver.stage(transfer(2), 1))
        await serves(harness, engine, 1)


async def test_a_sender_that_is_killed_in_the_middle_leaves_the_old_weights_serving(harness: VllmHarness) -> None:
    """Long before the deadline."""
    engine: Any = await harness.engine()
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(Path(__file__).with_name("vllm_sender.py")), "n0", "1", "1", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(2 * DEADLINE):
        address = (await process.stdout.readline()).decode().removeprefix("address ").strip()
        with receiving(engine) as receiver:
            order = msgspec.structs.replace(transfer(1), address=address, deadline_seconds=BEYOND)
            staging = asyncio.ensure_future(receiver.receiver.stage(order, 1))
            assert await process.stdout.readline() == b"halted\n"
            process.send_signal(signal.SIGKILL)
            with pytest.raises(TransferFailed, match="n0 did not receive version 1"):
                await staging
            await process.wait()
            await serves(harness, engine, 0)
            await swap(harness, engine, 1, await receiver.stage(transfer(2), 1))
            await serves(harness, engine, 1)


async def test_a_frozen_worker_is_named_by_the_deadline(harness: VllmHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Node and sender both know; when it is back, it serves what it served, and takes part again."""
    engine: Any = await harness.engine()
    core = await harness.cores.get(False)
    hold = Hold(monkeypatch)
    with receiving(engine, seconds=4.0) as receiver:
        async with asyncio.timeout(DEADLINE):
            staging = asyncio.ensure_future(receiver.stage(transfer(1), 1))
            await hold.reached.wait()
            os.kill(core.pids()[-1], signal.SIGSTOP)
            hold.go.set()
            with pytest.raises(TransferFailed, match=r"n0 did not receive version 1 .*: no word by the deadline of 4 s from n0"):
                await staging
            os.kill(core.pids()[-1], signal.SIGCONT)
            assert receiver.result is not None and receiver.result.missing == ["n0"]
            await serves(harness, engine, 0)
            receiver.seconds = 30.0
            await swap(harness, engine, 1, await receiver.stage(transfer(2), 1))
            await serves(harness, engine, 1)


async def test_half_loaded_weights_then_a_dead_worker(harness: VllmHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """F39: a loader that fails in the middle ends the engine, which answers nothing more. So does a worker that is killed while
    it receives, and the node need not wait for the deadline."""
    engine: Any = await harness.engine(tied=True)
    core = await harness.cores.get(True)
    rings = shared_memory_of(core.pids())
    assert rings and all(path.exists() for path in rings)
    async with asyncio.timeout(DEADLINE):
        with receiving(engine, tied=True) as receiver:
            staged = await receiver.stage(transfer(1), 1)
            await core.llm.collective_rpc("segue_break_loader", args=(5,))
            epoch = harness.epoch()
            await engine.pause(PauseMode.FREEZE, epoch)
            early = Consumer(engine, ask(prompt(510, 9), lineage=1))
            with pytest.raises(EngineDead, match="the loader ran out of luck"):
                await engine.load(1, staged)
            assert engine.version == 0
            with pytest.raises(EngineDead, match="the loader ran out of luck"):
                await engine.resume(epoch)
            with pytest.raises(EngineDead):
                await early.task
        other: Any = await harness.engine(tied=True, version=None)
        hold = Hold(monkeypatch)
        with receiving(other, tied=True, seconds=BEYOND) as receiver:
            staging = asyncio.ensure_future(receiver.stage(transfer(1), 1))
            await hold.reached.wait()
            os.kill(core.pids()[-1], signal.SIGKILL)
            hold.go.set()
            with pytest.raises(EngineDead, match="n0 is gone: its worker process ended"):
                await staging
            assert receiver.result is not None and receiver.result.missing == ["n0"]
            with pytest.raises(EngineDead, match=r"vLLM ended \((?!EngineDeadError)"):
                await other.pause(PauseMode.ABORT, harness.epoch())
        await core.stop()
        assert not any(path.exists() for path in rings), "left in /dev/shm"


@pytest.mark.full
async def test_each_of_two_tensor_parallel_workers_receives_everything(tmp_path: Path) -> None:
    """Every worker is a member of the transfer, gets full tensors, and takes its shard of them."""
    from rollout.vllm.build import build_engine

    models = [tiny(seed, **{**SIZES, "num_key_value_heads": 2}) for seed in range(3)]
    engine: Any = build_engine(
        save(models[0], tmp_path),
        slots=2,
        max_tokens=MAX_TOKENS,
        score_tokens=64,
        dtype="float32",
        device="cpu",
        worker_extension=EXTENSION,
        engine_args={"tensor_parallel_size": 2},
    )
    await engine.start()
    receiver = SentReceiver("n0", engine, lambda version: (named(models[version]), None), ranks=2)
    try:
        for version, model in enumerate(models):
            order = Transfer(version, version, version + 1, 1, members_of("n0", 2), "", 30.0)
            staged = await receiver.stage(order, 1)
            await engine.pause(PauseMode.ABORT, version + 1)
            await engine.load(version, staged)
            close(await engine.score(prompt(3, 40)), reference_logprobs(model, prompt(3, 40), 1))
            await engine.resume(version + 1)
            got = await run(engine, ask(prompt(1, 10), lineage=version))
            close(got.logprobs, reference_logprobs(model, prompt(1, 10) + got.tokens, 10))
    finally:
        receiver.close()
        await engine.stop()
