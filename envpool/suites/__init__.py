"""The suites Segue ships, by name. A suite's module is imported only when it is asked for."""

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
    """The suite `name` with `[task.args]`. Raises UserError: no such suite, or arguments it cannot use."""
    module = SUITES.get(name)
    if module is None:
        close = difflib.get_close_matches(name, SUITES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(sorted(SUITES))}."
        raise UserError(f"There is no environment suite task.env = {name!r}: {hint}")
    suite: Suite = importlib.import_module(module).build(args or {})
    return suite
