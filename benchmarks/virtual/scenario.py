"""A scenario: what a virtual cluster and its workload are like, from a TOML file. Times are seconds, lengths tokens.

The table `[config]` holds Segue's own keys (docs/config.md): mode, batch, group, staleness, update, rollout, …, checked as for a
real run. Everything else describes what is modelled. A mistake in a file is one sentence: where, what, and what to do.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.virtual.distributions import Distribution
from benchmarks.virtual.published import Published
from segue.config import Config, parse_overrides
from segue.config.root import resolve
from segue.errors import UserError

ENV = "modelled"
_TOKEN_KEYS = ("max_tokens", "max_turn_tokens", "max_observation_tokens", "slice_tokens")
_SLOTS_PER_WORKER = 256


class EngineModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One node's engine: continuous batching on `gpus` GPUs.

    A decoding step of b requests with k tokens of context in all takes
    `decode_seconds + decode_seconds_per_request · b + decode_seconds_per_kv_token · k`; meanwhile nothing is prefilled, and while
    something is, nothing decodes.

    kv_tokens             KV cache, in tokens; where it is full, idle prefixes are evicted, then requests preempted
    block_tokens          cached prefixes are read in whole blocks of this size
    swap_seconds          from an idle engine with the old weights to one with the new
    """

    decode_seconds: float = 0.02
    decode_seconds_per_request: float = 0.0
    decode_seconds_per_kv_token: float = 0.0
    prefill_seconds_per_token: float = 0.0
    kv_tokens: int = 1 << 40
    block_tokens: int = 16
    swap_seconds: float = 0.0
    gpus: int = 1


class EnvModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Environments. Probabilities are per step and drawn anew in every attempt; a hang ends at `envpool.step_seconds`."""

    step_seconds: Distribution = Distribution()
    reset_seconds: Distribution = Distribution()
    error: float = 0.0
    crash: float = 0.0
    hang: float = 0.0


class WorkloadModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Episodes. `success`: probability of reward 1."""

    turns: Distribution = Distribution(mean=4.0)
    prompt_tokens: Distribution = Distribution(mean=256.0)
    action_tokens: Distribution = Distribution(mean=128.0)
    observation_tokens: Distribution = Distribution(mean=64.0)
    success: float = 0.5


class LearnerModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One learner of `gpus` GPUs: a step takes `step_seconds + seconds_per_token · tokens`, context included; after it the
    weights are gathered (`gather_seconds`), and at `checkpoint.every` a checkpoint written."""

    step_seconds: float = 1.0
    seconds_per_token: float = 0.0
    gather_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    gpus: int = 1


class WeightsModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A transfer to m nodes takes `seconds + seconds_per_member · m` once all of them have come."""

    seconds: float = 0.0
    seconds_per_member: float = 0.0


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """See the module.

    source, assumptions  where the numbers are from, and what the source leaves open
    unit                 tokens that one modelled token stands for: lengths are rounded to it, costs are not
    paper                the published figures that it stands for, if any (benchmarks/paper.py)
    """

    name: str
    config: dict[str, Any]
    about: str = ""
    source: str = ""
    assumptions: list[str] = []
    unit: int = 1
    engine: EngineModel = EngineModel()
    env: EnvModel = EnvModel()
    workload: WorkloadModel = WorkloadModel()
    learner: LearnerModel = LearnerModel()
    weights: WeightsModel = WeightsModel()
    paper: Published | None = None


class World(msgspec.Struct, frozen=True):
    """A scenario that was checked: with the resolved config (lengths in units) and the values of its empirical distributions.

    `values` are by the distribution's path in the file, for instance "env.step_seconds".
    """

    scenario: Scenario
    config: Config
    values: dict[str, tuple[float, ...]]


def parse_sets(overrides: list[str]) -> dict[str, Any]:
    """What --set says over a scenario, as nested tables. Raises `UserError`, also for a table that no scenario has: Segue's own
    keys, which --set of a run names so, are one deeper here."""
    tables = parse_overrides(overrides)
    known = [name for name in Scenario.__struct_fields__ if name != "paper"]
    for key in tables:
        if key not in known:
            raise UserError(
                f"--set {key}… goes into no part of a scenario ({', '.join(known)}): Segue's own keys are in config, as in "
                "--set config.staleness.max_age=2."
            )
    return tables


