"""Keys of the rollout nodes."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, field_validator

from segue.config.cores import CoresEach
from segue.config.own import own_or
from segue.config.section import Section

PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")
"""vLLM's engine arguments that multiply to its number of workers."""


class RolloutConfig(Section):
    """`[rollout]`: nodes, their engine, and the budgets of an episode."""

    nodes: int = Field(2, ge=1)
    """Rollout nodes, a process each."""
    max_nodes: int = Field(0, ge=0)
    """Up to how many nodes there may be when hosts join a run that is under way; 0: no more than `nodes`."""
    engine: str = "embedded"
    """`embedded`: torch, in the node; `vllm`: vLLM, for models and loads beyond a laptop's; or one of your own, as
    `module:function` (`segue.cluster.own_parts`)."""
    engine_args: dict[str, Any] = {}
    """Engine arguments of vLLM, such as `tensor_parallel_size` or `kv_cache_memory_bytes`, by vLLM's own names. Those that follow
    from other keys cannot be set here. An engine of your own gets them as they are."""
    slots: int = Field(32, ge=1)
    """Sequences decoded at once."""
    idle_slots: int = Field(0, ge=0)
    """Of the embedded engine: as many more episodes keep their KV while they wait for an environment; each takes the memory of
    `max_tokens` tokens. With 0, episodes beyond `slots` may have to be prefilled anew at each turn. vLLM keeps what its cache
    holds."""
    max_episodes: int = Field(48, ge=1)
    """Episode loops per node, those waiting for an environment included."""
    threads: int = Field(1, ge=1)
    """torch threads per node."""
    cores: CoresEach = ()
    """CPU cores of each node, a list per node: `[[0, 1], [2, 3]]`. Left out: those of `cluster.cores`."""
    gpus: float = Field(0.0, ge=0.0)
    """GPUs per node."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the weights in the engine."""
    temperature: float = Field(1.0, ge=1e-3)
    """Of sampling for training."""
    max_turns: int = Field(8, ge=1)
    """Turns of an episode; one that has not ended after them is truncated."""
    max_tokens: int = Field(512, ge=8)
    """Tokens of an episode's whole context."""
    max_turn_tokens: int = Field(64, ge=1)
    """Tokens of one action."""
    max_observation_tokens: int = Field(0, ge=0)
    """A longer observation is cut and says so; 0 means what the context leaves."""
    wall_seconds: float = Field(300.0, gt=0.0)
    """Wall time of an episode, pauses not counted."""
    slice_tokens: int = Field(0, ge=0)
    """Tokens of one lease, after which an episode may be parked; 0 for no limit."""
    keep_trajectories: int = Field(32, ge=0)
    """Newest trained trajectories kept for reading, one per step."""

    @field_validator("engine")
    @classmethod
    def _known(cls, value: str) -> str:
        return own_or(("embedded", "vllm"), value)

    @property
    def own_engine(self) -> bool:
        """Whether the engine is the user's."""
        return ":" in self.engine

    @property
    def most(self) -> int:
        """Nodes there may be at a time."""
        return max(self.nodes, self.max_nodes)

    @property
    def ranks(self) -> int:
        """Processes of a node's engine that receive weights: each is a member of a transfer."""
        sizes = [self.engine_args.get(name, 1) for name in PARALLEL]
        return math.prod(size for size in sizes if isinstance(size, int) and size > 0)
