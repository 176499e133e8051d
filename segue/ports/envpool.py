"""What rollout nodes say to an env pool, and what it answers.

A node sends requests in batches (`EnvSubmit`, acknowledged at once); the pool pushes replies in batches to the node that asked
(`EnvDeliver`) as they come. Every request and reply carries (episode, attempt, step); a repeated (episode, attempt, step) gets
the stored reply; a reply that its asker no longer expects is refused there and counted.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from segue.episode import ActionRecord, Task, observation_hash
from segue.ports.rpc import Done, Rpc
from segue.wire import Message

RESET_STEP = -1
"""The step number of a create (reset) in requests, replies and turn records."""


class Resume(enum.StrEnum):
    """How an environment of a lost attempt is rebuilt: from its snapshot, by replaying its actions, or not at all.

    What is PINNED lives in its worker only: once it has taken a step, its episode cannot leave the node that has it.
    """

    SNAPSHOT = "snapshot"
    REPLAY = "replay"
    PINNED = "pinned"


class ChatMessage(msgspec.Struct, frozen=True):
    """One message of a conversation, in the field's usual roles: system, user, assistant, tool."""

    role: str
    content: str


class Observation(msgspec.Struct, frozen=True):
    """What the policy sees next. At reset: the whole prompt. `tools` (JSON schemas) only at reset.

    `stop` are strings that complete an action (a closing tag, say): the turn ends with the token that completes one.
    """

    messages: list[ChatMessage]
    tools: list[dict[str, Any]] = []
    stop: list[str] = []


def observation_digest(observation: Observation) -> int:
    """The hash of an observation that records and replays compare (`segue.episode.observation_hash` over its contents)."""
    return observation_hash(message.content for message in observation.messages)


class StepResult(msgspec.Struct, frozen=True):
    """Gymnasium's five values for text. `info` holds numbers kept apart from the reward (success, format, …)."""

    observation: Observation
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, float] = {}


class Restore(msgspec.Struct, frozen=True):
    """How to rebuild an environment: from `snapshot` (None: from a reset), then `replay`, comparing observation hashes."""

    snapshot: bytes | None
    snapshot_turn: int
    replay: list[ActionRecord]


class Create(msgspec.Struct, frozen=True, tag=True):
    """Build an instance for (episode, attempt), reset it to the task or restore it. Answered by `Created`."""

    episode: int
    attempt: int
    task: Task
    member: int
    restore: Restore | None = None


class Step(msgspec.Struct, frozen=True, tag=True):
    """Take turn `step` (0-based) with `action`. Answered by `Stepped`."""

    episode: int
    attempt: int
    step: int
    action: str


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The record of turn `step` is in the scheduler's log: the pool may forget the snapshot and reply of that turn."""

    episode: int
    attempt: int
    step: int


class Close(msgspec.Struct, frozen=True, tag=True):
    """Done with the instance. Not answered; closing an unknown instance is no error."""

    episode: int
    attempt: int


EnvRequest = Create | Step | Accepted | Close


class Created(msgspec.Struct, frozen=True, tag=True):
    """The instance is ready. After a restore `observation` is that of the last replayed or restored turn.

    `resume`: whether, and how, the episode can go on elsewhere.
    """

    episode: int
    attempt: int
    observation: Observation
    snapshot: bytes | None
    seconds: float
    resume: Resume


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """The result of a step, and the snapshot after it (None: too large or not offered; rebuild by replay)."""

    episode: int
    attempt: int
    step: int
    result: StepResult
    snapshot: bytes | None
    seconds: float


class EnvFailed(msgspec.Struct, frozen=True, tag=True):
    """The call failed and the instance is gone. `failure`: infra, env or data; `reason` is one of a closed set."""

    episode: int
    attempt: int
    step: int
    failure: str
    reason: str
    detail: str


EnvReply = Created | Stepped | EnvFailed


class EnvSubmit(Message, frozen=True):
    """Requests of one node, in order. Replies to it may gather for `patience` seconds, counted from the last ones sent."""

    node: str
    session: int
    requests: list[EnvRequest]
    patience: float = 0.0


class EnvDeliver(Message, frozen=True):
    """Replies for one session of a node."""

    pool: str
    session: int
    replies: list[EnvReply]


class PoolStatusRequest(Message, frozen=True):
    """Ask for the pool's counts."""


class PoolStatus(Message, frozen=True):
    """Slots by state and the counters of the catalogue, plain JSON-like."""

    data: dict[str, Any]


ENV_SUBMIT = Rpc("env_submit", EnvSubmit, Done)
ENV_DELIVER = Rpc("env_deliver", EnvDeliver, Done)
POOL_STATUS = Rpc("pool_status", PoolStatusRequest, PoolStatus)
