"""A receiver's side of one transfer, as blocking code for a thread that can be left behind (`crew.py`).

consumes     the sender's head, verdicts and buckets
waits for    each of them: verdicts until `hard`, collectives until `soft`
produces     its reports, and verified weights in fresh buffers
on failure   its group is closed, it says so to the sender, and raises `TransferFailed` with the sender's reason where that comes
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from segue.errors import WireError
from segue.ports.scheduler import Transfer
from segue.ports.weights import Manifest, TransferFailed
from weightsync.buckets import checksum, new_bucket
from weightsync.group import BroadcastGroup, GroupError, Groups, build_group
from weightsync.manifest import Layout, ManifestMismatch, check_manifest, with_checksums
from weightsync.messages import Fault, Report, Stage
from weightsync.sending import deadlines
from weightsync.staged import Staged, check_ties
from weightsync.store import Channel, StoreError, connect_store, local_address
from weightsync.turns import failure_sentence


@dataclass(frozen=True)
class Receiving:
    """What all transfers of a receiver share."""

    member: str
    model: str
    expected: Layout | None
    groups: Groups
    backend: str
    device: torch.device


class _Left(Exception):
    """Nobody waits for this transfer any more."""


class Staging:
    """One transfer. `run` in a thread; what it received, and how long that took, is read afterwards."""

    def __init__(self, transfer: Transfer, rank: int, means: Receiving, roll_call_seconds: float) -> None:
        self._transfer = transfer
        self._rank = rank
        self._means = means
        self._soft, self._hard = deadlines(transfer.deadline_seconds, roll_call_seconds)
        self.received = 0
        self.transfer_seconds = 0.0
        self._group: BroadcastGroup | None = None

    def run(self, left: threading.Event) -> Staged:
        """The whole transfer. `left` is set when nobody waits for it any more. Raises `TransferFailed`."""
        try:
            store = connect_store(self._transfer.address, self._hard)
            channel = Channel(store, self._transfer.transfer)
            channel.join(self._means.member, local_address(self._transfer.address))
            manifest = self._acknowledge(channel)
            build = self._await_go(channel)
            buckets, checksums = self._take_part(channel, store, manifest, build, left)
            channel.report(self._report(Stage.RECEIVED, checksums=checksums))
            verdict = channel.verdict("commit", self._hard)
            if not verdict.ok:
                raise TransferFailed(verdict.reason)
            assert verdict.checksums == checksums
            if self._group is not None:
                self._means.groups.keep(self._group)
                self._group = None
            return Staged(self._transfer.version, with_checksums(manifest, checksums), buckets)
        except (StoreError, WireError) as error:
            raise TransferFailed(self._sentence(str(error))) from error
        finally:
            self._drop_group()

    def _acknowledge(self, channel: Channel) -> Manifest:
        """Read the head, and refuse what cannot be loaded before anything is sent."""
        head = channel.head(self._hard)
        if head.manifest is None:
            raise TransferFailed(head.reason)
        try:
            check_manifest(head.manifest, self._means.model, self._means.expected)
        except ManifestMismatch as error:
            channel.report(self._report(Stage.READY, Fault.REFUSED, str(error)))
            raise TransferFailed(self._sentence(str(error))) from error
        return head.manifest

    def _await_go(self, channel: Channel) -> bool:
        """Report ready, wait for the go, and return whether the group must be built.

        After a go even a member that nobody waits for any more joins the group, to leave it at once: an open connection that
        closes ends the others' waits, an empty place would hold them until their deadline.
        """
        self._group = self._means.groups.take(self._transfer.group, self._transfer.members)
        channel.report(self._report(Stage.READY, holds_group=self._group is not None))
        verdict = channel.verdict("go", self._hard)
        if not verdict.ok:
            raise TransferFailed(verdict.reason)
        if verdict.build:
            self._drop_group()
        assert verdict.build or self._group is not None
        return verdict.build

    def _take_part(
        self, channel: Channel, store: dist.TCPStore, manifest: Manifest, build: bool, left: threading.Event
    ) -> tuple[list[torch.Tensor], list[int]]:
        """Receive everything.

        Failures are reported after the stack of the collective is gone, and with it the group's connections: only that ends the
        waits of the others.
        """
        fault, sentence = Fault.NONE, ""
        try:
            if build:
                self._group = self._build(store)
            return self._receive(manifest, left)
        except GroupError as error:
            fault, sentence = Fault.LOST, str(error)
        except _Left:
            fault = Fault.ABANDONED
        except (MemoryError, RuntimeError, ManifestMismatch) as error:
            fault, sentence = Fault.OWN, str(error) or type(error).__name__
        self._drop_group()
        if fault is Fault.ABANDONED:
            raise self._abandoned(channel)
        channel.report(self._report(Stage.RECEIVED, fault, sentence))
        if fault is Fault.OWN:
            raise TransferFailed(self._sentence(sentence))
        try:
            verdict = channel.verdict("commit", self._hard)  # the sender knows, or finds out, whose fault it is
        except StoreError:
            raise TransferFailed(self._sentence(f"the broadcast broke: {sentence}")) from None
        assert not verdict.ok
        raise TransferFailed(verdict.reason)

    def _build(self, store: dist.TCPStore) -> BroadcastGroup:
        transfer, means = self._transfer, self._means
        return build_group(
            means.backend,
            store,
            group=transfer.group,
            transfer=transfer.transfer,
            members=transfer.members,
            rank=self._rank,
            host=local_address(transfer.address),
            device=means.device,
            deadline=self._soft,
        )

    def _receive(self, manifest: Manifest, left: threading.Event) -> tuple[list[torch.Tensor], list[int]]:
        """All buckets, each in a fresh buffer, and their checksums, each computed while the next bucket is on its way."""
        group = self._group
        assert group is not None
        began = time.perf_counter()
        buckets: list[torch.Tensor] = []
        checksums: list[int] = []
        for number in range(len(manifest.buckets)):
            if left.is_set():
                raise _Left
            bucket = new_bucket(manifest, number, self._means.device)
            work = group.begin(bucket, self._soft) if bucket.numel() else None
            checksums += [checksum(previous) for previous in buckets[-1:]]
            if work is not None:
                group.finish(work, self._soft)
            buckets.append(bucket)
            self.received += bucket.numel()
        self.transfer_seconds = time.perf_counter() - began
        checksums += [checksum(previous) for previous in buckets[-1:]]
        check_ties(manifest, self._means.expected, buckets)
        return buckets, checksums

    def _drop_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _abandoned(self, channel: Channel) -> TransferFailed:
        sentence = "its node does not wait for it any more"
        channel.report(self._report(Stage.RECEIVED, Fault.ABANDONED, sentence))
        return TransferFailed(self._sentence(sentence))

    def _report(
        self,
        stage: Stage,
        fault: Fault = Fault.NONE,
        sentence: str = "",
        *,
        holds_group: bool = False,
        checksums: Sequence[int] = (),
    ) -> Report:
        return Report(self._means.member, stage, fault, sentence, holds_group, list(checksums))

    def _sentence(self, why: str) -> str:
        return failure_sentence(self._transfer, self._means.member, why)
