"""What `segue top` shows, from two looks at the processes of a run, or from what a run that is over has left. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from segue.metrics.samples import Samples, Scrape, difference, quantile, read_sample, role_of, total, values
from segue.metrics.vocabulary import ROLES, STATES, is_idle
from segue.report import steps

STALE_SECONDS = 30.0
"""A process beats once a second; one that has not for so long is shown as stuck."""
EACH = 8
"""Of a role with more processes than that, the sum is shown, with those that idle most and those that are not well."""
IDLEST = 3
_STATE_SECONDS, _ENV = "segue_worker_state_seconds_total", "segue_env_step_seconds"


@dataclass(frozen=True)
class Look:
    """The processes of a run in one moment: `moment` in seconds of any steady clock, `wall` in Unix seconds; `samples` of those
    that answered, `silent` why the others did not, `hosts` which host each is on if there are several; `line` is the newest of
    metrics.jsonl, `ages` the trained tokens by age of all its lines."""

    moment: float
    wall: float
    samples: Scrape = field(default_factory=dict)
    silent: Mapping[str, str] = field(default_factory=dict)
    hosts: Mapping[str, str] = field(default_factory=dict)
    line: Mapping[str, Any] | None = None
    ages: Sequence[int] = ()


@dataclass(frozen=True)
class Process:
    """One process, or `count` of a role together. `shares` of its time by state; `now` the state it is in; `version` of the
    weights it has, and how many versions that is `behind`; `bare` ones have no weights yet; `trouble` in words; `host` where
    there are several."""

    name: str
    shares: Mapping[str, float]
    now: str = ""
    version: int | None = None
    behind: int = 0
    bare: int = 0
    trouble: str = ""
    host: str = ""
    count: int = 1

    @property
    def busy(self) -> float | None:
        """The share of time in states that are not waiting; None where nothing is known."""
        return sum(share for state, share in self.shares.items() if not is_idle(state)) if self.shares else None


@dataclass(frozen=True)
class Queue:
    """Items waiting; `capacity` None where it is not bounded in items."""

    name: str
    depth: int
    capacity: int | None = None


@dataclass(frozen=True)
class Ages:
    """Staleness of trained tokens in steps: of the last step, of the whole run, and the bound. What is not known is None."""

    last_mean: float | None
    last_max: int | None
    mean: float | None
    max: int | None
    bound: int


@dataclass(frozen=True)
class Latency:
    """Of environment steps, in seconds; `over`: of which ones (in that time: those between the looks)."""

    p50: float
    p95: float
    over: str


@dataclass(frozen=True)
class Picture:
    """Everything that is drawn. `span`: the seconds that shares and rates are over; None: all of the run."""

    span: float | None
    processes: Sequence[Process]
    ages: Ages
    line: Mapping[str, Any] | None = None
    queues: Sequence[Queue] = ()
    in_flight: int | None = None
    requests: int | None = None
    newest: int | None = None
    unpublished: bool = False
    """There is a learner, and it has published no weights yet."""
    latency: Latency | None = None
    per_second: Mapping[str, float] = field(default_factory=dict)
    success: Mapping[str, float] = field(default_factory=dict)
    """On held-out tasks, by evaluation."""


def live(before: Look | None, now: Look, bound: int) -> Picture:
    """A run that goes on, whose tokens may have an age of at most `bound`. Shares and rates are over the time since `before`;
    without it, over the life of the processes."""
    samples = now.samples
    seconds = now.moment - before.moment if before is not None else None
    known = {} if before is None else before.samples
    both = samples if before is None else {target: samples[target] for target in samples if target in known}
    grew = difference(known, both)
    learners = [own for target, own in samples.items() if role_of(target) == "learner"]
    published = [version for own in learners if (version := _version(own)) is not None]
    newest = max(published, default=None)
    found = [_process(target, grew, now, newest) for target in sorted({*samples, *now.silent}, key=_order)]
    return Picture(
        span=seconds,
        processes=[process for role in ROLES for process in _of_role(role, found)],
        ages=_ages(now.line, now.ages, bound),
        line=now.line,
        queues=list(_queues(samples)),
        in_flight=_whole(samples, "scheduler", "segue_episodes_in_flight"),
        requests=_whole(samples, "rollout", "segue_requests_running"),
        newest=newest,
        unpublished=bool(learners) and newest is None,
        latency=(_latency(grew, "in that time") if seconds else None) or _latency(difference({}, samples), "whole run"),
        per_second=_rates(grew, seconds, now.line),
    )


def _order(target: str) -> tuple[str, int]:
    """rollout-2 before rollout-10."""
    name, _, rank = target.rpartition("-")
    return name, int(rank) if rank.isdecimal() else 0


def _process(target: str, grew: Scrape, now: Look, newest: int | None) -> Process:
    role = role_of(target)
    host = now.hosts.get(target, "")
    if target in now.silent:
        return Process(target, {}, trouble=f"does not answer: {now.silent[target]}", host=host)
    samples = now.samples[target]
    beat = samples.get("segue_worker_heartbeat_timestamp_seconds", 0.0)
    silence = now.wall - beat if beat else 0.0
    version = _version(samples) if role == "rollout" else None
    return Process(
        target,
        _shares({target: grew[target]} if target in grew else {}, role),
        now=_state(samples),
        version=version,
        behind=max(0, (newest or 0) - version) if version is not None else 0,
        bare=int(role == "rollout" and version is None),
        trouble=f"no sign of life for {silence:.0f} s" if silence > STALE_SECONDS else "",
        host=host,
    )


def _version(samples: Samples) -> int | None:
    """Of the weights published or loaded; None before the first ones: the gauge begins with 0, which is a version too."""
    version = samples.get("segue_policy_version", 0.0)
    return int(version) if version or samples.get("segue_policy_update_timestamp_seconds") else None


def _shares(grew: Scrape, role: str) -> dict[str, float]:
    return shares_of({state: total(grew, role, _STATE_SECONDS, state=state) for state in STATES[role]})


def shares_of(seconds: Mapping[str, float]) -> dict[str, float]:
    """Each state's share of the time, without those that there were none of; nothing where no time passed."""
    elapsed = sum(seconds.values())
    return {state: spent / elapsed for state, spent in seconds.items() if spent > 0.0} if elapsed > 0.0 else {}


