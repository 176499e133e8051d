"""Keys of the learner, its model, weight sync and checkpoints."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from segue.config.section import Section


class ModelConfig(Section):
    """`[model]`: a Hugging Face folder or name, or "" for the model that `[warmstart]` makes."""

    path: str = ""


class WarmstartConfig(Section):
    """`[warmstart]`: a small model and tokenizer made for the task, distilled from its scripted teacher; cached by content."""

    hidden_size: int = Field(192, ge=32)
    layers: int = Field(4, ge=1)
    heads: int = Field(6, ge=1)
    intermediate_size: int = Field(512, ge=32)
    steps: int = Field(400, ge=1)
    batch: int = Field(64, ge=1)
    lr: float = Field(1e-3, gt=0.0)
    good_share: float = Field(0.4, ge=0.0, le=1.0)
    threads: int = Field(2, ge=1)
    seed: int = 0


class LearnerConfig(Section):
    """`[learner]`: estimator, loss, correction (reference names of docs/algorithms.md), optimizer, ranks.

    `correction`: "decoupled" (importance weight exp(p − b) on a PPO loss anchored on p), "tis" (that weight, at most
    `weight_cap`), "none" (a PPO loss anchored on the behaviour policy, whose ratio is the correction; no weight beside it).
    `proximal`: "recompute" (an extra forward when a batch takes several optimizer steps), "loglinear" (no extra forward).
    `mask_outcomes`: trajectories that ended so are in neither loss nor baseline (their return says too little); counted.
    """

    ranks: int = Field(1, ge=1)
    threads: int = Field(1, ge=1)
    gpus: float = Field(0.0, ge=0.0)
    dtype: Literal["float32", "bfloat16"] = "float32"
    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    aggregation: Literal["token", "trajectory", "constant"] = "trajectory"
    constant_length: int = Field(0, ge=0)
    clip_low: float = Field(0.2, gt=0.0, lt=1.0)
    clip_high: float = Field(0.28, gt=0.0)
    correction: Literal["decoupled", "tis", "none"] = "decoupled"
    proximal: Literal["recompute", "loglinear"] = "recompute"
    weight_cap: float = Field(2.0, gt=0.0)
    mask_outcomes: tuple[Literal["truncated_turns", "truncated_tokens", "truncated_wall", "truncated_env"], ...] = (
        "truncated_tokens",
        "truncated_wall",
    )
    minibatches: int = Field(1, ge=1)
    lr: float = Field(3e-4, gt=0.0)
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    weight_decay: float = Field(0.0, ge=0.0)
    adam_betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = Field(1.0, gt=0.0)
    pack_tokens: int = Field(4096, ge=64)
    logprob_chunk_tokens: int = Field(1024, ge=16)
    batch_wait_seconds: float = Field(300.0, gt=0.0)


class CheckpointConfig(Section):
    """`[checkpoint]`: written every `every` steps (0: only at the end and on Ctrl-C); the newest `keep` are kept."""

    every: int = Field(10, ge=0)
    keep: int = Field(2, ge=1)


class WeightSyncConfig(Section):
    """`[weightsync]`: torch.distributed backend of the broadcast group, bucket size, deadline of one transfer."""

    backend: Literal["nccl", "gloo"] = "gloo"
    bucket_bytes: int = Field(512 << 20, ge=1024)
    deadline_seconds: float = Field(30.0, gt=0.0)
