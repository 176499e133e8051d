"""The vLLM arm of `benchmarks.weight_sync`: how long an update keeps vLLM from decoding, against vLLM's own `reload_weights`.

One engine, one random Llama on disk. In each round, in rotating order: an update by the way of a run (sent by a learner's sender,
received by vLLM's workers, swapped in during a pause), the same over a link that is slowed, and `reload_weights` from the local
safetensors file (in the page cache) in a pause of the same kind. Timed is the pause: from engine idle to the first step possible,
without the probe, which is timed apart.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollout.model_config import meta_model, read_config
from rollout.vllm.build import build_engine
from segue.metrics import ActivityClock, Metrics
from segue.ports.engine import PauseMode
from segue.ports.scheduler import Transfer
from weightsync.gauges import PRECEDENCE
from weightsync.group import BroadcastGroup
from weightsync.manifest import layout, payload_bytes
from weightsync.sender import TorchSender
from weightsync.workers import WorkersReceiver

PORTS = (20000, 20999)
TOKENS = 128
PROBE = 64


@dataclass
class Rounds:
    """Seconds, one per round."""

    pause: list[float] = field(default_factory=list)
    pause_slow_link: list[float] = field(default_factory=list)
    reload: list[float] = field(default_factory=list)
    transfer: list[float] = field(default_factory=list)
    transfer_slow_link: list[float] = field(default_factory=list)
    probe: list[float] = field(default_factory=list)


def random_llama(folder: str, *, layers: int, hidden: int, vocabulary: int, dtype: str, seed: int) -> None:
    """A random model in safetensors files."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(folder)


@contextmanager
def slowed(seconds_per_bucket: float) -> Iterator[None]:
    """A link on which every bucket takes so much longer, as the sender sees it."""
    finish = BroadcastGroup.finish

    def slow(group: Any, *args: Any) -> None:
        finish(group, *args)
        time.sleep(seconds_per_bucket)

    BroadcastGroup.finish = slow  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        BroadcastGroup.finish = finish  # type: ignore[method-assign]


class Arm:
    """The engine, a sender in this process, and the receiver between them."""

    def __init__(self, folder: str, *, dtype: str, device: str, backend: str, staging: str, bucket_bytes: int, seed: int) -> None:
        self.folder = folder
        given = {"load_format": "auto"}  # which reload_weights needs
        self.engine = build_engine(
            folder,
            slots=4,
            max_tokens=TOKENS,
            score_tokens=PROBE,
            dtype=dtype,
            device=device,
            seed=seed,
            worker_extension="segue.cluster.vllm_worker.Extension",
            engine_args=given,
        )
        expected = layout(meta_model(read_config(folder), dtype).state_dict())
        metrics = Metrics("weightsync")
        connect = self.engine.connect_workers
        self.receiver = WorkersReceiver("n0", connect, metrics, backend=backend, staging=staging, expected=expected)
        clock = ActivityClock(PRECEDENCE, time.monotonic)
        sent_from = device if backend == "nccl" else "cpu"
        self.sender = TorchSender(
            "policy", backend, bucket_bytes, "127.0.0.1", PORTS, Metrics("weightsync"), clock, device=sent_from
        )
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self.named = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        self.version = -1
        self.epoch = 0
        self.bytes = 0

    async def round(self, taken: Rounds, slow: float, number: int) -> None:
        """All three once; `number` says who begins."""
        ways = [self.update(taken, 0.0), self.update(taken, slow), self.reload(taken)]
        for way in range(3):
            await ways[(number + way) % 3]

    async def update(self, rounds: Rounds, slow: float) -> None:
        """One update by the way of a run, each bucket taking `slow` seconds longer."""
        self.version += 1
        self.bytes = payload_bytes(self.sender.publish(self.version, self.named))
        transfer = Transfer(self.version, self.version, self.version + 1, 1, ["n0"], self.sender.address, 600.0)
        began = time.perf_counter()
        with slowed(slow):
            result, staged = await asyncio.gather(self.sender.send(transfer), self.receiver.stage(transfer, 1))
        assert result.ok, result.reason
        (rounds.transfer_slow_link if slow else rounds.transfer).append(time.perf_counter() - began)
        self.epoch += 1
        await self.engine.pause(PauseMode.ABORT, self.epoch)
        idle = time.perf_counter()
        await self.engine.load(self.version, staged)
        loaded = time.perf_counter()
        await self.engine.score(list(range(PROBE)))
        proved = time.perf_counter()
        await self.engine.resume(self.epoch)
        (rounds.pause_slow_link if slow else rounds.pause).append(time.perf_counter() - proved + loaded - idle)
        rounds.probe.append(proved - loaded)

    async def reload(self, rounds: Rounds) -> None:
        """vLLM's own way, in a pause of the same kind."""
        self.epoch += 1
        await self.engine.pause(PauseMode.ABORT, self.epoch)
        idle = time.perf_counter()
        await self.engine._core.llm.collective_rpc("reload_weights", kwargs={"weights_path": self.folder})
        await self.engine.resume(self.epoch)
        rounds.reload.append(time.perf_counter() - idle)

    async def close(self) -> None:
        self.receiver.close()
        self.sender.close()
        await self.engine.stop()


async def measure(
    folder: Path,
    *,
    layers: int,
    hidden: int,
    vocabulary: int,
    rounds: int,
    slowdown: float,
    dtype: str = "float32",
    device: str = "cpu",
    backend: str = "gloo",
    staging: str = "device",
    bucket_bytes: int = 64 << 20,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Figures of the arm; seconds are medians over `rounds` interleaved rounds after one that warms up."""
    random_llama(str(folder), layers=layers, hidden=hidden, vocabulary=vocabulary, dtype=dtype, seed=seed)
    arm = Arm(str(folder), dtype=dtype, device=device, backend=backend, staging=staging, bucket_bytes=bucket_bytes, seed=seed)
    taken = Rounds()
    await arm.engine.start()
    try:
        warm = Rounds()
        for _ in range(2):
            await arm.update(warm, 0.0)
        await arm.reload(warm)
        buckets = -(-arm.bytes // bucket_bytes)
        slow = (slowdown - 1.0) * warm.transfer[-1] / buckets
        for number in range(rounds):
            await arm.round(taken, slow, number)
            say(f"round {number}: pause {taken.pause[-1]:.3f} s, reload {taken.reload[-1]:.3f} s")
    finally:
        await arm.close()
    median = {name: statistics.median(seconds) for name, seconds in vars(taken).items()}
    return {
        "bytes": arm.bytes,
        "pause_ratio": statistics.median(p / r for p, r in zip(taken.pause, taken.reload, strict=True)),
        "pause_ratio_slow_link": statistics.median(s / p for s, p in zip(taken.pause_slow_link, taken.pause, strict=True)),
        "slow_link_factor": median["transfer_slow_link"] / median["transfer"],
        "seconds": {name: round(seconds, 5) for name, seconds in median.items()},
        "all_seconds": vars(taken),
    }
