"""Suites of users' own, as "module:function": found, called, and looked at. One sentence for whatever is wrong with them."""

from __future__ import annotations

import inspect
from typing import Any

from envpool.environment import Suite
from segue.by_path import load
from segue.errors import UserError
from segue.users_code import described

MUST_BE = "it must be a function of one dict, the [task.args] table, that returns a Suite (envpool/environment.py)"


def load_own(name: str, args: dict[str, Any]) -> Suite:
    """The suite that "module:function" makes from `[task.args]`. Raises UserError."""
    build = load(name, f"The environment suite task.env = {name!r}", MUST_BE)
    _check_takes_one(name, build)
    try:
        suite = build(args)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"The suite task.env = {name!r} could not be made ({described(error, build)}): mend it.") from error
    lacking = [method for method in ("tasks", "make") if lacks(suite, method)]
    if lacking:
        returned = "returned None" if suite is None else f"returned {type(suite).__name__}, which lacks {' and '.join(lacking)}"
        raise UserError(f"task.env = {name!r} {returned}: {MUST_BE}.")
    made: Suite = suite
    return made


def lacks(suite: Any, method: str) -> bool:
    """Whether a suite has no such method of its own; one that is inherited from the protocol does nothing."""
    return not callable(getattr(suite, method, None)) or getattr(type(suite), method, None) is getattr(Suite, method)


def _check_takes_one(name: str, build: Any) -> None:
    try:
        signature = inspect.signature(build)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind({})
    except TypeError:
        raise UserError(f"task.env = {name!r} takes the arguments {signature}: {MUST_BE}.") from None
