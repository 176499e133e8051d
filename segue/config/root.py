"""The whole configuration: sections, combinations that cannot work, loading, overrides, saving.

Every error names the key, the value and the remedy, in one sentence.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails

from segue.config.cluster import ClusterConfig, SerialConfig
from segue.config.envpool import EnvPoolConfig
from segue.config.learner import CheckpointConfig, LearnerConfig, ModelConfig, WarmstartConfig, WeightSyncConfig
from segue.config.rollout import RolloutConfig
from segue.config.scheduler import (
    BatchConfig,
    DataConfig,
    EvalConfig,
    GroupConfig,
    QueueConfig,
    SchedulerConfig,
    StalenessConfig,
    TaskConfig,
    UpdateConfig,
)
from segue.config.section import Section, Seed
from segue.errors import UserError

PROBE_TOLERANCES = {"float32": 1e-3, "float16": 0.1, "bfloat16": 1.0}
"""Nats, by the coarser of the two precisions. Measured on a trained model of 1 M parameters and random tokens, engine against
learner: 1e-5, 0.03 and 0.4 at most (docs/weightsync.md)."""


class Config(Section):
    """A run: the keys outside all tables, and one table per role or subject."""

    mode: Literal["async", "one_step_off", "sync"] = "async"
    """How far generation may run ahead: `async` up to `staleness.max_age`, `one_step_off` 1 step (whole episodes), `sync` 0."""
    steps: int = Field(ge=1)
    """Batches trained in all."""
    seed: Seed = 0
    """Of everything random: tasks, sampling, shuffling, initial weights."""
    task: TaskConfig
    model: ModelConfig = ModelConfig()
    warmstart: WarmstartConfig | None = None
    group: GroupConfig = GroupConfig()
    batch: BatchConfig = BatchConfig()
    staleness: StalenessConfig = StalenessConfig()
    update: UpdateConfig = UpdateConfig()
    queue: QueueConfig = QueueConfig()
    data: DataConfig = DataConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    rollout: RolloutConfig = RolloutConfig()
    envpool: EnvPoolConfig = EnvPoolConfig()
    learner: LearnerConfig = LearnerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    weightsync: WeightSyncConfig = WeightSyncConfig()
    cluster: ClusterConfig = ClusterConfig()
    eval: EvalConfig = EvalConfig()
    serial: SerialConfig = SerialConfig()


def load_config(path: Path, overrides: list[str] | None = None) -> Config:
    """Read, override, check and resolve a config file. Raises `UserError` with one sentence."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"There is no config file {path}: name one that exists, for instance configs/quickstart.toml.") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder: name a config file in it.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML ({error}): correct that line.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): check its permissions.") from None
    items = overrides or []
    extra = parse_overrides(items)
    if extra.get("model", {}).get("path") and "warmstart" not in extra and not data.get("model", {}).get("path"):
        data.pop("warmstart", None)  # the file's way to a model; the user has named another
    _merge(data, extra)
    return resolve(data, str(path), items)


def parse_overrides(overrides: list[str]) -> dict[str, Any]:
    """`["learner.lr=1e-5"]` as a nested dict; values are TOML, and what is not valid TOML is taken as a string."""
    result: dict[str, Any] = {}
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--set {item} is not key=value: write for instance --set learner.lr=1e-5.")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        node = result
        *parents, last = key.strip().split(".")
        for part in parents:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise UserError(f"--set {item} goes into {part}, which another --set made a value: leave one of the two out.")
        if isinstance(node.get(last), dict):
            raise UserError(
                f"--set {item} gives {key.strip()} a value, but another --set goes into it: leave one of the two out."
            )
        node[last] = value
    return result


def _merge(data: dict[str, Any], extra: dict[str, Any]) -> None:
    for key, value in extra.items():
        if isinstance(value, dict) and isinstance(data.get(key), dict):
            _merge(data[key], value)
        else:
            data[key] = value


def resolve(data: dict[str, Any], where: str, overrides: Sequence[str] = ()) -> Config:
    """A checked config with all defaults that depend on other keys filled in.

    Raises `UserError` that blames `where`, or those of the `--set` items `overrides` that the mistake is in.
    """
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        raise UserError(_sentence(error, where, overrides)) from None
    config = _resolved(config)
    try:
        _check(config, where)
    except UserError as error:
        named = [item for item in overrides if re.search(rf"(?<![\w.]){re.escape(_key(item))}(?![\w.]*\w)", str(error))]
        if not named:
            raise
        blamed = f"{where} with {' '.join(f'--set {item}' for item in named)}"
        raise UserError(blamed + str(error).removeprefix(where)) from None
    return config


