"""Success against age: means and paired differences over seeds, with Student's t intervals, and what they decide.

A seed's cells share tasks, held-out tasks, initial weights and the seed of sampling, so that a cell is compared with the
synchronous cell of its own seed, and the interval is that of the mean of the differences.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.learning_cells import CORRECTIONS, CURVES, SYNC, Outcome

MARGIN = 0.08
"""A correction holds where the interval of (corrected − synchronous) success lies within ± this."""
DECIDED_AT = 4
"""The age at which the corrections are judged."""
NAIVE_FROM = 8
"""From this age on training without a correction is expected to be worse than synchronous training."""
# fmt: off
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110,
        2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)
# fmt: on
"""The 0.975 quantile of Student's t with 1, 2, … 30 degrees of freedom (any statistics table)."""


def t_quantile(freedom: int) -> float:
    """The 0.975 quantile of Student's t; beyond 30 degrees of freedom by its expansion around the normal one, to 0.001
    (Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5)."""
    if freedom <= len(T_95):
        return T_95[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the mean, from the spread of the values; None with fewer than two."""
    if len(values) < 2:
        return None
    half = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.mean(values)
    return mean - half, mean + half


def verdict(difference: tuple[float, float] | None, margin: float = MARGIN) -> str:
    """`holds`: the interval lies within ± margin; `differs`: outside of it; else `undecided`."""
    if difference is None:
        return "undecided"
    low, high = difference
    if -margin <= low and high <= margin:
        return "holds"
    return "differs" if high < -margin or low > margin else "undecided"


def summarize(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """The benchmark's figures from all cells that are done, in any order."""
    runs = sorted(outcomes, key=lambda run: run.cell)
    by: dict[tuple[int, str], dict[int, Outcome]] = defaultdict(dict)
    for run in runs:
        by[run.age, run.correction][run.seed] = run
    sync = by.get((0, SYNC), {})
    names = [SYNC, *CORRECTIONS]
    rows = [row(age, name, by[age, name], sync) for age, name in sorted(by, key=lambda key: (key[0], names.index(key[1])))]
    before = [run.success_before for run in sync.values() if run.success_before is not None]
    return {
        "rows": rows,
        "success_before": statistics.mean(before) if before else None,
        "margin": MARGIN,
        "interval": "95 %, Student's t over seeds",
        "corrected_at_4": {r["correction"]: r["verdict"] for r in rows if r["age"] == DECIDED_AT and r["correction"] != "none"},
        "naive_worse_from_8": {str(r["age"]): r["worse"] for r in rows if r["age"] >= NAIVE_FROM and r["correction"] == "none"},
    }


def row(age: int, correction: str, runs: Mapping[int, Outcome], sync: Mapping[int, Outcome]) -> dict[str, Any]:
    """One (η, correction) over its seeds: success, its difference from the synchronous runs of the same seeds, mean curves.

    `worse`: the whole interval of the difference lies below 0; None while there is no interval.
    """
    seeds = sorted(runs)
    successes = [runs[seed].success for seed in seeds]
    pairs = [runs[seed].success - sync[seed].success for seed in seeds if seed in sync] if age else []
    difference = interval(pairs)
    return {
        "age": age,
        "correction": correction,
        "seeds": seeds,
        "n": [runs[seed].n for seed in seeds],
        "success": statistics.mean(successes),
        "success_interval": interval(successes),
        "successes": successes,
        "difference": statistics.mean(pairs) if pairs else None,
        "difference_interval": difference,
        "verdict": verdict(difference) if age else None,
        "worse": difference[1] < 0 if difference is not None else None,
        "curves": {name: _mean_curve([runs[seed].curves[name] for seed in seeds]) for name in CURVES},
        "seconds": statistics.mean(runs[seed].seconds for seed in seeds),
    }


def _mean_curve(curves: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Step by step over seeds; None where no seed has a finite number."""
    means: list[float | None] = []
    for values in zip(*curves, strict=True):
        known = [value for value in values if value is not None]
        means.append(round(statistics.mean(known), 5) if known else None)
    return means


# --- on the console ---------------------------------------------------------------------------------------------------------


def table(figures: Mapping[str, Any]) -> str:
    """A line per (η, correction)."""
    lines = [f"{'η':>3}  {'correction':<11}{'seeds':>5}  {'success':>7}  {'95 %':<15}{'− sync':>7}  {'95 %':<17}verdict"]
    for r in figures["rows"]:
        shown = (
            f"{r['age']:>3}  {r['correction']:<11}{len(r['seeds']):>5}  {r['success']:7.3f}  {_span(r['success_interval']):<15}"
        )
        if r["age"]:
            difference = "" if r["difference"] is None else f"{r['difference']:+.3f}"
            worse = ", worse" if r["worse"] else ""
            shown += f"{difference:>7}  {_span(r['difference_interval'], '+'):<17}{r['verdict']}{worse}"
        lines.append(shown.rstrip())
    return "\n".join(lines)


def _span(bounds: Sequence[float] | None, sign: str = "") -> str:
    return f"{bounds[0]:{sign}.3f} … {bounds[1]:{sign}.3f}" if bounds is not None else "–"
