"""A worker process's end of weight sync: a receiver of its own, on a thread of its own, that obeys the node over a local socket.

consumes     the node's orders: stage a transfer, or let go of one
produces     reports: what it holds, or why not; and the held weights for whoever loads them (`take`)
waits for    orders, as long as the node lives; transfers until their own deadline (`receiver.py`)
unblocked by the node, a newer order, the end of the connection, `close`

The process's main thread decodes tokens and is never asked for anything before the weights are to be loaded.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

from segue.ports.scheduler import Transfer
from segue.ports.weights import StagedWeights, TransferFailed, WeightReceiver
from weightsync.worker_messages import Recorder, WorkerOrder, WorkerReport, post, receive

CONNECT_SECONDS = 30.0

log = logging.getLogger(__name__)


class WorkerEnd:
    """See the module.

    socket    path of the Unix socket that the node listens on
    member    this worker's name in `Transfer.members`
    receiver  makes the receiver, with the metrics it is to use

    Raises `OSError` or `TimeoutError` when the node cannot be reached.
    """

    def __init__(self, socket: str, member: str, receiver: Callable[[Any], WeightReceiver]) -> None:
        self._socket = socket
        self._member = member
        self._metrics = Recorder()
        self._receiver = receiver(self._metrics)
        self._held: tuple[int, StagedWeights] | None = None
        self._lock = threading.Lock()
        self._task: asyncio.Task[None] | None = None
        self._running = -1
        self._loop = asyncio.new_event_loop()
        self._over: asyncio.Event = asyncio.Event()
        self._thread = threading.Thread(target=self._work, name="segue-weights", daemon=True)
        self._connected: asyncio.Future[None] = self._loop.create_future()
        reached = threading.Event()
        self._connected.add_done_callback(lambda _: reached.set())
        self._thread.start()
        if not reached.wait(CONNECT_SECONDS + 5.0):
            raise TimeoutError(f"the thread of {member} that receives weights did not start")
        self._connected.result()

    def take(self, transfer: int) -> StagedWeights:
        """The weights of a transfer that was reported as held; they are the caller's now. Any thread."""
        with self._lock:
            held, self._held = self._held, None
        if held is None or held[0] != transfer:
            raise RuntimeError(f"{self._member} does not hold the weights of transfer {transfer}")
        return held[1]

    def close(self) -> None:
        """Let go of everything and end the thread, as far as it can be ended. Any thread; idempotent."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join(5.0)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._let_go()
            self._receiver.close()
            self._loop.close()

    async def _serve(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await asyncio.open_unix_connection(self._socket)
        except (OSError, TimeoutError) as error:
            self._connected.set_exception(error)
            return
        post(writer, WorkerReport(self._member))
        self._connected.set_result(None)
        over = asyncio.ensure_future(self._over.wait())
        orders = asyncio.ensure_future(self._obey(reader, writer))
        await asyncio.wait([over, orders], return_when=asyncio.FIRST_COMPLETED)
        for task in (over, orders, self._task):
            if task is not None:
                task.cancel()
        await asyncio.gather(over, orders, return_exceptions=True)
        writer.close()

    async def _obey(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (order := await receive(reader, WorkerOrder)) is not None:
            if order.stage is not None:
                self._let_go()  # there is room for one copy
                self._running = order.transfer
                self._task = asyncio.ensure_future(self._stage(order.stage, order.rank, writer))
            elif order.transfer == self._running and self._task is not None:
                self._task.cancel()
                self._let_go(order.transfer)

    async def _stage(self, transfer: Transfer, rank: int, writer: asyncio.StreamWriter) -> None:
        """One transfer, and the report of how it ended. What supersedes or cancels it is known to the node."""
        number, failure, manifest = transfer.transfer, "", None
        try:
            staged = await self._receiver.stage(transfer, rank)
        except TransferFailed as error:
            failure = str(error)
        except Exception as error:  # a mistake of ours: the node must not wait for the deadline
            log.exception("staging transfer %d failed", number)
            failure = f"{self._member} failed in transfer {number}: {type(error).__name__}: {error}"
        else:
            manifest = staged.manifest
            with self._lock:
                self._held = (number, staged)
            del staged
        report = WorkerReport(self._member, number, manifest, failure, self._metrics.take())
        post(writer, report)

    def _let_go(self, transfer: int | None = None) -> None:
        """Of what is held; of that transfer's only, if one is named."""
        with self._lock:
            if self._held is not None and transfer in (None, self._held[0]):
                self._held = None
