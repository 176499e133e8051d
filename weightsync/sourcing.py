"""A further source's side of one transfer, as blocking code for a thread that can be left behind (`crew.py`).

consumes     the sender's order, head and verdicts
waits for    its own copy of the weights, which its rank makes at the same time as rank 0, until `soft`; the verdicts until `hard`
produces     its reports, and the broadcast of its share of the buckets in a group of its own
on failure   its group is closed, which ends the members' waits, and it tells the sender, who names whoever does not
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from segue.errors import WireError
from segue.ports.transfer import Transfer
from segue.ports.weights import Manifest, TransferFailed
from weightsync.broadcast import broadcast_share, deadlines
from weightsync.group import BroadcastGroup, GroupError, Groups, build_group
from weightsync.messages import Fault, Report, Stage
from weightsync.shelf import Kept, Shelf
from weightsync.store import Channel, StoreError, connect_store


@dataclass(frozen=True)
class SourceMeans:
    """What all transfers of a source share. `number` is its own among the sources, of which the sender is 0."""

    name: str
    number: int
    shelf: Shelf
    groups: Groups
    backend: str
    device: torch.device
    host: str
    roll_call_seconds: float


class Sourcing:
    """One transfer. `run` in a thread; what was sent, and how long that took, is read afterwards."""

    def __init__(self, transfer: Transfer, means: SourceMeans) -> None:
        self._transfer = transfer
        self._means = means
        self._soft, self._hard = deadlines(transfer.deadline_seconds, means.roll_call_seconds)
        self._group: BroadcastGroup | None = None
        self.phase = "stage"
        self.sent = 0
        self.transfer_seconds = 0.0

    def run(self, left: threading.Event) -> None:
        """The whole transfer. `left` is set when nobody waits for it any more. Raises `TransferFailed`."""
        transfer, means = self._transfer, self._means
        try:
            store = connect_store(transfer.address, self._hard)
            channel = Channel(store, transfer.transfer)
            channel.join(means.name, means.host)
            head = channel.head(self._hard)
            if head.manifest is None:
                raise TransferFailed(head.reason)
            there = means.shelf.wait_for(transfer.step, self._soft)
            with means.shelf.pinned(transfer.step) as kept:
                if not there or kept is None:
                    held = ", ".join(map(str, means.shelf.steps())) or "none"
                    raise self._refuse(channel, Fault.OWN, f"it has no weights of step {transfer.step} (kept: {held})")
                if _bones(kept.manifest) != _bones(head.manifest):
                    raise self._refuse(channel, Fault.REFUSED, "its own weights are laid out in another way")
                self._serve(kept, channel, store, left)
        except (StoreError, WireError) as error:
            raise TransferFailed(self._sentence(str(error))) from error
        finally:
            self._drop_group()

    def _refuse(self, channel: Channel, fault: Fault, why: str) -> TransferFailed:
        channel.report(Report(self._means.name, Stage.READY, fault, why))
        return TransferFailed(self._sentence(why))

    def _serve(self, kept: Kept, channel: Channel, store: dist.TCPStore, left: threading.Event) -> None:
        transfer, means = self._transfer, self._means
        self._group = means.groups.take(transfer.group, means.number, transfer.members)
        channel.report(Report(means.name, Stage.READY, holds_group=self._group is not None))
        go = channel.verdict("go", self._hard)
        if not go.ok:
            raise TransferFailed(go.reason)
        if go.build:
            self._drop_group()
        self.phase = "transfer"
        lost = self._broadcast(kept, store, left)
        if lost:
            self._drop_group()
            channel.report(Report(means.name, Stage.RECEIVED, Fault.LOST, lost))
        else:
            channel.report(Report(means.name, Stage.RECEIVED, checksums=kept.checksums()))
        commit = channel.verdict("commit", self._hard)
        if not commit.ok:
            raise TransferFailed(commit.reason)
        assert self._group is not None
        means.groups.keep(self._group)
        self._group = None
        means.shelf.sent(kept)

    def _broadcast(self, kept: Kept, store: dist.TCPStore, left: threading.Event) -> str:
        """Send everything; how the group broke, or "". Nothing of a broken group is left on any stack when this returns."""
        transfer, means = self._transfer, self._means
        began = time.perf_counter()
        try:
            if self._group is None:
                self._group = build_group(
                    means.backend,
                    store,
                    transfer,
                    source=means.number,
                    rank=0,
                    host=means.host,
                    device=means.device,
                    deadline=self._soft,
                )
            broadcast_share(kept, self._group, self._soft, left, self._count)
        except GroupError as error:
            return str(error)
        self.transfer_seconds = time.perf_counter() - began
        return ""

    def _count(self, nbytes: int) -> None:
        self.sent += nbytes

    def _drop_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _sentence(self, why: str) -> str:
        transfer = self._transfer
        return f"{self._means.name} did not send its share of step {transfer.step} (transfer {transfer.transfer}): {why}"


def _bones(manifest: Manifest) -> tuple[object, ...]:
    """What must be the same at all sources."""
    return (manifest.what, manifest.model, manifest.step, manifest.tensors, manifest.buckets, manifest.aliases)
