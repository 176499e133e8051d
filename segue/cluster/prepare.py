"""Before a run's processes start: the config is resolved, the run directory made, the plan printed, the model found."""

from __future__ import annotations

import functools
import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from envpool.environment import Split
from envpool.suites import load_suite
from rollout.vllm.arguments import check_arguments
from segue.cluster.cores import check_cores
from segue.cluster.devices import with_devices
from segue.cluster.hosts.attached import Attached
from segue.cluster.hosts.facts import facts_here
from segue.cluster.hosts.layout import Seat, lay_out, map_lines
from segue.cluster.hosts.messages import HostFacts
from segue.cluster.hosts.plan import note_hosts
from segue.cluster.hosts.several import check_alone
from segue.cluster.models import beside, check_model, found_model, make_model
from segue.cluster.own_suite import try_suite
from segue.cluster.plan import plan_lines
from segue.cluster.ports import all_roles, check_ports
from segue.cluster.processes import die_with_parent
from segue.cluster.stopped import go_on_command
from segue.config import Config, load_config, to_toml
from segue.config.learner import WarmstartConfig
from segue.errors import UserError
from segue.rundir import CheckpointFolder, RunDir
from segue.suite_path import look_beside


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start.

    `resume` is the checkpoint folder to go on from, or ""; `go_on` the command that resumes this run if it is stopped.
    """

    config: Config
    run: RunDir
    model: str
    resume: str
    attempt: int
    only_eval: bool = False
    go_on: str = ""


def prepare(
    config_path: Path,
    overrides: list[str],
    run_path: Path | None,
    resume: bool,
    serial: bool = False,
    hosts: Sequence[HostFacts] = (),
    ray: str = "",
) -> Prepared:
    """Check everything a user can get wrong, print the plan, make the warm start if it is not cached. Raises `UserError`.

    `hosts` are those of a run on several, this one first; `ray` is where the Ray is that they are nodes of already, or "".
    """
    look_beside(config_path, RunDir(config_path.parent).suite_path())
    gpus = sum(host.gpus for host in hosts) if hosts else None
    config = beside(with_devices(load_config(config_path, overrides), gpus), config_path)
    check(config)
    seats: list[Seat] = []
    if serial:
        _check_serial(config)
    elif hosts:
        config = _listening_on(config, hosts[0].address)
        seats = lay_out(config, hosts)
        check_ports(config, hosts[0].address, [seat.role for seat in seats if seat.host == 0])
    else:
        check_ports(config, config.cluster.interface, all_roles(config))
        check_cores(config)
    now = datetime.now()
    checkpoint, again, changes = None, False, ""
    if resume:
        assert run_path is not None
        changes = changed_keys(tomllib.loads(RunDir.open(run_path).config_text()), config)
        run, checkpoint = _resume(run_path, config)
    elif run_path is not None:
        again = RunDir(run_path).begun_in_vain()
        run = RunDir.create(run_path, to_toml(config))
    else:
        run = RunDir.create_default(config_path, to_toml(config), now)
    attempt = run.begin_attempt(now, checkpoint.step if checkpoint else None)
    note_hosts(run, hosts, seats, ray)
    for line in [*plan_lines(config, str(config_path), run.path, _model_text(config), serial), *map_lines(seats, hosts)]:
        print(line, flush=True)
    if ray:
        print(f"  ray       the one at {ray}, which goes on when the run ends", flush=True)
    if again:
        print("  again     an earlier attempt in that directory trained no step: it is replaced, its logs too", flush=True)
    if checkpoint is not None:
        print(f"  resume    from {checkpoint.path} (step {checkpoint.step})", flush=True)
        print(f"  changed   {changes or 'nothing since the last attempt'}", flush=True)
    try:
        model = find_model(config)
    except BaseException:
        if not resume:  # nothing is begun, and the name is free for another try
            run.discard()
        raise
    go_on = go_on_command(config_path, run.path, overrides, serial)
    return Prepared(config, run, model, str(checkpoint.path) if checkpoint else "", attempt, go_on=go_on)


def dry_run(config_path: Path, overrides: list[str], serial: bool, count: int) -> int:
    """Check what can be checked without a run directory, print the plan, start nothing. With several hosts, as if all were like
    this one; on a Ray that is there already, on what its nodes say. Raises `UserError`."""
    look_beside(config_path, RunDir(config_path.parent).suite_path())
    config = load_config(config_path, overrides)
    check_alone(config, count)
    hosts = [facts_here(rank, "") for rank in range(count)] if count > 1 else []
    if config.cluster.ray and not serial:
        with Attached(config) as attached:
            hosts = attached.hosts
    config = beside(with_devices(config, sum(host.gpus for host in hosts) if hosts else None), config_path)
    check(config)
    seats = lay_out(config, hosts) if hosts else []
    if count > 1:
        config = _listening_on(config, "each host's own address")
    lines = plan_lines(config, str(config_path), Path("(a dry run)"), _model_text(config), serial)
    print("\n".join([*lines, *map_lines(seats, hosts)]), flush=True)
    if count > 1:
        print("  (as if every host were like this one)", flush=True)
    return 0


def _listening_on(config: Config, address: str) -> Config:
    """On several hosts each listens on its own address; the config has the first one's, unless it names another."""
    if config.cluster.interface not in ("127.0.0.1", "::1"):
        return config
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"interface": address})})


