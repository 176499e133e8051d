"""The sender's side of one transfer, as blocking code for a thread that can be left behind (`crew.py`).

consumes     reports of the members and of the other sources, through the store
waits for    all to acknowledge the manifest; all to have received; each until `soft`, the roll call until `hard`
produces     orders for the other sources, head, "go", the broadcast of its own buckets, "commit", and a `TransferResult`;
             it never raises for a member or a source
on failure   the group is closed first, which ends the members' waits, then whoever still says nothing by the roll call is missing
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from segue.errors import WireError
from segue.ports.transfer import Transfer, TransferResult
from weightsync.broadcast import broadcast_share, deadlines
from weightsync.crew import Deadline
from weightsync.group import BroadcastGroup, GroupError, Groups, build_group, group_prefix
from weightsync.messages import Head, Stage, Verdict
from weightsync.round import Round
from weightsync.shelf import Kept, Shelf
from weightsync.store import Channel, StoreError, Sweeper, connect_store, transfer_prefix


@dataclass(frozen=True)
class Means:
    """What all transfers of a sender share.

    `sources` are the names of all learner ranks that send, this one first. `roll_call_seconds`: how long survivors of a failure
    have to say that they live.
    """

    shelf: Shelf
    groups: Groups
    sweeper: Sweeper
    backend: str
    device: torch.device
    host: str
    address: str
    roll_call_seconds: float
    sources: tuple[str, ...]


class Sending:
    """One transfer. `run` in a thread; the other methods from the event loop when it was left behind."""

    def __init__(self, transfer: Transfer, means: Means) -> None:
        self._transfer = transfer
        self._means = means
        self._soft, self._hard = deadlines(transfer.deadline_seconds, means.roll_call_seconds)
        self._others: tuple[str, ...] = ()
        self._round = Round(transfer.members)
        self._began = 0.0
        self._sent = 0
        self._gather_seconds = 0.0
        self._group: BroadcastGroup | None = None
        self.phase = "stage"

    def run(self, left: threading.Event) -> TransferResult:
        """The whole transfer. `left` is set when nobody waits for it any more."""
        transfer, means = self._transfer, self._means
        try:
            with means.shelf.pinned(transfer.step) as kept:
                store = connect_store(means.address, self._soft)
                means.sweeper.sweep(store)
                channel = Channel(store, transfer.transfer)
                if kept is None:
                    return self._unknown_step(channel)
                self._gather_seconds = kept.gather_seconds
                self._others = means.sources[1 : len(kept.manifest.buckets)]  # whose share is not empty
                self._round = Round(transfer.members, self._others)
                return self._serve(kept, channel, store, left)
        except StoreError as error:
            self._round.broke(str(error))
            return self._failed()
        finally:
            if self._group is not None:
                self._group.close()
            prefixes = [transfer_prefix(transfer.transfer) + "/"]
            if means.backend == "gloo":  # NCCL may look into its store later
                prefixes.append(group_prefix(transfer.group, transfer.transfer) + "/")
            means.sweeper.ended(Deadline(transfer.deadline_seconds), *prefixes)

    def overdue(self, reason: str) -> TransferResult:
        """The result when the thread did not come back in time. Whoever has not reported is named."""
        stage = Stage.RECEIVED if self.phase == "transfer" else Stage.READY
        self._round.waited_out(dict.fromkeys(self._round.silent(stage), "did not answer"))
        self._round.broke(reason)
        return self._failed()

    def _unknown_step(self, channel: Channel) -> TransferResult:
        held = ", ".join(map(str, self._means.shelf.steps())) or "none"
        self._round.broke(f"weights of step {self._transfer.step} are not kept any more (kept: {held})")
        result = self._failed()
        channel.announce(Head(None, result.reason))
        return result

    def _serve(self, kept: Kept, channel: Channel, store: dist.TCPStore, left: threading.Event) -> TransferResult:
        try:
            channel.announce(Head(kept.manifest, sources=self._means.sources))
            for name in self._others:
                channel.order(name, self._transfer)
            if not self._all_ready(channel):
                return self._call_off(channel, "go", "commit")
            self._broadcast(kept, channel, store, left)
            if not self._all_received(kept, channel):
                return self._call_off(channel, "commit")
        except WireError as error:
            self._round.broke(f"a member's report cannot be read: {error}")
            return self._call_off(channel, "go", "commit")
        channel.decide("commit", Verdict(True, checksums=self._checksums(kept)))
        assert self._group is not None
        self._means.groups.keep(self._group)
        self._group = None
        self._means.shelf.sent(kept)
        self._sent = kept.nbytes
        return self._result(True, "")

    def _checksums(self, kept: Kept) -> list[int]:
        """Of all buckets, by the sources that sent them."""
        ours = dict(zip(kept.mine, kept.checksums(), strict=True))
        for number, name in enumerate(self._others, start=1):
            theirs = range(number, len(kept.manifest.buckets), len(self._means.sources))
            ours |= dict(zip(theirs, self._round.sent_by(name), strict=True))
        return [ours[bucket] for bucket in range(len(kept.manifest.buckets))]

    def _all_ready(self, channel: Channel) -> bool:
        """Everybody acknowledged the manifest. Silence counts at the deadline only: a member may not know of the transfer yet."""
        self._hear(channel, Stage.READY, self._soft)
        troubled, silent = self._round.troubled, self._round.silent(Stage.READY)
        if silent and not troubled:
            self._round.waited_out({name: self._why_silent(channel, name) for name in silent})
        return not (troubled or silent)

    def _all_received(self, kept: Kept, channel: Channel) -> bool:
        """Everybody has every bucket, undamaged. After a failure a roll call tells who lives: all took part, silence counts."""
        self._hear(channel, Stage.RECEIVED, self._soft)
        clause = f"took part and did not report that it has everything within {self._soft.seconds:.1f} s"
        if self._round.troubled:
            if self._group is not None:
                self._group.close()  # ends the waits of those that still receive
            self._hear(channel, Stage.RECEIVED, self._roll_call_deadline(), beyond_trouble=True)
            clause = "took part and is silent since the broadcast broke"
        elif not self._round.silent(Stage.RECEIVED):
            self._round.compare(self._checksums(kept))
        self._round.waited_out(dict.fromkeys(self._round.silent(Stage.RECEIVED), clause))
        return self._round.ok

    def _hear(self, channel: Channel, stage: Stage, deadline: Deadline, beyond_trouble: bool = False) -> None:
        """Hear reports until everybody has spoken, somebody has failed (unless `beyond_trouble`), or the deadline."""
        while self._round.silent(stage) and (beyond_trouble or not self._round.troubled):
            report = channel.next_report(deadline)
            if report is None:
                break
            self._round.hear(report)
        for name in self._round.silent(stage):  # killed between writing its report and ringing, or rung after the deadline
            late = channel.report_of(name, stage)
            if late is not None:
                self._round.hear(late)

    def _roll_call_deadline(self) -> Deadline:
        """Three quarters of the time between soft and hard: the verdict must reach members whose own deadline is `hard`, too."""
        return self._hard.within(0.75 * min(self._means.roll_call_seconds, 0.2 * self._transfer.deadline_seconds))

    def _broadcast(self, kept: Kept, channel: Channel, store: dist.TCPStore, left: threading.Event) -> None:
        """Say go, and broadcast all buckets. When the group breaks it is closed, with nothing of it left on any stack."""
        transfer, means = self._transfer, self._means
        self._group = means.groups.take(transfer.group, 0, transfer.members)
        if self._group is not None and not self._round.all_hold_group:
            self._group.close()
            self._group = None
        self.phase, self._began = "transfer", time.perf_counter()
        channel.decide("go", Verdict(True, build=self._group is None))
        try:
            if self._group is None:
                self._group = build_group(
                    means.backend,
                    store,
                    transfer,
                    source=0,
                    rank=0,
                    host=means.host,
                    device=means.device,
                    deadline=self._soft,
                )
            broadcast_share(kept, self._group, self._soft, left, self._count)
        except GroupError as error:
            self._round.broke(f"the broadcast broke: {error}")

    def _count(self, nbytes: int) -> None:
        self._sent += nbytes

    def _why_silent(self, channel: Channel, name: str) -> str:
        seconds = f"{self._soft.seconds:.1f} s"
        where = channel.joined(name)
        if where:
            return f"joined from {where} and did not acknowledge the manifest within {seconds}"
        return f"did not join at {self._means.address} within {seconds}: is it alive, and can it reach that address?"

    def _call_off(self, channel: Channel, *keys: str) -> TransferResult:
        result = self._failed()
        for key in keys:
            channel.decide(key, Verdict(False, result.reason))
        return result

    def _failed(self) -> TransferResult:
        transfer = self._transfer
        what = f"weights of step {transfer.step} (version {transfer.version}, transfer {transfer.transfer}) were not sent"
        return self._result(False, f"{what}: {self._round.reason()}")

    def _result(self, ok: bool, reason: str) -> TransferResult:
        return TransferResult(
            version=self._transfer.version,
            transfer=self._transfer.transfer,
            ok=ok,
            missing=self._round.missing(),
            reason=reason,
            bytes=self._sent,
            gather_seconds=self._gather_seconds,
            transfer_seconds=time.perf_counter() - self._began if self._began else 0.0,
        )
