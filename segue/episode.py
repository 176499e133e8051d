"""Episodes: the task they attempt, the states they pass through, the log they leave, and the snapshot they resume from."""

from __future__ import annotations

import enum
import zlib
from collections.abc import Iterable
from typing import Any

import msgspec

from segue.trajectory import TokenLog
from segue.wire import Message


class Purpose(enum.StrEnum):
    """Why an episode runs. Evaluation bypasses the age limit and the queue and is counted apart."""

    TRAIN = "train"
    EVAL = "eval"


class State(enum.StrEnum):
    """Where an episode is; it is in exactly one (design.md §3). DROPPED and FAILED carry a reason or a class."""

    PENDING = "pending"
    LEASED = "leased"
    PARKED = "parked"
    ASSEMBLING = "assembling"
    QUEUED = "queued"
    DELIVERED = "delivered"
    TRAINED = "trained"
    DROPPED = "dropped"
    FAILED = "failed"


class Outcome(enum.StrEnum):
    """How a finished episode ended: the environment ended it, or the named budget truncated it."""

    TERMINATED = "terminated"
    TRUNCATED_TURNS = "truncated_turns"
    TRUNCATED_TOKENS = "truncated_tokens"
    TRUNCATED_WALL = "truncated_wall"
    TRUNCATED_ENV = "truncated_env"


class DropReason(enum.StrEnum):
    """Why an episode that could have been trained was not. Infrastructure trouble is a failure, not a drop."""

    STALE = "stale"
    ZERO_VARIANCE = "zero_variance"
    GROUP_FAILED = "group_failed"
    REDUNDANT = "redundant"
    SHUTDOWN = "shutdown"


class FailureClass(enum.StrEnum):
    """What failed: the machinery (infra), the environment (env), or the task's own data or scorer (data)."""

    INFRA = "infra"
    ENV = "env"
    DATA = "data"


class Task(msgspec.Struct, frozen=True):
    """One problem. `payload` is what the environment suite understands; `seed` fixes everything random about it."""

    id: str
    env: str
    seed: int
    payload: dict[str, Any] = {}


class ActionRecord(msgspec.Struct, frozen=True, array_like=True):
    """One past action with a hash of the observation it caused: what a rebuild by replay repeats and compares."""

    action: str
    observation_hash: int


class TurnRecord(msgspec.Struct, frozen=True):
    """What one environment step did: part (b) of a turn (design.md §6). Turn -1 is the reset.

    `stop` are the strings that complete the next action; empty: those in force before. (An environment rebuilt elsewhere need
    not say them again.)
    """

    turn: int
    reward: float
    terminated: bool
    truncated: bool
    action: str
    observation_hash: int
    snapshot: bytes | None
    info: dict[str, float]
    stop: list[str] = []


class DeltaBody(Message, frozen=True):
    """The payload of a delta: tokens added to the log, and the turn's record if this is part (b).

    `action_complete` marks the delta that ends a turn's sampled tokens: part (a) is then whole, and its text is `action`.
    """

    log: TokenLog
    record: TurnRecord | None = None
    action_complete: bool = False
    action: str = ""


class EpisodeSnapshot(msgspec.Struct, frozen=True):
    """All that another node needs to go on with an episode, addressed by (episode, turn).

    `deltas` are the accepted delta payloads in order (encoded DeltaBody); `next_seq` continues their numbering;
    `seconds` is the wall time already used, waits for weights left out.
    """

    turn: int = -1
    next_seq: int = 0
    deltas: list[bytes] = []
    seconds: float = 0.0


def log_checksum(payloads: Iterable[bytes], start: int = 0) -> int:
    """CRC-32 over delta payloads in order; a node sends it with `finish` and the scheduler compares its own."""
    for payload in payloads:
        start = zlib.crc32(payload, start)
    return start


def observation_hash(texts: Iterable[str]) -> int:
    """A hash of an observation's texts, equal in every process (unlike `hash`)."""
    value = 0
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        value = zlib.crc32(data, zlib.crc32(len(data).to_bytes(8, "little"), value))
    return value
