"""The hosting side of a worker process: reads calls, runs each in the thread of its instance, writes replies as they come."""

from __future__ import annotations

import os
import queue
import socket
import threading
from typing import Protocol

from envpool.environment import Suite
from envpool.instance import Instance
from envpool.messages import (
    LENGTH,
    MAX_FRAME,
    Call,
    Dispose,
    FromWorker,
    Load,
    LoadedSuite,
    LoadFailed,
    Make,
    Reply,
    ToWorker,
    frame,
)
from envpool.suites import load_suite
from segue import wire
from segue.errors import UserError


class Sender(Protocol):
    def __call__(self, reply: Reply, /) -> None: ...


class Host:
    """Serves one channel until its other end closes it."""

    def __init__(self, channel: int) -> None:
        self._socket = socket.socket(fileno=channel)
        self._socket.setblocking(True)
        self._reader = self._socket.makefile("rb")
        self._write_lock = threading.Lock()
        self._threads: dict[int, _InstanceThread] = {}

    def serve(self) -> None:
        """Returns at end of file, with environments possibly still busy: the process ends then, and they with it."""
        load = self._receive()
        if load is None:
            return
        assert isinstance(load, Load), "the first message says what to load"
        try:
            suite = load_suite(load.suite, load.args)
        except UserError as error:
            self._send(LoadFailed(True, str(error)))
            return
        except Exception as error:
            self._send(LoadFailed(False, f"the suite {load.suite} does not load: {type(error).__name__}: {error}"))
            raise
        self._send(LoadedSuite(os.getpid()))
        while (call := self._receive()) is not None:
            assert not isinstance(call, Load), "a worker loads once"
            self._dispatch(suite, load.snapshot_bytes, call)

    def _dispatch(self, suite: Suite, snapshot_bytes: int, call: Call) -> None:
        if isinstance(call, Make):
            assert call.instance not in self._threads, "an instance is made once"
            self._threads[call.instance] = _InstanceThread(Instance(suite, call, snapshot_bytes), self._send)
            self._threads[call.instance].start()
        thread = self._threads[call.instance]
        thread.calls.put(call)
        if isinstance(call, Dispose):
            del self._threads[call.instance]

    def _receive(self) -> Load | Call | None:
        header = self._reader.read(LENGTH.size)
        if len(header) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack(header)
        assert length <= MAX_FRAME, length
        body = self._reader.read(length)
        if len(body) < length:
            return None
        return wire.decode(body, ToWorker).body

    def _send(self, reply: LoadedSuite | LoadFailed | Reply) -> None:
        data = frame(FromWorker(reply))
        with self._write_lock:
            try:
                self._socket.sendall(data)
            except (BrokenPipeError, ConnectionResetError):
                os._exit(0)  # the pool is gone


class _InstanceThread(threading.Thread):
    """Runs the calls of one instance, in order, until it is disposed of. Nothing of it outlives the instance."""

    def __init__(self, instance: Instance, send: Sender) -> None:
        super().__init__(daemon=True)
        self.calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._instance = instance
        self._reply = send

    def run(self) -> None:
        while True:
            call = self.calls.get()
            self._reply(self._instance.perform(call))
            if isinstance(call, Dispose):
                return
