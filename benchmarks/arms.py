"""The arms of a sweep: ways to run the same loop, as overrides of a config.

Only what an arm is about differs: batch, group size, concurrency, lengths, latencies and seeds are those of the config, so that
two arms of one point meet the same episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from segue.config import Config
from segue.errors import UserError

_DEADLINE_SECONDS = 600.0
"""Beyond the drain: a node that then has not loaded is fenced out."""


class Arm(msgspec.Struct, frozen=True):
    """`overrides` are nested tables over a config; `drains`: running episodes or turns finish before an update, however long that
    takes; `redundant`: groups begin with more members than count."""

    name: str
    about: str
    overrides: dict[str, Any]
    drains: bool = False
    redundant: bool = False

    def tables(self, config: Config, redundancy: int) -> dict[str, Any]:
        """What to lay over a config of this kind; `redundancy` is r of a redundant arm."""
        tables = {key: dict(value) if isinstance(value, dict) else value for key, value in self.overrides.items()}
        if self.drains:
            drain = config.rollout.wall_seconds
            update = tables.setdefault("update", {})
            update |= {"drain_seconds": drain, "deadline_seconds": drain + _DEADLINE_SECONDS}
        if self.redundant:
            tables["group"] = {"redundancy": redundancy}
        return tables


def _partial(name: str, inflight: str, about: str, **more: bool) -> Arm:
    return Arm(name, about, {"mode": "async", "update": {"inflight": inflight}}, **more)


_ALL = (
    Arm("sync", "each batch is sampled by the newest weights; training waits for its slowest episode", {"mode": "sync"}),
    Arm(
        "sync_redundant",
        "sync, and each group begins with r members more than count: its slowest are dropped",
        {"mode": "sync"},
        redundant=True,
    ),
    Arm(
        "one_step_off",
        "generation runs one step ahead; whole episodes finish before an update",
        {"mode": "one_step_off"},
        drains=True,
    ),
    _partial("async_episode", "episode", "async without partial rollouts: whole episodes finish before an update", drains=True),
    _partial("async_turn", "turn", "async with partial rollouts: turns finish before an update", drains=True),
    _partial("async_recompute", "recompute", "async with partial rollouts: an update stops turns, their KV is computed anew"),
    _partial("async_keep", "keep", "async with partial rollouts: an update freezes turns, which go on with their old KV"),
    _partial("async_redundant", "recompute", "async_recompute, and each group begins with r members more", redundant=True),
)
ARMS = {arm.name: arm for arm in _ALL}
"""All arms by name, in the order of tables and plots."""


def chosen(names: Sequence[str] | None) -> list[Arm]:
    """Those named, in the order of `ARMS`; None: all. Raises `UserError` when a name is unknown, or none is given."""
    if names is None:
        return list(ARMS.values())
    for name in names:
        if name not in ARMS:
            raise UserError(f"There is no arm {name}: known are {', '.join(ARMS)}.")
    if not names:
        raise UserError(f"A sweep without arms compares nothing: name some of {', '.join(ARMS)}.")
    return [arm for name, arm in ARMS.items() if name in names]
