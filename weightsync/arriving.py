"""Weights on their way into an engine that is paused: buckets go from the thread that receives them to the event loop, one at a
time, and each is let go of before the next is handed over.

consumes     buckets, from the thread of the transfer
waits for    the next bucket or the end of the transfer (the loop); the loop to be done with one, until the deadline (the thread)
produces     the tensors of each bucket; `TransferFailed` when not everybody got everything undamaged
on close     the thread gives up; whoever waits for it finds it superseded or cancelled
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import torch

from segue.ports.transfer import Transfer
from segue.ports.weights import Manifest
from weightsync.buckets import unpack_one
from weightsync.crew import Deadline
from weightsync.staging import NotWaitedFor, Staging
from weightsync.waiting import Attempt


class Arriving:
    """Implements `segue.ports.weights.ArrivingWeights`. Made on the event loop."""

    manifest: Manifest

    def __init__(self, transfer: Transfer, staging: Staging) -> None:
        self.version = transfer.version
        self._staging = staging
        self._deadline = Deadline(transfer.deadline_seconds)
        self._loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[Manifest] = self._loop.create_future()
        self._queue: asyncio.Queue[tuple[int, torch.Tensor]] = asyncio.Queue()
        self._done_with = threading.Semaphore(0)
        self._closed = False
        self._attempt: Attempt[Manifest] | None = None

    def work(self, left: threading.Event) -> Manifest:
        """The transfer, in its thread."""

        def opened(manifest: Manifest) -> None:
            self._loop.call_soon_threadsafe(self._open, manifest)

        def take(number: int, bucket: torch.Tensor) -> None:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (number, bucket))
            del bucket
            self._done_with.acquire(timeout=self._deadline.left())
            if self._closed or left.is_set() or not self._deadline.left():
                raise NotWaitedFor

        return self._staging.stream(left, opened, take)

    def _open(self, manifest: Manifest) -> None:
        if not self._opened.done():
            self._opened.set_result(manifest)

    async def begin(self, attempt: Attempt[Manifest]) -> None:
        """Return when everybody takes part. Raises `TransferFailed`."""
        self._attempt = attempt
        try:
            self.manifest = await attempt.first(self._opened)
        except BaseException:
            self.close()
            raise

    async def buckets(self) -> AsyncIterator[dict[str, torch.Tensor]]:
        """See the port."""
        attempt = self._attempt
        assert attempt is not None, "begin comes first"
        try:
            for _ in self.manifest.buckets:
                number, bucket = await attempt.first(asyncio.ensure_future(self._queue.get()))
                tensors = unpack_one(self.manifest, number, bucket)
                del bucket
                yield tensors
                del tensors
                self._done_with.release()
            self.manifest = await attempt.result()
        finally:
            self.close()

    def close(self) -> None:
        """Nobody waits for the rest. Idempotent."""
        self._closed = True
        self._done_with.release()
        if self._attempt is not None:
            self._attempt.give_up()
