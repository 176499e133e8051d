"""The trainer's state as flat whole tensors, gathered from the ranks and given back to them: what checkpoints store."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from learner.checkpoints import Checkpoint, LearnerState
from learner.model import full_tensors, meta_tensors
from learner.trainer import Trainer
from learner.world import from_first
from segue.errors import UserError

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def gather_state(trainer: Trainer, keep: bool) -> LearnerState | None:
    """Everything that a resumed learner needs. A collective: all ranks call; the one with `keep` (rank 0) gets it."""
    models = {}
    for name, model in trainer.models.items():
        configs = [model.lm.config, *([model.lm.generation_config] if model.lm.generation_config is not None else [])]
        models[name] = (full_tensors(model, meta_tensors(model) if keep else ()), configs)
    optimizer: dict[str, torch.Tensor] = {}
    for name, parameter in trainer.policy.lm.named_parameters():
        for moment, value in trainer.optimizer.state.get(parameter, {}).items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if keep:
                optimizer[f"{moment}.{name}"] = whole
    rng = _gather_rng(trainer.policy.device)
    return LearnerState(trainer.step, models, optimizer, rng) if keep else None


def _gather_rng(device: torch.device) -> dict[str, torch.Tensor]:
    """Every rank's random state, uint8, under `<device type>.<rank>`."""
    own = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        own["cuda"] = torch.cuda.get_rng_state(device)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return {f"{kind}.0": state for kind, state in own.items()}
    result = {}
    for kind, state in own.items():
        parts = [torch.empty_like(state) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, state)
        result.update({f"{kind}.{rank}": part for rank, part in enumerate(parts)})
    return result


def restore_state(trainer: Trainer, checkpoint: Checkpoint, rank: int) -> None:
    """Optimizer, random state and step out of a checkpoint (its models are loaded by path, before). A collective when sharded.

    Another number of ranks than before is fine; ranks that did not exist then keep their fresh random state. Raises `UserError`
    when the optimizer's state is that of another model.
    """
    stored = checkpoint.optimizer()
    parameters = dict(trainer.policy.lm.named_parameters())
    names = {name.split(".", 1)[1] for name in stored}
    if not names <= set(parameters) or any(
        tuple(stored[f"exp_avg.{name}"].shape) != tuple(parameters[name].shape) for name in names if f"exp_avg.{name}" in stored
    ):
        raise UserError(
            f"The checkpoint {checkpoint.path} holds the optimizer of another model: resume with the model it was made with."
        )
    for name in sorted(names):  # placing is a collective: one order on all ranks
        parameter = parameters[name]
        trainer.optimizer.state[parameter] = {
            moment: _placed(stored[f"{moment}.{name}"], parameter, moment) for moment in _MOMENTS if f"{moment}.{name}" in stored
        }
    rng = checkpoint.rng()
    if f"cpu.{rank}" in rng:
        torch.set_rng_state(rng[f"cpu.{rank}"])
    if f"cuda.{rank}" in rng and trainer.policy.device.type == "cuda":
        torch.cuda.set_rng_state(rng[f"cuda.{rank}"], trainer.policy.device)
    trainer.step = checkpoint.step
    assert from_first(checkpoint.step) == checkpoint.step, "ranks resumed from different checkpoints"


def _placed(value: torch.Tensor, parameter: torch.Tensor, moment: str) -> torch.Tensor:
    """As the optimizer keeps it: moments sharded and placed like their parameter, the step count on the CPU."""
    if moment == "step":
        return value.clone()
    if isinstance(parameter, DTensor):
        return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
    return value.to(parameter.device)
