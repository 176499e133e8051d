"""What the core wants done. The shell carries commands out in the order in which they were given."""

from __future__ import annotations

import msgspec

from segue.episode import Task
from segue.ports.transfer import Transfer


class Refuse(msgspec.Struct, frozen=True, gc=False):
    """The message was of an attempt that is over: tell the sender to stop it and discard."""

    episode: int
    attempt: int


class Ignore(msgspec.Struct, frozen=True, gc=False):
    """The delta is in the log already: its payload is not stored again."""

    episode: int
    seq: int


class Resend(msgspec.Struct, frozen=True, gc=False):
    """Something is missing from `seq` on: ask the sender for it. What came after the gap was not taken."""

    episode: int
    attempt: int
    seq: int


class Forget(msgspec.Struct, frozen=True, gc=False):
    """The stored payloads of this episode can go."""

    episode: int


class Grant(msgspec.Struct, frozen=True):
    """Lease `attempt` of the episode to a node. Its snapshot is the stored log: `next_seq` deltas up to `turn`."""

    node: str
    session: int
    episode: int
    attempt: int
    group: int
    member: int
    purpose: str
    priority: int
    task: Task
    temperature: float
    turn: int
    next_seq: int
    seconds: float


class DropAttempt(msgspec.Struct, frozen=True, gc=False):
    """Tell the node to stop this attempt and discard it."""

    node: str
    session: int
    episode: int
    attempt: int
    reason: str


class ParkAttempt(msgspec.Struct, frozen=True, gc=False):
    """Tell the node to save this attempt and let go of it."""

    node: str
    session: int
    episode: int
    attempt: int


class ExtendSlice(msgspec.Struct, frozen=True, gc=False):
    """Tell the node to go on with this attempt for another slice."""

    node: str
    session: int
    episode: int
    attempt: int


class BeginTransfer(msgspec.Struct, frozen=True):
    """Start a broadcast: the sender and every `(node, session)` are told of `transfer`, under the update id `update`.

    `inflight` is how requests in flight cross.
    """

    update: int
    transfer: Transfer
    nodes: list[tuple[str, int]]
    inflight: str


class Abandon(msgspec.Struct, frozen=True, gc=False):
    """Tell the node to give up `update`."""

    node: str
    session: int
    update: int
    reason: str


class UpdateDone(msgspec.Struct, frozen=True):
    """A broadcast is over: who runs `version` now, and who left over it."""

    version: int
    step: int
    loaded: list[str]
    left: list[str]
    seconds: float


class Fence(msgspec.Struct, frozen=True, gc=False):
    """This session is over: nothing it says counts any more."""

    node: str
    session: int
    reason: str


class MemberPlan(msgspec.Struct, frozen=True):
    """One trajectory of a batch."""

    episode: int
    member: int
    outcome: str
    reward: float
    seconds: float
    info: dict[str, float]


class GroupPlan(msgspec.Struct, frozen=True):
    """One group of a batch: its valid members. `size` is how many were meant to be."""

    group: int
    task: str
    size: int
    members: list[MemberPlan]


class BatchPlan(msgspec.Struct, frozen=True):
    """A batch formed for target step `step`; `versions` are all that sampled a token in it.

    `trainable` and `over_age` count its sampled tokens by whether their age at `step` is within the bound.
    """

    step: int
    groups: list[GroupPlan]
    versions: list[int]
    trainable: int
    over_age: int


class FormBatch(msgspec.Struct, frozen=True):
    """A batch is ready to be taken."""

    plan: BatchPlan


class ReleaseBatch(msgspec.Struct, frozen=True):
    """The batch of `step` is committed: its payloads can go."""

    step: int
    episodes: list[int]


class NeedTasks(msgspec.Struct, frozen=True, gc=False):
    """Take `count` tasks from the stream and hand them in as `TasksArrived`."""

    count: int


class EvalDone(msgspec.Struct, frozen=True, gc=False):
    """Every episode of evaluation `name` finished or failed."""

    name: str


class Warn(msgspec.Struct, frozen=True, gc=False):
    """Something the user should read; the run goes on."""

    sentence: str


class Fatal(msgspec.Struct, frozen=True, gc=False):
    """The run cannot go on; `part` failed first.

    `users`: environments or their tasks failed, which is the user's to mend. `sentence` then says only what happened, without
    a full stop: the shell adds the `remedy`, and before it the log that has the traceback if the user's code `raised`.
    """

    part: str
    sentence: str
    users: bool = False
    remedy: str = ""
    raised: bool = False


class StopNodes(msgspec.Struct, frozen=True):
    """Tell these sessions to stop all work."""

    nodes: list[tuple[str, int]]
    reason: str


Command = (
    Refuse
    | Ignore
    | Resend
    | Forget
    | Grant
    | DropAttempt
    | ParkAttempt
    | ExtendSlice
    | BeginTransfer
    | Abandon
    | UpdateDone
    | Fence
    | FormBatch
    | ReleaseBatch
    | NeedTasks
    | EvalDone
    | Warn
    | Fatal
    | StopNodes
)
