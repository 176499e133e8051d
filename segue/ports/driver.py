"""What the driver asks of the scheduler: to open training, evaluations, what happened, its state, to stop."""

from __future__ import annotations

from typing import Any

import msgspec

from segue.episode import Task
from segue.ports.rpc import Done, Rpc
from segue.wire import Message


class OpenTraining(Message, frozen=True):
    """Open admission for `steps` steps in all."""

    steps: int


class StartEval(Message, frozen=True):
    """Run one episode of each of `tasks` under `name`, at `temperature` (0 = greedy), on the newest loaded weights."""

    name: str
    tasks: list[Task]
    temperature: float


class EvalState(Message, frozen=True):
    """How far evaluation `name` has come. `rewards`/`success` have one entry per finished episode."""

    name: str


class EvalStateReply(Message, frozen=True):
    """Counts of one evaluation; `done` once finished + failed = n.

    `example` says why the last one failed, `users` whether by its environment or its task's data: the user's to mend; `raised`
    whether the user's code raised, so that the env pool's log has a traceback.
    """

    n: int
    finished: int
    failed: int
    success: list[float]
    rewards: list[float]
    done: bool
    example: str = ""
    users: bool = False
    raised: bool = False


class WatchEvents(Message, frozen=True):
    """Run events after number `after`; waits at most `wait` seconds for the first."""

    after: int
    wait: float


class RunEvent(msgspec.Struct, frozen=True):
    """Something the driver prints or acts on: step, update, eval, warning, fatal. `data` is plain JSON-like."""

    number: int
    what: str
    data: dict[str, Any]


class EventsReply(Message, frozen=True):
    """Events in order; empty when none came in time."""

    events: list[RunEvent]


class GetStatus(Message, frozen=True):
    """Ask for the scheduler's counts."""


class Status(Message, frozen=True):
    """The scheduler's counts, plain JSON-like (`scheduler.report`)."""

    data: dict[str, Any]


class StopRun(Message, frozen=True):
    """Close admission, tell the nodes to stop, release every waiter with `reason`."""

    reason: str


OPEN_TRAINING = Rpc("open_training", OpenTraining, Done)
START_EVAL = Rpc("start_eval", StartEval, Done)
EVAL_STATE = Rpc("eval_state", EvalState, EvalStateReply)
WATCH_EVENTS = Rpc("watch_events", WatchEvents, EventsReply)
GET_STATUS = Rpc("get_status", GetStatus, Status)
NODE_STATUS = Rpc("node_status", GetStatus, Status)
STOP_RUN = Rpc("stop_run", StopRun, Done)
