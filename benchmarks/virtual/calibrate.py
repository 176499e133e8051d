"""Calibration: the models of a scenario from a real run's figures, and how far a prediction for another run is off.

    python -m benchmarks.virtual.calibrate CONFIG [--set …] --fit KEY=VALUE [--fit …] --held-out KEY=VALUE [--json FILE]

Runs `segue train CONFIG` once per `--fit` and once with `--held-out`, fits the models to the former, plays the latter in virtual
time, and compares trained tokens per second.

What is fitted, from two scrapes of `/metrics` and the lines between them:

decode, prefill  While an engine generates with b requests running, the time that one of them spends per sampled token is
                 t = decode_seconds + decode_seconds_per_request · b + prefill_seconds_per_token · b · P / N, with P prefilled and
                 N sampled tokens (all share the engine). b is the sum of turns' seconds over the seconds in state `generate`, at
                 most the slots. Each window of a run is one equation; solved by least squares without negative terms.
env latency      The histogram of `segue_env_step_seconds` as an empirical distribution, scaled to its exact mean; resets by
                 their mean.
learner step     A line through (tokens, seconds) of the steps, if it rises; gathering and publishing by their mean.
weights          The mean transfer and load.
workload         Mean lengths and turns; turns of the suite `latency` are uniform between its own limits.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks import result
from benchmarks.command import Parser, ended, json_file
from benchmarks.figures import Window
from benchmarks.virtual.distributions import Distribution
from benchmarks.virtual.measure import measure
from benchmarks.virtual.scenario import (
    EngineModel,
    EnvModel,
    LearnerModel,
    Scenario,
    WeightsModel,
    WorkloadModel,
    World,
    build_world,
)
from benchmarks.virtual.world import quiet
from benchmarks.watched import Watched, scratch, train
from segue.config import Config, load_config, parse_overrides
from segue.errors import RunFailed, UserError
from segue.metrics.samples import Scrape, difference, grown, quantile
from segue.report import steps as step_lines

RUN_SECONDS = 900.0
QUANTILES = 400
NEEDED = 0.15
"""How far a prediction may be off."""
_ENV = "env.step_seconds"


class Turns(msgspec.Struct, frozen=True):
    """One window of one run, as far as its engines are concerned: totals over all nodes, each with `slots` slots."""

    slots: int
    turns: float
    turn_seconds: float
    generate_seconds: float
    sampled: float
    prefilled: float

    @property
    def running(self) -> float:
        """Mean number of requests that decode in an engine that generates; others wait for a slot."""
        return min(float(self.slots), self.turn_seconds / self.generate_seconds)

    @property
    def seconds_per_token(self) -> float:
        """That a decoding request spends per token it samples."""
        return self.running * self.generate_seconds / self.sampled

    @property
    def prefill_weight(self) -> float:
        """What a second of prefill per token adds to `seconds_per_token`."""
        return self.running * self.prefilled / self.sampled


class Observed(msgspec.Struct, frozen=True):
    """A window of a run: what the models are fitted to."""

    engine: Turns
    env_seconds: list[float]
    reset_seconds: float
    learner: list[tuple[float, float]]
    publish_seconds: float
    transfer_seconds: float
    load_seconds: float
    episodes: float
    prompt_tokens: float
    observation_tokens: float


def observe(lines: Sequence[Mapping[str, Any]], before: Scrape, after: Scrape, window: Window, slots: int) -> Observed:
    """Read a window. Raises `RunFailed` if its engines did nothing."""

    def more(role: str, name: str, **labels: str) -> float:
        return grown(before, after, role, name, **labels)

    def mean(role: str, name: str, **labels: str) -> float:
        count = more(role, f"{name}_count", **labels)
        return more(role, f"{name}_sum", **labels) / count if count else 0.0

    turns = more("rollout", "segue_turn_generate_seconds_count")
    sampled = more("rollout", "segue_decode_tokens_total")
    generate = more("rollout", "segue_worker_state_seconds_total", state="generate")
    if not (turns and sampled and generate):
        raise RunFailed("rollout", "The engines sampled nothing inside the window: it is too short to calibrate on.")
    engine = Turns(
        slots=slots,
        turns=turns,
        turn_seconds=more("rollout", "segue_turn_generate_seconds_sum"),
        generate_seconds=generate,
        sampled=sampled,
        prefilled=more("rollout", "segue_engine_prefill_tokens_total"),
    )
    here = lines[window.warm : window.last]
    phases = ("proximal_seconds", "forward_backward_seconds", "optimizer_seconds")
    learner = [(line["tokens_generated"], sum(line.get(phase, 0.0) for phase in phases)) for line in here]
    episodes = step_lines.total(here, "trajectories")
    # Nothing is sampled after an episode's last step, so that its observation is never computed.
    observations = more("envpool", "segue_env_step_seconds_count") - more("scheduler", "segue_episodes_finished_total")
    return Observed(
        engine=engine,
        env_seconds=latencies(before, after),
        reset_seconds=mean("envpool", "segue_env_reset_seconds"),
        learner=learner,
        publish_seconds=mean("learner", "segue_learner_step_seconds", phase="publish"),
        transfer_seconds=mean("weightsync", "segue_weight_sync_seconds", phase="transfer"),
        load_seconds=mean("rollout", "segue_rollout_pause_seconds"),
        episodes=episodes,
        prompt_tokens=_over(
            more("rollout", "segue_prefill_tokens_total", cause="first"), more("envpool", "segue_env_reset_seconds_count")
        ),
        observation_tokens=_over(more("rollout", "segue_prefill_tokens_total", cause="turn"), observations),
    )


def latencies(before: Scrape, after: Scrape) -> list[float]:
    """Quantiles of the environment's step time, at equal distances, scaled so that their mean is the exact one."""
    name = "segue_env_step_seconds"
    count = grown(before, after, "envpool", f"{name}_count")
    if not count:
        return []
    mean = grown(before, after, "envpool", f"{name}_sum") / count
    grew = difference(before, after)
    found = [quantile(grew, "envpool", name, (i + 0.5) / QUANTILES) or 0.0 for i in range(QUANTILES)]
    scale = mean * QUANTILES / sum(found) if sum(found) else 1.0
    return [value * scale for value in found]


