"""What the transfer tests share: senders and receivers with metrics of their own, weights, and transfers."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from segue.metrics.registry import Metrics
from segue.metrics.states import ActivityClock
from segue.ports.transfer import Transfer
from weightsync.gauges import PRECEDENCE
from weightsync.manifest import Layout
from weightsync.receiver import TorchReceiver
from weightsync.sender import TorchSender
from weightsync.source import TorchSource
from weightsync.staged import Staged

HOST = "127.0.0.1"
PORTS = (21000, 21999)
BUCKET_BYTES = 8192
GENEROUS = 30.0
"""Seconds for transfers that are to succeed: a busy machine must not fail them."""


@dataclass
class Gauged:
    """Metrics and clock of one target."""

    metrics: Metrics = field(default_factory=lambda: Metrics("weightsync"))
    clock: ActivityClock = field(default_factory=lambda: ActivityClock(PRECEDENCE, time.monotonic))

    def failures(self, phase: str) -> float:
        return self.metrics.value("segue_weight_sync_failures_total", phase=phase)


def weights(step: int, layers: int = 6) -> dict[str, torch.Tensor]:
    """A small model whose every tensor tells its step; layers are larger than a bucket, one tensor is empty, two are tied."""
    generator = torch.Generator().manual_seed(step)
    embed = torch.rand((50, 16), generator=generator)
    named = {"embed.weight": embed, "head.weight": embed, "empty": torch.empty(0, 4)}
    for layer in range(layers):
        named[f"layers.{layer}.a"] = torch.rand((33, 40), generator=generator)
        named[f"layers.{layer}.b"] = torch.rand((40, 40), generator=generator).to(torch.bfloat16)
        named[f"layers.{layer}.scale"] = torch.tensor(float(step))
    return named


def assert_weights(staged: Staged, step: int) -> None:
    """Exactly what was published for `step`, under every name."""
    expected = weights(step)
    tensors = staged.tensors()
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor), name
    assert len(staged.manifest.checksums) == len(staged.manifest.buckets) > 3
    assert staged.manifest.step == step


SOURCES = ("learner-0", "learner-1")


def make_sender(
    gauged: Gauged | None = None, roll_call_seconds: float = 5.0, sources: tuple[str, ...] = SOURCES[:1]
) -> TorchSender:
    gauged = gauged or Gauged()
    return TorchSender(
        "policy",
        "gloo",
        BUCKET_BYTES,
        HOST,
        PORTS,
        gauged.metrics,
        gauged.clock,
        roll_call_seconds=roll_call_seconds,
        sources=sources,
    )


def make_source(number: int = 1, sources: tuple[str, ...] = SOURCES, gauged: Gauged | None = None) -> TorchSource:
    gauged = gauged or Gauged()
    return TorchSource("policy", "gloo", BUCKET_BYTES, HOST, gauged.metrics, gauged.clock, sources=sources, number=number)


def publish_share(source: TorchSender | TorchSource, step: int, layers: int = 6) -> None:
    """Publish a step as a learner rank does that has gathered its own share alone: the rest has no values."""
    real = weights(step, layers)
    metas: dict[int, torch.Tensor] = {id(tensor): tensor.to("meta") for tensor in real.values()}  # tied ones stay tied
    named = {name: metas[id(tensor)] for name, tensor in real.items()}
    source.publish(step, named | {name: real[name] for name in source.share(named)})


def make_receiver(name: str, gauged: Gauged | None = None, expected: Layout | None = None) -> TorchReceiver:
    gauged = gauged or Gauged()
    return TorchReceiver(name, "gloo", "cpu", gauged.metrics, expected=expected)


def transfer_to(
    address: str, members: list[str], number: int, step: int, group: int = 1, deadline_seconds: float = GENEROUS
) -> Transfer:
    """Transfer `number` of `step`, whose version is 100 + `step`."""
    return Transfer(
        version=100 + step,
        step=step,
        transfer=number,
        group=group,
        members=members,
        address=address,
        deadline_seconds=deadline_seconds,
    )
