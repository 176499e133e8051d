"""What the pool's core decides (commands) and why calls fail (reasons). Plain values, no behaviour."""

from __future__ import annotations

import enum

import msgspec

from envpool.messages import Call
from segue.episode import FailureClass
from segue.ports.envpool import EnvReply


class Reason(enum.StrEnum):
    """Why a call was answered with `EnvFailed`: the closed set of its `reason`."""

    ENV_ERROR = "env_error"
    DATA_ERROR = "data_error"
    CREATE_TIMEOUT = "create_timeout"
    RESET_TIMEOUT = "reset_timeout"
    STEP_TIMEOUT = "step_timeout"
    WORKER_DIED = "worker_died"
    WORKER_KILLED = "worker_killed"
    RESTORE_MISMATCH = "restore_mismatch"
    SEED_MISMATCH = "seed_mismatch"
    NOT_RESUMABLE = "not_resumable"
    NO_CAPACITY = "no_capacity"
    RESPAWN_LIMIT = "respawn_limit"
    POOL_FAILED = "pool_failed"
    IDLE_TIMEOUT = "idle_timeout"
    UNKNOWN_INSTANCE = "unknown_instance"
    REFUSED_STALE = "refused_stale"
    OUT_OF_ORDER = "out_of_order"


CLASS_OF = dict.fromkeys(Reason, FailureClass.INFRA) | {
    Reason.ENV_ERROR: FailureClass.ENV,
    Reason.DATA_ERROR: FailureClass.DATA,
    Reason.CREATE_TIMEOUT: FailureClass.ENV,
    Reason.RESET_TIMEOUT: FailureClass.ENV,
    Reason.STEP_TIMEOUT: FailureClass.ENV,
    Reason.RESTORE_MISMATCH: FailureClass.ENV,
    Reason.SEED_MISMATCH: FailureClass.ENV,
}
"""Whose fault each is: the environment's, the task data's, or (the rest) the machinery's."""


GROUP_OF = {
    Reason.ENV_ERROR: "error",
    Reason.DATA_ERROR: "error",
    Reason.CREATE_TIMEOUT: "timeout",
    Reason.RESET_TIMEOUT: "timeout",
    Reason.STEP_TIMEOUT: "timeout",
    Reason.WORKER_DIED: "worker_died",
    Reason.WORKER_KILLED: "worker_killed",
    Reason.RESTORE_MISMATCH: "restore",
    Reason.NOT_RESUMABLE: "restore",
    Reason.SEED_MISMATCH: "seed",
    Reason.NO_CAPACITY: "capacity",
    Reason.RESPAWN_LIMIT: "capacity",
    Reason.POOL_FAILED: "capacity",
    Reason.IDLE_TIMEOUT: "unknown",
    Reason.UNKNOWN_INSTANCE: "unknown",
    Reason.REFUSED_STALE: "refused",
    Reason.OUT_OF_ORDER: "refused",
}
"""Label values of `segue_env_failure_reasons_total`: about ten, as for every metric."""


class KillReason(enum.StrEnum):
    """Why the pool killed a worker."""

    START_TIMEOUT = "start_timeout"
    CREATE_TIMEOUT = "create_timeout"
    RESET_TIMEOUT = "reset_timeout"
    STEP_TIMEOUT = "step_timeout"
    CLOSE_TIMEOUT = "close_timeout"
    LOST = "lost"


class Spawn(msgspec.Struct, frozen=True):
    """Start a worker process for a seat; `generation` counts the workers the seat has had."""

    seat: int
    generation: int


class Kill(msgspec.Struct, frozen=True):
    """End the seat's worker and everything that descends from it."""

    seat: int
    generation: int


class Send(msgspec.Struct, frozen=True):
    """Hand a call to the seat's worker."""

    seat: int
    generation: int
    call: Call


class Deliver(msgspec.Struct, frozen=True):
    """Hand a reply to one session of a node."""

    node: str
    session: int
    reply: EnvReply


Command = Spawn | Kill | Send | Deliver


class Fault(msgspec.Struct, frozen=True):
    """Why the pool cannot work at all. `user`: it is the user's to mend."""

    user: bool
    sentence: str
