"""Weight sync inside one process and one event loop, for serial mode and for tests: the same ports, manifests, buckets, checks
and bookkeeping as over torch.distributed, with a copy in memory where that one broadcasts.

A transfer is a meeting at the `LocalHub`. The sender drives it: it waits for its members, checks the manifest for each, copies
the buckets for each, compares checksums, and hands the staged weights out. Time is the loop's, and the copy costs
`transfer_seconds` of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

import torch

from segue.clock import Compute, now
from segue.metrics.registry import Metrics
from segue.metrics.states import ActivityClock
from segue.ports.transfer import Transfer, TransferResult
from segue.ports.weights import Manifest, Probe, TransferFailed
from weightsync.buckets import checksum, share_names
from weightsync.gauges import Gauges
from weightsync.manifest import Layout, ManifestMismatch, check_manifest, payload_bytes, with_checksums
from weightsync.messages import Fault, Report, Stage
from weightsync.round import Round
from weightsync.shelf import Kept, Shelf
from weightsync.staged import Staged, check_ties
from weightsync.turns import ReceiverTurns, SenderTurns, failure_sentence

_REMEMBERED = 64
"""Ended transfers whose reason is remembered: late members belong to the newest few."""


class _Seat:
    """One member at a meeting; the sender answers through `outcome`."""

    def __init__(self, model: str, expected: Layout | None) -> None:
        self.model = model
        self.expected = expected
        self.outcome: asyncio.Future[Staged] = asyncio.get_running_loop().create_future()


class _Meeting:
    """The members that came to one transfer, by name. A member that gives up leaves its seat."""

    def __init__(self) -> None:
        self.seats: dict[str, _Seat] = {}
        self.came = asyncio.Event()
        self.sender_is_here = False

    def take(self, member: str, seat: _Seat) -> None:
        self.seats[member] = seat
        self.came.set()


class LocalHub:
    """Where the senders and receivers of one process meet, by transfer id."""

    def __init__(self) -> None:
        self._meetings: dict[int, _Meeting] = {}
        self._over: dict[int, str] = {}

    def meeting(self, transfer: int) -> _Meeting:
        """The meeting of a transfer; the first to come opens it."""
        return self._meetings.setdefault(transfer, _Meeting())

    def leave(self, transfer: int, member: str) -> None:
        """A member goes; the last one closes the door unless the sender is still there."""
        meeting = self._meetings.get(transfer)
        if meeting is not None:
            meeting.seats.pop(member, None)
            if not meeting.seats and not meeting.sender_is_here:
                del self._meetings[transfer]

    def end(self, transfer: int, reason: str) -> None:
        """The sender goes: the meeting is over. `reason` is for whoever comes late."""
        self._meetings.pop(transfer, None)
        self._over[transfer] = reason or "the transfer is over"
        while len(self._over) > _REMEMBERED:
            del self._over[next(iter(self._over))]

    def over(self, transfer: int) -> str:
        """Why it is too late for this transfer, or ""."""
        return self._over.get(transfer, "")


class LocalSender:
    """`segue.ports.weights.WeightSender` at a `LocalHub`; arguments as `TorchSender`'s.

    `compute` is where copies are made (a `LogicalCompute` of its own in serial mode), `transfer_seconds` what one costs there.
    """

    address = "local"

    def __init__(
        self,
        hub: LocalHub,
        model_name: str,
        bucket_bytes: int,
        transfer_seconds: float,
        compute: Compute,
        metrics: Metrics,
        clock: ActivityClock,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._hub = hub
        self._transfer_seconds = transfer_seconds
        self._compute = compute
        self.shelf = Shelf(model_name, bucket_bytes, dtype)
        self._gauges = Gauges(metrics, clock)
        self._turns = SenderTurns()

    def share(self, named: Mapping[str, torch.Tensor]) -> set[str]:
        """All names: there is one source."""
        return self.shelf.share(named)

    def publish(self, step: int, named: Mapping[str, torch.Tensor], probe: Probe | None = None) -> Manifest:
        """Copy the full weights of `step` aside."""
        with self._gauges.gathering():
            return self.shelf.put(step, named, probe).manifest

    async def send(self, transfer: Transfer) -> TransferResult:
        """Hand the weights of `transfer.step` to its members; never raises for a member, and returns by the deadline."""
        refused = self._turns.begin(transfer)
        if refused is not None:
            return refused
        sending = _LocalSending(transfer, self._hub.meeting(transfer.transfer))
        reason = "the sender gave the transfer up"
        try:
            with self._gauges.transferring(transfer.transfer), self.shelf.pinned(transfer.step) as kept:
                if kept is None:
                    held = ", ".join(map(str, self.shelf.steps())) or "none"
                    sending.round.broke(f"weights of step {transfer.step} are not kept any more (kept: {held})")
                else:
                    await sending.run(kept, self._compute, self._transfer_seconds)
                result = sending.conclude(kept)
                if kept is not None and result.ok:
                    self.shelf.sent(kept)
            reason = result.reason
        finally:
            self._hub.end(transfer.transfer, reason)
        self._gauges.moved(result.bytes)
        if result.ok:
            self._gauges.took("transfer", result.transfer_seconds)
        else:
            self._gauges.failed("transfer" if sending.copies else "stage")
        return result

    def close(self) -> None:
        self._turns.closed = True
        self.shelf.clear()


class _LocalSending:
    """One transfer."""

    def __init__(self, transfer: Transfer, meeting: _Meeting) -> None:
        self._transfer = transfer
        self._meeting = meeting
        meeting.sender_is_here = True
        self._began = now()
        self._seats: dict[str, _Seat] = {}
        self.round = Round(transfer.members)
        self.copies: dict[str, Staged] = {}

    async def run(self, kept: Kept, compute: Compute, cost: float) -> None:
        """Both stages, within the transfer's deadline."""
        try:
            async with asyncio.timeout(self._transfer.deadline_seconds):
                self._welcome(kept)
                while self.round.silent(Stage.READY):
                    await self._meeting.came.wait()
                    self._welcome(kept)
                if self._all_present():
                    self._began = now()
                    await compute.run(lambda: self._copy(kept), cost)
        except TimeoutError:
            absent = dict.fromkeys(self.round.silent(Stage.READY), f"did not come within {self._transfer.deadline_seconds:.1f} s")
            self.round.waited_out(absent)
            if not absent:
                self.round.broke(f"copying took longer than the {self._transfer.deadline_seconds:.1f} s of the transfer")

    def _welcome(self, kept: Kept) -> None:
        self._meeting.came.clear()
        for name, seat in self._meeting.seats.items():
            self._seats[name] = seat
            try:
                check_manifest(kept.manifest, seat.model, seat.expected)
                self.round.hear(Report(name, Stage.READY))
            except ManifestMismatch as error:
                self.round.hear(Report(name, Stage.READY, Fault.REFUSED, str(error)))

    def _all_present(self) -> bool:
        """Nobody refused, and everybody who came still waits."""
        for name, seat in self._seats.items():
            if seat.outcome.done() or self._meeting.seats.get(name) is not seat:
                self.round.hear(Report(name, Stage.RECEIVED, Fault.ABANDONED, "its node does not wait for it any more"))
        return not self.round.troubled

    def _copy(self, kept: Kept) -> None:
        """Every member gets buffers of its own, as from a broadcast."""
        for name, seat in self._seats.items():
            buckets = [kept.bucket(number).clone() for number in kept.mine]
            checksums = [checksum(bucket) for bucket in buckets]
            try:
                check_ties(kept.manifest, seat.expected, buckets)
            except ManifestMismatch as error:
                self.round.hear(Report(name, Stage.RECEIVED, Fault.OWN, str(error)))
                continue
            self.copies[name] = Staged(self._transfer.version, with_checksums(kept.manifest, checksums), buckets)
            self.round.hear(Report(name, Stage.RECEIVED, checksums=checksums))
        self.round.compare(kept.checksums())

    def conclude(self, kept: Kept | None) -> TransferResult:
        """Tell everybody how it went."""
        transfer, ok = self._transfer, self._all_present() and self.round.ok
        what = f"weights of step {transfer.step} (version {transfer.version}, transfer {transfer.transfer}) were not sent"
        reason = "" if ok else f"{what}: {self.round.reason()}"
        for name, seat in self._meeting.seats.items():
            if seat.outcome.done():
                continue
            if ok:
                seat.outcome.set_result(self.copies[name])
            else:
                seat.outcome.set_exception(TransferFailed(reason))
        return TransferResult(
            version=transfer.version,
            transfer=transfer.transfer,
            ok=ok,
            missing=self.round.missing(),
            reason=reason,
            bytes=kept.nbytes if kept is not None and ok else 0,
            gather_seconds=kept.gather_seconds if kept is not None else 0.0,
            transfer_seconds=now() - self._began if self.copies else 0.0,
        )


