"""What a pool and its worker processes say to each other: wire messages in frames of a 4-byte little-endian length and the bytes.

Every call names its instance and carries a number of its own; the reply repeats both. At most one call per instance is on its
way. A worker that was killed takes its channel with it, so a late reply has nowhere to come from; in process its number is gone.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from segue import wire
from segue.episode import Task
from segue.ports.envpool import Observation, StepResult
from segue.wire import Message

LENGTH = struct.Struct("<I")
MAX_FRAME = 256 << 20


class Load(msgspec.Struct, frozen=True, tag=True):
    """First message to a worker: which suite to load. Snapshots above `snapshot_bytes` are not sent."""

    suite: str
    args: dict[str, Any]
    snapshot_bytes: int


class Make(msgspec.Struct, frozen=True, tag=True):
    """Build an instance."""

    instance: int
    call: int
    task: Task
    member: int
    attempt: int


class Reset(msgspec.Struct, frozen=True, tag=True):
    """Reset the instance to its task."""

    instance: int
    call: int


class RestoreTo(msgspec.Struct, frozen=True, tag=True):
    """Restore the fresh instance to a snapshot, instead of a reset."""

    instance: int
    call: int
    snapshot: bytes


class Act(msgspec.Struct, frozen=True, tag=True):
    """One step. `key`: of its effects (`envpool.environment.effect_key`). `snapshot`: whether one is wanted after it."""

    instance: int
    call: int
    action: str
    key: str = ""
    snapshot: bool = True


class Dispose(msgspec.Struct, frozen=True, tag=True):
    """Close the instance and forget it."""

    instance: int
    call: int


Call = Make | Reset | RestoreTo | Act | Dispose


class ToWorker(Message, frozen=True):
    """Pool → worker."""

    body: Load | Make | Reset | RestoreTo | Act | Dispose


class LoadedSuite(msgspec.Struct, frozen=True, tag=True):
    """The worker takes calls now. `pid` leads the process group that environments run in."""

    pid: int


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """The suite does not load. `user`: the sentence is for the user."""

    user: bool
    sentence: str


class Made(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Make`: how the instance can be rebuilt (`segue.ports.envpool.Resume`)."""

    instance: int
    call: int
    resume: str


class Observed(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Reset` and `RestoreTo`."""

    instance: int
    call: int
    observation: Observation
    snapshot: bytes | None


class Acted(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Act`."""

    instance: int
    call: int
    result: StepResult
    snapshot: bytes | None


class Disposed(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Dispose`. `error`: what closing raised; the instance is gone all the same."""

    instance: int
    call: int
    error: str = ""


class Raised(msgspec.Struct, frozen=True, tag=True):
    """The call raised: `failure` is env or data. The instance takes nothing but `Dispose` any more.

    `detail` is half a sentence (`segue.users_code.described`); errors of one `kind` are the same error again.
    """

    instance: int
    call: int
    failure: str
    detail: str
    kind: str = ""
    traceback: str = ""


Reply = Made | Observed | Acted | Disposed | Raised


class FromWorker(Message, frozen=True):
    """Worker → pool."""

    body: LoadedSuite | LoadFailed | Made | Observed | Acted | Disposed | Raised


def frame(message: Message) -> bytes:
    """A message ready for the channel."""
    body = wire.encode(message)
    return LENGTH.pack(len(body)) + body
