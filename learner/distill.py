"""Supervised distillation: cross-entropy on demonstrated tokens. The warm start makes its policy with this."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from learner.model import PackedModel
from learner.packing import pack, plan, useful_length
from segue.trajectory import TokenLog


def distill(
    model: PackedModel,
    logs: Sequence[TokenLog],
    steps: int,
    batch: int,
    lr: float,
    seed: int = 0,
    pack_tokens: int = 4096,
    max_grad_norm: float = 1.0,
    progress: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Train `model` in place on tokens with mask 1; returns each step's loss (nats per demonstrated token).

    Every step takes `batch` demonstrations from a reshuffled pass over all; AdamW, 5 % warm-up, cosine decay to a tenth of `lr`.
    Equal arguments give equal weights on one machine. `progress(step, loss)` is called after each step, steps counting from 1.
    Raises ValueError when there is nothing to learn from.
    """
    ends = [useful_length(log.mask) for log in logs]
    tokens = [log.tokens[:end] for log, end in zip(logs, ends, strict=True) if end]
    masks = [log.mask[:end] for log, end in zip(logs, ends, strict=True) if end]
    if not tokens:
        raise ValueError("no demonstration has a demonstrated token")
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    warmup = max(1, steps // 20)
    waiting: list[int] = []
    losses = []
    for step in range(steps):
        while len(waiting) < batch:
            waiting.extend(int(i) for i in rng.permutation(len(tokens)))
        chosen, waiting = waiting[:batch], waiting[batch:]
        total = sum(int(masks[i].sum()) for i in chosen)
        decay = 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, step / max(1, steps))))
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / warmup) * decay
        optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        for indices in plan([len(tokens[i]) for i in chosen], 1, pack_tokens)[0]:
            row = pack([chosen[i] for i in indices], tokens, masks).to(model.device)
            logprobs, _ = model(row)
            part = -logprobs.sum() / max(1, total)
            part.backward()
            loss += float(part.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        losses.append(loss)
        if progress is not None:
            progress(step + 1, loss)
    return losses
