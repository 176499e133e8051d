"""Transfers over real gloo groups, sender and receivers in one process (each receiver on connections and a thread of its own)."""

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
import torch
import torch.distributed as dist
from weightsync_support import (
    HOST,
    PORTS,
    Gauged,
    assert_weights,
    make_receiver,
    make_sender,
    transfer_to,
    weights,
)

from segue.errors import UserError
from segue.ports.transfer import TransferResult
from segue.ports.weights import Probe, TransferFailed, WeightReceiver, WeightSender
from weightsync import group
from weightsync.crew import Deadline
from weightsync.manifest import layout, payload_bytes
from weightsync.receiver import TorchReceiver
from weightsync.sender import TorchSender
from weightsync.staged import Staged
from weightsync.store import Channel, Sweeper, connect_store, join_address, local_address, serve_store, split_address

SHORT = 2.0
"""Seconds for transfers that are to fail at their deadline."""


class Fleet:
    """A sender and its receivers."""

    def __init__(self) -> None:
        self.gauged = Gauged()
        self.sender = make_sender(self.gauged)
        self.receivers: dict[str, TorchReceiver] = {}
        self.receiver_gauged: dict[str, Gauged] = {}

    def add(self, name: str, expected: dict[str, torch.Tensor] | None = None) -> TorchReceiver:
        self.receiver_gauged[name] = Gauged()
        layout_of = None if expected is None else layout(expected)
        self.receivers[name] = make_receiver(name, self.receiver_gauged[name], layout_of)
        return self.receivers[name]

    async def run(
        self, members: list[str], number: int, step: int, group: int = 1, deadline: float = 30.0
    ) -> tuple[TransferResult, dict[str, Staged | TransferFailed]]:
        """One transfer to `members`, of which those that are in the fleet take part."""
        transfer = transfer_to(self.sender.address, members, number, step, group, deadline)

        async def stage(name: str) -> Staged | TransferFailed:
            try:
                return await self.receivers[name].stage(transfer, members.index(name) + 1)
            except TransferFailed as error:
                return error

        here = [name for name in members if name in self.receivers]
        result, *ends = await asyncio.gather(self.sender.send(transfer), *map(stage, here))
        assert isinstance(result, TransferResult)
        return result, dict(zip(here, ends, strict=True))  # type: ignore[arg-type]

    def close(self) -> None:
        self.sender.close()
        for receiver in self.receivers.values():
            receiver.close()


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    made = Fleet()
    yield made
    made.close()


def assert_all(result: TransferResult, ends: dict[str, Staged | TransferFailed], step: int) -> None:
    assert result.ok and result.missing == [] and result.reason == ""
    for end in ends.values():
        assert isinstance(end, Staged), end
        assert_weights(end, step)
        assert end.version == result.version == 100 + step


def _client(address: str) -> dist.TCPStore:
    return connect_store(address, Deadline(20.0))


def sentences(ends: dict[str, Staged | TransferFailed]) -> dict[str, str]:
    assert all(isinstance(end, TransferFailed) for end in ends.values()), ends
    return {name: str(end) for name, end in ends.items()}