def _state(samples: Samples) -> str:
    """The state now; of a process with slots, the one that most of them are in, with how many of how many."""
    slots = {
        read_sample(sample)[1]["state"]: int(count)
        for sample, count in samples.items()
        if sample.startswith("segue_worker_state{")
    }
    everything = sum(slots.values())
    if not everything:
        return ""
    state = max(slots, key=lambda state: slots[state])
    return state if everything == 1 else f"{state} {slots[state]}/{everything}"


def _of_role(role: str, processes: Sequence[Process]) -> Iterable[Process]:
    """All of them, or their sum and those worth a look."""
    own = [process for process in processes if role_of(process.name) == role]
    if len(own) <= EACH:
        return own
    told = [process for process in own if process.shares]
    states = [state for state in STATES[role] if any(state in process.shares for process in told)]
    mean = {state: sum(process.shares.get(state, 0.0) for process in told) / len(told) for state in states}
    idlest = sorted(told, key=lambda process: process.busy or 0.0)[:IDLEST]
    unwell = [process for process in own if process.trouble and process not in idlest]
    behind, bare = max(process.behind for process in own), sum(process.bare for process in own)
    together = Process(f"{role} × {len(own)}", mean, behind=behind, bare=bare, count=len(own))
    return [together, *idlest, *unwell[:EACH]]


def _whole(samples: Scrape, role: str, name: str) -> int | None:
    found = [*values(samples, role, name)]
    return int(sum(found)) if found else None


