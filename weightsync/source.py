"""A learner rank other than 0 in weight sync (`segue.ports.weights.FurtherSource`): keeps its share of the published weights, and
broadcasts it when the sender says so.

consumes     `publish` from the training thread; orders from a queue in the sender's store
waits for    an order, in a thread, at most `LISTEN_SECONDS` at a time; each transfer, in a thread of its own, until its deadline
unblocked by an order, the deadlines, the end of the store
produces     broadcasts; what it has to say goes to the sender, who alone reports to the scheduler
on close     running transfers are given up; then the threads are joined
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Mapping

import torch

from segue.errors import WireError
from segue.metrics.registry import Metrics
from segue.metrics.states import ActivityClock
from segue.ports.transfer import Transfer
from segue.ports.weights import Manifest, Probe, TransferFailed
from weightsync.crew import Abandoned, Crew, Deadline
from weightsync.gauges import Gauges
from weightsync.group import Groups, check_backend
from weightsync.shelf import Shelf
from weightsync.sourcing import SourceMeans, Sourcing
from weightsync.store import StoreError, connect_store, next_order, wake

LISTEN_SECONDS = 60.0
"""So often a source that hears nothing makes sure that the store still answers."""
_ANSWER_SECONDS = 10.0
"""How much longer a store may take before the thread that asks it is left behind."""

log = logging.getLogger(__name__)


class TorchSource:
    """Rank 0 of the broadcast groups of its share. Arguments as `weightsync.sender.TorchSender`'s.

    sources   the names of all learner ranks that send, the sender first
    number    which of them this is, at least 1
    """

    def __init__(
        self,
        model_name: str,
        backend: str,
        bucket_bytes: int,
        host: str,
        metrics: Metrics,
        clock: ActivityClock,
        *,
        sources: tuple[str, ...],
        number: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        roll_call_seconds: float = 5.0,
    ) -> None:
        check_backend(backend)
        assert 1 <= number < len(sources)
        self.name = sources[number]
        self.shelf = Shelf(model_name, bucket_bytes, dtype, source=number, sources=len(sources))
        self._gauges = Gauges(metrics, clock)
        self._crew = Crew("weightsync-source")
        self._means = SourceMeans(self.name, number, self.shelf, Groups(), backend, torch.device(device), host, roll_call_seconds)
        self._address = ""
        self._closed = False
        self._transfers: set[asyncio.Task[None]] = set()

    def share(self, named: Mapping[str, torch.Tensor]) -> set[str]:
        """Names of the tensors in this source's buckets."""
        return self.shelf.share(named)

    def publish(self, step: int, named: Mapping[str, torch.Tensor], probe: Probe | None = None) -> Manifest:
        """Copy this source's share of `step` aside; returns when the caller may change the weights."""
        with self._gauges.gathering():
            return self.shelf.put(step, named, probe).manifest

    async def serve(self, address: str) -> None:
        """Obey the sender at `address` until it is gone, or `close`."""
        self._address = address
        while not self._closed:
            try:
                work = self._crew.run(lambda left: self._listen(address, left), LISTEN_SECONDS + _ANSWER_SECONDS)
                transfer = await work
            except Abandoned as error:
                if not self._closed:
                    log.warning("%s: the weight sender at %s does not answer (%s)", self.name, address, error)
                continue
            except WireError as error:
                log.warning("%s: an order of the weight sender cannot be read: %s", self.name, error)
                continue
            except StoreError as error:
                if not self._closed:  # rank 0 is gone, which the learner's own collectives notice, or it has closed
                    log.warning("%s obeys no weight sender any more: %s", self.name, error)
                return
            if transfer is not None:  # each comes once; what is stale was refused by the sender, whose transfers may overtake
                task = asyncio.get_running_loop().create_task(self._take_part(transfer), name=f"transfer {transfer.transfer}")
                self._transfers.add(task)
                task.add_done_callback(self._transfers.discard)

    def _listen(self, address: str, left: threading.Event) -> Transfer | None:
        store = connect_store(address, Deadline(_ANSWER_SECONDS))
        return None if left.is_set() else next_order(store, self.name, Deadline(LISTEN_SECONDS))

    async def _take_part(self, transfer: Transfer) -> None:
        sourcing = Sourcing(transfer, self._means)
        log.info("%s sends its share of step %d (transfer %d)", self.name, transfer.step, transfer.transfer)
        with self._gauges.transferring(transfer.transfer):
            try:
                await self._crew.run(sourcing.run, transfer.deadline_seconds)
            except (TransferFailed, Abandoned) as error:
                log.warning("%s: %s", self.name, error)
                self._gauges.failed(sourcing.phase)
            else:
                self._gauges.took("transfer", sourcing.transfer_seconds)
        self._gauges.moved(sourcing.sent)

    def _wake(self) -> None:
        with contextlib.suppress(StoreError):  # the store is gone, which has woken it, too
            wake(connect_store(self._address, Deadline(1.0)), self.name)

    def close(self) -> None:
        """Give up what runs, and leave all groups. Idempotent."""
        listening, self._closed = not self._closed and bool(self._address), True
        if listening:  # for up to a minute; it is woken by another thread, because a frozen store answers nobody
            waker = threading.Thread(target=self._wake, name="weightsync-wake", daemon=True)
            waker.start()
            waker.join(2.0)
        for task in self._transfers:
            task.cancel()
        self._means.groups.close()
        self._crew.close(2.0)
        self.shelf.clear()
