"""Keys of the scheduler: groups and batches, age, updates, the queue, the task stream, retries."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from segue.config.cores import Cores
from segue.config.section import Section


class TaskConfig(Section):
    """`[task]`: which environment suite the tasks come from."""

    env: str
    """Environment suite: `search_qa`, `price_list`, `latency`, or one of your own as `module:function`."""
    train_tasks: int = Field(1024, ge=1)
    """Tasks to train on; the stream starts over after them."""
    args: dict[str, Any] = {}
    """Arguments of the suite."""


class GroupConfig(Section):
    """`[group]`: the episodes of one task, over which the baseline is taken."""

    size: int = Field(8, ge=1)
    """G, episodes of one task."""
    min_valid: int = Field(0, ge=0)
    """Members that must be valid for a group to ship; 0 means ⌈G/2⌉, and it is never under 2 (1 with G = 1)."""
    redundancy: int = Field(0, ge=0)
    """r, members of a training group beyond G: it begins with G + r, the first G valid ones count, and the others are dropped as
    `redundant`. Waits for fewer stragglers; costs their tokens and r places per group, and biases towards short episodes."""
    filter_zero_variance: bool = False
    """Drop groups whose returns are all equal, instead of counting them in the batch with advantage 0."""

    @property
    def needed(self) -> int:
        """`group.min_valid` with its default resolved."""
        if self.size == 1:
            return 1
        return max(2, self.min_valid or -(-self.size // 2))

    @property
    def members(self) -> int:
        """G + r, episodes that a training group begins with."""
        return self.size + self.redundancy


class BatchConfig(Section):
    """`[batch]`: what one learner step trains."""

    groups: int = Field(16, ge=1)
    """B, groups in a batch."""


class StalenessConfig(Section):
    """`[staleness]`: how old a token may be when it is trained."""

    max_age: int = Field(4, ge=0)
    """η: no token is trained at a greater age, in steps. `mode` sets it to 0 (sync) or 1 (one_step_off)."""
    over_age: Literal["mask", "drop", "train"] = "mask"
    """Tokens over age: `mask` keeps them out of the loss, `drop` drops their episode, `train` waives the bound."""


class UpdateConfig(Section):
    """`[update]`: how new weights reach the rollout nodes."""

    inflight: Literal["recompute", "keep", "turn", "episode"] = "recompute"
    """Requests in flight when new weights come: `recompute` their KV, `keep` it, let `turn`s or whole `episode`s finish first."""
    rolling: float = Field(1.0, gt=0.0, le=1.0)
    """Share of the nodes that update at a time."""
    drain_seconds: float = Field(10.0, gt=0.0)
    """How long `turn` and `episode` wait before what is left is interrupted."""
    deadline_seconds: float = Field(60.0, gt=0.0)
    """A node that has not loaded by then is fenced out."""
    policy: Literal["every", "budget"] = "every"
    """`every` step's weights go to the nodes at once; `budget`: fewer, while recomputing what updates drop costs too much
    (docs/reprefill.md)."""
    reprefill_budget: float = Field(0.05, gt=0.0, lt=1.0)
    """Share of the rollout time that may go into recomputing contexts because of updates."""
    reprefill_window: float = Field(60.0, gt=0.0)
    """Seconds over which that share is taken."""
    budget_inflight: tuple[Literal["turn", "keep"], ...] = ("keep",)
    """Where holding updates back is not enough: what may take the place of `inflight`, one after the other; `[]` for nothing."""


class QueueConfig(Section):
    """`[queue]`: bounds of the trajectory queue."""

    groups: int = Field(0, ge=0)
    """Groups the trajectory queue may hold; 0 means (max_age + 1) · B, and fewer are refused."""
    bytes: int = Field(256 << 20, ge=1)
    """Bytes it may hold in memory; what is beyond goes to the run directory."""


class DataConfig(Section):
    """`[data]`: the task stream and the batches ahead."""

    prefetch: int | None = Field(None, ge=0)
    """Batches formed ahead of training; left out: 1, or 0 when max_age is 0."""
    shuffle: bool = True
    """Shuffle the training tasks, differently each time round."""


class SchedulerConfig(Section):
    """`[scheduler]`: leases, retries per failure class, message load."""

    lease_seconds: float = Field(15.0, gt=0.0)
    """A lease ends this long after the last exchange with its node."""
    cores: Cores = []
    """CPU cores of the scheduler; `[]`: those of `cluster.cores`."""
    messages_per_second: float = Field(500.0, gt=0.0)
    """Calls between the scheduler and all others together; with more nodes each one's reports and orders gather longer."""
    affinity: bool = True
    """Lease an episode where its prefix is in the cache: on the node it ran on last, its group-mates on one node. `false`: always
    to the least loaded node."""
    affinity_slack: float = Field(0.25, ge=0.0, le=1.0)
    """Share of a node's places by which it may be fuller than the emptiest before affinity yields: with 48 places the default
    lets one group of 8 begin together and spreads the next."""
    retries_infra: int = Field(3, ge=0)
    """Further attempts of an episode whose node, engine or connection failed."""
    retries_env: int = Field(2, ge=0)
    """Further attempts of an episode whose environment failed."""
    retries_data: int = Field(0, ge=0)
    """Further attempts of an episode whose task data or scorer failed."""
    max_quarantined: int = Field(16, ge=1)
    """The run ends when more tasks than this have been set aside because they keep failing."""


class EvalConfig(Section):
    """`[eval]`: held-out tasks, run as episodes of their own on the rollout nodes."""

    tasks: int = Field(256, ge=0)
    """Held-out tasks, one episode each; 0 for no evaluation."""
    temperature: float = Field(0.0, ge=0.0)
    """0 is greedy."""
    before: bool = True
    """Evaluate before training."""
    after: bool = True
    """Evaluate after training."""
    deadline_seconds: float = Field(600.0, gt=0.0)
    """An evaluation that takes longer ends the run with a sentence."""
