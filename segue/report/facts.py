"""The input contract of a run's summary: what the driver gathers at the end, as plain typed values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class EpisodeCounts:
    """Training episodes, from the scheduler's status: `admitted` is the sum over `states` (a `segue.episode.State` each).

    `finished` came to an end of their own, whatever became of them; `dropped` by reason and `failed` by class sum to those
    states; `paused` and `resumed` count requests that ended before their turn did, and went on.
    """

    admitted: int = 0
    finished: int = 0
    trained: int = 0
    states: Mapping[str, int] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)
    failed: Mapping[str, int] = field(default_factory=dict)
    paused: int = 0
    resumed: int = 0

    @classmethod
    def from_status(cls, episodes: Mapping[str, Any]) -> EpisodeCounts:
        """From a mapping with exactly these keys. Raises KeyError for a missing one."""
        return cls(**{name: episodes[name] for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class WeightSyncFigures:
    """Totals over all weight updates: transfers as the sender saw them, loads and pauses over all nodes."""

    updates: int = 0
    bytes: int = 0
    transfers: int = 0
    transfer_seconds: float = 0.0
    loads: int = 0
    pause_seconds: float = 0.0

    @classmethod
    def from_status(cls, figures: Mapping[str, Any]) -> WeightSyncFigures:
        """From a mapping that has at least these keys. Raises KeyError for a missing one."""
        return cls(**{name: type(getattr(cls, name))(figures[name]) for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class EvalResult:
    """One evaluation: `n` tasks, of which `failed` came to no result; `success` is the mean over the others."""

    success: float
    n: int
    failed: int = 0


@dataclass(frozen=True)
class RunFacts:
    """Everything `segue.report.build_summary` reads.

    mode, bound     `config.mode` and `segue.report.read.age_bound`
    attempts        how often the run was started
    wall_seconds    from the start of the roles to the end of the last evaluation; of earlier attempts, what was gone on from
    lines           the lines of metrics.jsonl (`segue.report.step_line`), earlier attempts' included
    episodes        from the scheduler's status
    weight_sync     from the scheduler's status
    node_updates    updates of nodes that had weights, by how requests in flight crossed, from the scheduler's counts
    coalesced       versions that never went to the nodes, by reason, from the scheduler's counts
    metrics         `Metrics.snapshot()` of every role process, by target name ("rollout-0", "weightsync-learner-0")
    states          seconds per state of every role process, by target name
    evals           by name, usually "before" and "after"; those that did not run are absent
    notes           sentences that a reader of the figures must know (a waived promise, a part that gave no figures)
    """

    mode: str
    bound: int
    wall_seconds: float
    lines: Sequence[Mapping[str, Any]]
    episodes: EpisodeCounts
    weight_sync: WeightSyncFigures = WeightSyncFigures()
    node_updates: Mapping[str, int] = field(default_factory=dict)
    coalesced: Mapping[str, int] = field(default_factory=dict)
    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    states: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    evals: Mapping[str, EvalResult] = field(default_factory=dict)
    notes: Sequence[str] = ()
    attempts: int = 1
