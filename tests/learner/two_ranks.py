"""One rank of test_ranks.py: `python two_ranks.py RANK WORLD PORT MODEL OUT JSON-LEARNER-SECTIONS`.

Trains three batches under each `[learner]` section, from the same model, and saves what came of it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from learner_data import learner_config, prepare_batch, random_batch
from torch.distributed.tensor import DTensor

from learner.model import POLICY, full_tensors, load_model, meta_tensors, shard
from learner.trainer import Trainer
from learner.world import join_world, leave_world


def train(rank: int, world: int, model_path: str, section: dict[str, object]) -> dict[str, object]:
    config = learner_config(learner=section)
    model = load_model(model_path)
    if world > 1:
        shard(model, "float32")
    trainer = Trainer({POLICY: model}, config, world=world, step=3)
    gradients: list[torch.Tensor] = []
    optimize = trainer._optimize

    def spy() -> float:
        for parameter in trainer.policy.parameters():
            grad = parameter.grad
            assert grad is not None
            gradients.append(grad.full_tensor() if isinstance(grad, DTensor) else grad.clone())
        return optimize()

    trainer._optimize = spy  # type: ignore[method-assign]
    stats, rows = [], []
    for step in (3, 4, 5):
        prepared = prepare_batch(random_batch(seed=step, groups=8, size=3, step=step), config, rank, world)
        rows.append([[sum(m.row.lengths) for m in micros] for micros in prepared.minibatches])
        stats.append(trainer.train(prepared, version=step).stats)
    weights = full_tensors(model, meta_tensors(model))
    return {"gradients": gradients, "weights": weights, "stats": stats, "rows": rows}


def main(rank: int, world: int, port: int, model_path: str, out: Path, sections: list[dict[str, object]]) -> None:
    torch.set_num_threads(1)
    if world > 1:
        join_world(rank, world, f"127.0.0.1:{port}", 60.0, 60.0)
    torch.save([train(rank, world, model_path, section) for section in sections], out / f"{world}-{rank}.pt")
    leave_world()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5]), json.loads(sys.argv[6]))