def fit_engine(windows: Sequence[Turns]) -> EngineModel:
    """See the module. With a single window only `decode_seconds` can be told."""
    columns = np.array([[1.0, w.running, w.prefill_weight] for w in windows])
    weights = np.array([1.0 / w.seconds_per_token for w in windows])  # relative errors count
    fixed, per_request, prefill = nonnegative(columns * weights[:, None], np.ones(len(windows)))
    if fixed + per_request <= 0.0:
        raise RunFailed("rollout", "The runs do not tell what decoding costs: fit to runs that differ in rollout.max_episodes.")
    return EngineModel(decode_seconds=fixed, decode_seconds_per_request=per_request, prefill_seconds_per_token=prefill)


def fit_learner(points: Sequence[tuple[float, float]], gather: float) -> LearnerModel:
    """A line without a negative term through (tokens, seconds)."""
    fixed, per_token = nonnegative(np.array([[1.0, n] for n, _ in points]), np.array([seconds for _, seconds in points]))
    return LearnerModel(step_seconds=fixed, seconds_per_token=per_token, gather_seconds=gather)


def nonnegative(a: np.ndarray, y: np.ndarray) -> list[float]:
    """argmin |a·x − y| over x ≥ 0, for a few columns: the best of the least-squares solutions on every subset of them."""
    n = a.shape[1]
    best, least = [0.0] * n, float(np.sum(y * y))
    for chosen in itertools.chain.from_iterable(itertools.combinations(range(n), k) for k in range(1, min(n, len(y)) + 1)):
        x, *_ = np.linalg.lstsq(a[:, chosen], y, rcond=None)
        if (x < 0.0).any():
            continue
        error = float(np.sum((a[:, chosen] @ x - y) ** 2))
        if error < least - 1e-12 * max(1.0, least):
            best, least = [0.0] * n, error
            for i, value in zip(chosen, x, strict=True):
                best[i] = float(value)
    return best


