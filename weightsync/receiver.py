"""An engine's end of weight sync (`segue.ports.weights.WeightReceiver`): receives and verifies weights while the engine goes on.

consumes     `stage` or `open` from the node's update procedure
waits for    the sender, in a thread per transfer; the event loop waits for the thread, until the transfer's deadline
unblocked by the sender's verdict, a newer `stage` or `open`, cancellation, `close`, or the deadline
produces     `Staged` weights in memory of their own, `Arriving` ones, or `TransferFailed`
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from segue.metrics.registry import Metrics
from segue.ports.transfer import Transfer
from weightsync.arriving import Arriving
from weightsync.crew import Crew
from weightsync.group import Groups, check_backend
from weightsync.manifest import Layout
from weightsync.memory import Landing
from weightsync.staged import Staged
from weightsync.staging import Receiving, Staging
from weightsync.turns import ReceiverTurns
from weightsync.waiting import Attempt

R = TypeVar("R")


class TorchReceiver:
    """One member of the broadcast groups.

    member_name    its name in `Transfer.members`
    backend        "gloo" or "nccl", as the sender's
    device         of the broadcast: "cpu" for gloo, the engine's GPU for nccl
    engine_device  where the engine's weights are (default: `device`)
    staging        where received weights wait: "device" or "host" (see `weightsync.staging`); it matters beside a GPU only, and
                   not to `open`, whose buckets are loaded from where they arrive
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
        engine_device: torch.device | str | None = None,
        staging: str = "device",
        roll_call_seconds: float = 5.0,
    ) -> None:
        check_backend(backend)
        on, engine = torch.device(device), torch.device(device if engine_device is None else engine_device)
        rest = {"device": engine, "host": torch.device("cpu"), "none": on}[staging]
        landing = Landing(on, rest, pinned=engine.type == "cuda")
        self.member_name = member_name
        self._means = Receiving(member_name, model_name, expected, Groups(), backend, landing)
        self._metrics = metrics
        self._crew = Crew("weightsync-receive")
        self._roll_call_seconds = roll_call_seconds
        self._turns = ReceiverTurns(member_name)
        self._attempt: Attempt[Any] | None = None

    async def stage(self, transfer: Transfer, rank: int) -> Staged:
        """Take part in `transfer` as `rank`; everything has arrived and is verified when this returns.

        A newer call supersedes one that still runs; cancelling it, or a failure, discards all it received. Raises
        `TransferFailed`, by the deadline at the latest.
        """
        self._turns.begin(transfer, rank)
        staging = Staging(transfer, rank, self._means, self._roll_call_seconds)
        attempt = self._start(transfer, staging, staging.run)
        try:
            return await attempt.result()
        finally:
            attempt.give_up()
            if self._attempt is attempt:
                self._attempt = None  # it holds what was staged, which is the caller's alone

    async def open(self, transfer: Transfer, rank: int) -> Arriving:
        """Take part in `transfer` as `rank`; returns when everybody does, with buckets to be loaded as they arrive.

        Superseded, cancelled and failed like `stage`, until the last bucket was taken.
        """
        self._turns.begin(transfer, rank)
        staging = Staging(transfer, rank, self._means, self._roll_call_seconds)
        arriving = Arriving(transfer, staging)
        await arriving.begin(self._start(transfer, staging, arriving.work))
        return arriving

    def _start(self, transfer: Transfer, staging: Staging, work: Callable[[threading.Event], R]) -> Attempt[R]:
        self._give_up(f"superseded by transfer {transfer.transfer}")
        running = asyncio.ensure_future(self._crew.run(work, transfer.deadline_seconds))
        running.add_done_callback(lambda _: self._count(staging, running))
        self._attempt = attempt = Attempt(transfer, self.member_name, running)
        return attempt

    def _count(self, staging: Staging, running: asyncio.Future[Any]) -> None:
        self._metrics.add("segue_weight_sync_bytes_total", staging.received)
        if not running.cancelled() and running.exception() is None:
            self._metrics.observe("segue_weight_sync_seconds", staging.transfer_seconds, phase="transfer")

    def _give_up(self, why: str) -> None:
        if self._attempt is not None:
            self._attempt.supersede(why)

    def close(self) -> None:
        """Give up what runs, leave all groups, and join the threads. Idempotent."""
        self._turns.closed = True
        self._give_up("the receiver was closed")
        self._means.groups.close()
        self._means.landing.arena.clear()
        self._crew.close(2.0)
