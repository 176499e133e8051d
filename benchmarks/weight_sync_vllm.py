"""vLLM's part of `benchmarks.weight_sync`: its workers receive, and its pause is compared with its own `reload_weights`."""

from __future__ import annotations

import argparse
import time
from typing import Any

from rollout.model_config import meta_model, read_config
from rollout.vllm.build import build_engine
from segue.metrics.registry import Metrics
from segue.ports.engine import Engine
from segue.ports.weights import WeightReceiver
from weightsync.manifest import layout
from weightsync.workers import WorkersReceiver

MEMBER = "rollout-0"
SCORED = 64


class VllmArm:
    """vLLM, one worker. The baseline is `reload_weights` from the model's safetensors file (in the page cache), in a pause of the
    same kind, from idle until it can go on: it does the same work in the worker, but for where the tensors come from."""

    members = [MEMBER]
    baseline = "vLLM's reload_weights from a local safetensors file"

    def __init__(self, args: argparse.Namespace, metrics: Metrics) -> None:
        cuda = args.device.startswith("cuda")
        self._folder = args.model
        self._engine: Any = build_engine(
            args.model,
            slots=args.sequences,
            max_tokens=args.max_tokens,
            score_tokens=SCORED,
            dtype="float32",
            device=args.device,
            worker_extension="segue.cluster.vllm_worker.Extension",
            engine_args={"load_format": "auto"},  # which reload_weights needs
        )
        self.engine: Engine = self._engine
        self.receiver: WeightReceiver = WorkersReceiver(
            MEMBER,
            self._engine.connect_workers,
            metrics,
            backend="nccl" if cuda else "gloo",
            staging=args.staging,
            expected=layout(meta_model(read_config(args.model), "float32").state_dict()),
        )

    async def start(self) -> None:
        await self._engine.start()

    async def baseline_seconds(self) -> float:
        core = self._engine._core  # below the engine, whose pauses belong to the update procedure
        await core.pause(keep=True)
        began = time.perf_counter()
        await core.llm.collective_rpc("reload_weights", kwargs={"weights_path": self._folder})
        await core.resume()
        return time.perf_counter() - began

    async def stop(self) -> None:
        await self._engine.stop()