def fit(observed: Sequence[Observed], config: Config) -> tuple[Scenario, dict[str, tuple[float, ...]]]:
    """A scenario with everything fitted, without its config, and the values of its empirical distributions."""
    total = {name: sum(getattr(o.engine, name) for o in observed) for name in ("turns", "sampled")}
    latency = sorted(value for o in observed for value in o.env_seconds)
    points = [point for o in observed for point in o.learner]
    learner = fit_learner(points, _mean([o.publish_seconds for o in observed]))
    action = total["sampled"] / total["turns"]
    prompt, observation = _mean([o.prompt_tokens for o in observed]), _mean([o.observation_tokens for o in observed])
    engine = msgspec.structs.replace(
        fit_engine([o.engine for o in observed]), swap_seconds=_mean([o.load_seconds for o in observed])
    )
    turns = _turns(config, total["turns"] / max(1.0, sum(o.episodes for o in observed)))
    # The fitted learner counts sampled tokens, the modelled one all tokens of its trajectories.
    context = prompt / turns.mean + action + observation
    learner = msgspec.structs.replace(learner, seconds_per_token=learner.seconds_per_token * action / context)
    scenario = Scenario(
        name="fitted",
        config={},
        about="Fitted to a real run.",
        engine=engine,
        env=EnvModel(
            step_seconds=Distribution("empirical", file="latencies") if len(latency) > 1 else Distribution(),
            reset_seconds=Distribution(mean=_mean([o.reset_seconds for o in observed])),
        ),
        workload=WorkloadModel(
            turns=turns,
            prompt_tokens=Distribution(mean=prompt),
            action_tokens=Distribution(mean=action),
            observation_tokens=Distribution(mean=observation),
        ),
        learner=learner,
        weights=WeightsModel(seconds=_mean([o.transfer_seconds for o in observed])),
    )
    return scenario, {_ENV: tuple(latency)} if len(latency) > 1 else {}


def _turns(config: Config, mean: float) -> Distribution:
    args = config.task.args
    if config.task.env == "latency" and "turns_min" in args and "turns_max" in args and not args.get("turns_mean"):
        low, high = args["turns_min"], args["turns_max"]
        return Distribution("uniform", mean=(low + high) / 2, low=low - 0.499, high=high + 0.499)
    return Distribution(mean=mean)


def predict(scenario: Scenario, values: Mapping[str, tuple[float, ...]], config: Config) -> float:
    """Trained tokens per second of a run of `config`, in virtual time, in the window that is measured in a real run too."""
    kept = (
        "mode",
        "steps",
        "seed",
        "group",
        "batch",
        "staleness",
        "update",
        "data",
        "scheduler",
        "rollout",
        "learner",
        "checkpoint",
    )
    data = {name: value for name, value in config.model_dump(exclude_none=True).items() if name in kept}
    data["rollout"] |= {"engine": "embedded", "engine_args": {}}
    data["envpool"] = config.envpool.model_dump()
    data["weightsync"] = {"probe_tokens": config.weightsync.probe_tokens, "deadline_seconds": config.weightsync.deadline_seconds}
    tables = msgspec.to_builtins(scenario)
    tables["env"]["step_seconds"] = {"mean": 0.0}  # the values are at hand, and need no file
    tables["engine"]["kv_tokens"] = max(scenario.engine.kv_tokens, config.rollout.max_tokens)
    checked = build_world(tables | {"config": data}, "the prediction")
    world = World(msgspec.structs.replace(checked.scenario, env=scenario.env), checked.config, dict(values))
    figures, _ = measure(world, ceilings=False)
    return figures.tokens_per_second


