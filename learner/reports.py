"""What the learner tells of itself: metrics of the catalogue after each step, and sampled trajectories for reading."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from learner.batches import Member, PreparedBatch
from learner.kept import SampledTrajectories
from learner.trainer import StepStats
from segue.metrics import Metrics
from segue.trajectory import Author

log = logging.getLogger(__name__)

_GAUGES = {
    "segue_ess_ratio": "ess_token",
    "segue_clipped_tokens_ratio": "clip_fraction",
    "segue_kept_tokens_ratio": "kept_fraction",
    "segue_logprob_gap_abs_mean_nats": "logprob_gap_mean",
    "segue_logprob_gap_abs_max_nats": "logprob_gap_max",
    "segue_entropy_nats": "entropy",
    "segue_grad_norm": "grad_norm",
}


def record_step(metrics: Metrics, env: str, done: StepStats) -> None:
    """Counters, gauges and ages of one trained batch. Figures without a token behind them (NaN) leave their gauge as it was."""
    stats = done.stats
    metrics.add("segue_learner_steps_total")
    metrics.add("segue_trained_tokens_total", stats["tokens_trained"])
    metrics.add("segue_masked_tokens_total", stats["tokens_masked_age"], reason="age")
    metrics.observe_counts("segue_token_staleness_versions", range(len(done.ages)), done.ages)
    for gauge, name in _GAUGES.items():
        if not math.isnan(stats[name]):
            metrics.set(gauge, stats[name])
    metrics.set("segue_reward_mean", stats["reward_mean"], env=env)
    metrics.set("segue_reward_std", stats["reward_std"], env=env)
    for phase, seconds in done.seconds.items():
        metrics.observe("segue_learner_step_seconds", seconds, phase=phase)


class TrajectorySamples:
    """Keeps one trained trajectory per step, with what the learner made of it, as `trajectories/learner-0-<number>.json`.

    Text is decoded where `tokenizer` (the model's tokenizer files) has a tokenizer.json.
    """

    def __init__(self, run_dir: Path, tokenizer: Mapping[str, bytes], seed: int, keep: int) -> None:
        folder = run_dir / "trajectories"
        folder.mkdir(parents=True, exist_ok=True)
        self._kept = SampledTrajectories(folder, "learner-0", keep)
        self._seed = seed
        self._tokenizer = _tokenizer(tokenizer.get("tokenizer.json"))

    def write(self, batch: PreparedBatch) -> None:
        """Write the sample of a batch, the same one for the same seed and step. Raises `RunFailed` when the disk is full."""
        if batch.members:
            member = batch.members[int(np.random.default_rng([self._seed, batch.step]).integers(len(batch.members)))]
            self._kept.save(lambda: self._told(batch.step, member))

    def _told(self, step: int, member: Member) -> dict[str, Any]:
        trajectory = member.trajectory
        return {
            "step": step,
            "episode": trajectory.episode,
            "group": trajectory.group,
            "member": trajectory.member,
            "task": trajectory.task,
            "outcome": trajectory.outcome,
            "reward": trajectory.reward,
            "turn_rewards": trajectory.turn_rewards,
            "advantage": member.advantage,
            "in_loss": bool(member.keep.any()),
            "info": trajectory.info,
            "segments": [self._segment(member, *bounds) for bounds in _segments(member)],
        }

    def _segment(self, member: Member, author: int, turn: int, start: int, end: int) -> dict[str, Any]:
        log, ids = member.trajectory.log, member.trajectory.log.tokens[start:end].tolist()
        told: dict[str, Any] = {"author": Author(author).name.lower(), "turn": turn, "tokens": end - start}
        sampled = int(log.mask[start:end].sum())
        if sampled:
            at = np.flatnonzero(log.mask[start:end]) + start
            told["sampled"] = sampled
            told["versions"] = log.versions[at].tolist() if len(set(log.versions[at].tolist())) > 1 else int(log.versions[at[0]])
            told["max_age"] = int(member.ages[at].max())
            told["kept"] = int(member.keep[at].sum())
            told["mean_logprob"] = round(float(log.logprobs[at].mean()), 4)
        if self._tokenizer is None:
            return {**told, "ids": ids}
        return {**told, "text": self._tokenizer.decode(ids, skip_special_tokens=False)}


def _segments(member: Member) -> list[tuple[int, int, int, int]]:
    """(author, turn, start, end) of each segment."""
    found, start = [], 0
    for segment in member.trajectory.log.segments:
        found.append((segment.author, segment.turn, start, start + segment.length))
        start += segment.length
    return found


def _tokenizer(content: bytes | None) -> Any:
    """The tokenizer in a tokenizer.json, or None: without one, ids are written."""
    if content is None:
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(content.decode())
    except Exception as error:  # tokenizers raises bare Exception
        log.warning("trajectories are written as ids: tokenizer.json cannot be read (%s)", error)
        return None
