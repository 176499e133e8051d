"""An engine's end of weight sync (`segue.ports.weights.WeightReceiver`): receives and verifies weights while the engine goes on.

consumes     `stage` from the node's update procedure
waits for    the sender, in a thread per transfer; the event loop waits for the thread, until the transfer's deadline
unblocked by the sender's verdict, a newer `stage`, cancellation, `close`, or the deadline
produces     `Staged` weights in memory of their own, or `TransferFailed`
"""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from segue.metrics.registry import Metrics
from segue.ports.scheduler import Transfer
from segue.ports.weights import TransferFailed
from weightsync.crew import Abandoned, Crew
from weightsync.group import Groups, check_backend
from weightsync.manifest import Layout
from weightsync.memory import Landing
from weightsync.staged import Staged
from weightsync.staging import Receiving, Staging
from weightsync.turns import ReceiverTurns, failure_sentence


class TorchReceiver:
    """One member of the broadcast groups.

    member_name    its name in `Transfer.members`
    backend        "gloo" or "nccl", as the sender's
    device         where buffers live: "cpu" for gloo, the engine's GPU for nccl
    metrics        of the node's weightsync target; gets bytes and the phase `transfer`, the node adds the other phases
    model_name     the model it holds
    expected       that model's own layout (`weightsync.manifest.layout` of its named tensors), checked before the first byte
                   is sent; None leaves names and shapes to the engine's `load`

    Used from one event loop. Raises `UserError` when the backend cannot work here.
    """

    def __init__(
        self,
        member_name: str,
        backend: str,
        device: torch.device | str,
        metrics: Metrics,
        *,
        model_name: str = "policy",
        expected: Layout | None = None,
        roll_call_seconds: float = 5.0,
    ) -> None:
        check_backend(backend)
        self.member_name = member_name
        self._means = Receiving(member_name, model_name, expected, Groups(), backend, Landing(torch.device(device)))
        self._metrics = metrics
        self._crew = Crew("weightsync-receive")
        self._roll_call_seconds = roll_call_seconds
        self._turns = ReceiverTurns(member_name)
        self._superseded: asyncio.Future[str] | None = None

    async def stage(self, transfer: Transfer, rank: int) -> Staged:
        """Take part in `transfer` as `rank`; everything has arrived and is verified when this returns.

        A newer call supersedes one that still runs; cancelling it, or a failure, discards all it received. Raises
        `TransferFailed`, by the deadline at the latest.
        """
        self._turns.begin(transfer, rank)
        self._give_up(f"superseded by transfer {transfer.transfer}")
        superseded: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._superseded = superseded
        staging = Staging(transfer, rank, self._means, self._roll_call_seconds)
        try:
            staged = await self._run(staging, transfer, superseded)
        finally:
            self._metrics.add("segue_weight_sync_bytes_total", staging.received)
        self._metrics.observe("segue_weight_sync_seconds", staging.transfer_seconds, phase="transfer")
        return staged

    async def _run(self, staging: Staging, transfer: Transfer, superseded: asyncio.Future[str]) -> Staged:
        work = asyncio.ensure_future(self._crew.run(staging.run, transfer.deadline_seconds))
        either: list[asyncio.Future[Any]] = [work, superseded]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if superseded.done():
                raise TransferFailed(failure_sentence(transfer, self.member_name, superseded.result()))
            return work.result()
        except Abandoned as error:
            why = f"the weight sender at {transfer.address} did not answer by the deadline ({error})"
            raise TransferFailed(failure_sentence(transfer, self.member_name, why)) from error
        finally:
            if not work.cancel() and not work.cancelled():
                work.exception()  # superseded just as it failed: nobody else will ask for it

    def _give_up(self, why: str) -> None:
        if self._superseded is not None and not self._superseded.done():
            self._superseded.set_result(why)

    def close(self) -> None:
        """Give up what runs, leave all groups, and join the threads. Idempotent."""
        self._turns.closed = True
        self._give_up("the receiver was closed")
        self._means.groups.close()
        self._crew.close(2.0)
