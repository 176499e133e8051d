"""Values that name a part of Segue's, or one of the user's own as "module:name"."""

from __future__ import annotations

import re
from collections.abc import Sequence

_OWN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def own_or(known: Sequence[str], value: str) -> str:
    """The value, if it is among `known` or may name something of the user's. Raises `ValueError`."""
    if value not in known and not _OWN.fullmatch(value):
        raise ValueError(f"must be {' or '.join(known)}, or one of your own as module:name")
    return value
