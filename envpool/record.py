"""What a pool knows about an instance: its limits, phase and record, and who is told of its fate. See `envpool.instances`."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from envpool.commands import KillReason, Reason
from segue.ports.envpool import RESET_STEP, Create, EnvReply, Resume


class PoolLimits(msgspec.Struct, frozen=True):
    """Size and deadlines of a pool, in seconds; see `segue.config.envpool`.

    `start_seconds` bounds the start of a worker process, `idle_seconds` an instance's wait for an action.
    """

    workers: int
    instances: int
    start_seconds: float
    create_seconds: float
    reset_seconds: float
    step_seconds: float
    close_seconds: float
    idle_seconds: float
    respawns_per_minute: int


class Phase(enum.StrEnum):
    """See the module."""

    QUEUED = "queued"
    MAKING = "making"
    RESETTING = "resetting"
    REPLAYING = "replaying"
    IDLE = "idle"
    STEPPING = "stepping"
    CLOSING = "closing"


TIMEOUTS = {
    Phase.MAKING: (Reason.CREATE_TIMEOUT, KillReason.CREATE_TIMEOUT),
    Phase.RESETTING: (Reason.RESET_TIMEOUT, KillReason.RESET_TIMEOUT),
    Phase.REPLAYING: (Reason.STEP_TIMEOUT, KillReason.STEP_TIMEOUT),
    Phase.STEPPING: (Reason.STEP_TIMEOUT, KillReason.STEP_TIMEOUT),
    Phase.CLOSING: (Reason.WORKER_KILLED, KillReason.CLOSE_TIMEOUT),
}
"""How an instance fails whose call runs out of time, and why its worker is killed."""
CLOCK_STATES = {
    Phase.MAKING: "reset",
    Phase.RESETTING: "reset",
    Phase.REPLAYING: "reset",
    Phase.IDLE: "wait_action",
    Phase.STEPPING: "step",
    Phase.CLOSING: "other",
}
"""What a slot's clock shows while its instance is in a phase (`segue.metrics`, role envpool)."""


@dataclass(slots=True)
class Instance:
    """One instance. `stored` are replies that the node has not yet accepted, by step."""

    number: int
    node: str
    session: int
    create: Create
    asked: float
    phase: Phase = Phase.QUEUED
    slot: int = -1
    call: int = 0
    called: float = 0.0
    resume: Resume = Resume.PINNED
    replayed: int = 0
    next_step: int = 0
    wanted: bool = True
    stored: dict[int, EnvReply] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """The step number of the call that runs, or of the next one."""
        return self.next_step if self.phase in (Phase.IDLE, Phase.STEPPING) else RESET_STEP


class Owner(Protocol):
    """Who speaks with the nodes (`envpool.pool.Pool`)."""

    def answered(self, instance: Instance, reply: EnvReply) -> None:
        """The call that the node waits for is done."""
        ...

    def failed(self, instance: Instance, reason: Reason, detail: str, waits: bool) -> None:
        """The instance is lost to its node, which waits for a reply or not. It is no longer wanted."""
        ...
