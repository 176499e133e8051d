"""The suites Segue ships, by name, and those of users, as "module:function". A module is imported only when it is asked for."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from envpool.environment import Suite
from segue.errors import UserError

SUITES = {
    "latency": "envpool.suites.latency",
    "search_qa": "envpool.suites.search_qa",
}


def load_suite(name: str, args: dict[str, Any] | None = None) -> Suite:
    """The suite `name` with `[task.args]`. Raises UserError: no such suite, or arguments it cannot use.

    A suite of one's own is "module:function", where the function takes the arguments (a dict) and returns a `Suite`.
    """
    if ":" in name:
        return _users_suite(name, args or {})
    module = SUITES.get(name)
    if module is None:
        close = difflib.get_close_matches(name, SUITES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(sorted(SUITES))}."
        raise UserError(f"There is no environment suite task.env = {name!r}: {hint}")
    suite: Suite = importlib.import_module(module).build(args or {})
    return suite


def _users_suite(name: str, args: dict[str, Any]) -> Suite:
    module, _, function = name.partition(":")
    try:
        build = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"The environment suite task.env = {name!r} cannot be imported ({error}): check its name and path."
        ) from error
    suite: Suite = build(args)
    return suite
