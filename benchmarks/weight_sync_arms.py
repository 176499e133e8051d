"""The engine-specific parts of `benchmarks.weight_sync`: an engine with its receiver, and what its pause is compared with.

To add one: a class with `Arm`'s members, and its name in `ARMS`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from segue.clock import ThreadCompute
from segue.metrics.registry import Metrics
from segue.ports.engine import Engine
from segue.ports.weights import WeightReceiver

MEMBER = "rollout-0"


class Arm(Protocol):
    """engine, receiver  of one node, which `rollout.update` drives as in a run
    members          its names in a transfer
    baseline         what the pause is divided by, in words
    """

    engine: Engine
    receiver: WeightReceiver
    members: list[str]
    baseline: str

    async def start(self) -> None:
        """Start the engine; it has no weights yet."""
        ...

    async def baseline_seconds(self) -> float:
        """Do once what the pause is compared with. The engine has weights, and is being asked for tokens."""
        ...

    async def stop(self) -> None: ...


class EmbeddedArm:
    """The embedded engine. Its pause is compared with a copy of as many bytes from memory that a receiver could have staged into
    memory that a model could be in, both touched before, in the same thread."""

    members = [MEMBER]

    def __init__(self, args: argparse.Namespace, metrics: Metrics) -> None:
        from rollout.embedded import EmbeddedEngine
        from weightsync.receiver import TorchReceiver

        self._device = torch.device(args.device)
        self._compute = ThreadCompute("engine")
        self.engine: Engine = EmbeddedEngine(
            args.model,
            slots=args.sequences,
            max_tokens=args.max_tokens,
            dtype="float32",
            device=args.device,
            compute=self._compute,
        )
        cuda = self._device.type == "cuda"
        self._on_host = args.staging == "host" and cuda
        self.receiver: WeightReceiver = TorchReceiver(
            MEMBER,
            "nccl" if cuda else "gloo",
            args.device,
            metrics,
            engine_device=args.device,
            staging=args.staging,
        )
        kind = "from page-locked memory to the GPU" if self._on_host else f"within {self._device.type} memory"
        self.baseline = f"a plain copy of the same bytes {kind}"
        self._bytes = args.bytes
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    async def start(self) -> None:
        await self.engine.start()

        def touched() -> tuple[torch.Tensor, torch.Tensor]:
            source = torch.zeros(self._bytes, dtype=torch.uint8, device="cpu" if self._on_host else self._device)
            target = torch.zeros(self._bytes, dtype=torch.uint8, device=self._device)
            return source.pin_memory() if self._on_host else source, target

        self._buffers = await self._compute.run(touched, 0.0)

    async def baseline_seconds(self) -> float:
        assert self._buffers is not None
        source, target = self._buffers

        def copy() -> float:
            self._settle()
            began = time.perf_counter()
            target.copy_(source, non_blocking=True)
            self._settle()
            return time.perf_counter() - began

        return await self._compute.run(copy, 0.0)

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    async def stop(self) -> None:
        await self.engine.stop()
        self._compute.close()


def _vllm(args: argparse.Namespace, metrics: Metrics) -> Arm:
    from benchmarks.weight_sync_vllm import VllmArm

    return VllmArm(args, metrics)


ARMS: dict[str, Callable[[Any, Metrics], Arm]] = {"embedded": EmbeddedArm, "vllm": _vllm}
"""By the name of `--engine`."""
