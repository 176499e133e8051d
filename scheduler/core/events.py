"""What the core is told beyond the port messages that it reads as they are (`DeltaHead`, `Finish`, `Fail`, `Parked`, …)."""

from __future__ import annotations

import msgspec

from segue.episode import Task
from segue.ports.rollout import DeltaHead, Discarded, Fail, Finish, Loaded, LoadFailed, Parked, Paused, Resumed, SliceUsed
from segue.ports.transfer import TransferResult


class NodeJoined(msgspec.Struct, frozen=True):
    """A rollout node begins `session`. What an older session of that name held goes on elsewhere."""

    node: str
    session: int
    max_episodes: int
    slots: int


class NodeHeard(msgspec.Struct, frozen=True):
    """An exchange of this session arrived: its leases begin anew."""

    node: str
    session: int


class NodeSpent(msgspec.Struct, frozen=True, gc=False):
    """What this node has computed again because of weight updates, in all since its process began: tokens, engine seconds."""

    node: str
    session: int
    tokens: float
    seconds: float


class NodeLost(msgspec.Struct, frozen=True):
    """The process behind this session is known to be gone; nobody needs to wait for its leases to end."""

    node: str
    session: int
    reason: str


class FromNode(msgspec.Struct, frozen=True):
    """A report about the node's weights, with the session it comes from."""

    node: str
    session: int
    report: Loaded | LoadFailed


class TasksArrived(msgspec.Struct, frozen=True):
    """The next tasks of the stream, in order; the answer to `NeedTasks`."""

    tasks: list[Task]


class TrainingOpened(msgspec.Struct, frozen=True):
    """Train `steps` batches in all."""

    steps: int


class EvalStarted(msgspec.Struct, frozen=True):
    """Run one episode of each task under `name`."""

    name: str
    tasks: list[Task]
    temperature: float


class WeightsReady(msgspec.Struct, frozen=True):
    """The learner holds the weights of `step` ready to send, and can be met at `address`."""

    step: int
    address: str


class SendFailed(msgspec.Struct, frozen=True):
    """The learner could not be asked to send: a transfer that failed before it began."""

    transfer: int
    reason: str


class BatchTaken(msgspec.Struct, frozen=True):
    """The batch of `step` is on its way to the learner."""

    step: int


class BatchTrained(msgspec.Struct, frozen=True):
    """The learner acknowledged the last optimizer step of the batch of `step`."""

    step: int


class BatchesCommitted(msgspec.Struct, frozen=True):
    """All batches below `step` are inside a complete checkpoint."""

    step: int


class LearnerRewound(msgspec.Struct, frozen=True):
    """The learner was restored at `step`: it trains the kept batches `step`, `step` + 1, … again, in order."""

    step: int


class StopRequested(msgspec.Struct, frozen=True):
    """No more work of any kind; what is live is dropped."""

    reason: str


Event = (
    DeltaHead
    | Finish
    | Fail
    | Parked
    | Discarded
    | SliceUsed
    | Paused
    | Resumed
    | TransferResult
    | NodeJoined
    | NodeHeard
    | NodeSpent
    | NodeLost
    | FromNode
    | TasksArrived
    | TrainingOpened
    | EvalStarted
    | WeightsReady
    | SendFailed
    | BatchTaken
    | BatchTrained
    | BatchesCommitted
    | LearnerRewound
    | StopRequested
)