def _queues(samples: Scrape) -> Iterable[Queue]:
    """Those of the scheduler with what they may hold, then those of the other roles, summed over their processes."""
    depths: dict[tuple[str, str], float] = {}
    for target, own in samples.items():
        for sample, depth in own.items():
            if sample.startswith("segue_queue_depth{"):
                key = role_of(target), read_sample(sample)[1]["queue"]
                depths[key] = depths.get(key, 0.0) + depth
    for role in ROLES:
        for (owner, queue), depth in depths.items():
            if owner == role:
                capacity = total(samples, role, "segue_queue_capacity", queue=queue)
                yield Queue(queue if role == "scheduler" else f"{role} {queue}", int(depth), int(capacity) or None)


def _ages(line: Mapping[str, Any] | None, whole: Sequence[int], bound: int) -> Ages:
    last = (line or {}).get("ages") or []
    return Ages(steps.age_mean(last), steps.age_max(last), steps.age_mean(whole), steps.age_max(whole), bound)


def _latency(grew: Scrape, over: str) -> Latency | None:
    p50, p95 = (quantile(grew, "envpool", _ENV, q) for q in (0.5, 0.95))
    return None if p50 is None or p95 is None else Latency(p50, p95, over)


def _rates(grew: Scrape, seconds: float | None, line: Mapping[str, Any] | None) -> dict[str, float]:
    """Tokens per second. Trained ones come a batch at a time: theirs is the last step's."""
    found: dict[str, float] = {}
    if seconds:
        found["sampled"] = total(grew, "rollout", "segue_decode_tokens_total") / seconds
        found["prefilled"] = total(grew, "rollout", "segue_engine_prefill_tokens_total") / seconds
    trained, took = steps.number(line or {}, "tokens_trained"), steps.number(line or {}, "step_seconds")
    if trained is not None and took:
        found["trained in the last step"] = trained / took
    return found


# --- a run that is over, or exports nothing -----------------------------------------------------------------------------------


def past(lines: Sequence[Mapping[str, Any]], summary: Mapping[str, Any] | None, bound: int) -> Picture:
    """From what a run has written: its steps and, if it came to its end, its summary."""
    line = lines[-1] if lines else None
    roles = (summary or {}).get("roles") or {}
    spent = {role: figures["states"] for role, figures in roles.items()} or _spent(lines)
    version = steps.number(line or {}, "version")
    p50, p95 = (steps.number(line or {}, f"env_step_{q}_seconds") for q in ("p50", "p95"))
    return Picture(
        span=None,
        processes=[Process(role, _known(role, spent[role])) for role in ROLES if role in spent],
        ages=_ages(line, steps.age_histogram(lines), bound),
        line=line,
        newest=None if version is None else int(version),
        latency=None if p50 is None or p95 is None else Latency(p50, p95, "last step"),
        per_second=_past_rates(lines),
        success={name: found["success"] for name, found in ((summary or {}).get("eval") or {}).items() if found},
    )


def _known(role: str, spent: Mapping[str, float]) -> dict[str, float]:
    """Shares of the states that this version of Segue knows."""
    return shares_of({state: spent.get(state, 0.0) for state in STATES[role]})


def _spent(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Seconds per role and state over all steps; nothing of lines that do not tell."""
    spent: dict[str, dict[str, float]] = {}
    for line in lines:
        for role, states in (line.get("state_seconds") or {}).items():
            own = spent.setdefault(role, {})
            for state, seconds in states.items():
                own[state] = own.get(state, 0.0) + seconds
    return spent


def _past_rates(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    seconds = steps.total(lines, "step_seconds")
    if not seconds:
        return {}
    found = {"trained": steps.total(lines, "tokens_trained") / seconds}
    if any("decode_tokens" in line for line in lines):
        found = {"sampled": steps.total(lines, "decode_tokens") / seconds, **found}
    return found
