"""The pool's log of what environments raise: one traceback per distinct error, and then how often it came again. No clock."""

from __future__ import annotations

import logging
from collections import Counter

from envpool.messages import Raised

log = logging.getLogger(__name__)

MOST_KINDS = 64
"""Distinct errors whose tracebacks are logged; any others are counted together."""
_OTHERS = "other errors"


class RaisedLog:
    """Errors by kind (type and line). A repeated one is logged again when it has come 10, 100, 1000, … times."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._seen: Counter[str] = Counter()

    def add(self, raised: Raised) -> None:
        """Note one error."""
        name = raised.kind or raised.detail
        key = name if name in self._seen or len(self._seen) < MOST_KINDS else _OTHERS
        self._seen[key] += 1
        count = self._seen[key]
        if count == 1:
            log.error("%s: an environment raised %s\n%s", self._pool, raised.detail, raised.traceback.rstrip())
        elif _is_power_of_ten(count):
            log.error("%s: %d times so far: %s (the last: %s)", self._pool, count, key, raised.detail)


def _is_power_of_ten(number: int) -> bool:
    return str(number).strip("0") == "1"
