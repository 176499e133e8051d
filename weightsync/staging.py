"""A receiver's side of one transfer, as blocking code for a thread that can be left behind (`crew.py`).

consumes     the sender's head and verdicts, buckets of every source
waits for    each of them: verdicts until `hard`, collectives until `soft`
produces     its reports; verified weights in memory of their own (`run`), or one bucket after the other (`stream`)
on failure   its groups are closed, it tells the sender, and raises `TransferFailed` with the sender's reason where that comes

Two buckets of each source are under way at a time: while one is checksummed (and loaded, by `stream`), the next ones arrive.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from segue.errors import WireError
from segue.ports.transfer import Transfer
from segue.ports.weights import Manifest, TransferFailed
from weightsync.broadcast import IN_FLIGHT, deadlines
from weightsync.buckets import bucket_bytes, checksum
from weightsync.group import BroadcastGroup, GroupError, Groups, build_group, device_stream
from weightsync.manifest import Layout, ManifestMismatch, check_manifest, tied_in_model_only, with_checksums
from weightsync.memory import Landing
from weightsync.messages import Fault, Head, Report, Stage
from weightsync.staged import Staged, check_ties
from weightsync.store import Channel, StoreError, connect_store, local_address
from weightsync.turns import failure_sentence

Take = Callable[[int, torch.Tensor], None]
"""(number of the bucket, its bytes where they rest): what is done with a bucket that has arrived."""


@dataclass(frozen=True)
class Receiving:
    """What all transfers of a receiver share."""

    member: str
    model: str
    expected: Layout | None
    groups: Groups
    backend: str
    landing: Landing


class NotWaitedFor(Exception):
    """Nobody waits for this transfer any more."""


class Staging:
    """One transfer. `run` or `stream` in a thread; what it received, and how long that took, is read afterwards."""

    def __init__(self, transfer: Transfer, rank: int, means: Receiving, roll_call_seconds: float) -> None:
        self._transfer = transfer
        self._rank = rank
        self._means = means
        self._soft, self._hard = deadlines(transfer.deadline_seconds, roll_call_seconds)
        self.received = 0
        self.transfer_seconds = 0.0
        self._head: Head | None = None
        self._groups: list[BroadcastGroup] = []

    def run(self, left: threading.Event) -> Staged:
        """The whole transfer: everything has arrived and is verified. `left` is set when nobody waits for it any more.

        Raises `TransferFailed`.
        """
        means = self._means
        buckets: list[torch.Tensor] = []

        def whole(manifest: Manifest) -> None:
            check_ties(manifest, means.expected, buckets)

        manifest = self._take_all(left, lambda number, bucket: buckets.append(bucket), whole)
        return Staged(self._transfer.version, manifest, buckets)

    def stream(self, left: threading.Event, opened: Callable[[Manifest], None], take: Take) -> Manifest:
        """The same without keeping anything: `opened` gets the manifest (without checksums) as soon as everybody takes part, and
        `take` each bucket, in order; what it is given may be written over once it and all views of it have gone.

        Returns the manifest with its checksums when every member has everything undamaged: only then was what `take` got the
        published weights. `take` may raise `NotWaitedFor`. Raises `TransferFailed`.
        """
        return self._take_all(left, take, lambda manifest: None, opened)

    def _take_all(
        self,
        left: threading.Event,
        take: Take,
        whole: Callable[[Manifest], None],
        opened: Callable[[Manifest], None] | None = None,
    ) -> Manifest:
        """The order of messages; `whole` is called when all buckets are there, `opened` before the first one comes."""
        try:
            store = connect_store(self._transfer.address, self._hard)
            channel = Channel(store, self._transfer.transfer)
            channel.join(self._means.member, local_address(self._transfer.address))
            manifest = self._acknowledge(channel, keeps=opened is None)
            build = self._await_go(channel)
            if opened is not None:
                opened(manifest)
            checksums = self._take_part(channel, store, manifest, build, left, take, whole)
            channel.report(self._report(Stage.RECEIVED, checksums=checksums))
            verdict = channel.verdict("commit", self._hard)
            if not verdict.ok:
                raise TransferFailed(verdict.reason)
            assert verdict.checksums == checksums
            while self._groups:
                self._means.groups.keep(self._groups.pop())
            return with_checksums(manifest, checksums)
        except (StoreError, WireError) as error:
            raise TransferFailed(self._sentence(str(error))) from error
        finally:
            self._drop_groups()

    def _acknowledge(self, channel: Channel, keeps: bool) -> Manifest:
        """Read the head, and refuse what cannot be loaded before anything is sent."""
        head = self._head = channel.head(self._hard)
        if head.manifest is None:
            raise TransferFailed(head.reason)
        try:
            check_manifest(head.manifest, self._means.model, self._means.expected)
            if not keeps:
                _check_streamable(head.manifest, self._means.expected)
        except ManifestMismatch as error:
            channel.report(self._report(Stage.READY, Fault.REFUSED, str(error)))
            raise TransferFailed(self._sentence(str(error))) from error
        return head.manifest

    def _await_go(self, channel: Channel) -> bool:
        """Report ready, wait for the go, and return whether the groups must be built.

        After a go even a member that nobody waits for any more joins the groups, to leave them at once: an open connection that
        closes ends the others' waits, an empty place would hold them until their deadline.
        """
        taken = [self._means.groups.take(self._transfer.group, source, self._transfer.members) for source in self._sources()]
        self._groups = [group for group in taken if group is not None]
        channel.report(self._report(Stage.READY, holds_group=None not in taken))
        verdict = channel.verdict("go", self._hard)
        if not verdict.ok:
            raise TransferFailed(verdict.reason)
        if verdict.build:
            self._drop_groups()
        assert verdict.build or None not in taken
        return verdict.build

    def _sources(self) -> range:
        """Numbers of the sources that have a bucket."""
        head = self._head
        assert head is not None and head.manifest is not None
        return range(min(len(head.sources), len(head.manifest.buckets)))

    def _take_part(
        self,
        channel: Channel,
        store: dist.TCPStore,
        manifest: Manifest,
        build: bool,
        left: threading.Event,
        take: Take,
        whole: Callable[[Manifest], None],
    ) -> list[int]:
        """Receive everything, and return its checksums.

        Failures are reported after the stack of the collective is gone, and with it the groups' connections: only that ends the
        waits of the others.
        """
        fault, sentence = Fault.NONE, ""
        try:
            if build:
                self._build(store)
            with device_stream(self._means.landing.works_on):
                checksums = self._receive(manifest, left, take)
            whole(manifest)
            return checksums
        except GroupError as error:
            fault, sentence = Fault.LOST, str(error)
        except NotWaitedFor:
            fault, sentence = Fault.ABANDONED, "its node does not wait for it any more"
        except (MemoryError, RuntimeError, ManifestMismatch) as error:
            fault, sentence = Fault.OWN, str(error) or type(error).__name__
        self._drop_groups()
        channel.report(self._report(Stage.RECEIVED, fault, sentence))
        if fault is not Fault.LOST:
            raise TransferFailed(self._sentence(sentence))
        try:
            verdict = channel.verdict("commit", self._hard)  # the sender knows, or finds out, whose fault it is
        except StoreError:
            raise TransferFailed(self._sentence(f"the broadcast broke: {sentence}")) from None
        assert not verdict.ok
        raise TransferFailed(verdict.reason)

    def _build(self, store: dist.TCPStore) -> None:
        transfer, means = self._transfer, self._means
        for source in self._sources():
            self._groups.append(
                build_group(
                    means.backend,
                    store,
                    transfer,
                    source=source,
                    rank=self._rank,
                    host=local_address(transfer.address),
                    device=means.landing.device,
                    deadline=self._soft,
                )
            )

    def _receive(self, manifest: Manifest, left: threading.Event, take: Take) -> list[int]:
        """All buckets, and their checksums, each computed and taken while the next ones are on their way."""
        landing, groups = self._means.landing, {group.source: group for group in self._groups}
        sizes = [bucket_bytes(manifest, number) for number in range(len(manifest.buckets))]
        landing.arena.keep(sizes)
        began = time.perf_counter()
        under_way: deque[tuple[torch.Tensor, Any]] = deque()
        checksums: list[int] = []
        started = iter(range(len(sizes)))

        def start() -> None:
            number = next(started, None)
            if number is not None:
                group, bucket = groups[number % len(groups)], landing.buffer(sizes[number])
                under_way.append((bucket, group.begin(bucket, self._soft) if bucket.numel() else None))

        for _ in range(IN_FLIGHT * len(groups)):
            start()
        for number in range(len(sizes)):
            if left.is_set():
                raise NotWaitedFor
            bucket, work = under_way.popleft()
            if work is not None:
                groups[number % len(groups)].finish(work, self._soft)
            self.received += bucket.numel()
            start()
            self.transfer_seconds = time.perf_counter() - began
            bucket = landing.land(bucket)
            checksums.append(checksum(bucket))
            take(number, bucket)
        if landing.rest.type == "cuda":
            torch.cuda.current_stream(landing.rest).synchronize()  # another stream will read it
        return checksums

    def _drop_groups(self) -> None:
        while self._groups:
            self._groups.pop().close()

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


def _check_streamable(manifest: Manifest, expected: Layout | None) -> None:
    """Buckets that are loaded as they arrive are not there to be compared. Raises `ManifestMismatch`."""
    pairs = tied_in_model_only(manifest, expected) if expected is not None else []
    if pairs:
        name, alias = pairs[0]
        raise ManifestMismatch(
            f"the model ties {alias} to {name}, and the sender sends both, which weightsync.staging = 'none' cannot compare"
        )
