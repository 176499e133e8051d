"""Weights between the learner's sender and the nodes' receivers. Only roles that hold a model import this (it needs torch)."""

from __future__ import annotations

from typing import Protocol

import msgspec
import torch

from segue.ports.scheduler import Transfer, TransferResult
from segue.wire import Message


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a manifest. `dtype` is torch's name without "torch."."""

    name: str
    shape: list[int]
    dtype: str


class Probe(msgspec.Struct, frozen=True, array_like=True):
    """What the published weights make of a fixed sequence, as the learner computes it: an engine that runs them says the same.

    tokens    n ≥ 2 token ids
    logprobs  n − 1 log-probabilities (nats, temperature 1), of each of `tokens[1:]` given all before it
    """

    tokens: list[int]
    logprobs: list[float]


class Manifest(Message, frozen=True):
    """What is sent: `what` is "full" (later: adapter, delta, with `base`), tensors in sending order, and a checksum.

    `buckets` are lists of indices into `tensors`; `checksums` has one CRC-32 per bucket, and is empty until they are known (the
    sender computes them while it sends; staged weights have them). `aliases` maps each tied name to the name in `tensors`
    under which its tensor is sent, once. `probe` is what the node checks after every load; None if `weightsync.probe_tokens` = 0.
    """

    what: str
    model: str
    base: int
    step: int
    tensors: list[TensorSpec]
    buckets: list[list[int]]
    checksums: list[int]
    aliases: dict[str, str] = {}
    probe: Probe | None = None


class StagedWeights(Protocol):
    """Weights that have fully arrived and been verified, in memory the receiver owns until `load` has returned."""

    version: int
    manifest: Manifest

    def tensors(self) -> dict[str, torch.Tensor]: ...


class WorkerWeights:
    """Weights that the engine's worker processes hold, arrived and verified there: a handle, by the transfer they came in.

    Who made it is told when nobody holds it any more (`weakref.finalize`), and lets the workers' memory go.
    """

    def __init__(self, version: int, manifest: Manifest, transfer: int) -> None:
        self.version = version
        self.manifest = manifest
        self.transfer = transfer

    def tensors(self) -> dict[str, torch.Tensor]:
        """There are none in this process."""
        raise AssertionError("these weights are in the engine's workers: load them there")


class WeightSender(Protocol):
    """Rank 0 of the learner: keeps the newest published weights and broadcasts them; its own thread does the sending.

    `address` is where members meet it ("host:port"); the learner hands it to the scheduler with every publish.
    """

    address: str

    def publish(self, step: int, named: dict[str, torch.Tensor], probe: Probe | None = None) -> Manifest:
        """Copy the weights aside (the only part the training thread waits for); they stay until the next publish is sent.

        `probe` is what these weights make of the run's probe; it goes into the manifest.
        """
        ...

    async def send(self, transfer: Transfer) -> TransferResult:
        """Take part in the broadcast as rank 0; never raises for a missing member, and returns by the transfer's deadline."""
        ...

    def close(self) -> None: ...


class WeightReceiver(Protocol):
    """One engine's end. `stage` returns when everything arrived and its checksums hold, or raises `TransferFailed`.

    `rank` is that of the node's first member; others follow it (`segue.ports.scheduler.members_of`).
    """

    async def stage(self, transfer: Transfer, rank: int) -> StagedWeights: ...

    def close(self) -> None: ...


class TransferFailed(Exception):
    """A transfer that did not complete; the sentence names who is missing and until when was waited."""