def _key(override: str) -> str:
    return override.partition("=")[0].strip()


def _sentence(error: ValidationError, where: str, overrides: Sequence[str]) -> str:
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    for item in overrides:
        if f"{key}.".startswith(f"{_key(item)}.") or f"{_key(item)}.".startswith(f"{key}."):
            where = f"--set {item}"  # the last one wins, as in the config
    if first["type"] == "extra_forbidden":
        what = f"table {key}" if isinstance(first["input"], dict) else f"key {key} = {_shown(first['input'])}"
        return f"{where} has an unknown {what}: {_nearest(key)}"
    if first["type"] == "missing" and isinstance(first["loc"][-1], int):
        return f"{where} gives {key.rpartition('.')[0]} too few values: add the missing one."
    if first["type"] == "missing":
        what = f"table [{key}]" if key in Config.model_fields and key not in _PLAIN else f"key {key}"
        return f"{where} lacks the {what}: add it."
    value = "" if isinstance(first["input"], dict) else f" = {_shown(first['input'])}"
    return f"{where} sets {key}{value}, which {_requirement(first)}: change it."


_PLAIN = ("mode", "steps", "seed")
"""The keys outside all tables."""

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "a text (in quotes)",
    "list": "a list (in brackets)",
    "tuple": "a list (in brackets)",
    "dict": "a table",
    "model": "a table",
}
"""What a value must be, by the first word of pydantic's error type."""