def load_world(path: Path, overrides: Mapping[str, Any] | None = None) -> World:
    """Read and check a scenario file; `overrides` are nested tables over its own. Raises `UserError`."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"There is no scenario file {path}: name one that exists, for instance one of benchmarks/scenarios/."
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path} is not a readable TOML file ({error}): correct it.") from None
    return build_world(merged(data, overrides or {}), str(path), path.parent)


def build_world(data: Mapping[str, Any], where: str, folder: Path = Path()) -> World:
    """Check the tables of a scenario; files are looked for in `folder`. Raises `UserError` that blames `where`."""
    _check_keys(data, Scenario, where, "")
    try:
        scenario = msgspec.convert(dict(data), Scenario)
    except msgspec.ValidationError as error:
        what, _, at = str(error).partition(" - at ")
        key = at.strip("`").removeprefix("$").removeprefix(".")
        raise UserError(f"{where} {f'sets {key}' if key else 'is incomplete'} ({what.replace('`', '')}): correct it.") from None
    _check_numbers(scenario, where)
    if scenario.paper is not None and (fault := scenario.paper.fault()):
        raise UserError(f"{where} {fault}.")
    values: dict[str, tuple[float, ...]] = {}
    for name, spec in distributions(scenario):
        if fault := spec.fault():
            raise UserError(f"{where}: {name} {fault}.")
        if spec.kind == "empirical":
            values[name] = _read_values(folder / spec.file, f"{where}: {name}")
    config = _config(scenario, where)
    _check_fit(scenario, config, where)
    return World(scenario, config, values)


def distributions(scenario: Scenario) -> Iterator[tuple[str, Distribution]]:
    """Every distribution of a scenario with its path in the file."""
    for table in ("env", "workload"):
        part = getattr(scenario, table)
        for field in msgspec.structs.fields(part):
            value = getattr(part, field.name)
            if isinstance(value, Distribution):
                yield f"{table}.{field.name}", value


def _check_keys(data: Any, kind: type[msgspec.Struct], where: str, parents: str) -> None:
    if not isinstance(data, Mapping):
        return
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    for key, value in data.items():
        field = fields.get(key)
        if field is None:
            close = difflib.get_close_matches(key, fields, n=1)
            remedy = f"did you mean {parents}{close[0]}?" if close else f"remove it; known are {', '.join(fields)}."
            raise UserError(f"{where} has an unknown key {parents}{key}: {remedy}")
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            _check_keys(value, field.type, where, f"{parents}{key}.")


def _check_numbers(scenario: Scenario, where: str) -> None:
    for table in ("engine", "env", "workload", "learner", "weights"):
        part = getattr(scenario, table)
        for field in msgspec.structs.fields(part):
            value = getattr(part, field.name)
            if isinstance(value, (int, float)) and not (math.isfinite(value) and value >= 0):
                raise UserError(f"{where} sets {table}.{field.name} = {value}: set it to 0 or more.")
    probabilities = {f"env.{name}": getattr(scenario.env, name) for name in ("error", "crash", "hang")}
    for name, value in (probabilities | {"workload.success": scenario.workload.success}).items():
        if value > 1.0:
            raise UserError(f"{where} sets {name} = {value}, which is a probability: set it to 1 or less.")
    positive = {
        "unit": scenario.unit,
        "engine.kv_tokens": scenario.engine.kv_tokens,
        "engine.block_tokens": scenario.engine.block_tokens,
    }
    for name, value in (positive | {"engine.gpus": scenario.engine.gpus}).items():
        if value < 1:
            raise UserError(f"{where} sets {name} = {value}: set it to 1 or more.")
    engine = scenario.engine
    if engine.decode_seconds + engine.decode_seconds_per_request + engine.decode_seconds_per_kv_token <= 0.0:
        raise UserError(f"{where} gives decoding no cost, so that time would stand still: set engine.decode_seconds above 0.")


def _check_fit(scenario: Scenario, config: Config, where: str) -> None:
    longest = config.rollout.max_tokens * scenario.unit
    if scenario.engine.kv_tokens < longest:
        raise UserError(
            f"{where} sets engine.kv_tokens = {scenario.engine.kv_tokens}, but an episode may have {longest} tokens of context "
            "(config.rollout.max_tokens): raise it, or lower that."
        )


def _config(scenario: Scenario, where: str) -> Config:
    """The run's config: that of the file, with lengths in units, and what virtual time fixes."""
    data = merged(scenario.config, {})
    for taken in ("task", "model", "warmstart", "eval"):
        if taken in data:
            raise UserError(f"{where} sets config.{taken}, which virtual time has no use for: remove it.")
    rollout = data.setdefault("rollout", {})
    if isinstance(rollout, dict):
        for key in _TOKEN_KEYS:
            if isinstance(rollout.get(key), int):
                rollout[key] = -(-rollout[key] // scenario.unit)
    data["task"] = {"env": ENV}
    data["model"] = {"path": ENV}
    data["eval"] = {"tasks": 0, "before": False, "after": False}
    pool = data.setdefault("envpool", {})
    if isinstance(pool, dict) and isinstance(rollout, dict) and not {"workers", "instances"} & set(pool):
        nodes, loops, pools = rollout.get("nodes", 2), rollout.get("max_episodes", 48), pool.get("pools", 1)
        if all(type(count) is int and count > 0 for count in (nodes, loops, pools)):  # others are refused below
            pool["instances"] = _SLOTS_PER_WORKER
            pool["workers"] = -(-nodes * loops // (pools * _SLOTS_PER_WORKER)) + 1  # one to spare while episodes close
    config = resolve(data, f"{where} [config]")
    if config.weightsync.staging == "none":
        raise UserError(f"{where} sets config.weightsync.staging = 'none', which is not modelled: leave it out.")
    return config


def _read_values(path: Path, what: str) -> tuple[float, ...]:
    try:
        values = tuple(float(line) for line in path.read_text(encoding="utf-8").split())
    except (OSError, ValueError) as error:
        raise UserError(f"{what} cannot be read from {path} ({error}): write one number per line.") from None
    if len(values) < 2 or not all(math.isfinite(value) and value >= 0.0 for value in values):
        raise UserError(f"{what}: {path} must have at least two numbers, none of them negative.")
    return values


def merged(data: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested tables with others laid over."""
    result = {key: merged(value, {}) if isinstance(value, Mapping) else value for key, value in data.items()}
    for key, value in over.items():
        below = result.get(key)
        if isinstance(value, Mapping):
            result[key] = merged(below if isinstance(below, dict) else {}, value)
        else:
            result[key] = value
    return result