class _Delivered:
    """`segue.ports.weights.ArrivingWeights` of which everything is there."""

    def __init__(self, staged: Staged) -> None:
        self.version, self.manifest = staged.version, staged.manifest
        self._tensors = staged.tensors()

    async def buckets(self) -> AsyncIterator[dict[str, torch.Tensor]]:
        for number in range(len(self.manifest.buckets)):
            yield {name: self._tensors[name] for name in share_names(self.manifest, [number])}

    def close(self) -> None:
        pass


class LocalReceiver:
    """`segue.ports.weights.WeightReceiver` at a `LocalHub`; arguments as `TorchReceiver`'s."""

    def __init__(
        self,
        hub: LocalHub,
        member_name: str,
        metrics: Metrics,
        *,
        model_name: str = "policy",
        expected: Layout | None = None,
    ) -> None:
        self.member_name = member_name
        self._hub = hub
        self._model = model_name
        self._expected = expected
        self._metrics = metrics
        self._turns = ReceiverTurns(member_name)
        self._current: tuple[Transfer, _Seat] | None = None

    async def stage(self, transfer: Transfer, rank: int) -> Staged:
        """Take part in `transfer`; a newer call supersedes one that still waits. Raises `TransferFailed`."""
        self._turns.begin(transfer, rank)
        self._give_up(f"superseded by transfer {transfer.transfer}")
        if self._hub.over(transfer.transfer):
            raise TransferFailed(self._hub.over(transfer.transfer))
        seat = _Seat(self._model, self._expected)
        self._current = (transfer, seat)
        self._hub.meeting(transfer.transfer).take(self.member_name, seat)
        began = now()
        try:
            async with asyncio.timeout(transfer.deadline_seconds):
                staged = await seat.outcome
        except TimeoutError:
            why = f"the sender did not answer within {transfer.deadline_seconds:.1f} s"
            raise TransferFailed(failure_sentence(transfer, self.member_name, why)) from None
        finally:
            self._hub.leave(transfer.transfer, self.member_name)
        self._metrics.add("segue_weight_sync_bytes_total", payload_bytes(staged.manifest))
        self._metrics.observe("segue_weight_sync_seconds", now() - began, phase="transfer")
        return staged

    async def open(self, transfer: Transfer, rank: int) -> _Delivered:
        """The same, bucket by bucket. Here everything is copied before anything is handed over."""
        return _Delivered(await self.stage(transfer, rank))

    def _give_up(self, why: str) -> None:
        if self._current is not None and not self._current[1].outcome.done():
            transfer, seat = self._current
            seat.outcome.set_exception(TransferFailed(failure_sentence(transfer, self.member_name, why)))

    def close(self) -> None:
        """Give up what runs. Idempotent."""
        self._turns.closed = True
        self._give_up("the receiver was closed")
