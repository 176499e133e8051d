"""A node's end of weight sync where its engine's worker processes receive for themselves (`segue.ports.weights.WeightReceiver`).

consumes     `stage` or `open` from the node's update procedure; the workers' reports, over a local socket
produces     orders to the workers (`worker.py`), and a handle of what they hold; or `TransferFailed`, `EngineDead`
waits for    the workers to connect, once, and to report: until the transfer's deadline
unblocked by their reports, the end of a worker, a newer call, cancellation, `close`, or the deadline

Every worker is a member of the transfer (`segue.ports.transfer.members_of`). Orders and reports do not go through the engine,
whose calls wait for the step it computes, and hold up the next one.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from segue.metrics.registry import Metrics
from segue.ports.engine import EngineDead
from segue.ports.transfer import Transfer, members_of
from segue.ports.weights import Manifest, TransferFailed, WorkerWeights
from weightsync.manifest import Layout
from weightsync.turns import ReceiverTurns, failure_sentence
from weightsync.worker_messages import WorkerOrder, WorkerReport, post, receive, replay

JOIN_SECONDS = 60.0
"""For the workers to connect: the order to do so waits for the step that the engine computes."""

log = logging.getLogger(__name__)


class WorkersReceiver:
    """See the module.

    node     its name; connect: tells every worker's backend `WorkerInit` (weightsync/vllm_backend.py), as plain values
    ranks    how many workers the engine has
    backend  "gloo" or "nccl", as the sender's; staging: where they keep what arrived (`weightsync.staging`)
    metrics  of the node's weightsync target; gets what the workers' receivers count
    expected the model's layout, which each worker compares with the sender's manifest before anything is sent

    Used from one event loop.
    """

    def __init__(
        self,
        node: str,
        connect: Callable[[dict[str, Any]], Awaitable[None]],
        metrics: Metrics,
        *,
        ranks: int = 1,
        backend: str = "gloo",
        staging: str = "device",
        model_name: str = "policy",
        expected: Layout,
        roll_call_seconds: float = 5.0,
    ) -> None:
        self._node = node
        self._connect = connect
        self._metrics = metrics
        self._members = members_of(node, ranks)
        self._info = {
            "backend": backend,
            "staging": staging,
            "model_name": model_name,
            "expected": msgspec.to_builtins(expected),
            "roll_call_seconds": roll_call_seconds,
        }
        self._turns = ReceiverTurns(self._members[0])
        self._links: dict[str, asyncio.StreamWriter] = {}
        self._joining: asyncio.Task[str] | None = None
        self._all_here = asyncio.Event()
        self._listeners: set[asyncio.Task[None]] = set()
        self._gone = ""
        self._part: _Part | None = None

    async def stage(self, transfer: Transfer, rank: int) -> WorkerWeights:
        """Have the workers take part in `transfer`, the first as `rank`; everything is there and verified when this returns.

        A newer call supersedes one that still runs; after a failure or a cancellation the workers let go of what they have.
        Raises `TransferFailed`, by the deadline at the latest; `EngineDead` where a worker has ended or cannot be reached:
        this engine gets no weights any more.
        """
        return await self._begin(transfer, rank, open=False)

    async def open(self, transfer: Transfer, rank: int) -> WorkerWeights:
        """The same, but everybody only takes part when this returns: weights arrive as the engine loads them."""
        return await self._begin(transfer, rank, open=True)

    async def _begin(self, transfer: Transfer, rank: int, *, open: bool) -> WorkerWeights:
        self._turns.begin(transfer, rank)
        self._give_up(f"superseded by transfer {transfer.transfer}")
        part = self._part = _Part(transfer, self._members)
        try:
            async with asyncio.timeout(transfer.deadline_seconds):
                manifest = await self._take_part(part, rank, open)
        except TimeoutError:
            why = f"no word by the deadline of {transfer.deadline_seconds:g} s from {', '.join(part.silent)}"
            raise TransferFailed(failure_sentence(transfer, self._node, why)) from None
        finally:
            if not part.succeeded:
                self._release(transfer.transfer)
        release = partial(self._release, transfer.transfer)
        return WorkerWeights(transfer.version, manifest, transfer.transfer, release, transfer.deadline_seconds if open else 0.0)

    async def _take_part(self, part: _Part, rank: int, open: bool) -> Manifest:
        """Order the workers to take part, and wait for their reports."""
        if self._joining is None:
            self._joining = asyncio.ensure_future(self._join())
        joined: list[asyncio.Future[Any]] = [self._joining, part.done]
        await asyncio.wait(joined, return_when=asyncio.FIRST_COMPLETED)
        if not part.done.done():
            transfer = part.transfer
            why = self._gone or self._joining.result()
            if why:
                raise EngineDead(failure_sentence(transfer, self._node, why))
            for place, member in enumerate(self._members):
                self._order(member, WorkerOrder(transfer.transfer, transfer, rank + place, open))
        return await part.done

    def close(self) -> None:
        """Give up what runs, and leave the workers alone. Idempotent."""
        self._turns.closed = True
        self._give_up("the receiver was closed")
        if self._joining is not None:
            self._joining.cancel()
        for task in self._listeners:
            task.cancel()
        for writer in self._links.values():
            writer.close()

    def _give_up(self, why: str) -> None:
        if self._part is not None:
            self._part.fail(TransferFailed(failure_sentence(self._part.transfer, self._node, why)))

    # --- the workers --------------------------------------------------------------------------------------------------

    async def _join(self) -> str:
        """Once: tell the workers where the node listens, and wait until all have connected. Returns "" or why that failed; what
        fails once fails for good. The socket is nobody else's.
        """
        folder = tempfile.mkdtemp(prefix="segue-")
        try:
            async with asyncio.timeout(JOIN_SECONDS):
                socket = str(Path(folder) / "weights")
                server = await asyncio.start_unix_server(self._accept, socket)
                try:
                    await self._connect({**self._info, "socket": socket, "members": self._members})
                    await self._all_here.wait()
                finally:
                    server.close()
        except TimeoutError:
            absent = [member for member in self._members if member not in self._links]
            return f"{', '.join(absent)} did not connect to its node within {JOIN_SECONDS:g} s"
        except Exception as error:  # the engine's, which says what it is to everybody
            return f"its workers cannot be reached ({error})"
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return ""

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._listen(reader, writer))
        self._listeners.add(task)
        task.add_done_callback(self._listeners.discard)

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello = await receive(reader, WorkerReport)
            if hello is None or hello.member not in self._members:
                return
            self._links[hello.member] = writer
            if len(self._links) == len(self._members):
                self._all_here.set()
            while (report := await receive(reader, WorkerReport)) is not None:
                if report.metric is not None:
                    replay(report.metric, self._metrics)
                elif self._part is not None:
                    self._part.hear(report)
            self._lost(hello.member)
        finally:
            writer.close()

    def _lost(self, member: str) -> None:
        """A worker ended, and its engine with it."""
        if self._turns.closed:
            return
        self._gone = f"{member} is gone: its worker process ended"
        log.warning("%s", self._gone)
        if self._part is not None:
            self._part.fail(EngineDead(failure_sentence(self._part.transfer, self._node, self._gone)))

    def _order(self, member: str, order: WorkerOrder) -> None:
        writer = self._links.get(member)
        if writer is not None:
            post(writer, order)

    def _release(self, transfer: int) -> None:
        """Nobody wants what came by this transfer."""
        for member in self._members:
            self._order(member, WorkerOrder(transfer))


class _Part:
    """The workers' reports on one transfer: `done` when all hold the weights, or the first says why not."""

    def __init__(self, transfer: Transfer, members: list[str]) -> None:
        self.transfer = transfer
        self.silent = list(members)
        self.done: asyncio.Future[Manifest] = asyncio.get_running_loop().create_future()
        self.done.add_done_callback(lambda done: done.cancelled() or done.exception())

    @property
    def succeeded(self) -> bool:
        return self.done.done() and not self.done.cancelled() and self.done.exception() is None

    def hear(self, report: WorkerReport) -> None:
        if report.transfer != self.transfer.transfer or report.member not in self.silent:
            return
        self.silent.remove(report.member)
        if report.manifest is None:
            self.fail(TransferFailed(report.failure))
        elif not self.silent and not self.done.done():
            self.done.set_result(report.manifest)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
