"""What a run reached: one struct for real and virtual runs alike, from the lines of metrics.jsonl and two scrapes of all targets.

Rates and shares are those of a window of steps (`Window`); what can only be said of a whole run says so.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from segue.errors import RunFailed, UserError
from segue.metrics.samples import Scrape, grown
from segue.metrics.vocabulary import PREFILL_CAUSES, REPEATED_PREFILL, STATES, is_idle
from segue.report import steps as step_lines

ROLES = ("rollout", "learner", "scheduler", "envpool")
Lines = Sequence[Mapping[str, Any]]


class Window(msgspec.Struct, frozen=True):
    """The steps that count: from when `warm` steps were trained to when `last` were."""

    warm: int
    last: int

    @classmethod
    def of(cls, steps: int, max_age: int, least: int = 1) -> Window:
        """The steady state of a run of `steps` steps. Raises `UserError` when fewer than `least` are left of it.

        The first η + 1 steps fill the pipeline, and in the last η + 2 no group begins because no step would need it; a
        synchronous step begins with nothing in flight, so that one step at either end is enough.
        """
        window = cls(max_age + 1, steps - (max_age + 2 if max_age else 1))
        if window.last - window.warm < least:
            needed = steps + least + window.warm - window.last
            of = f" of {least} steps" if least > 1 else ""
            raise UserError(f"{steps} steps leave no steady state{of} with staleness.max_age = {max_age}: use {needed} or more.")
        return window

    def steps(self, max_age: int) -> int:
        """How many steps a run of this age bound takes for a steady state as long as this one."""
        return self.last - self.warm + (max_age + 1) + (max_age + 2 if max_age else 1)


def open_until(last: int, places: int, groups: int) -> int:
    """Steps of a run that goes on admitting groups until `last` are trained, with `places` for episodes and `groups` a batch.

    A group that has begun and is not whole holds one place at least, so that at most `places` groups are ahead of those trained.
    Where a run had no more steps than its window, admission ended long before the window did: heavy tails leave many groups open.
    """
    return last + -(-places // groups) + 1


class Spread(msgspec.Struct, frozen=True):
    """Of some values."""

    mean: float
    median: float
    max: float


class Staleness(msgspec.Struct, frozen=True):
    """Ages of trained tokens, in steps; None without one."""

    bound: int
    mean: float | None
    p99: int | None
    max: int | None


class Wasted(msgspec.Struct, frozen=True):
    """Sampled tokens that no step trains, in the window: over age, of outcomes that are masked, thrown away by nodes, and in the
    logs of episodes that the scheduler dropped (`redundant`: of these, because G others of their group were valid).

    `run_share` is of the whole run: 1 − trained / sampled tokens, what was dropped or still on its way at its end included.
    """

    masked_age: int
    masked_outcome: int
    discarded: int
    dropped: int
    redundant: int
    run_share: float


class Efficiency(msgspec.Struct, frozen=True):
    """Trained tokens per second against the lower of two ceilings: what generation alone, and what training alone, could do.

    Raises `RunFailed` for a ceiling of 0.
    """

    generation_ceiling: float
    training_ceiling: float
    achieved: float

    def __post_init__(self) -> None:
        for name, ceiling in (("generation", self.generation_ceiling), ("training", self.training_ceiling)):
            if not ceiling > 0.0:
                raise RunFailed("ceilings", f"With {name} alone no tokens were counted, so there is no ceiling: give more steps.")

    @property
    def value(self) -> float:
        """Achieved ÷ min(ceilings)."""
        return self.achieved / min(self.generation_ceiling, self.training_ceiling)

    @property
    def balance(self) -> float:
        """Generation's ceiling over training's: a fair comparison has them between 0.8 and 1.25 of each other."""
        return self.generation_ceiling / self.training_ceiling


class Figures(msgspec.Struct, frozen=True):
    """See the module. Times in seconds, lengths in tokens.

    idle_share      by role: share of the time that its processes (env pools: slots) spent waiting; `state_share` by state
    prefill         context tokens computed, by cause; `reprefill_share`: those computed before, over all
    length_bias     mean sampled tokens of the window's trajectories over the mean of the population that they were drawn from:
                    below 1 means that short episodes are trained first
    env_failures    calls of environments that failed: a draw above their deadline, for one, which ends a whole worker
    """

    steps: int
    seconds: float
    tokens_trained: int
    tokens_sampled: int
    tokens_per_second: float
    step_seconds: Spread
    idle_share: dict[str, float]
    state_share: dict[str, dict[str, float]]
    staleness: Staleness
    prefill: dict[str, int]
    reprefill_share: float | None
    wasted: Wasted
    length_bias: float | None
    efficiency: Efficiency | None = None
    env_failures: int = 0


def figures_of(
    lines: Lines,
    before: Scrape,
    after: Scrape,
    window: Window,
    bound: int,
    *,
    sampled: float,
    unit: int = 1,
    population: float = 0.0,
) -> Figures:
    """What a run reached inside its window.

    before, after  scrapes when `window.warm` and `window.last` steps were trained
    sampled        tokens sampled in the whole run
    unit           tokens that one counted token stands for (virtual time)
    population     mean sampled tokens of all episodes; 0: that of all trained ones of the run, which hides what redundancy does:
                   give that of a run without it
    """
    here = lines[window.warm : window.last]
    seconds = here[-1]["elapsed_seconds"] - lines[window.warm - 1]["elapsed_seconds"]
    if seconds <= 0.0:
        raise RunFailed("learner", "The steps of the window took no time: there is nothing to measure.")
    ages = step_lines.age_histogram(here)
    durations = [line["step_seconds"] for line in here]
    trained = step_lines.total(here, "tokens_trained")
    prefill = {
        cause: round(unit * grown(before, after, "rollout", "segue_prefill_tokens_total", cause=cause))
        for cause in PREFILL_CAUSES
    }
    shares = {role: state_shares(before, after, role) for role in ROLES}
    computed = sum(prefill.values())
    return Figures(
        steps=len(here),
        seconds=seconds,
        tokens_trained=round(unit * trained),
        tokens_sampled=round(unit * grown(before, after, "rollout", "segue_decode_tokens_total")),
        tokens_per_second=unit * trained / seconds,
        step_seconds=Spread(statistics.mean(durations), statistics.median(durations), max(durations)),
        idle_share={role: sum(share for state, share in shares[role].items() if is_idle(state)) for role in ROLES},
        state_share=shares,
        staleness=Staleness(bound, step_lines.age_mean(ages), step_lines.age_quantile(ages, 0.99), step_lines.age_max(ages)),
        prefill=prefill,
        reprefill_share=sum(prefill[cause] for cause in REPEATED_PREFILL) / computed if computed else None,
        wasted=Wasted(
            masked_age=round(unit * step_lines.total(here, "tokens_masked_age")),
            masked_outcome=round(unit * step_lines.total(here, "tokens_masked_outcome")),
            discarded=round(unit * grown(before, after, "rollout", "segue_discarded_tokens_total")),
            dropped=round(unit * grown(before, after, "scheduler", "segue_dropped_tokens_total")),
            redundant=round(unit * grown(before, after, "scheduler", "segue_dropped_tokens_total", reason="redundant")),
            run_share=1.0 - step_lines.total(lines, "tokens_trained") / sampled if sampled else 0.0,
        ),
        length_bias=length_bias(here, lines, population),
        env_failures=round(grown(before, after, "envpool", "segue_env_failures_total")),
    )


def length_bias(here: Lines, lines: Lines, population: float = 0.0) -> float | None:
    """See `Figures`; None without a trajectory."""
    mean, whole = mean_length(here), population or mean_length(lines)
    return mean / whole if mean and whole else None


def mean_length(lines: Lines) -> float:
    """Mean sampled tokens of the trajectories in these batches."""
    count = step_lines.total(lines, "trajectories")
    return step_lines.total(lines, "tokens_generated") / count if count else 0.0


def state_shares(before: Scrape, after: Scrape, role: str) -> dict[str, float]:
    """Share of the time between two scrapes that a role's processes (env pools: their slots) spent in each state."""
    name = "segue_worker_state_seconds_total"
    spent = {state: grown(before, after, role, name, state=state) for state in STATES[role]}
    elapsed = sum(spent.values())
    return {state: seconds / elapsed for state, seconds in spent.items()} if elapsed > 0 else {}
