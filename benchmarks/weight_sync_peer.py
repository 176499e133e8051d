"""A process of `benchmarks.weight_sync`: a sender, a receiver without an engine, or a whole node, told what to do in JSON lines.

    python -m benchmarks.weight_sync_peer sender|receiver|node --host … --device … [what a node needs]

It answers every order with one line, and exits when stdin closes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from benchmarks.weight_sync_arms import ARMS
from rollout.gate import Gate
from rollout.update import Updater
from segue.metrics import ActivityClock, Metrics, StateClock
from segue.metrics.vocabulary import ROLLOUT_PRECEDENCE, STATES
from segue.ports.engine import FinishReason, GenerateRequest
from segue.ports.rollout import BeginUpdate, Loaded, LoadFailed, NodeEvent
from segue.ports.transfer import Transfer
from segue.ports.weights import Probe
from weightsync.gauges import PRECEDENCE
from weightsync.group import BroadcastGroup
from weightsync.receiver import TorchReceiver
from weightsync.sender import TorchSender

TENSOR_BYTES = 4 << 20
PORTS = (23000, 23999)
BARE_SECONDS = 120.0


def tensors_of(nbytes: int, seed: int) -> dict[str, torch.Tensor]:
    """`nbytes` of random float32 tensors of at most 4 MiB each."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [TENSOR_BYTES] * (nbytes // TENSOR_BYTES) + [nbytes % TENSOR_BYTES] * (nbytes % TENSOR_BYTES > 0)
    return {f"layers.{i}.weight": torch.rand(size // 4, generator=generator) for i, size in enumerate(sizes)}


class Peer:
    """What all roles do: bare broadcasts, over torch.distributed's own groups of the first 1 + n processes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device)
        self.backend = "nccl" if self.device.type == "cuda" else "gloo"
        self.metrics = Metrics("weightsync", args.name)
        self._groups: dict[int, Any] = {}
        self._buffer = torch.empty(0)

    async def start(self) -> dict[str, Any]:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        return {}

    async def stop(self) -> None:
        pass

    async def do_world(self, address: str, rank: int, world: int, counts: list[int]) -> dict[str, Any]:
        """Meet all others, and make a group for every number of receivers."""

        def meet() -> None:
            patience = timedelta(seconds=BARE_SECONDS)
            dist.init_process_group(self.backend, init_method=f"tcp://{address}", rank=rank, world_size=world, timeout=patience)
            self._groups = {count: dist.new_group(list(range(1 + count)), timeout=patience) for count in counts}

        await asyncio.to_thread(meet)
        return {}

    async def do_bare(self, nbytes: int, count: int) -> dict[str, Any]:
        """One `torch.distributed.broadcast` into memory that was used before: seconds from barrier to barrier."""
        if self._buffer.numel() != nbytes:
            self._buffer = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

        def broadcast() -> float:
            group = self._groups[count]
            dist.barrier(group)
            began = time.perf_counter()
            dist.broadcast(self._buffer, 0, group)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            dist.barrier(group)
            return time.perf_counter() - began

        return {"seconds": await asyncio.to_thread(broadcast)}


class Sender(Peer):
    """Rank 0 of a learner, as far as weight sync sees it."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        clock = ActivityClock(PRECEDENCE, time.monotonic)
        self.sender = TorchSender(
            "policy", self.backend, args.bucket_bytes, args.host, PORTS, self.metrics, clock, device=self.device
        )
        self._model: tuple[dict[str, torch.Tensor], Probe] | None = None
        self._named: dict[int, dict[str, torch.Tensor]] = {}
        self._rate: float | None = None

    async def start(self) -> dict[str, Any]:
        self._throttle()
        return {"address": self.sender.address, **await super().start()}

    async def do_publish(self, step: int, nbytes: int) -> dict[str, Any]:
        """`nbytes` of random numbers, the same ones under a new step."""
        if nbytes not in self._named:
            self._named = {nbytes: tensors_of(nbytes, 0)}
        await asyncio.to_thread(self.sender.publish, step, self._named[nbytes])
        return {}

    async def do_publish_model(self, step: int, path: str, tokens: list[int]) -> dict[str, Any]:
        """The model of a folder, with its probe."""
        if self._model is None:
            self._model = await asyncio.to_thread(_open_model, path, tokens)
        manifest = await asyncio.to_thread(self.sender.publish, step, *self._model)
        return {"bytes": sum(tensor.nbytes for tensor in self._model[0].values()), "buckets": len(manifest.buckets)}

    async def do_send(self, transfer: dict[str, Any]) -> dict[str, Any]:
        result = await self.sender.send(msgspec.convert(transfer, Transfer))
        return {"seconds": result.transfer_seconds} if result.ok else {"failed": result.reason}

    async def do_limit(self, bytes_per_second: float | None) -> dict[str, Any]:
        self._rate = bytes_per_second
        return {}

    def _throttle(self) -> None:
        """Before each bucket this process waits as long as a link of `_rate` bytes/s would take for it."""
        begin = BroadcastGroup.begin

        def throttled(group: BroadcastGroup, bucket: torch.Tensor, deadline: Any) -> Any:
            if self._rate is not None:
                time.sleep(bucket.numel() / self._rate)
            return begin(group, bucket, deadline)

        BroadcastGroup.begin = throttled  # type: ignore[method-assign, assignment]

    async def stop(self) -> None:
        self.sender.close()


def _open_model(path: str, tokens: list[int]) -> tuple[dict[str, torch.Tensor], Probe]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval().requires_grad_(False)
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0, :-1]
    taken = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    return dict(model.state_dict()), Probe(tokens, taken.tolist())


class Receiver(Peer):
    """A node without an engine: what arrives is dropped."""

    async def start(self) -> dict[str, Any]:
        started = await super().start()
        self._receiver = TorchReceiver(self.args.name, self.backend, self.device, self.metrics)
        return started

    async def do_stage(self, transfer: dict[str, Any]) -> dict[str, Any]:
        order = msgspec.convert(transfer, Transfer)
        staged = await self._receiver.stage(order, order.members.index(self.args.name) + 1)
        return {"bytes": sum(tensor.nbytes for tensor in staged.tensors().values())}

    async def stop(self) -> None:
        self._receiver.close()


class Node(Peer):
    """An engine that is asked for tokens all the time, its receiver, and the update procedure of a rollout node."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.arm = ARMS[args.engine](args, self.metrics)
        self._events: asyncio.Queue[NodeEvent] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sampled = 0
        self._updates = 0

    async def start(self) -> dict[str, Any]:
        started = await super().start()
        await self.arm.start()
        self.updater = Updater(
            self.arm.members[0],
            self.arm.engine,
            self.arm.receiver,
            Gate(),
            metrics=Metrics("rollout", "0"),
            sync_metrics=self.metrics,
            clock=StateClock(STATES["weightsync"], time.monotonic),
            activity=ActivityClock(ROLLOUT_PRECEDENCE, time.monotonic),
            keeps=False,
            probe_tolerance=self.args.probe_tolerance,
            staged=self.args.staging != "none",
            emit=lambda event, urgent: self._events.put_nowait(event),
            spawn=self._spawn,
        )
        return {"baseline": self.arm.baseline, "members": self.arm.members, **started}

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def do_generate(self) -> dict[str, Any]:
        """From now on, ask for tokens."""
        for episode in range(self.args.sequences):
            self._spawn(f"episode-{episode}", self._episode(episode))
        return {}

    async def _episode(self, episode: int) -> None:
        """One turn after the other, each of a context of its own; one that a pause ends goes on after it."""
        turn = 0
        while True:
            tokens = [1 + (7 * episode + 3 * turn + i) % 97 for i in range(8)]
            turn += 1
            new, finish = self.args.max_tokens - len(tokens) - 1, FinishReason.PAUSED
            while finish is FinishReason.PAUSED:
                request = GenerateRequest(
                    id=f"{episode}-{turn}-{len(tokens)}-{self.arm.engine.version}",
                    tokens=tokens,
                    max_tokens=new,
                    temperature=1.0,
                    stop_tokens=(),
                    stop_strings=(),
                    seed=episode,
                    offset=0,
                    priority=0,
                    episode=episode,
                    group=episode,
                    lineage=self.arm.engine.version,
                )
                async for chunk in self.arm.engine.generate(request):
                    tokens, new = tokens + chunk.tokens, new - len(chunk.tokens)
                    self._sampled += len(chunk.tokens)
                    finish = chunk.finish or finish
                if new <= 0:
                    break

    async def do_update(self, transfer: dict[str, Any]) -> dict[str, Any]:
        """One update, as ordered by a scheduler: its seconds by phase, and how many tokens came while weights were staged."""
        self._updates += 1
        order = msgspec.convert(transfer, Transfer)
        before, sampled = self._seconds(), self._sampled
        self.updater.begin(BeginUpdate(self._updates, order, "recompute", 0.0, order.deadline_seconds))
        event = await self._events.get()
        if isinstance(event, LoadFailed):
            return {"failed": event.reason}
        assert isinstance(event, Loaded)
        spent = {phase: seconds - before.get(phase, 0.0) for phase, seconds in self._seconds().items()}
        return {
            "stage": event.stage_seconds,
            "drain": event.drain_seconds,
            "pause": event.pause_seconds,
            "probe": spent.get("probe", 0.0),
            "load": spent.get("load", 0.0),
            "resume": spent.get("resume", 0.0),
            "tokens": self._sampled - sampled,
        }

    def _seconds(self) -> dict[str, float]:
        """Seconds of weight sync so far, by phase."""
        snapshot = self.metrics.snapshot()
        phases = ("probe", "load", "resume")
        return {phase: snapshot.get(f'segue_weight_sync_seconds_sum{{phase="{phase}"}}', 0.0) for phase in phases}

    async def do_baseline(self) -> dict[str, Any]:
        return {"seconds": await self.arm.baseline_seconds()}

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        self.arm.receiver.close()
        await self.arm.stop()


ROLES: dict[str, Callable[[argparse.Namespace], Peer]] = {"sender": Sender, "receiver": Receiver, "node": Node}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("--name", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bucket-bytes", type=int, default=0)
    parser.add_argument("--engine", default="embedded", choices=ARMS)
    parser.add_argument("--staging", default="device")
    parser.add_argument("--model", default="")
    parser.add_argument("--bytes", type=int, default=0)
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--probe-tolerance", type=float, default=1e-3)
    return parser.parse_args()


async def main() -> None:
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is not an answer

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    reader = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    args = parse()
    peer = ROLES[args.role](args)
    say(await peer.start())
    while line := await reader.readline():
        order = json.loads(line)
        work: Callable[..., Awaitable[dict[str, Any]]] = getattr(peer, f"do_{order.pop('do')}")
        try:
            say(await work(**order))
        except Exception as error:
            say({"failed": f"{type(error).__name__}: {error}"})
            raise
    await peer.stop()


if __name__ == "__main__":
    try:
        asyncio.run(main())
    finally:
        sys.stderr.flush()
        os._exit(0)  # threads of a collective may have been left behind
