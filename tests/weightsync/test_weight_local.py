"""The in-process transport on a logical clock: the same promises as over gloo."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
import torch
from weightsync_support import GENEROUS, Gauged, assert_weights, transfer_to, weights

from segue.clock import LogicalCompute, LogicalLoop, now
from segue.ports.transfer import TransferResult
from segue.ports.weights import Probe, TransferFailed, WeightReceiver, WeightSender
from weightsync.local import LocalHub, LocalReceiver, LocalSender
from weightsync.manifest import layout
from weightsync.staged import Staged

T = TypeVar("T")
COST = 0.05


def run(main: Coroutine[Any, Any, T]) -> T:
    """On a loop of its own, whose clock is logical."""
    loop = LogicalLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


class Fleet:
    def __init__(self, *names: str, expected: dict[str, torch.Tensor] | None = None) -> None:
        self.hub = LocalHub()
        self.gauged = Gauged()
        self.sender = LocalSender(self.hub, "policy", 8192, COST, LogicalCompute(), self.gauged.metrics, self.gauged.clock)
        self.receiver_gauged = {name: Gauged() for name in names}
        self.receivers = {
            name: LocalReceiver(self.hub, name, gauged.metrics, expected=None if expected is None else layout(expected))
            for name, gauged in self.receiver_gauged.items()
        }

    async def run(
        self, members: list[str], number: int, step: int, deadline: float = GENEROUS
    ) -> tuple[TransferResult, dict[str, Staged | str]]:
        transfer = transfer_to(self.sender.address, members, number, step, deadline_seconds=deadline)

        async def stage(name: str) -> Staged | str:
            try:
                return await self.receivers[name].stage(transfer, members.index(name) + 1)
            except TransferFailed as error:
                return str(error)

        here = [name for name in members if name in self.receivers]
        sending = asyncio.ensure_future(self.sender.send(transfer))
        ends = await asyncio.gather(*map(stage, here))
        return await sending, dict(zip(here, ends, strict=True))


def test_everybody_gets_buffers_of_its_own_after_the_transfers_time() -> None:
    async def main() -> None:
        fleet = Fleet("n0", "n1", expected=weights(0))
        held = []
        for step in range(3):
            probe = Probe([5, 0, 7], [-0.1 - step, -1e-9])
            fleet.sender.publish(step, weights(step), probe)
            began = now()
            result, ends = await fleet.run(["n0", "n1"], number=step, step=step)
            assert now() - began == pytest.approx(COST)
            assert result.ok and result.transfer_seconds == pytest.approx(COST) and result.bytes > 0
            assert all(isinstance(end, Staged) and end.manifest.probe == probe for end in ends.values())
            held.append(ends)
        for step, ends in enumerate(held):
            first, second = ends["n0"], ends["n1"]
            assert isinstance(first, Staged) and isinstance(second, Staged)
            assert_weights(first, step)
            assert_weights(second, step)
            first.tensors()["layers.0.a"].zero_()
            assert_weights(second, step)
        assert fleet.gauged.metrics.value("segue_weight_sync_bytes_total") == 3 * result.bytes
        assert fleet.receiver_gauged["n0"].metrics.value("segue_weight_sync_bytes_total") == 3 * result.bytes
        assert fleet.gauged.clock.state == "wait_version"

    run(main())


def test_the_sender_may_come_first_or_last() -> None:
    async def main() -> None:
        fleet = Fleet("n0")
        fleet.sender.publish(0, weights(0))
        for number, sender_first in enumerate((True, False)):
            transfer = transfer_to("local", ["n0"], number, 0)
            ends: tuple[Coroutine[Any, Any, Any], ...] = (fleet.sender.send(transfer), fleet.receivers["n0"].stage(transfer, 1))
            tasks = []
            for end in ends if sender_first else ends[::-1]:
                tasks.append(asyncio.ensure_future(end))
                await asyncio.sleep(1.0)
            await asyncio.gather(*tasks)

    run(main())


def test_a_missing_member_is_named_at_the_deadline() -> None:
    async def main() -> None:
        fleet = Fleet("n0")
        fleet.sender.publish(0, weights(0))
        result, ends = await fleet.run(["n0", "n1"], number=0, step=0, deadline=7.0)
        assert now() == pytest.approx(7.0)
        assert result.missing == ["n1"] and "n1 did not come within 7.0 s" in result.reason
        assert isinstance(ends["n0"], str)
        assert fleet.gauged.failures("stage") == 1
        result, ends = await fleet.run(["n0"], number=1, step=0)
        assert result.ok

    run(main())


def test_a_sender_that_never_comes_is_a_sentence_at_the_deadline() -> None:
    async def main() -> None:
        fleet = Fleet("n0")
        with pytest.raises(TransferFailed, match=r"n0 did not receive .* the sender did not answer within 3\.0 s"):
            await fleet.receivers["n0"].stage(transfer_to("local", ["n0"], 0, 0, deadline_seconds=3.0), 1)
        assert now() == pytest.approx(3.0)

    run(main())


def test_wrong_shapes_and_unequal_ties_are_refused() -> None:
    async def main() -> None:
        fleet = Fleet("n0", expected=weights(0) | {"layers.2.a": torch.zeros(2, 2)})
        fleet.sender.publish(0, weights(0))
        result, ends = await fleet.run(["n0"], number=0, step=0)
        assert result.missing == ["n0"] and "layers.2.a as float32[33, 40]" in result.reason == ends["n0"]
        fleet = Fleet("n0", expected=weights(0))
        fleet.sender.publish(0, weights(0) | {"head.weight": weights(1)["head.weight"]})
        result, ends = await fleet.run(["n0"], number=0, step=0)
        assert "the model ties head.weight to embed.weight" in result.reason == ends["n0"]

    run(main())


def test_stale_superseded_abandoned_and_unknown() -> None:
    async def main() -> None:
        fleet = Fleet("n0", "n1")
        receiver = fleet.receivers["n0"]
        fleet.sender.publish(3, weights(3))
        result, ends = await fleet.run(["n0"], number=4, step=1)
        assert "weights of step 1 are not kept any more (kept: 3)" in result.reason == ends["n0"]
        result, ends = await fleet.run(["n0"], number=4, step=3)
        assert "stale" in result.reason and "stale" in str(ends["n0"])

        old = asyncio.ensure_future(receiver.stage(transfer_to("local", ["n0"], 5, 3), 1))
        await asyncio.sleep(0.1)
        result, ends = await fleet.run(["n0"], number=6, step=3)
        assert result.ok
        with pytest.raises(TransferFailed, match="superseded by transfer 6"):
            await old

        transfer = transfer_to("local", ["n0", "n1"], 7, 3)
        sending = asyncio.ensure_future(fleet.sender.send(transfer))
        leaving = asyncio.ensure_future(receiver.stage(transfer, 1))
        await asyncio.sleep(0.1)
        leaving.cancel()
        await asyncio.wait([leaving])
        with pytest.raises(TransferFailed, match="n0 gave the transfer up"):
            await fleet.receivers["n1"].stage(transfer, 2)
        result = await sending
        assert not result.ok and result.missing == []

    run(main())


def test_closed_ends_refuse() -> None:
    async def main() -> None:
        fleet = Fleet("n0")
        waiting = asyncio.ensure_future(fleet.receivers["n0"].stage(transfer_to("local", ["n0"], 0, 0), 1))
        await asyncio.sleep(0.1)
        fleet.receivers["n0"].close()
        with pytest.raises(TransferFailed, match="closed"):
            await waiting
        fleet.sender.close()
        result = await fleet.sender.send(transfer_to("local", ["n0"], 1, 0))
        assert "closed" in result.reason

    run(main())


def test_both_ends_keep_their_ports() -> None:
    async def main() -> None:
        ours, theirs = Gauged(), Gauged()
        hub = LocalHub()
        sender: WeightSender = LocalSender(
            hub, "policy", 8192, COST, LogicalCompute(), ours.metrics, ours.clock, dtype=torch.bfloat16
        )
        receiver: WeightReceiver = LocalReceiver(hub, "n0", theirs.metrics, model_name="policy")
        sender.publish(0, weights(0))
        transfer = transfer_to("local", ["n0"], 0, 0)
        sending = asyncio.ensure_future(sender.send(transfer))
        staged = await receiver.stage(transfer, 1)
        assert (await sending).ok
        assert staged.tensors()["layers.0.a"].dtype == torch.bfloat16

    run(main())
