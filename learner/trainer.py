"""One training step: micro-batches forward and backward, gradient clipping, AdamW; and everything measured on the way."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from learner.batches import MicroBatch, PreparedBatch
from learner.diagnostics import OneRank, Reduce, TokenRecord, token_diagnostics
from learner.losses import proximal_logprobs, token_loss
from learner.model import POLICY, Models, PackedModel
from learner.schedule import learning_rate
from segue.by_path import load
from segue.config import Config
from segue.errors import UserError

Array = np.ndarray[Any, Any]


class NotFinite(ArithmeticError):
    """A gradient norm that is not a number: the weights were left as they were."""


@dataclass(frozen=True)
class StepStats:
    """What a step did: `stats` by name (see `learner.diagnostics`), `ages[a]` trained tokens of age a, seconds by phase.

    `updated`: the weights are others now; where they are not, there is nothing to publish.
    """

    step: int
    stats: dict[str, float]
    ages: list[int]
    seconds: dict[str, float]
    updated: bool = True


class TorchReduce:
    """Reduces over the default process group, on the model's device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def _all(self, values: Array, op: Any) -> Array:
        tensor = torch.from_numpy(np.array(values, dtype=np.float64)).to(self._device)
        dist.all_reduce(tensor, op=op)
        result: Array = tensor.cpu().numpy()
        return result

    def sum(self, values: Array) -> Array:
        return self._all(values, dist.ReduceOp.SUM)

    def max(self, values: Array) -> Array:
        return self._all(values, dist.ReduceOp.MAX)


@dataclass
class _Phases:
    """Seconds per phase, and who else wants to know which one it is."""

    enter: Callable[[str], None]
    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.enter(name)
        with self.part(name):
            yield

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Something inside a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