@pytest.mark.parametrize("count", [1, 3])
async def test_every_receiver_gets_every_version_over_one_group(
    fleet: Fleet, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several versions in a row: the group is built once by everybody, and used again."""
    built: list[int] = []
    _count_builds(monkeypatch, built.append)
    members = [f"n{i}" for i in range(count)]
    for name in members:
        fleet.add(name, weights(0))
    for step in range(3):
        fleet.sender.publish(step, weights(step))
        result, ends = await fleet.run(members, number=step, step=step)
        assert_all(result, ends, step)
        assert result.bytes == payload_bytes(fleet.sender.publish(step, weights(step)))
    assert sorted(built) == list(range(count + 1))


def _count_builds(monkeypatch: pytest.MonkeyPatch, seen: Callable[[int], None]) -> None:
    real = group._gloo

    def counting(store: object, rank: int, *args: object) -> object:
        seen(rank)
        return real(store, rank, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(group, "_gloo", counting)


async def test_the_probe_of_the_version_that_is_sent_arrives_with_it(fleet: Fleet) -> None:
    fleet.add("n0", weights(0))
    probes = {step: Probe([5, 0, 7], [-0.1 - step, -1e-9]) for step in range(2)}
    for step, probe in probes.items():
        fleet.sender.publish(step, weights(step), probe)
    for step, probe in probes.items():
        result, ends = await fleet.run(["n0"], number=step, step=step)
        assert_all(result, ends, step)
        assert isinstance(end := ends["n0"], Staged) and end.manifest.probe == probe
    fleet.sender.publish(2, weights(2))
    _, ends = await fleet.run(["n0"], number=2, step=2)
    assert isinstance(end := ends["n0"], Staged) and end.manifest.probe is None


async def test_metrics_and_states_of_both_ends(fleet: Fleet) -> None:
    fleet.add("n0")
    fleet.sender.publish(4, weights(4))
    result, _ = await fleet.run(["n0"], number=0, step=4)
    for gauged, phases in ((fleet.gauged, ("gather", "transfer")), (fleet.receiver_gauged["n0"], ("transfer",))):
        snapshot = gauged.metrics.snapshot()
        for phase in phases:
            assert snapshot[f'segue_weight_sync_seconds_count{{phase="{phase}"}}'] == 1
        assert gauged.metrics.value("segue_weight_sync_bytes_total") == result.bytes > 0
        assert gauged.metrics.value("segue_weight_sync_started_timestamp_seconds") == 0
        assert gauged.failures("stage") == gauged.failures("transfer") == 0
    assert fleet.gauged.clock.state == "wait_version"
    assert fleet.gauged.clock.seconds()["transfer"] > 0 and fleet.gauged.clock.seconds()["stage"] > 0


async def test_a_started_transfer_shows_since_when(fleet: Fleet) -> None:
    fleet.sender.publish(0, weights(0))
    running = asyncio.ensure_future(fleet.sender.send(transfer_to(fleet.sender.address, ["n0"], 0, 0)))
    store = _client(fleet.sender.address)
    await asyncio.to_thread(store.wait, ["transfer/0/head"])
    gauged = fleet.gauged
    assert gauged.metrics.value("segue_weight_sync_started_timestamp_seconds") > 1e9
    assert gauged.clock.state == "transfer"
    fleet.sender.close()
    assert not (await running).ok
    assert gauged.metrics.value("segue_weight_sync_started_timestamp_seconds") == 0
    assert gauged.clock.state == "wait_version" and gauged.failures("stage") == 1


async def test_the_event_loop_is_free_while_weights_are_staged(fleet: Fleet) -> None:
    receiver = fleet.add("n0")
    transfer = transfer_to(fleet.sender.address, ["n0"], 0, 0)
    running = asyncio.ensure_future(receiver.stage(transfer, 1))
    for _ in range(1000):  # the sender has not begun: if staging blocked the loop, it would not get here before the deadline
        await asyncio.sleep(0)
    assert not running.done()
    fleet.sender.publish(0, weights(0))
    result = await fleet.sender.send(transfer)
    assert result.ok
    assert_weights(await running, 0)


async def test_a_version_may_change_after_publish(fleet: Fleet) -> None:
    """The copy is the sender's own: the next optimizer step may write the parameters at once."""
    fleet.add("n0")
    named = weights(0)
    fleet.sender.publish(0, named)
    for tensor in named.values():
        tensor.zero_()
    assert_all(*await fleet.run(["n0"], number=0, step=0), step=0)


async def test_staged_weights_outlive_later_transfers(fleet: Fleet) -> None:
    """F38: buffers of one version are never written again, whatever arrives while a loader holds them."""
    fleet.add("n0")
    held = []
    for step in range(3):
        fleet.sender.publish(step, weights(step))
        _, ends = await fleet.run(["n0"], number=step, step=step)
        held.append(ends["n0"])
    for step, end in enumerate(held):
        assert isinstance(end, Staged)
        assert_weights(end, step)


async def test_what_nobody_holds_any_more_is_written_again(fleet: Fleet) -> None:
    """Nobody means the engine, the receiver and its threads: a copy that stays behind would be a second model in memory."""
    receiver = fleet.add("n0")
    arena = receiver._means.landing.arena
    for step in range(2):
        fleet.sender.publish(step, weights(step))
        result, ends = await fleet.run(["n0"], number=step, step=step)
        assert arena.spare_bytes() == 0
        ends.clear()
        await asyncio.sleep(0)  # asyncio holds what it woke this test with until it waits again
        gc.collect()
        assert arena.spare_bytes() == result.bytes


async def test_a_joining_node_is_served_the_newest_alone_and_then_joins_a_new_group(fleet: Fleet) -> None:
    fleet.add("n0")
    fleet.sender.publish(0, weights(0))
    assert_all(*await fleet.run(["n0"], number=0, step=0, group=1), step=0)
    fleet.add("n1")
    assert_all(*await fleet.run(["n1"], number=1, step=0, group=2), step=0)
    fleet.sender.publish(1, weights(1))
    assert_all(*await fleet.run(["n0", "n1"], number=2, step=1, group=3), step=1)


async def test_transfers_to_disjoint_members_may_overlap(fleet: Fleet) -> None:
    fleet.add("n0")
    fleet.add("n1")
    fleet.sender.publish(0, weights(0))
    both = await asyncio.gather(fleet.run(["n0"], 0, 0, group=1), fleet.run(["n1"], 1, 0, group=2))
    for result, ends in both:
        assert_all(result, ends, 0)


async def test_a_member_that_lost_its_group_makes_everybody_build_it_anew(fleet: Fleet) -> None:
    """One end restarted (or gave its group up) while the others still hold theirs: nobody waits for a group that cannot be."""
    fleet.add("n0")
    fleet.add("n1")
    fleet.sender.publish(0, weights(0))
    assert_all(*await fleet.run(["n0", "n1"], number=0, step=0), step=0)
    fleet.receivers["n1"].close()
    fleet.add("n1")
    assert_all(*await fleet.run(["n0", "n1"], number=1, step=0), step=0)


async def test_a_missing_receiver_is_named_and_the_others_are_released_and_served_again(fleet: Fleet) -> None:
    """F28, F30: nothing is sent until everybody acknowledged; the survivors then build a group of their own under a new id."""
    fleet.add("n0")
    fleet.add("n2")
    fleet.sender.publish(0, weights(0))
    result, ends = await fleet.run(["n0", "n1", "n2"], number=0, step=0, group=1, deadline=SHORT)
    assert not result.ok and result.missing == ["n1"] and result.bytes == 0
    assert f"n1 did not join at {fleet.sender.address} within" in result.reason
    for sentence in sentences(ends).values():
        assert "n1 did not join" in sentence and "n0" not in sentence.split("n1 did not join")[0]
    assert fleet.gauged.failures("stage") == 1
    assert_all(*await fleet.run(["n0", "n2"], number=1, step=0, group=2), step=0)


async def test_wrong_shapes_are_refused_before_the_first_byte(fleet: Fleet) -> None:
    fleet.add("n0")
    fleet.add("n1", expected=weights(0) | {"layers.2.a": torch.zeros(2, 2)})
    fleet.sender.publish(0, weights(0))
    result, ends = await fleet.run(["n0", "n1"], number=0, step=0)
    assert not result.ok and result.missing == ["n1"] and result.bytes == 0
    difference = "the manifest gives layers.2.a as float32[33, 40] where the model has float32[2, 2]"
    assert f"n1 refused the manifest: {difference}" in result.reason
    assert all(difference in sentence for sentence in sentences(ends).values())
    assert_all(*await fleet.run(["n0"], number=1, step=0, group=2), step=0)


@pytest.mark.parametrize("kind", ["adapter", "delta"])
async def test_other_kinds_of_manifest_are_refused(fleet: Fleet, kind: str) -> None:
    fleet.add("n0")
    fleet.sender.publish(0, weights(0))
    with fleet.sender.shelf.pinned(0) as kept:
        assert kept is not None
        kept.manifest = msgspec.structs.replace(kept.manifest, what=kind)
    result, ends = await fleet.run(["n0"], number=0, step=0)
    assert result.missing == ["n0"] and f"weights of kind {kind!r}" in result.reason
    assert f"weights of kind {kind!r}" in sentences(ends)["n0"]


async def test_a_damaged_bucket_is_found_and_nobody_gets_it(fleet: Fleet) -> None:
    fleet.add("n0")
    fleet.add("n1")
    fleet.sender.publish(0, weights(0))
    with fleet.sender.shelf.pinned(0) as kept:
        assert kept is not None
        kept.checksums()  # of the bytes as published
        kept.bucket(2)[5] ^= 1
    result, ends = await fleet.run(["n0", "n1"], number=0, step=0)
    assert not result.ok and result.missing == []
    assert "bucket 2 arrived damaged at n0" in result.reason and "bucket 2 arrived damaged at n1" in result.reason
    assert all("arrived damaged" in sentence for sentence in sentences(ends).values())
    assert fleet.gauged.failures("transfer") == 1
    fleet.sender.publish(1, weights(1))
    assert_all(*await fleet.run(["n0", "n1"], number=1, step=1, group=2), step=1)


async def test_names_tied_in_the_model_only_must_be_equal(fleet: Fleet) -> None:
    """F37: two values for one tensor would leave whichever was loaded last."""
    apart = weights(0) | {"head.weight": weights(1)["head.weight"]}
    fleet.add("n0", expected=weights(0))
    fleet.sender.publish(0, apart)
    result, ends = await fleet.run(["n0"], number=0, step=0)
    assert result.missing == ["n0"] and "the model ties head.weight to embed.weight" in sentences(ends)["n0"]
    fleet.sender.publish(1, weights(1) | {"head.weight": weights(1)["head.weight"].clone()})
    assert_all(*await fleet.run(["n0"], number=1, step=1, group=2), step=1)


async def test_a_step_that_is_not_kept_releases_everybody_at_once(fleet: Fleet) -> None:
    """F31: the receiver learns that what it waits for will not come."""
    fleet.add("n0")
    fleet.sender.publish(5, weights(5))
    result, ends = await fleet.run(["n0"], number=0, step=3)
    assert not result.ok and result.missing == []
    assert "weights of step 3 are not kept any more (kept: 5)" in result.reason
    assert "weights of step 3 are not kept" in sentences(ends)["n0"]


async def test_stale_transfers_are_refused_on_both_sides(fleet: Fleet) -> None:
    fleet.add("n0")
    fleet.sender.publish(0, weights(0))
    assert_all(*await fleet.run(["n0"], number=5, step=0), step=0)
    for stale in (5, 4):
        result, ends = await fleet.run(["n0"], number=stale, step=0)
        assert not result.ok and "stale" in result.reason and "stale" in sentences(ends)["n0"]
    assert_all(*await fleet.run(["n0"], number=6, step=0), step=0)  # the group is still whole


async def test_a_newer_stage_supersedes_one_that_waits(fleet: Fleet) -> None:
    receiver = fleet.add("n0")
    old = asyncio.ensure_future(receiver.stage(transfer_to(fleet.sender.address, ["n0"], 0, 0), 1))
    await asyncio.sleep(0)
    fleet.sender.publish(1, weights(1))
    assert_all(*await fleet.run(["n0"], number=1, step=1, group=2), step=1)
    with pytest.raises(TransferFailed, match="superseded by transfer 1"):
        await old


async def test_an_abandoned_stage_ends_the_transfer_for_all_and_misses_nobody(fleet: Fleet) -> None:
    """The node gave up between its acknowledgement and the go: it must not sit in a collective nobody waits for."""
    fleet.add("n0")
    fleet.add("n1")
    fleet.sender.publish(0, weights(0))
    transfer = transfer_to(fleet.sender.address, ["n0", "n1"], 0, 0)
    sending = asyncio.ensure_future(fleet.sender.send(transfer))
    leaving = asyncio.ensure_future(fleet.receivers["n0"].stage(transfer, 1))
    store = _client(fleet.sender.address)
    await asyncio.to_thread(store.wait, ["transfer/0/ready/n0"])
    leaving.cancel()
    await asyncio.wait([leaving])
    with pytest.raises(TransferFailed, match="n0 gave the transfer up"):
        await fleet.receivers["n1"].stage(transfer, 2)
    result = await sending
    assert not result.ok and result.missing == [] and "n0 gave the transfer up" in result.reason
    assert_all(*await fleet.run(["n0", "n1"], number=1, step=0, group=2), step=0)


async def test_a_rank_that_is_not_the_members_is_refused(fleet: Fleet) -> None:
    """F33: ranks come from the list of members, and a disagreement shows both."""
    receiver = fleet.add("n0")
    transfer = transfer_to(fleet.sender.address, ["n1", "n0"], 0, 0)
    for rank in (0, 1, 3):
        with pytest.raises(TransferFailed, match=f"told to be rank {rank}, and the members from rank 1 on are n1, n0"):
            await receiver.stage(transfer, rank)


async def test_a_sender_that_never_comes_is_a_sentence_at_the_deadline(fleet: Fleet) -> None:
    receiver = fleet.add("n0")
    with pytest.raises(TransferFailed, match=r"n0 did not receive version 100 .*'head' did not come by the deadline"):
        await receiver.stage(transfer_to(fleet.sender.address, ["n0"], 0, 0, deadline_seconds=0.5), 1)


async def test_a_sender_that_is_gone_is_a_sentence_at_once(fleet: Fleet) -> None:
    receiver = fleet.add("n0")
    with socket.socket() as nobody:
        nobody.bind((HOST, 0))  # bound, but not listening
        address = join_address(HOST, nobody.getsockname()[1])
        with pytest.raises(TransferFailed, match=rf"the weight sender at {address} cannot be reached \(Connection refused\)"):
            await receiver.stage(transfer_to(address, ["n0"], 0, 0, deadline_seconds=1e6), 1)


async def test_closing_the_sender_ends_the_waits_of_both_sides(fleet: Fleet) -> None:
    fleet.add("n0")
    fleet.sender.publish(0, weights(0))
    running = asyncio.ensure_future(fleet.run(["n0", "n1"], number=0, step=0))
    store = _client(fleet.sender.address)
    await asyncio.to_thread(store.wait, ["transfer/0/ready/n0"])
    fleet.sender.close()
    result, ends = await running
    assert not result.ok
    assert "n0 did not receive" in sentences(ends)["n0"]
    again = await fleet.sender.send(transfer_to(fleet.sender.address, ["n0"], 9, 0))
    assert not again.ok and "closed" in again.reason


async def test_a_closed_receiver_gives_up_and_refuses(fleet: Fleet) -> None:
    receiver = fleet.add("n0")
    transfer = transfer_to(fleet.sender.address, ["n0"], 0, 0, deadline_seconds=0.5)  # its thread ends by itself then
    running = asyncio.ensure_future(receiver.stage(transfer, 1))
    await asyncio.sleep(0)
    receiver.close()
    with pytest.raises(TransferFailed, match="closed"):
        await running
    with pytest.raises(TransferFailed, match="closed"):
        await receiver.stage(transfer_to(fleet.sender.address, ["n0"], 1, 0), 1)


def test_what_a_transfer_left_in_the_store_goes_after_its_deadline() -> None:
    store = serve_store(HOST, PORTS)
    sweeper = Sweeper()
    for number in (1, 10, 2):
        Channel(store, number).join("n0", HOST)
        store.set(f"group/7/{number}/0", "rank 0")
    sweeper.ended(Deadline(0.0), "transfer/1/", "group/7/1/")
    sweeper.ended(Deadline(60.0), "transfer/2/", "group/7/2/")
    sweeper.sweep(store)
    left = ["group/7/10/0", "group/7/2/0", "transfer/10/joined/n0", "transfer/2/joined/n0"]
    assert sorted(store.list_keys()) == left
    sweeper.sweep(store)
    assert sorted(store.list_keys()) == left


def test_the_ports_satisfy_the_protocols() -> None:
    sender: type[WeightSender] = TorchSender
    receiver: type[WeightReceiver] = TorchReceiver
    assert sender is not None and receiver is not None


def test_no_free_port_is_one_sentence_that_names_the_key() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"no port of cluster\.ports = \[{port}, {port}\] is free for weight sync"):
            serve_store(HOST, (port, port))


