"""Weights between the learner's sender and the nodes' receivers. Only roles that hold a model import this (it needs torch)."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Protocol

import msgspec
import torch

from segue.ports.transfer import Transfer, TransferResult
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

    `buckets` are lists of indices into `tensors`; `checksums` has one number per bucket, and is empty until they are known (the
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


class ArrivingWeights(Protocol):
    """Weights that an engine loads as they arrive, while it is paused, because there is no memory for a second copy.

    All members take part; `manifest` has no checksums before the last bucket. Whoever does not exhaust `buckets` closes it.
    """

    version: int
    manifest: Manifest

    def buckets(self) -> AsyncIterator[dict[str, torch.Tensor]]:
        """The tensors of one bucket after the other, by name, tied names included. They are the receiver's again as soon as the
        next ones are asked for. Ends when everybody has everything undamaged; raises `TransferFailed` when that is not so.
        """
        ...

    def close(self) -> None: ...


class WorkerWeights:
    """Weights in the engine's worker processes, or on their way there: a handle, by the transfer they come in. It stands for
    `StagedWeights` and for `ArrivingWeights`, as far as there are no tensors in this process.

    `seconds`: how long what has not arrived may take. `release` is called once, when it is closed or nobody holds it any more:
    the workers let go of what they have then.
    """

    def __init__(
        self, version: int, manifest: Manifest, transfer: int, release: Callable[[], None], seconds: float = 0.0
    ) -> None:
        self.version = version
        self.manifest = manifest
        self.transfer = transfer
        self.seconds = seconds
        self._release = weakref.finalize(self, release)
        self._release.atexit = False

    def tensors(self) -> dict[str, torch.Tensor]:
        """There are none here."""
        raise AssertionError("these weights are in the engine's workers: load them there")

    def buckets(self) -> AsyncIterator[dict[str, torch.Tensor]]:
        """There are none here."""
        raise AssertionError("these weights arrive in the engine's workers: load them there")

    def close(self) -> None:
        """Idempotent."""
        self._release()


class WeightSource(Protocol):
    """A learner rank that sends weights: its share of the buckets, where several do."""

    def share(self, named: Mapping[str, torch.Tensor]) -> set[str]:
        """Of which tensors `publish` reads the values; the others may be on the meta device. So may all be here."""
        ...

    def publish(self, step: int, named: Mapping[str, torch.Tensor], probe: Probe | None = None) -> Manifest:
        """Copy the weights aside (the only part the training thread waits for); they stay until the next publish is sent.

        `probe` is what these weights make of the run's probe; it goes into the manifest. With several sources, all publish.
        """
        ...

    def close(self) -> None: ...


class FurtherSource(WeightSource, Protocol):
    """A rank other than 0: takes part in the transfers of the sender at `address`, in threads of its own, until it is closed."""

    async def serve(self, address: str) -> None: ...


class WeightSender(WeightSource, Protocol):
    """Rank 0 of the learner: keeps the newest published weights and broadcasts them; its own thread does the sending.

    `address` is where members meet it ("host:port"); the learner hands it to the scheduler with every publish.
    """

    address: str

    async def send(self, transfer: Transfer) -> TransferResult:
        """Take part in the broadcast as rank 0; never raises for a missing member, and returns by the transfer's deadline."""
        ...


class WeightReceiver(Protocol):
    """One engine's end. `stage` returns when everything arrived and its checksums hold, or raises `TransferFailed`; `EngineDead`
    where the engine's own processes are to receive and are gone.

    `open` is for an engine that is paused already: it returns when everybody takes part, before the first bucket comes. `rank` is
    that of the node's first member; others follow it (`segue.ports.transfer.members_of`).
    """

    async def stage(self, transfer: Transfer, rank: int) -> StagedWeights: ...

    async def open(self, transfer: Transfer, rank: int) -> ArrivingWeights: ...

    def close(self) -> None: ...


class TransferFailed(Exception):
    """A transfer that did not complete; the sentence names who is missing and until when was waited."""