class Trainer:
    """The policy, its optimizer, and the step they are at. With several ranks every method is a collective.

    `step` is the number of batches trained; `train` takes the batch of exactly that step.
    """

    def __init__(self, models: Models, config: Config, world: int = 1, step: int = 0) -> None:
        self.models = models
        self.config = config
        self.world = world
        self.step = step
        decayed = [p for p in self.policy.parameters() if p.ndim > 1]
        others = [p for p in self.policy.parameters() if p.ndim <= 1]
        learner = config.learner
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": learner.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=learner.lr,
            betas=learner.adam_betas,
        )
        self._reduce: Reduce = TorchReduce(self.policy.device) if world > 1 else OneRank()

    @property
    def policy(self) -> PackedModel:
        return self.models[POLICY]

    def train(self, batch: PreparedBatch, version: int | None = None, enter: Callable[[str], None] | None = None) -> StepStats:
        """Train one batch. `version` is the id of the weights the policy has now: tokens it sampled show the log-prob gap.

        `enter(phase)` is told of each phase (proximal, forward_backward, optimizer) as it begins. Raises `NotFinite`, before the
        weights change, when a gradient norm is not finite.
        """
        assert batch.step == self.step, f"the batch of step {batch.step} came at step {self.step}"
        bound = self.config.staleness
        assert bound.over_age == "train" or len(batch.ages) <= bound.max_age + 1, f"tokens of age {len(batch.ages) - 1}"
        phases = _Phases(enter or (lambda phase: None))
        rate = learning_rate(self.config.learner, self.step, self.config.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with phases.phase("proximal"):
            proximal = self._recomputed(batch)
        records: list[TokenRecord] = []
        losses, norms = [], []
        for index, micros in enumerate(batch.minibatches):
            with phases.phase("forward_backward"):
                loss = 0.0
                for micro, recomputed in zip(micros, proximal[index], strict=True):
                    part, record = self._micro(phases, micro, recomputed, index == 0, version)
                    loss += part
                    records.append(record)
            with phases.phase("optimizer"):
                norms.append(self._optimize())
                losses.append(float(self._reduce.sum(np.array([loss]))[0]))
        measured = token_diagnostics(records, self._reduce)
        assert measured["action_tokens"] == batch.action_tokens, "the ranks' shares do not make up the batch"
        self.step += 1
        stats = {
            **batch.stats,
            **measured,
            "loss": float(np.mean(losses)) if losses else 0.0,
            "grad_norm": max(norms, default=0.0),
            "learning_rate": rate,
            "optimizer_steps": float(len(batch.minibatches)),
        }
        return StepStats(batch.step, stats, batch.ages, phases.seconds)

    def _recomputed(self, batch: PreparedBatch) -> list[list[torch.Tensor | None]]:
        """p under the weights before the first optimizer step; None where the first forward pass gives it, or none is needed."""
        learner = self.config.learner
        wanted = learner.correction != "none" and learner.proximal == "recompute"
        result: list[list[torch.Tensor | None]] = []
        for index, micros in enumerate(batch.minibatches):
            if index == 0 or not wanted:
                result.append([None] * len(micros))
                continue
            with torch.no_grad():
                result.append([self.policy(micro.row.to(self.policy.device))[0] for micro in micros])
        return result

    def _micro(
        self, phases: _Phases, micro: MicroBatch, recomputed: torch.Tensor | None, first: bool, version: int | None
    ) -> tuple[float, TokenRecord]:
        row = micro.row.to(self.policy.device)
        with torch.set_grad_enabled(micro.grad):
            with phases.part("forward"):
                logprobs, entropy = self.policy(row)
            if len(row.targets) == 0:
                loss, record = logprobs.sum(), _nothing()
            else:
                fields, learner = row.fields, self.config.learner
                behaviour = fields["behaviour"]
                proximal = proximal_logprobs(learner, logprobs, behaviour, fields["age"], recomputed)
                result = token_loss(learner, logprobs, behaviour, fields["advantage"], proximal)
                loss = (result.loss * fields["keep"] * fields["scale"]).sum()
                # These weights' own log-probability, if some forward pass under them happened.
                own = logprobs.detach() if first else recomputed
                fresh = (fields["version"] == (-1 if version is None else version)) & (fields["clean_kv"] == 1)
                record = TokenRecord(
                    log_rho=_numpy(result.log_rho),
                    delta=_numpy(logprobs.detach() - behaviour),
                    entropy=_numpy(entropy),
                    clipped=_numpy(result.clipped),
                    kept=_numpy(fields["keep"] * (result.weight > 0)),  # a weight of 0 is a refusal too
                    comparable=_numpy(fresh) if own is not None else np.zeros(len(row.targets)),
                    gap=_numpy(own - behaviour) if own is not None else np.zeros(len(row.targets)),
                    sequence=_numpy(row.sequence),
                )
            if micro.grad:
                # FSDP averages gradients over ranks; the scales are those of the whole step, so that the sum is wanted.
                with phases.part("backward"):
                    (loss * self.world).backward()
        return float(loss.detach()), record

    def _optimize(self) -> float:
        if isinstance(self.policy, FSDPModule):
            self.policy.reshard()  # a forward pass without backward leaves the root gathered: the next would use old weights
        parameters = list(self.policy.parameters())
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.learner.max_grad_norm)
        value = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if not np.isfinite(value):
            self.optimizer.zero_grad(set_to_none=True)
            raise NotFinite(f"the gradient norm of step {self.step} is {value}")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return value


def trainer_class(config: Config) -> type[Trainer]:
    """The class that `learner.trainer` names. Raises `UserError`."""
    path = config.learner.trainer
    if path == "segue":
        return Trainer
    must_be = "it must be a subclass of learner.trainer.Trainer"
    found = load(path, f"The trainer learner.trainer = {path!r}", must_be)
    if not (isinstance(found, type) and issubclass(found, Trainer)):
        raise UserError(f"learner.trainer = {path!r} is a {type(found).__name__}: {must_be}.")
    return found


def _numpy(tensor: torch.Tensor) -> Array:
    result: Array = tensor.detach().cpu().numpy()
    return result


def _nothing() -> TokenRecord:
    none = np.zeros(0)
    return TokenRecord(none, none, none, none, none, none, none, none)
