"""The resolved plan of a run, printed before anything starts."""

from __future__ import annotations

from pathlib import Path

from segue import __version__
from segue.cluster.cores import cores_text
from segue.config import Config


def plan_lines(config: Config, source: str, run: Path, model: str, serial: bool = False) -> list[str]:
    """What will run where, one line per subject; `serial`: all in one process, whose clock is logical."""
    episodes = f"{config.batch.groups} groups × {config.group.size} episodes"
    if config.group.redundancy:
        episodes += f" (the first of {config.group.members})"
    evaluation = [name for name, on in (("before", config.eval.before), ("after", config.eval.after)) if on and config.eval.tasks]
    return [
        f"Segue {__version__}: {source} → {run}",
        f"  loop      {config.mode}, {config.steps} steps of {episodes}, η = {config.staleness.max_age} "
        f"({config.staleness.over_age} over age), in-flight updates: {config.update.inflight}",
        f"  model     {model}",
        f"  tasks     {config.task.env}, {config.task.train_tasks} for training"
        + (f", {config.eval.tasks} held out, evaluated {' and '.join(evaluation)} training" if evaluation else ""),
        *(_serial_lines(config) if serial else _process_lines(config)),
    ]


def _process_lines(config: Config) -> list[str]:
    rollout, learner, pool = config.rollout, config.learner, config.envpool
    low, high = config.cluster.ports
    cores = cores_text(config)
    return [
        "  scheduler 1 process",
        f"  envpool   {pool.pools} × {pool.workers} worker processes, up to {pool.instances} environments each",
        f"  rollout   {rollout.nodes} × {rollout.engine} engine, {rollout.slots} slots, {rollout.max_episodes} episodes, "
        f"{rollout.threads} thread(s), {_device(rollout.gpus)}",
        f"  learner   {learner.ranks} rank(s), {learner.threads} thread(s), {_device(learner.gpus)}; {_learning(config)}",
        f"  weights   {config.weightsync.backend} broadcast; ports {low}-{high} on {config.cluster.interface}",
        *([f"  cores     {cores}"] if cores else []),
    ]


def _serial_lines(config: Config) -> list[str]:
    rollout, cost = config.rollout, config.serial
    return [
        "  serial    one process, one loop, logical clock: "
        f"a learner step takes {cost.learner_step_seconds:g} s, decoding {cost.decode_seconds:g} s a token",
        f"  rollout   {rollout.nodes} × {rollout.engine} engine, {rollout.slots} slots, {rollout.max_episodes} episodes",
        f"  learner   {_learning(config)}",
    ]


def _learning(config: Config) -> str:
    learner = config.learner
    return f"{learner.advantage}, {learner.correction}, lr {learner.lr:g}"


def _device(gpus: float) -> str:
    return f"{gpus:g} GPU" if gpus else "CPU"
