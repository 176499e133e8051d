"""A suite of the user's own, tried before anything of a run starts: loaded, asked for its tasks, in a process of its own.

It may be heavy (torch, a data set), and the process that prepares and watches a run is to stay light; it may also crash.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tomllib
from typing import Any, Literal

from envpool.suites import load_suite
from segue.cluster.processes import describe_exit, die_with_parent
from segue.config import Config, to_toml
from segue.config.root import resolve
from segue.episode import Task
from segue.errors import UserError
from segue.users_code import described


def try_suite(config: Config) -> None:
    """Raises `UserError` if the config's own suite does not load, has no tasks, or lacks what its warm start needs."""
    name, seconds = config.task.env, config.cluster.start_seconds
    end_with_us = functools.partial(die_with_parent, os.getpid())
    command = [sys.executable, "-m", "segue.cluster.own_suite"]
    try:
        child = subprocess.run(
            command, input=to_toml(config), capture_output=True, text=True, timeout=seconds, preexec_fn=end_with_us, check=False
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"The suite task.env = {name!r} was not loaded within cluster.start_seconds = {seconds:g}: "
            "make it faster, or raise that."
        ) from None
    try:
        sentence = json.loads(child.stdout)["sentence"]
    except ValueError:
        last = next((line for line in reversed(child.stderr.splitlines()) if line.strip()), "it said nothing")
        how = describe_exit(child.returncode)
        raise UserError(f"The suite task.env = {name!r} ended the process that loaded it ({how}; {last}): mend it.") from None
    if sentence:
        raise UserError(sentence)


def examine(config: Config) -> None:
    """What `try_suite` says, in this process."""
    from segue.cluster.warmstart import check_teacher

    suite = load_suite(config.task.env, config.task.args)
    if config.warmstart is not None:
        check_teacher(config.task.env, suite)
    _check_tasks(config, suite, "task.train_tasks", "train", config.task.train_tasks)
    if config.eval.tasks:
        _check_tasks(config, suite, "eval.tasks", "eval", config.eval.tasks)


def _check_tasks(config: Config, suite: Any, key: str, split: Literal["train", "eval"], wanted: int) -> None:
    name = config.task.env
    try:
        tasks = list(suite.tasks(split, wanted, config.seed))
    except UserError as error:
        raise UserError(f"{key} = {wanted} cannot be had: {str(error)[:1].lower()}{str(error)[1:]}") from None
    except Exception as error:
        told = described(error, type(suite))
        raise UserError(
            f"The suite task.env = {name!r} could not give its {split} tasks ({told}): mend its method tasks."
        ) from error
    wrong = next((task for task in tasks if not isinstance(task, Task)), None)
    if wrong is not None or not tasks:
        what = f"a {type(wrong).__name__}" if tasks else "none"
        raise UserError(
            f"The suite task.env = {name!r} gave {what} where {key} = {wanted} asks for tasks (segue.episode.Task): "
            "mend its method tasks."
        )


def main() -> None:
    """`python -m segue.cluster.own_suite`: the config on stdin, the sentence (or null) as JSON on stdout."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the suite prints
    sentence = None
    try:
        examine(resolve(tomllib.loads(sys.stdin.read()), "the config"))
    except UserError as error:
        sentence = str(error)
    with answer:
        json.dump({"sentence": sentence}, answer)


if __name__ == "__main__":
    main()
