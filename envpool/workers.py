"""Where a pool's workers run: the protocol, and the real thing, one process group per worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from typing import Any, Protocol

from envpool.channel import Channel
from envpool.messages import Call, FromWorker, Load, LoadedSuite, LoadFailed, Reply, ToWorker, frame
from segue import wire
from segue.errors import WireError

log = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
"""How long a guard has to end its descendants before it is killed itself."""
CLOSE_SECONDS = 10.0
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class Sink(Protocol):
    """Who listens to the workers. Called from the event loop, never from inside `spawn`, `send` or `kill`."""

    def said(self, seat: int, generation: int, body: LoadedSuite | LoadFailed | Reply) -> None:
        """A worker sent something."""
        ...

    def lost(self, seat: int, generation: int, detail: str) -> None:
        """A worker died of itself or its channel broke: it `detail`. Everything it had sent before has been handed over."""
        ...

    def gone(self, seat: int, generation: int) -> None:
        """A worker that was killed or lost has left no process behind."""
        ...


class Workers(Protocol):
    """Workers by seat and generation. `spawn`, `send` and `kill` return at once."""

    def open(self, sink: Sink) -> None: ...

    def spawn(self, seat: int, generation: int) -> None: ...

    def send(self, seat: int, generation: int, call: Call) -> None:
        """Nothing happens if that worker is dead; `lost` says so."""
        ...

    def kill(self, seat: int, generation: int) -> None:
        """End the worker and all that descends from it; `gone` follows."""
        ...

    async def close(self) -> None:
        """End all of them; no more events."""
        ...


class _Worker:
    """One worker: its guard process, the channel to its host, and what is known of its end."""

    def __init__(self, process: subprocess.Popen[bytes], channel: Channel) -> None:
        self.process = process
        self.pidfd = os.pidfd_open(process.pid)
        self.channel = channel
        self.host = 0
        self.killed = False
        self.detail = ""
        self.exited = asyncio.Event()
        self.force: asyncio.TimerHandle | None = None

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def end_host_group(self) -> None:
        """Only where the guard could not do it."""
        if self.host:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.host, signal.SIGKILL)


class ProcessWorkers:
    """Spawns `python -m envpool.worker` in process groups of their own. Death is an event: a pidfd in the event loop.

    Groups, not sessions: Linux shares a core out among sessions (autogroup), and one that mostly sleeps was seen to wait for
    seconds at a time (Linux 6.18) on a core that a rollout node kept busy, until its calls ran into their deadlines.
    """

    def __init__(self, suite: str, args: dict[str, Any], snapshot_bytes: int) -> None:
        self._load = Load(suite, args, snapshot_bytes)
        self._workers: dict[tuple[int, int], _Worker] = {}
        self._sink: Sink | None = None

    def open(self, sink: Sink) -> None:
        self._sink = sink

    def pids(self) -> dict[int, tuple[int, int]]:
        """(guard, host) process ids by seat; the host is 0 until it is ready."""
        return {seat: (worker.process.pid, worker.host) for (seat, _), worker in self._workers.items()}

    def spawn(self, seat: int, generation: int) -> None:
        key = (seat, generation)
        near, far = socket.socketpair()
        command = [sys.executable, "-m", "envpool.worker", str(os.getpid())]
        try:
            process = subprocess.Popen(command, stdin=far.fileno(), process_group=0, env=os.environ | _ONE_THREAD)
        except OSError as error:
            near.close()
            asyncio.get_running_loop().call_soon(self._not_started, key, f"could not be started: {error}")
            return
        finally:
            far.close()
        channel = Channel(near, lambda body: self._received(key, body), lambda: self._end(self._workers[key]))
        worker = self._workers[key] = _Worker(process, channel)
        asyncio.get_running_loop().add_reader(worker.pidfd, self._exited, key)
        channel.write(frame(ToWorker(self._load)))

    def send(self, seat: int, generation: int, call: Call) -> None:
        worker = self._workers.get((seat, generation))
        if worker is not None:
            worker.channel.write(frame(ToWorker(call)))

    def kill(self, seat: int, generation: int) -> None:
        worker = self._workers.get((seat, generation))
        if worker is not None and not worker.killed:
            worker.killed = True
            self._end(worker)

    async def close(self) -> None:
        self._sink = None
        workers = list(self._workers.values())
        for seat, generation in list(self._workers):
            self.kill(seat, generation)
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                for worker in workers:
                    await worker.exited.wait()
        except TimeoutError:
            log.error("env workers %s did not end within %g s", [w.process.pid for w in workers], CLOSE_SECONDS)

    def _end(self, worker: _Worker) -> None:
        """Let the guard end everything; if it cannot, end it."""
        worker.channel.close()
        worker.signal(signal.SIGTERM)
        if worker.force is None:
            worker.force = asyncio.get_running_loop().call_later(GRACE_SECONDS, self._force, worker)

    def _force(self, worker: _Worker) -> None:
        worker.end_host_group()
        worker.signal(signal.SIGKILL)

    def _received(self, key: tuple[int, int], data: bytes) -> None:
        worker = self._workers[key]
        try:
            body = wire.decode(data, FromWorker).body
        except WireError as error:
            worker.detail = f"sent what is no message ({error})"
            self._end(worker)
            return
        if isinstance(body, LoadedSuite):
            worker.host = body.pid
        if self._sink is not None:
            self._sink.said(*key, body)

    def _not_started(self, key: tuple[int, int], detail: str) -> None:
        if self._sink is not None:
            self._sink.lost(*key, detail)
            self._sink.gone(*key)

    def _exited(self, key: tuple[int, int]) -> None:
        """The guard has ended: last of all its processes, unless it was killed itself."""
        worker = self._workers[key]
        asyncio.get_running_loop().remove_reader(worker.pidfd)
        worker.channel.drain()  # what it said before it died still counts; and the answer to it may be to kill it
        worker.channel.close()
        code = worker.process.wait()
        if code < 0:
            worker.end_host_group()
        if worker.force is not None:
            worker.force.cancel()
        os.close(worker.pidfd)
        del self._workers[key]
        worker.exited.set()
        if self._sink is not None:
            if not worker.killed:
                self._sink.lost(*key, worker.detail or _ending(code))
            self._sink.gone(*key)


def _ending(code: int) -> str:
    number = -code if code < 0 else code - 128
    if code < 0 or code > 128:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(number).name}"
    return f"exited with code {code}"
