"""`segue eval`: the held-out tasks of a config, run by its starting model or by a checkpoint of a run, on the same machinery."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path

from segue.cluster.devices import with_devices
from segue.cluster.models import beside
from segue.cluster.own_suite import try_suite
from segue.cluster.prepare import Prepared, check, find_model
from segue.cluster.supervisor import watch
from segue.config import Config, load_config, to_toml
from segue.errors import UserError
from segue.rundir import RunDir
from segue.suite_path import look_beside


def evaluate(target: Path, overrides: list[str], step: int | None, as_json: bool) -> int:
    """Evaluate and print the result; returns the exit code. Its processes' logs are in a run directory of its own."""
    if target.is_dir():
        source = RunDir.open(target)
        look_beside(source.config, source.suite_path())
        config = with_devices(load_config(source.config, overrides))
        model = str(_checkpoint(source, step) / "models" / "policy")
        name = source.name
    else:
        if step is not None:
            raise UserError(f"--step {step} needs a run directory, and {target} is none: leave it out or name a run.")
        if not target.exists():
            raise UserError(
                f"{target} is neither a run directory nor a config file: name one that exists, for instance under runs/."
            )
        look_beside(target, RunDir(target.parent).suite_path())
        config = beside(with_devices(load_config(target, overrides)), target)
        check(config)
        model = find_model(config)
        name = target.stem
    if config.eval.tasks == 0:
        raise UserError(f"{target} sets eval.tasks = 0, so there is nothing to evaluate: add --set eval.tasks=256.")
    if target.is_dir() and ":" in config.task.env:
        try_suite(config)
    remedy = "call segue eval in a folder that you can write to"
    run = RunDir.create_default(Path(f"eval-{name}"), to_toml(config), datetime.now(), remedy=remedy)
    attempt = run.begin_attempt(datetime.now())
    code = watch(Prepared(config, run, model, "", attempt, only_eval=True), serial=False, quiet=as_json)
    if code > 128:
        print("Stopped: the evaluation has no result.", file=sys.stderr if as_json else sys.stdout)
    if code == 0 and as_json:
        print(json.dumps(_result(run, config, model), indent=2))
    return code


def _checkpoint(run: RunDir, step: int | None) -> Path:
    found = {folder.step: folder.path for folder in run.complete_checkpoints()}
    if not found:
        raise UserError(
            f"{run.path} has no complete checkpoint to evaluate: name another run, or {run.config} for the model it starts from."
        )
    if step is None:
        return found[max(found)]
    if step not in found:
        there = ", ".join(str(number) for number in found)
        raise UserError(f"{run.path} has no complete checkpoint of step {step} (there is {there}): name one of these.")
    return found[step]


def _result(run: RunDir, config: Config, model: str) -> dict[str, object]:
    summary = json.loads(run.summary.read_text(encoding="utf-8"))
    return {**summary["eval"]["eval"], "env": config.task.env, "temperature": config.eval.temperature, "model": model}
