"""Keys of the rollout nodes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from segue.config.section import Section


class RolloutConfig(Section):
    """`[rollout]`: nodes, their engine, and the budgets of an episode.

    `slots` are sequences decoded at once; `max_episodes` are episode loops per node, those waiting for an environment included.
    `max_tokens` bounds the whole context of an episode, `max_turn_tokens` one action. An observation of more than
    `max_observation_tokens` (0: what the context leaves) is cut and says so. `slice_tokens` (0: none) bounds a lease.
    """

    nodes: int = Field(2, ge=1)
    engine: Literal["embedded", "vllm"] = "embedded"
    engine_args: dict[str, Any] = {}
    slots: int = Field(32, ge=1)
    max_episodes: int = Field(48, ge=1)
    threads: int = Field(1, ge=1)
    gpus: float = Field(0.0, ge=0.0)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    temperature: float = Field(1.0, gt=0.0)
    max_turns: int = Field(8, ge=1)
    max_tokens: int = Field(512, ge=8)
    max_turn_tokens: int = Field(64, ge=1)
    max_observation_tokens: int = Field(0, ge=0)
    wall_seconds: float = Field(300.0, gt=0.0)
    slice_tokens: int = Field(0, ge=0)
    keep_trajectories: int = Field(32, ge=0)
