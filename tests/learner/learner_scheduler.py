"""The scheduler as the learner sees it, for unit tests: hands out given batches, answers, and writes down what it heard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from learner_data import learner_config

from learner.shell import LearnerShell
from segue.clock import Compute, LogicalCompute, LogicalLoop
from segue.config import Config
from segue.metrics import Metrics, StateClock
from segue.metrics.vocabulary import STATES
from segue.ports.driver import GET_STATUS, GetStatus, Status
from segue.ports.learner import (
    COMMITTED,
    PUBLISH,
    SEND_WEIGHTS,
    TAKE_BATCH,
    TRAINED,
    TRANSFER_RESULT,
    Batch,
    BatchReply,
    Committed,
    Publish,
    PublishReply,
    SendWeights,
    TakeBatch,
    TrainedReply,
    TrainedReport,
)
from segue.ports.rpc import Done, Peer, PeerTimeout, Service, ask
from segue.ports.transfer import Transfer, TransferResult
from segue.ports.weights import Manifest, Probe

T = TypeVar("T")


class HandedOut:
    """`batches(step)` gives the batch of a step, None for one that never comes. `heard` lists what was said, in order."""

    def __init__(self, batches: Callable[[int], Batch | None]) -> None:
        self.name = "scheduler-0"
        self.heard: list[tuple[str, Any]] = []
        self.reports: list[TrainedReport] = []
        self.transfers: list[TransferResult] = []
        self.stop = ""
        self.opened_at = 0.0
        self.trained = 0
        self.versions = 0
        self.time_outs: dict[str, int] = {}
        self.lost: Exception | None = None
        self.on_trained: Callable[[int], None] = lambda step: None
        self.transferred = asyncio.Event()
        self._batches = batches
        self._moved = asyncio.Event()
        self._service = Service()
        self._service.add(TAKE_BATCH, self._take)
        self._service.add(TRAINED, self._trained)
        self._service.add(PUBLISH, self._publish)
        self._service.add(COMMITTED, self._committed)
        self._service.add(TRANSFER_RESULT, self._transfer_result)
        self._service.add(GET_STATUS, self._status)

    async def call(self, method: str, body: bytes, timeout: float) -> bytes:
        if self.lost is not None:
            raise self.lost
        if self.time_outs.get(method, 0):
            self.time_outs[method] -= 1
            raise PeerTimeout(f"scheduler-0 did not answer {method} within {timeout:g} s")
        return await asyncio.wait_for(self._service.handle(method, body), timeout)

    def end(self, reason: str) -> None:
        """There will be no more batches."""
        self.stop = reason
        self._moved.set()

    async def _take(self, request: TakeBatch) -> BatchReply:
        deadline = asyncio.get_running_loop().time() + request.wait
        while True:
            if self.stop:
                return BatchReply(None, self.stop)
            batch = self._batches(request.step)
            if batch is not None and request.step <= self.trained + 1:
                self.heard.append(("take", request.step))
                return BatchReply(batch)
            left = deadline - asyncio.get_running_loop().time()
            if left < 1e-6:  # what rounding leaves of the deadline is no time to wait
                return self._none_yet()
            self._moved.clear()
            try:
                await asyncio.wait_for(self._moved.wait(), left)
            except TimeoutError:
                return self._none_yet()

    def _none_yet(self) -> BatchReply:
        return BatchReply(None, opened=asyncio.get_running_loop().time() >= self.opened_at)

    async def _trained(self, report: TrainedReport) -> TrainedReply:
        self.heard.append(("trained", report.step))
        self.reports.append(report)
        self.trained = report.step + 1
        self._moved.set()
        self.on_trained(report.step)
        return TrainedReply(f"cut of {report.step}".encode() if report.cut else None)

    async def _publish(self, request: Publish) -> PublishReply:
        self.heard.append(("publish", request.step))
        assert request.address == "host:1"
        self.versions += 1
        return PublishReply(self.versions - 1)

    async def _committed(self, request: Committed) -> Done:
        self.heard.append(("committed", request.step))
        return Done()

    async def _transfer_result(self, result: TransferResult) -> Done:
        self.transfers.append(result)
        self.transferred.set()
        return Done()

    async def _status(self, request: GetStatus) -> Status:
        return Status({"nodes": {"live": 0}, "episodes": {"leased": 5, "parked": 0}})


class Kept:
    """A weight sender that keeps copies; `send` waits for `go`."""

    address = "host:1"

    def __init__(self) -> None:
        self.published: dict[int, dict[str, torch.Tensor]] = {}
        self.probes: dict[int, Probe | None] = {}
        self.sent: list[Transfer] = []
        self.go = asyncio.Event()
        self.closed = False

    def share(self, named: Mapping[str, torch.Tensor]) -> set[str]:
        return set(named)

    def publish(self, step: int, named: Mapping[str, torch.Tensor], probe: Probe | None = None) -> Manifest:
        self.probes[step] = probe
        self.published[step] = {name: tensor.clone() for name, tensor in named.items()}
        return Manifest("full", "policy", 0, step, [], [], [], probe=probe)

    async def send(self, transfer: Transfer) -> TransferResult:
        self.sent.append(transfer)
        await self.go.wait()
        return TransferResult(transfer.version, transfer.transfer, True, [], "", 10, 0.0, 0.1)

    def close(self) -> None:
        self.closed = True


class KeptElsewhere(Kept):
    """The source of another rank: every second tensor is its share."""

    def share(self, named: Mapping[str, torch.Tensor]) -> set[str]:
        return set(list(named)[::2])

    async def serve(self, address: str) -> None:
        assert address == Kept.address
        await asyncio.Event().wait()


class Learner:
    """A one-rank learner at a `HandedOut` scheduler."""

    def __init__(
        self,
        run_dir: Path,
        model: Path,
        batches: Callable[[int], Batch | None],
        config: Config | None = None,
        resume: Path | None = None,
        compute: Compute | None = None,
        prefetch: bool = False,
    ) -> None:
        self.config = config or learner_config(steps=4, checkpoint={"every": 2}, learner={"lr": 0.01, "pack_tokens": 64})
        self.scheduler = HandedOut(batches)
        self.sender = Kept()
        self.metrics = Metrics("learner", envs=["latency"])
        self.clock = StateClock(STATES["learner"], asyncio.get_running_loop().time)
        self.metrics.attach(self.clock)
        self.shell = LearnerShell(
            self.config,
            run_dir,
            0,
            1,
            str(model),
            self.sender,
            self.metrics,
            self.clock,
            resume,
            compute=compute or LogicalCompute(),
            prefetch=prefetch,
        )
        peer: Peer = self.scheduler
        self.shell.connect("scheduler-0", peer)

    async def run(self) -> None:
        await self.shell.start()
        await self.shell.run()

    async def ask_to_send(self, number: int, step: int = 0) -> None:
        class Direct:
            name = "learner-0"

            def __init__(self, shell: LearnerShell) -> None:
                self._shell = shell

            async def call(self, method: str, body: bytes, timeout: float) -> bytes:
                return await self._shell.handle(method, body)

        transfer = Transfer(0, step, number, 0, ["rollout-0"], "host:1", 5.0)
        await ask(Direct(self.shell), SEND_WEIGHTS, SendWeights(transfer), 5.0)


def on_logical_loop(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `work()` on a loop whose clock jumps: no wait takes real time, and a deadlock raises."""
    with asyncio.Runner(loop_factory=LogicalLoop) as runner:
        return runner.run(work())
