"""Modelled environment workers: `envpool.workers.Workers` whose environments are a turn count, and whose calls take drawn times.

The pool above them is the production one: seats, slots, deadlines, snapshots, replays.
"""

from __future__ import annotations

import asyncio

import msgspec

from benchmarks.virtual.scenario import EnvModel
from benchmarks.virtual.workload import Workload
from envpool.messages import (
    Act,
    Acted,
    Call,
    Dispose,
    Disposed,
    LoadedSuite,
    Made,
    Make,
    Observed,
    Raised,
    Reply,
    Reset,
    RestoreTo,
)
from envpool.workers import Sink
from segue.clock import now
from segue.episode import FailureClass
from segue.ports.envpool import ChatMessage, Observation, Resume, StepResult

ERROR, CRASH, HANG = 1, 2, 3
Seat = tuple[int, int]


class _Environment:
    """One instance: which episode it serves, and how many turns it has taken."""

    __slots__ = ("attempt", "group", "member", "turn", "turns")

    def __init__(self, make: Make, workload: Workload) -> None:
        self.group = make.task.seed
        self.member = make.member
        self.attempt = make.attempt
        self.turn = 0
        self.turns = workload.turns(self.group, self.member)


class ModelledWorkers:
    """See the module. A worker is there at once; a kill takes all its instances."""

    def __init__(self, model: EnvModel, workload: Workload) -> None:
        self._model = model
        self._workload = workload
        self._sink: Sink | None = None
        self._seats: dict[Seat, dict[int, _Environment]] = {}

    def open(self, sink: Sink) -> None:
        self._sink = sink

    def spawn(self, seat: int, generation: int) -> None:
        self._seats[seat, generation] = {}
        self._later((seat, generation), 0.0, LoadedSuite(0))

    def send(self, seat: int, generation: int, call: Call) -> None:
        key = (seat, generation)
        instances = self._seats.get(key)
        if instances is None:
            return
        if isinstance(call, Make):
            instances[call.instance] = _Environment(call, self._workload)
            self._later(key, 0.0, Made(call.instance, call.call, Resume.SNAPSHOT))
        elif isinstance(call, Dispose):
            del instances[call.instance]
            self._later(key, 0.0, Disposed(call.instance, call.call))
        elif isinstance(call, Act):
            self._act(key, instances[call.instance], call)
        else:
            environment = instances[call.instance]
            if isinstance(call, RestoreTo):
                environment.turn = msgspec.msgpack.decode(call.snapshot, type=int)
            else:
                assert isinstance(call, Reset)
            seconds = self._workload.reset_seconds.draw(environment.group, environment.member, 0)
            self._later(key, seconds, Observed(call.instance, call.call, self._observation(environment), _snapshot(environment)))

    def kill(self, seat: int, generation: int) -> None:
        if self._seats.pop((seat, generation), None) is not None:
            asyncio.get_running_loop().call_soon(self._gone, (seat, generation))

    async def close(self) -> None:
        self._sink = None
        self._seats.clear()

    def _act(self, key: Seat, environment: _Environment, call: Act) -> None:
        model, workload = self._model, self._workload
        here = (environment.group, environment.member, environment.attempt, environment.turn)
        if workload.strikes(CRASH, model.crash, *here):
            asyncio.get_running_loop().call_soon(self._crash, key)
            return
        if workload.strikes(HANG, model.hang, *here):
            return  # the pool's deadline ends it
        seconds = workload.step_seconds.draw(environment.group, environment.member, environment.turn)
        if workload.strikes(ERROR, model.error, *here):
            reply: Reply = Raised(call.instance, call.call, FailureClass.ENV, "drew an error", "modelled error")
            self._later(key, seconds, reply)
            return
        environment.turn += 1
        ended = environment.turn >= environment.turns
        reward = workload.reward(environment.group, environment.member) if ended else 0.0
        result = StepResult(self._observation(environment), reward, ended, False, {"success": reward} if ended else {})
        self._later(key, seconds, Acted(call.instance, call.call, result, _snapshot(environment) if call.snapshot else None))

    def _observation(self, environment: _Environment) -> Observation:
        if environment.turn == 0:
            characters = self._workload.prompt_characters(environment.group)
        elif environment.turn >= environment.turns:
            characters = 1  # nothing is sampled after it
        else:
            characters = self._workload.observation_characters(environment.group, environment.member, environment.turn)
        return Observation([ChatMessage("user", "o" * characters)])

    def _later(self, key: Seat, seconds: float, reply: Reply | LoadedSuite) -> None:
        loop = asyncio.get_running_loop()
        if seconds > 0.0:
            loop.call_at(now() + seconds, self._say, key, reply)
        else:
            loop.call_soon(self._say, key, reply)

    def _say(self, key: Seat, reply: Reply | LoadedSuite) -> None:
        if self._sink is not None and key in self._seats:
            self._sink.said(*key, reply)

    def _crash(self, key: Seat) -> None:
        if self._sink is not None and key in self._seats:
            self._sink.lost(*key, "crashed, as it was drawn")

    def _gone(self, key: Seat) -> None:
        if self._sink is not None:
            self._sink.gone(*key)


def _snapshot(environment: _Environment) -> bytes:
    return msgspec.msgpack.encode(environment.turn)
