"""The suites Segue ships, by name, and those of users, as "module:function". A module is imported only when it is asked for."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from envpool.environment import Suite
from envpool.suites.own import load_own
from segue.errors import UserError

SUITES = {
    "latency": "envpool.suites.latency",
    "price_list": "envpool.suites.price_list",
    "search_qa": "envpool.suites.search_qa",
}


def load_suite(name: str, args: dict[str, Any] | None = None) -> Suite:
    """The suite `name` with `[task.args]`. Raises UserError: no such suite, or arguments it cannot use.

    A suite of one's own is "module:function", where the function takes the arguments (a dict) and returns a `Suite`.
    """
    if ":" in name:
        return load_own(name, args or {})
    module = SUITES.get(name)
    if module is None:
        close = difflib.get_close_matches(name, SUITES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(sorted(SUITES))}."
        raise UserError(f"There is no environment suite task.env = {name!r}: {hint}")
    suite: Suite = importlib.import_module(module).build(args or {})
    return suite