def _resume(path: Path, config: Config) -> tuple[RunDir, CheckpointFolder]:
    """The run at `path`, ready to go on from its newest checkpoint; nothing of it is changed unless it can."""
    checkpoint = RunDir.open(path).latest_checkpoint()
    if checkpoint.step > config.steps:
        raise UserError(
            f"The run in {path} is at step {checkpoint.step} and steps = {config.steps}: raise steps to go on with it."
        )
    if checkpoint.step == config.steps and RunDir(path).summary.is_file():
        raise UserError(
            f"The run in {path} has done its {config.steps} steps: raise steps to go on, for instance with "
            f"--set steps={2 * config.steps}."
        )
    _check_same_model(path, config)
    run = RunDir.resume(path, to_toml(config))
    run.truncate_metrics(checkpoint.step)
    run.clear_targets()
    return run, checkpoint


def changed_keys(then: dict[str, Any], config: Config) -> str:
    """What a config changes against that of the last attempt `then`: "learner.lr 0.001 → 0.002, …", or "" for nothing."""
    before, now = _flat(then), _flat(tomllib.loads(to_toml(config)))
    keys = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    return ", ".join(f"{key} {before.get(key, 'unset')} → {now.get(key, 'unset')}" for key in keys)


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"learner.lr": …} of nested tables."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _check_same_model(path: Path, config: Config) -> None:
    """A checkpoint holds weights of one shape, and tasks of one suite that are still to be done."""
    then, now = tomllib.loads(RunDir(path).config_text()), tomllib.loads(to_toml(config))
    for key in (
        "task.env",
        "model.path",
        "model.chat_template",
        *(f"warmstart.{key}" for key in sorted(WarmstartConfig.model_fields)),
    ):
        table, _, name = key.partition(".")
        before, wanted = then.get(table, {}).get(name), now.get(table, {}).get(name)
        if before != wanted and key != "warmstart.threads":
            raise UserError(
                f"The run in {path} was begun with {key} = {before!r}, and a resumed run cannot change it to {wanted!r}: "
                "set it back, or begin another run."
            )


def _check_serial(config: Config) -> None:
    if config.rollout.engine != "embedded":
        raise UserError(
            f"--serial runs in one process, which rollout.engine = '{config.rollout.engine}' cannot: "
            "add --set rollout.engine=embedded."
        )
    if config.learner.ranks > 1:
        raise UserError(f"--serial runs one learner rank, and learner.ranks = {config.learner.ranks}: add --set learner.ranks=1.")


def find_model(config: Config) -> str:
    """The folder to start from; makes what is not there and not cached."""
    return str(make_model(config) if config.model.path else _warm_start(config))


def check(config: Config) -> None:
    """What else can be found wrong before anything starts: the suite and its tasks, the model's folder. Raises `UserError`."""
    if ":" in config.task.env:
        try_suite(config)
    else:
        suite = load_suite(config.task.env, config.task.args)
        asked: list[tuple[str, Split, int]] = [
            ("task.train_tasks", "train", config.task.train_tasks),
            ("eval.tasks", "eval", config.eval.tasks),
        ]
        for key, split, wanted in asked:
            try:
                suite.tasks(split, wanted, config.seed)
            except UserError as error:
                raise UserError(f"{key} = {wanted} cannot be had: {str(error)[0].lower()}{str(error)[1:]}") from None
    if config.rollout.engine == "vllm":
        check_arguments(config.rollout.engine_args)
    check_model(config)


def _model_text(config: Config) -> str:
    if config.model.path:
        found = found_model(config)
        made = "" if found == Path(config.model.path) else f" ({found or 'converted now, once'})"
        return config.model.path + made
    from segue.cluster.warmstart import cached

    found = cached(config)
    return f"warm start {found}" if found else "warm start (made now, once: distilled from the suite's scripted teacher)"


def _warm_start(config: Config) -> Path:
    from segue.cluster.warmstart import cached

    found = cached(config)
    if found is not None:
        return found
    return _make_in_child(config)


def _make_in_child(config: Config) -> Path:
    """Make the warm start in a process of its own: it loads torch, which this process does not need."""
    import subprocess
    import sys
    import tempfile

    with tempfile.TemporaryDirectory(prefix="segue-") as folder:  # its own: that folder is looked for modules too
        file = Path(folder) / "config.toml"
        file.write_text(to_toml(config), encoding="utf-8")
        command = [sys.executable, "-m", "segue.cli", "warmstart", str(file)]
        end_with_us = functools.partial(die_with_parent, os.getpid())
        child = subprocess.run(command, check=False, preexec_fn=end_with_us, stdout=subprocess.PIPE, text=True)
    if child.returncode == 130:
        raise KeyboardInterrupt
    if child.returncode != 0:
        raise UserError("The warm start failed: see the message above.")
    return Path(child.stdout.strip())