def test_an_interface_of_another_machine_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r"cluster\.interface = '192\.0\.2\.7'"):
        serve_store("192.0.2.7", (21000, 21010))


def test_two_senders_take_two_ports_of_the_range() -> None:
    first, second = serve_store(HOST, (21100, 21200)), serve_store(HOST, (21100, 21200))
    assert first.port != second.port and {first.port, second.port} <= set(range(21100, 21201))


def test_the_store_listens_on_its_interface_only() -> None:
    store = serve_store(HOST, (21300, 21400))
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", store.port))  # free: the store took no wildcard address


@pytest.mark.parametrize(("host", "port"), [("10.0.0.1", 5), ("node-3.cluster", 21000), ("fe80::1", 7)])
def test_addresses_round_trip(host: str, port: int) -> None:
    assert split_address(join_address(host, port)) == (host, port)


def test_the_address_towards_a_loopback_sender_is_loopback() -> None:
    assert local_address("127.0.0.1:21000") == "127.0.0.1"


def test_an_unknown_or_impossible_backend_is_one_sentence() -> None:
    gauged = Gauged()
    with pytest.raises(UserError, match=r"weightsync\.backend = 'mpi' is unknown"):
        TorchReceiver("n0", "mpi", "cpu", gauged.metrics)
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match=r"weightsync\.backend = 'nccl' needs a GPU"):
            TorchReceiver("n0", "nccl", "cpu", gauged.metrics)
