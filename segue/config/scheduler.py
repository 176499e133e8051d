"""Keys of the scheduler: groups and batches, age, updates, the queue, the task stream, retries."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from segue.config.section import Section


class TaskConfig(Section):
    """`[task]`: which environment suite the tasks come from. `args` go to the suite unread."""

    env: str
    train_tasks: int = Field(1024, ge=1)
    args: dict[str, Any] = {}


class GroupConfig(Section):
    """`[group]`: G episodes of one task. `min_valid` members must be valid for a group to ship (default ⌈G/2⌉, never under 2)."""

    size: int = Field(8, ge=1)
    min_valid: int = Field(0, ge=0)
    filter_zero_variance: bool = False

    @property
    def needed(self) -> int:
        """`group.min_valid` with its default resolved."""
        if self.size == 1:
            return 1
        return max(2, self.min_valid or -(-self.size // 2))


class BatchConfig(Section):
    """`[batch]`: B groups make a batch."""

    groups: int = Field(16, ge=1)


class StalenessConfig(Section):
    """`[staleness]`: no token is trained at an age above `max_age`; `over_age` says what happens to those that would be."""

    max_age: int = Field(4, ge=0)
    over_age: Literal["mask", "drop", "train"] = "mask"


class UpdateConfig(Section):
    """`[update]`: how new weights reach the rollout nodes. `rolling` is the share of nodes that update at a time."""

    inflight: Literal["recompute", "keep", "turn", "episode"] = "recompute"
    rolling: float = Field(1.0, gt=0.0, le=1.0)
    drain_seconds: float = Field(10.0, gt=0.0)
    deadline_seconds: float = Field(60.0, gt=0.0)


class QueueConfig(Section):
    """`[queue]`: bounds of the trajectory queue. 0 groups means (max_age + 1) · B; bytes beyond `bytes` spill to disk."""

    groups: int = Field(0, ge=0)
    bytes: int = Field(256 << 20, ge=1)


class DataConfig(Section):
    """`[data]`: `prefetch` batches are formed ahead of training (default 1; 0 when max_age is 0)."""

    prefetch: int | None = Field(None, ge=0)
    shuffle: bool = True


class SchedulerConfig(Section):
    """`[scheduler]`: leases, retries per failure class, message load."""

    lease_seconds: float = Field(15.0, gt=0.0)
    messages_per_second: float = Field(500.0, gt=0.0)
    retries_infra: int = Field(3, ge=0)
    retries_env: int = Field(2, ge=0)
    retries_data: int = Field(0, ge=0)
    max_quarantined: int = Field(16, ge=1)


class EvalConfig(Section):
    """`[eval]`: held-out tasks, one episode each, before and after training. Temperature 0 is greedy."""

    tasks: int = Field(256, ge=0)
    temperature: float = Field(0.0, ge=0.0)
    before: bool = True
    after: bool = True
    deadline_seconds: float = Field(600.0, gt=0.0)
