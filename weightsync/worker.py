"""A worker process's end of weight sync: a receiver of its own, on a thread of its own, that obeys the node over a local socket.

consumes     the node's orders: take part in a transfer, or let go of one
produces     reports: what it holds, or why not; and the tensors for whoever loads them (`tensors`)
waits for    orders, as long as the node lives; transfers until their own deadline (`receiver.py`)
unblocked by the node, a newer order, the end of the connection, `close`

The process's main thread decodes tokens and is never asked for anything before the weights are to be loaded.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from segue.ports.weights import ArrivingWeights, StagedWeights, TransferFailed, WeightReceiver
from weightsync.worker_messages import Recorder, WorkerOrder, WorkerReport, post, receive

CONNECT_SECONDS = 30.0

log = logging.getLogger(__name__)


def _read_here(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of each. On a GPU the reader only queues its copies, on another stream than the one that the memory was
    taken for: the allocator is told, so that nothing that arrives later is written there before they are done."""
    for name, tensor in tensors.items():
        if tensor.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        yield name, tensor


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
        self._receiver = receiver(Recorder(lambda call: self._say(WorkerReport(member, metric=call))))
        self._writer: asyncio.StreamWriter | None = None
        self._staged: StagedWeights | None = None
        self._arriving: ArrivingWeights | None = None
        self._held = -1
        self._lock = threading.Lock()
        self._task: asyncio.Task[None] | None = None
        self._newest = -1
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._work, name="segue-weights", daemon=True)
        self._connected: asyncio.Future[None] = self._loop.create_future()
        reached = threading.Event()
        self._connected.add_done_callback(lambda _: reached.set())
        self._thread.start()
        if not reached.wait(CONNECT_SECONDS + 5.0):
            raise TimeoutError(f"the thread of {member} that receives weights did not start")
        self._connected.result()

    def tensors(self, transfer: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor of everything that came, or comes now, by a transfer that was reported as held. For one other thread.

        What arrives now raises `TransferFailed` when not everybody gets everything undamaged. A tensor may be kept; its memory
        is used again once nobody has a view of it.
        """
        with self._lock:
            staged, arriving, held = self._staged, self._arriving, self._held
            self._staged, self._arriving, self._held = None, None, -1
        if held != transfer:
            raise RuntimeError(f"{self._member} does not hold the weights of transfer {transfer}")
        if staged is not None:
            return _read_here(staged.tensors())
        assert arriving is not None
        return self._arrive(arriving)

    def _arrive(self, arriving: ArrivingWeights) -> Iterator[tuple[str, torch.Tensor]]:
        buckets = arriving.buckets()

        async def following() -> dict[str, torch.Tensor] | None:
            return await anext(buckets, None)

        try:
            while (tensors := asyncio.run_coroutine_threadsafe(following(), self._loop).result()) is not None:
                yield from _read_here(tensors)
                del tensors
        except concurrent.futures.CancelledError:
            raise TransferFailed(f"{self._member} was closed while weights arrived") from None
        finally:
            with contextlib.suppress(RuntimeError):  # the thread has ended, and all that arrived with it
                self._loop.call_soon_threadsafe(arriving.close)

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
                reader, self._writer = await asyncio.open_unix_connection(self._socket)
        except (OSError, TimeoutError) as error:
            self._connected.set_exception(error)
            return
        self._say(WorkerReport(self._member))
        self._connected.set_result(None)
        over = asyncio.ensure_future(self._over.wait())
        orders = asyncio.ensure_future(self._obey(reader))
        await asyncio.wait([over, orders], return_when=asyncio.FIRST_COMPLETED)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}  # one may hand out buckets to a thread that waits for them
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._writer.close()

    async def _obey(self, reader: asyncio.StreamReader) -> None:
        while (order := await receive(reader, WorkerOrder)) is not None:
            if order.begin is not None:
                if self._task is not None:
                    self._task.cancel()  # it may have everything already, and not have said so
                self._let_go()  # there is room for one copy
                self._newest = order.transfer
                self._task = asyncio.ensure_future(self._take_part(order))
            elif order.transfer == self._newest and self._task is not None:
                self._task.cancel()
                self._let_go()

    async def _take_part(self, order: WorkerOrder) -> None:
        """One transfer, and the report of what came of it. What supersedes or cancels it is known to the node."""
        assert order.begin is not None
        number, failure, manifest = order.transfer, "", None
        try:
            if order.open:
                arriving = await self._receiver.open(order.begin, order.rank)
                manifest = arriving.manifest
                self._hold(number, None, arriving)
            else:
                staged = await self._receiver.stage(order.begin, order.rank)
                manifest = staged.manifest
                self._hold(number, staged, None)
                del staged
        except TransferFailed as error:
            failure = str(error)
        except Exception as error:  # a mistake of ours: the node must not wait for the deadline
            log.exception("transfer %d failed", number)
            failure = f"{self._member} failed in transfer {number}: {type(error).__name__}: {error}"
        self._say(WorkerReport(self._member, number, manifest, failure))

    def _hold(self, transfer: int, staged: StagedWeights | None, arriving: ArrivingWeights | None) -> None:
        with self._lock:
            self._held, self._staged, self._arriving = transfer, staged, arriving

    def _let_go(self) -> None:
        """Of what is held, if it has not been taken."""
        with self._lock:
            arriving, self._held, self._staged, self._arriving = self._arriving, -1, None, None
        if arriving is not None:
            arriving.close()

    def _say(self, report: WorkerReport) -> None:
        if self._writer is not None:
            post(self._writer, report)
