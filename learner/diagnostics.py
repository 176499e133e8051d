"""Diagnostics of algorithms.md §6, over sampled tokens only: sums first, reduced over ranks, then divided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from learner.corrections import LOG_LIMIT

Array = np.ndarray[Any, Any]


class Reduce(Protocol):
    """Element-wise sum or maximum of a float64 array over all ranks (the identity with one rank)."""

    def sum(self, values: Array) -> Array: ...

    def max(self, values: Array) -> Array: ...


class OneRank:
    """The reduction of a world of one."""

    def sum(self, values: Array) -> Array:
        return values

    def max(self, values: Array) -> Array:
        return values


@dataclass(frozen=True)
class TokenRecord:
    """What one micro-batch says about its n sampled tokens; every array [n], detached.

    log_rho    p − b (l − b when the ratio is anchored on b), before any truncation or mask
    delta      l − b
    entropy    nats, full vocabulary, sampling temperature
    clipped    the PPO clip cut this token's gradient
    kept       q
    comparable sampled by exactly the weights that recomputed it, on KV of those weights: |`gap`| is then numerics alone
    gap        recomputed − b where comparable, else ignored
    sequence   which trajectory the token belongs to
    """

    log_rho: Array
    delta: Array
    entropy: Array
    clipped: Array
    kept: Array
    comparable: Array
    gap: Array
    sequence: Array


def effective_sample_size(log_weights: Array, reduce: Reduce | None = None) -> float:
    """(Σw)²/(N Σw²) of w = exp(log_weights), over all ranks; logs clamped to ±20, the largest subtracted first. NaN for N = 0."""
    reduce = reduce or OneRank()
    logs = np.clip(log_weights.astype(np.float64), -LOG_LIMIT, LOG_LIMIT)
    top = float(reduce.max(np.array([logs.max() if len(logs) else -np.inf]))[0])
    w = np.exp(logs - top) if len(logs) else logs
    total, squares, n = reduce.sum(np.array([w.sum(), (w**2).sum(), float(len(w))]))
    return float(total**2 / (n * squares)) if n else float("nan")


def sequence_log_weights(log_rho: Array, sequence: Array) -> Array:
    """log Πρ per trajectory that has tokens here (the *sum* is clamped, by its user)."""
    _, at = np.unique(sequence, return_inverse=True)
    return np.bincount(at, weights=log_rho.astype(np.float64)) if len(sequence) else np.zeros(0)


def token_diagnostics(records: Sequence[TokenRecord], reduce: Reduce | None = None) -> dict[str, float]:
    """Statistics of one batch over all ranks' records. Without a single sampled token all ratios are NaN."""
    reduce = reduce or OneRank()

    def joined(name: str) -> Array:
        parts = [getattr(record, name) for record in records]
        return np.concatenate(parts).astype(np.float64) if parts else np.zeros(0)

    delta, kept, comparable = joined("delta"), joined("kept"), joined("comparable")
    gap = np.abs(joined("gap"))[comparable > 0]
    log_rho = joined("log_rho")
    sums = reduce.sum(
        np.array(
            [
                len(delta),
                -delta.sum(),
                (delta**2 / 2).sum(),
                (np.exp(np.clip(delta, -LOG_LIMIT, LOG_LIMIT)) - 1 - delta).sum(),
                joined("entropy").sum(),
                joined("clipped").sum(),
                kept.sum(),
                len(gap),
                gap.sum(),
                np.exp(np.clip(log_rho, -LOG_LIMIT, LOG_LIMIT)).sum(),
            ]
        )
    )
    n, k1, k2, k3, entropy, clipped, kept_tokens, compared, gap_sum, weights = (float(x) for x in sums)

    def per_token(value: float) -> float:
        return value / n if n else float("nan")

    largest = float(reduce.max(np.array([gap.max() if len(gap) else -np.inf]))[0])
    sequences = np.concatenate([sequence_log_weights(r.log_rho, r.sequence) for r in records]) if records else np.zeros(0)
    return {
        "action_tokens": n,
        "kept_fraction": per_token(kept_tokens),
        "clip_fraction": per_token(clipped),
        "ess_token": effective_sample_size(log_rho, reduce),
        "ess_sequence": effective_sample_size(sequences, reduce),
        "weight_mean": per_token(weights),
        "kl_k1": per_token(k1),
        "kl_k2": per_token(k2),
        "kl_k3": per_token(k3),
        "entropy": per_token(entropy),
        "logprob_gap_tokens": compared,
        "logprob_gap_mean": gap_sum / compared if compared else float("nan"),
        "logprob_gap_max": largest if compared else float("nan"),
    }


@dataclass(frozen=True)
class Lengths:
    """Per trajectory of a batch, each [n]: sampled tokens, those that train, and versions that sampled any of the latter."""

    generated: Array
    trained: Array
    versions: Array


def length_diagnostics(lengths: Lengths) -> dict[str, float]:
    """Action tokens per trajectory, generated against trained: a ratio under 0.9 means that staleness rules shorten the data."""
    trains = lengths.trained > 0
    generated = float(lengths.generated.mean()) if len(lengths.generated) else 0.0
    trained = float(lengths.trained[trains].mean()) if trains.any() else 0.0
    n = int((lengths.generated > 0).sum())
    return {
        "length_generated": generated,
        "length_trained": trained,
        "length_ratio": trained / generated if generated else float("nan"),
        "trajectories": float(len(lengths.generated)),
        "trajectories_trained": float(trains.sum()),
        "trajectories_kept_fraction": float(trains.sum()) / n if n else float("nan"),
        "trajectories_multi_version": float((lengths.versions[trains] > 1).sum()),
    }


def context_diagnostics(prompts: Array, lengths: Array) -> dict[str, float]:
    """Per trajectory [n]: tokens before the first sampled one, and of the whole. What docs/reprefill.md's prediction is made of:
    the means of both and of the square of what comes after the prompt."""
    after = (lengths - prompts).astype(float)
    return {
        "prompt_tokens": float(prompts.mean()) if len(prompts) else 0.0,
        "after_prompt_tokens": float(after.mean()) if len(after) else 0.0,
        "after_prompt_tokens_squared": float((after**2).mean()) if len(after) else 0.0,
    }


def age_diagnostics(generated: Array, trained: Array) -> dict[str, float]:
    """`generated` and `trained` are ages of tokens [n], sampled and kept; means and maxima in steps (0 without tokens)."""
    return {
        "age_generated_mean": float(generated.mean()) if len(generated) else 0.0,
        "age_generated_max": float(generated.max()) if len(generated) else 0.0,
        "age_trained_mean": float(trained.mean()) if len(trained) else 0.0,
        "age_trained_max": float(trained.max()) if len(trained) else 0.0,
        "tokens_generated": float(len(generated)),
        "tokens_trained": float(len(trained)),
    }


def mean_info(infos: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of every number that environments reported (success, format, …), as `info_<name>`, over those that reported it."""
    names = sorted({name for info in infos for name in info})
    return {f"info_{name}": float(np.mean([info[name] for info in infos if name in info])) for name in names}