def _over(total: float, count: float) -> float:
    return total / count if count > 0.0 else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


# --- real runs --------------------------------------------------------------------------------------------------------------


class Asked(msgspec.Struct, frozen=True):
    """One of the real runs, checked: what it sets, and what follows."""

    item: str
    overrides: list[str]
    config: Config
    window: Window


def asked(args: argparse.Namespace) -> tuple[list[Asked], Asked]:
    """The runs to fit to and the one held out. Raises `UserError` for a mistake in any of them, before the first one begins."""

    def check(item: str) -> Asked:
        overrides = [*args.overrides, *item.split()]
        config = load_config(args.config, overrides)
        return Asked(item, overrides, config, Window.of(config.steps, config.staleness.max_age))

    return [check(item) for item in args.fit], check(args.held_out)


def compare(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Run, fit, predict, compare."""
    fits, held_out = asked(args)
    fitted: list[Observed] = []
    for i, one in enumerate(fits):
        watched, window = _watch(args.config, one, scratch / f"fit-{i}"), one.window
        fitted.append(
            observe(watched.lines, watched.scrapes[window.warm], watched.scrapes[window.last], window, one.config.rollout.slots)
        )
        print(f"fitted to {one.item}", flush=True)
    scenario, values = fit(fitted, fits[-1].config)
    watched, window = _watch(args.config, held_out, scratch / "held-out"), held_out.window
    seconds = watched.lines[window.last - 1]["elapsed_seconds"] - watched.lines[window.warm - 1]["elapsed_seconds"]
    actual = step_lines.total(watched.lines[window.warm : window.last], "tokens_trained") / seconds
    predicted = predict(scenario, values, held_out.config)
    error = predicted / actual - 1.0
    return {
        "fitted": msgspec.to_builtins(scenario),
        "predicted_tokens_per_second": predicted,
        "actual_tokens_per_second": actual,
        "error": error,
        "needed": NEEDED,
        "holds": abs(error) <= NEEDED,
    }


def _watch(config: Path, one: Asked, run: Path) -> Watched:
    return train(config, run, one.overrides, {one.window.warm, one.window.last}, RUN_SECONDS)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("virtual.calibrate", __doc__)
    parser.add_argument("config", type=Path, help="of the real runs, for instance configs/latency.toml")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="for all runs")
    parser.add_argument(
        "--fit",
        action="append",
        required=True,
        metavar="KEY=VALUE …",
        help="a run to fit to; several, that differ in concurrency",
    )
    parser.add_argument("--held-out", required=True, metavar="KEY=VALUE …", help="the run that is predicted")
    parser.add_argument("--json", type=json_file, help="write the figures here")
    args = parser.parse_args(arguments)
    parse_overrides([part for item in (*args.fit, args.held_out) for part in item.split()])
    return args


def main() -> int:
    where = result.machine()
    quiet()
    try:
        args = parse()
        with scratch("calibrate") as folder:
            figures = compare(args, folder)
        seeds = sorted({one.config.seed for fits, held in [asked(args)] for one in (*fits, held)})
    except (RunFailed, UserError) as error:
        print(error, file=sys.stderr)
        return 1 if isinstance(error, RunFailed) else 2
    told = result.document(
        "virtual.calibrate", figures, seeds=seeds, arguments=vars(args), packages=("torch", "ray"), where=where
    )
    result.write(args.json, told)
    print(
        f"predicted {figures['predicted_tokens_per_second']:.1f} trained tokens/s, measured "
        f"{figures['actual_tokens_per_second']:.1f}: off by {figures['error']:+.1%}, "
        f"{'as' if figures['holds'] else 'NOT as'} claimed: "
        f"at most {NEEDED:.0%}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(ended(main))
