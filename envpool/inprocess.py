"""Workers that are no processes: serial mode, virtual time and fast tests. The pool above them is the same.

Calls hold up the event loop and run in one thread beside it, so that an environment may have a loop of its own, as it may in a
worker process (F80). What an environment would take by its model (`envpool.environment.Timed`) passes on the
loop's clock instead: a logical clock jumps over it. A simulated crash or a kill takes all instances of the seat, as the end of a
process would.
"""

from __future__ import annotations

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor

from envpool.environment import SimulatedCrash, Suite
from envpool.instance import Instance
from envpool.messages import Call, Dispose, LoadedSuite, Make, Reply
from envpool.suites import load_suite
from envpool.workers import Sink
from segue.config import Config

Seat = tuple[int, int]


class InProcessWorkers:
    """See `envpool.workers.Workers`."""

    def __init__(self, suite: Suite, snapshot_bytes: int) -> None:
        self._suite = suite
        self._snapshot_bytes = snapshot_bytes
        self._sink: Sink | None = None
        self._thread = ThreadPoolExecutor(1, "environments")
        self._instances: dict[Seat, dict[int, Instance]] = {}
        """By seats whose worker lives. Callbacks that come due after its end find it missing and do nothing."""

    @classmethod
    def of(cls, config: Config) -> InProcessWorkers:
        """The workers that a config's pools need. Raises UserError: no such suite, or arguments it cannot use."""
        return cls(load_suite(config.task.env, config.task.args), config.envpool.snapshot_bytes)

    def open(self, sink: Sink) -> None:
        self._sink = sink

    def spawn(self, seat: int, generation: int) -> None:
        self._instances[seat, generation] = {}
        self._later((seat, generation), 0.0, LoadedSuite(0))

    def send(self, seat: int, generation: int, call: Call) -> None:
        asyncio.get_running_loop().call_soon(self._perform, (seat, generation), call)

    def kill(self, seat: int, generation: int) -> None:
        if self._instances.pop((seat, generation), None) is not None:
            asyncio.get_running_loop().call_soon(self._gone, (seat, generation))

    async def close(self) -> None:
        self._sink = None
        for instances in self._instances.values():
            for number, instance in instances.items():
                self._thread.submit(instance.perform, Dispose(number, 0)).result()
        self._instances.clear()
        self._thread.shutdown(wait=False)

    def _perform(self, key: Seat, call: Call) -> None:
        instances = self._instances.get(key)
        if instances is None or self._sink is None:
            return
        if isinstance(call, Make):
            instances[call.instance] = Instance(self._suite, call, self._snapshot_bytes, defer=True)
        instance = instances[call.instance]
        try:
            reply = self._thread.submit(instance.perform, call).result()
        except SimulatedCrash as crash:
            self._sink.lost(*key, f"crashed: {crash}")
            return
        owed = instance.owed()
        if isinstance(call, Dispose):
            del instances[call.instance]
        if owed < math.inf:  # a hang is ended by the pool's deadline, like any other
            self._later(key, owed, reply)

    def _later(self, key: Seat, seconds: float, reply: Reply | LoadedSuite) -> None:
        loop = asyncio.get_running_loop()
        if seconds > 0.0:
            loop.call_later(seconds, self._say, key, reply)
        else:
            loop.call_soon(self._say, key, reply)

    def _say(self, key: Seat, reply: Reply | LoadedSuite) -> None:
        if self._sink is not None and key in self._instances:
            self._sink.said(*key, reply)

    def _gone(self, key: Seat) -> None:
        if self._sink is not None:
            self._sink.gone(*key)
