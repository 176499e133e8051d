"""The learner's end of weight sync (`segue.ports.weights.WeightSender`): keeps published weights, broadcasts them when told.

consumes     `publish` from the training thread, `send` from the learner's event loop
waits for    its members, in a thread per transfer; the event loop waits for the thread, until the transfer's deadline
unblocked by the members' reports, or the deadline
produces     one `TransferResult` per transfer
on close     the store goes first, which ends all waits; then the threads are joined
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from segue.metrics.registry import Metrics
from segue.metrics.states import ActivityClock
from segue.ports.transfer import Transfer, TransferResult
from segue.ports.weights import Manifest, Probe
from weightsync.crew import Abandoned, Crew
from weightsync.gauges import Gauges
from weightsync.group import Groups, check_backend
from weightsync.sending import Means, Sending
from weightsync.shelf import Shelf
from weightsync.store import Sweeper, join_address, serve_store
from weightsync.turns import SenderTurns


class TorchSender:
    """Rank 0 of the broadcast groups.

    model_name     which of the learner's models this is ("policy")
    backend        "gloo" or "nccl"
    bucket_bytes   size of a bucket, see `weightsync.manifest.plan`
    host, ports    where the store listens: an address of this machine that the members can reach, and `cluster.ports`
    clock          made with `weightsync.gauges.PRECEDENCE`
    dtype          what floating-point tensors are sent as (default: as they are); the engines must hold the same
    device         of the broadcast: "cpu" for gloo, this rank's GPU for nccl
    sources        the names of all learner ranks that send, this one first: each of the others has a `TorchSource`

    Raises `UserError` when no port is free or the backend cannot work here. Needs no running event loop to be made.
    """

    def __init__(
        self,
        model_name: str,
        backend: str,
        bucket_bytes: int,
        host: str,
        ports: tuple[int, int],
        metrics: Metrics,
        clock: ActivityClock,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        roll_call_seconds: float = 5.0,
        sources: Sequence[str] = ("the sender",),
    ) -> None:
        check_backend(backend)
        store = serve_store(host, ports)
        self._store: dist.TCPStore | None = store
        self.address = join_address(host, store.port)
        self.shelf = Shelf(model_name, bucket_bytes, dtype, sources=len(sources))
        self._gauges = Gauges(metrics, clock)
        self._crew = Crew("weightsync-send")
        self._means = Means(
            shelf=self.shelf,
            groups=Groups(),
            sweeper=Sweeper(),
            backend=backend,
            device=torch.device(device),
            host=host,
            address=self.address,
            roll_call_seconds=roll_call_seconds,
            sources=tuple(sources),
        )
        self._turns = SenderTurns()

    def share(self, named: Mapping[str, torch.Tensor]) -> set[str]:
        """Names of the tensors that `publish` reads: with other sources, those of this one's buckets."""
        return self.shelf.share(named)

    def publish(self, step: int, named: Mapping[str, torch.Tensor], probe: Probe | None = None) -> Manifest:
        """Copy the full weights of `step` aside; returns when the caller may change them. Called by the training thread.

        `named` are full tensors on any device (gathered, where the model is sharded), tied ones under all their names or one.
        """
        with self._gauges.gathering():
            return self.shelf.put(step, named, probe).manifest

    async def send(self, transfer: Transfer) -> TransferResult:
        """Broadcast the weights of `transfer.step` to its members. Never raises for a member; returns by the deadline.

        Transfers to disjoint members may run side by side. One that is not newer than all that its members took part in is stale
        and refused without touching the network.
        """
        refused = self._turns.begin(transfer)
        if refused is not None:
            return refused
        sending = Sending(transfer, self._means)
        with self._gauges.transferring(transfer.transfer):
            try:
                result = await self._crew.run(sending.run, transfer.deadline_seconds)
            except Abandoned as error:
                result = sending.overdue(str(error))
        self._gauges.moved(result.bytes)
        if result.ok:
            self._gauges.took("transfer", result.transfer_seconds)
        else:
            self._gauges.failed(sending.phase)
        return result

    def close(self) -> None:
        """End everything: running transfers fail, groups and store close. Idempotent."""
        self._turns.closed = True
        self._store = None  # the last reference: its server stops
        self._means.groups.close()
        self._crew.close(2.0)
        self.shelf.clear()
