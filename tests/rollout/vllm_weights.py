"""Weights for vLLM's workers from a real sender, by the way of a run: published, sent in buckets, received by the workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from segue.metrics import ActivityClock, Metrics
from segue.ports.transfer import Transfer, TransferResult
from segue.ports.weights import Probe
from weightsync.gauges import PRECEDENCE
from weightsync.manifest import Layout, layout
from weightsync.sender import TorchSender
from weightsync.workers import WorkersReceiver

PORTS = (21000, 21999)
Published = Callable[[int], tuple[dict[str, torch.Tensor], Probe | None]]


def make_sender(bucket_bytes: int = 16384, roll_call_seconds: float = 1.0) -> TorchSender:
    """One whose buckets are small: a tiny model fills several."""
    clock = ActivityClock(PRECEDENCE, time.monotonic)
    metrics = Metrics("weightsync")
    return TorchSender("policy", "gloo", bucket_bytes, "127.0.0.1", PORTS, metrics, clock, roll_call_seconds=roll_call_seconds)


class SentReceiver:
    """A node's receiver; each `stage` has its weights published and sent to it.

    `published(version)` are the weights, and their probe if there is one. `expected` is what the workers take the model to be;
    None: what is published for version 0.
    """

    def __init__(
        self,
        name: str,
        engine: Any,
        published: Published,
        *,
        ranks: int = 1,
        expected: Layout | None = None,
        metrics: Metrics | None = None,
        seconds: float = 30.0,
    ) -> None:
        self.sender = make_sender()
        self.published = published
        self.seconds = seconds
        self.result: TransferResult | None = None
        self._sending: asyncio.Future[TransferResult] | None = None
        expected = expected or layout(published(0)[0])
        metrics = metrics or Metrics("weightsync", name)
        self.receiver = WorkersReceiver(name, engine.connect_workers, metrics, ranks=ranks, expected=expected)

    def publish(self, version: int) -> None:
        """Its step is its version."""
        tensors, probe = self.published(version)
        self.sender.publish(version, tensors, probe)

    async def stage(self, transfer: Transfer, rank: int) -> Any:
        transfer = self._send(transfer)
        try:
            return await self.receiver.stage(transfer, rank)
        finally:
            await self.settled()

    async def open(self, transfer: Transfer, rank: int) -> Any:
        return await self.receiver.open(self._send(transfer), rank)

    def _send(self, transfer: Transfer) -> Transfer:
        self.publish(transfer.version)
        transfer = msgspec.structs.replace(transfer, address=self.sender.address, deadline_seconds=self.seconds)
        self._sending = asyncio.ensure_future(self.sender.send(transfer))
        return transfer

    async def settled(self) -> None:
        """The sender's word on the last transfer is in `result`."""
        assert self._sending is not None
        self.result = await self._sending

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()
