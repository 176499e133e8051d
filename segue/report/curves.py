"""The curves of a run over its steps, as data: what `segue report --html` draws. Pure functions on the lines of metrics.jsonl."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from segue.metrics.vocabulary import PREFILL_CAUSES, ROLES, is_idle
from segue.report import steps

Line = Mapping[str, Any]
Value = Callable[[Line], float | None]
Point = tuple[float, float]

MOST = 240
"""Points per curve; of longer runs several steps become one point."""
SMOOTHING = 40
"""A curve of so many points or more is drawn thin, and thick its mean over neighbours: to each side this part of the curve."""


@dataclass(frozen=True)
class Series:
    """One curve; `points` (step, value), steps counted from 1 as on the console. `high`: a maximum or high quantile, not to be
    smoothed; `mark`: single points that no line joins."""

    name: str
    points: tuple[Point, ...]
    style: Literal["line", "dashed", "high", "mark"] = "line"


@dataclass(frozen=True)
class Chart:
    """Curves that share an axis. `unit` labels it; `level` is a line across with its name; `share`: 0 to 1, shown in per cent;
    `stack`: areas on top of each other; `log`: powers of ten."""

    title: str
    about: str
    unit: str
    series: tuple[Series, ...]
    level: tuple[str, float] | None = None
    share: bool = False
    stack: bool = False
    log: bool = False


def charts(lines: Sequence[Line], bound: int, evals: Mapping[str, Mapping[str, Any] | None]) -> tuple[list[Chart], list[str]]:
    """The charts that the lines have figures for, and the titles of those that they have none for."""
    made = [*_learning(lines, evals), *_asynchrony(lines, bound), *_speed(lines)]
    return [chart for chart in made if chart.series], [chart.title for chart in made if not chart.series]


def _learning(lines: Sequence[Line], evals: Mapping[str, Mapping[str, Any] | None]) -> Iterator[Chart]:
    held_out = [Series("held-out success", found, "mark")] if (found := tuple(_evaluated(lines, evals))) else []
    yield Chart(
        "Reward and success",
        "Mean return and success of the episodes in each batch; dots: success on held-out tasks.",
        "mean per episode",
        (*_curves(lines, {"reward": _of("reward_mean"), "success": _of("info_success")}, dashed=("success",)), *held_out),
    )
    yield Chart(
        "Entropy",
        "Of the policy at the tokens that it sampled, mean over a batch.",
        "nats",
        _curves(lines, {"entropy": _of("entropy")}),
    )
    yield Chart(
        "Gradient norm",
        "Global, before clipping.",
        "norm",
        _curves(lines, {"gradient norm": _of("grad_norm")}),
    )
    gap = _curves(lines, {"mean": _positive("logprob_gap_mean"), "max": _positive("logprob_gap_max")}, high=("max",))
    yield Chart(
        "Log-probability gap",
        "|learner − engine| where both used the same weights; steps without such tokens have no point.",
        "nats",
        gap,
        log=True,
    )


def _asynchrony(lines: Sequence[Line], bound: int) -> Iterator[Chart]:
    ages: dict[str, Value] = {
        "mean": lambda line: steps.age_mean(line.get("ages") or []),
        "max": lambda line: steps.age_max(line.get("ages") or []),
    }
    yield Chart(
        "Staleness",
        "Age of trained tokens: how many steps before they are trained the weights were made that sampled them.",
        "steps",
        _curves(lines, ages, high=("max",)),
        level=("bound", float(bound)),
    )
    yield Chart(
        "Idle share by role",
        "Share of the time since the step before that a role's processes waited.",
        "share of time",
        _curves(lines, {role: _idle(role) for role in ROLES}),
        share=True,
    )
    causes: dict[str, Value] = {cause: _part("prefill_tokens", cause) for cause in PREFILL_CAUSES}
    prefill = [series for series in _curves(lines, causes) if any(value for _, value in series.points)]
    yield Chart(
        "Prefill by cause",
        "Context tokens that the engines computed since the step before; first, turn and block are necessary.",
        "tokens per step",
        tuple(prefill),
        stack=True,
    )
    yield Chart(
        "Queue and episodes in flight",
        "Finished groups that wait for a batch, and episodes that are running, when the step ended.",
        "count",
        _curves(lines, {"groups waiting": _of("queue_groups"), "episodes in flight": _of("in_flight")}),
    )


def _speed(lines: Sequence[Line]) -> Iterator[Chart]:
    latency = {"p50": _of("env_step_p50_seconds"), "p95": _of("env_step_p95_seconds")}
    yield Chart(
        "Environment latency",
        "Of the environment steps since the step before; quantiles interpolate inside the buckets of a histogram.",
        "seconds",
        _curves(lines, latency, high=("p95",)),
    )
    yield Chart(
        "Step time",
        "From one step's end to the next one's, and how long of it the learner waited for its batch.",
        "seconds",
        _curves(lines, {"step": _of("step_seconds"), "waiting for a batch": _of("wait_seconds")}),
    )
    yield Chart(
        "Tokens per second",
        "Trained: carried a gradient. Sampled: by all engines, evaluation included.",
        "tokens per second",
        _curves(lines, {"trained": _rate("tokens_trained"), "sampled": _rate("decode_tokens")}),
    )


def _of(key: str) -> Value:
    return lambda line: steps.number(line, key)


def _positive(key: str) -> Value:
    """For a logarithmic axis."""

    def value(line: Line) -> float | None:
        found = steps.number(line, key)
        return found if found is not None and found > 0.0 else None

    return value


def _part(key: str, name: str) -> Value:
    return lambda line: None if not line.get(key) else float(line[key].get(name, 0))


def _rate(key: str) -> Value:
    def value(line: Line) -> float | None:
        count, seconds = steps.number(line, key), steps.number(line, "step_seconds")
        return count / seconds if count is not None and seconds else None

    return value


def _idle(role: str) -> Value:
    def value(line: Line) -> float | None:
        spent = (line.get("state_seconds") or {}).get(role) or {}
        elapsed = sum(spent.values())
        return sum(seconds for state, seconds in spent.items() if is_idle(state)) / elapsed if elapsed else None

    return value


def _evaluated(lines: Sequence[Line], evals: Mapping[str, Mapping[str, Any] | None]) -> Iterator[Point]:
    """Evaluations before and after training, at the steps they stand at."""
    ends = {"before": 0.0, "after": float(lines[-1]["step"] + 1) if lines else 0.0}
    for name, at in ends.items():
        if (found := evals.get(name)) is not None:
            yield at, float(found["success"])


def _curves(
    lines: Sequence[Line], values: Mapping[str, Value], high: Sequence[str] = (), dashed: Sequence[str] = ()
) -> tuple[Series, ...]:
    """The curves that have a point; those in `high` are maxima or high quantiles, and thinned out by their maximum."""
    found = []
    for name, value in values.items():
        points = [(float(line["step"] + 1), y) for line in lines if (y := value(line)) is not None]
        if points:
            together = thinned(points, max if name in high else _mean)
            found.append(Series(name, tuple(together), "high" if name in high else "dashed" if name in dashed else "line"))
    return tuple(found)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def thinned(points: Sequence[Point], join: Callable[[Sequence[float]], float], most: int = MOST) -> list[Point]:
    """At most `most` points: of longer curves, as many neighbours as needed become one, at their last step."""
    each = -(-len(points) // most)
    pieces = [points[i : i + each] for i in range(0, len(points), each)] if each > 1 else [[point] for point in points]
    return [(piece[-1][0], join([y for _, y in piece])) for piece in pieces]


def smoothed(points: Sequence[Point]) -> tuple[list[Point], int]:
    """Each point as the mean of itself and its neighbours to both sides, and of how many in all; 1 where there are too few."""
    reach = len(points) // SMOOTHING
    if not reach:
        return [*points], 1
    near = [points[max(0, i - reach) : i + reach + 1] for i in range(len(points))]
    return [(point[0], _mean([y for _, y in around])) for point, around in zip(points, near, strict=True)], 2 * reach + 1