def _shown(value: Any) -> str:
    """Nearly as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(list(value) if isinstance(value, tuple) else value)


def _requirement(error: ErrorDetails) -> str:
    """A pydantic error as the end of a sentence."""
    kind, _, what = error["type"].partition("_")
    if what in ("type", "parsing", "from_float", "parsing_size") and kind in _KINDS:
        return f"must be {_KINDS[kind]}"
    if error["type"] == "too_long":
        return f"must have at most {error['ctx']['max_length']} values"
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input should be ").removeprefix("must be ")
    return f"must be {message}"


def _nearest(key: str) -> str:
    import difflib

    *parents, last = key.split(".")
    node: Any = Config
    for part in parents:
        field = node.model_fields.get(part) if isinstance(node, type) and issubclass(node, Section) else None
        if field is None:
            return "remove it."
        kinds = [k for k in (field.annotation, *getattr(field.annotation, "__args__", ())) if isinstance(k, type)]
        node = next((k for k in kinds if issubclass(k, Section)), None)
    if node is None:
        return "remove it."
    close = difflib.get_close_matches(last, list(node.model_fields), n=1)
    return f"did you mean {'.'.join([*parents, close[0]])}?" if close else "remove it."


def _resolved(config: Config) -> Config:
    update: dict[str, Any] = {}
    age = {"sync": 0, "one_step_off": 1}.get(config.mode, config.staleness.max_age)
    if config.mode != "async":
        update["staleness"] = config.staleness.model_copy(update={"max_age": age})
    if config.mode == "one_step_off":
        update["update"] = config.update.model_copy(update={"inflight": "episode"})
    if config.data.prefetch is None:
        update["data"] = config.data.model_copy(update={"prefetch": 0 if age == 0 else 1})
    if config.queue.groups == 0:
        update["queue"] = config.queue.model_copy(update={"groups": (age + 1) * config.batch.groups})
    update["weightsync"] = config.weightsync.model_copy(
        update={
            "probe_tokens": min(config.weightsync.probe_tokens, config.rollout.max_tokens),
            "probe_tolerance": config.weightsync.probe_tolerance
            or max(PROBE_TOLERANCES[config.rollout.dtype], PROBE_TOLERANCES[config.learner.dtype]),
        }
    )
    if config.learner.batch_wait_seconds == 0.0:
        update["learner"] = config.learner.model_copy(update={"batch_wait_seconds": config.rollout.wall_seconds + 300.0})
    if config.group.min_valid != config.group.needed:
        update["group"] = config.group.model_copy(update={"min_valid": config.group.needed})
    return config.model_copy(update=update)


def _check(config: Config, where: str) -> None:
    """Combinations that cannot work."""
    age, groups, size = config.staleness.max_age, config.batch.groups, config.group.size
    learner, rollout, pool = config.learner, config.rollout, config.envpool

    def refuse(what: str) -> None:
        raise UserError(f"{where} {what}")

    if learner.advantage in ("grpo", "rloo", "dr_grpo") and size < 2:
        refuse(
            f"sets group.size = {size} with learner.advantage = '{learner.advantage}', whose baseline needs other members: "
            "set group.size to 2 or more."
        )
    if config.group.min_valid > size:
        refuse(f"sets group.min_valid = {config.group.min_valid} above group.size = {size}: lower it.")
    places = rollout.nodes * rollout.max_episodes
    if config.group.redundancy and config.group.members > places:
        refuse(
            f"sets group.redundancy = {config.group.redundancy}, but rollout.nodes × rollout.max_episodes = {places} episodes at "
            f"once are fewer than the {config.group.members} of one group, whose extra members would begin when others have "
            "finished: lower group.redundancy or raise rollout.max_episodes."
        )
    if config.queue.groups < (age + 1) * groups:
        refuse(
            f"sets queue.groups = {config.queue.groups}, but staleness.max_age = {age} and batch.groups = {groups} need "
            f"{(age + 1) * groups}: raise queue.groups or leave it out."
        )
    if age == 0 and config.data.prefetch:
        refuse(f"sets data.prefetch = {config.data.prefetch} with staleness.max_age = 0: set data.prefetch to 0 or leave it out.")
    if config.data.prefetch is not None and config.data.prefetch > age:
        refuse(f"sets data.prefetch = {config.data.prefetch} above staleness.max_age = {age}: lower it.")
    if config.mode == "sync" and config.update.rolling < 1.0:
        refuse(
            f"sets update.rolling = {config.update.rolling} with mode = 'sync', which updates all nodes at once: leave it out."
        )
    if config.update.policy == "budget" and age == 0:
        why = "mode = 'sync'" if config.mode == "sync" else "staleness.max_age = 0"
        refuse(
            f"sets update.policy = 'budget' with {why}, where every step needs its own weights on all nodes: leave update.policy "
            "out, or allow a greater age."
        )
    if learner.aggregation == "constant" and learner.constant_length == 0:
        refuse(
            "sets learner.aggregation = 'constant' without learner.constant_length: set it to the most action tokens you expect."
        )
    low, high = learner.mask_range
    if not 0.0 <= low <= 1.0 <= high:
        refuse(
            f"sets learner.mask_range = [{low:g}, {high:g}], which must hold 1, the weight of a token of age 0: set it for "
            "instance to [0.5, 5.0]."
        )
    if learner.proximal == "loglinear" and (learner.correction != "decoupled" or learner.minibatches == 1):
        refuse(
            f"sets learner.proximal = 'loglinear' with learner.correction = '{learner.correction}' and learner.minibatches = "
            f"{learner.minibatches}, where no proximal policy is approximated: leave it out, or use correction = 'decoupled' "
            "and minibatches of 2 or more."
        )
    if learner.minibatches > groups:
        refuse(f"sets learner.minibatches = {learner.minibatches} above batch.groups = {groups}: lower it.")
    ways = {config.update.inflight, *(config.update.budget_inflight if config.update.policy == "budget" else ())}
    drains = bool(ways & {"turn", "episode"})
    if drains and config.update.drain_seconds >= config.update.deadline_seconds:
        refuse(
            f"sets update.drain_seconds = {config.update.drain_seconds:g}, not below update.deadline_seconds = "
            f"{config.update.deadline_seconds:g}, after which a node that still waits is fenced out: lower it."
        )
    if 0.0 < config.eval.temperature < 1e-3:
        refuse(f"sets eval.temperature = {config.eval.temperature:g}, too cold to sample at: use 0 (greedy) or at least 0.001.")
    if rollout.max_turn_tokens >= rollout.max_tokens:
        refuse(
            f"sets rollout.max_turn_tokens = {rollout.max_turn_tokens}, not below rollout.max_tokens = "
            f"{rollout.max_tokens}: lower it."
        )
    for name, threads, lists in (("rollout", rollout.threads, rollout.cores), ("learner", learner.threads, learner.cores)):
        least = min((len(cores) for cores in lists), default=threads)
        if threads > least:
            refuse(
                f"sets {name}.threads = {threads} above the {least} of one list of {name}.cores, and threads on one core "
                f"wait for one another: lower {name}.threads or name more cores."
            )
    if rollout.engine_args and rollout.engine == "embedded":
        refuse(
            f"sets rollout.engine_args with rollout.engine = '{rollout.engine}', which takes none: leave them out, or set "
            "rollout.engine = 'vllm'."
        )
    if rollout.engine == "vllm" and rollout.idle_slots:
        refuse(
            f"sets rollout.idle_slots = {rollout.idle_slots} with rollout.engine = 'vllm', which has no slots: leave it out, "
            "or set rollout.engine_args.kv_cache_memory_bytes."
        )
    if rollout.engine == "vllm" and rollout.temperature < 0.01:
        refuse(f"sets rollout.temperature = {rollout.temperature:g}, and vLLM takes any below 0.01 for 0.01: raise it.")
    if rollout.engine == "vllm" and 0.0 < config.eval.temperature < 0.01:
        refuse(f"sets eval.temperature = {config.eval.temperature:g}, and vLLM takes any below 0.01 for 0.01: use 0 or raise it.")
    capacity = pool.pools * pool.workers * pool.instances
    if places > capacity:
        refuse(
            f"lets {rollout.nodes} nodes run {rollout.max_episodes} episodes each, but the env pools hold only "
            f"{pool.pools} × {pool.workers} × {pool.instances} = {capacity} instances: "
            "lower rollout.max_episodes or raise envpool.instances."
        )
    capacity = pool.most * pool.workers * pool.instances
    if rollout.most * rollout.max_episodes > capacity:
        refuse(
            f"lets up to {rollout.most} nodes (rollout.max_nodes) run {rollout.max_episodes} episodes each, but the env pools "
            f"will hold only {pool.most} × {pool.workers} × {pool.instances} = {capacity} instances: "
            "raise envpool.max_pools or envpool.instances."
        )
    if not config.model.path and config.warmstart is None:
        refuse("names no model: set model.path to a Hugging Face folder, or add a [warmstart] table.")
    if config.model.path and config.warmstart is not None:
        refuse(
            "has both model.path and a [warmstart] table: leave one out (--set model.path wins over a [warmstart] in the file)."
        )
    if config.warmstart is not None and config.warmstart.hidden_size % config.warmstart.heads:
        refuse(
            f"sets warmstart.hidden_size = {config.warmstart.hidden_size}, which warmstart.heads = {config.warmstart.heads} "
            "does not divide: change one."
        )
    if config.weightsync.probe_tokens == 1:
        refuse(
            "sets weightsync.probe_tokens = 1, but nothing precedes the first token, so that it has no log-probability: "
            "set it to 2 or more, or to 0 for no probe."
        )
    if config.weightsync.staging == "none":
        patience = config.weightsync.deadline_seconds
        if drains and config.update.drain_seconds >= patience:
            refuse(
                f"sets weightsync.staging = 'none', where a transfer waits while nodes drain, with update.drain_seconds = "
                f"{config.update.drain_seconds:g}, not below weightsync.deadline_seconds = {patience:g}: lower it."
            )
    if config.weightsync.backend == "nccl" and not (learner.gpus and rollout.gpus):
        refuse("sets weightsync.backend = 'nccl' without learner.gpus and rollout.gpus: set both, or use backend = 'gloo'.")
    shared = next(
        (f"{name}.gpus = {gpus:g}" for name, gpus in (("learner", learner.gpus), ("rollout", rollout.gpus)) if gpus % 1), ""
    )
    if config.weightsync.backend == "nccl" and shared:
        refuse(
            f"sets weightsync.backend = 'nccl' with {shared}, and NCCL refuses two processes on one GPU: use backend = 'gloo'."
        )
    if 0 < rollout.gpus < rollout.ranks:
        refuse(
            f"sets rollout.gpus = {rollout.gpus:g}, and rollout.engine_args want a GPU for each of {rollout.ranks} workers: set "
            f"rollout.gpus to {rollout.ranks}, or leave it out."
        )


def to_toml(config: Config) -> str:
    """The resolved config as TOML; loading it gives the same config."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))
