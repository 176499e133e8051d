"""The hosts of one run from the first one's point of view: collected, checked against each other, and told how it ended."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from segue.cluster.hosts.facts import facts_here
from segue.cluster.hosts.head import Head
from segue.cluster.hosts.messages import HostFacts, Join
from segue.cluster.hosts.several import check_alone, to_be_seen
from segue.cluster.hosts.where import Where, resolve, token_of
from segue.config import load_config
from segue.errors import UserError

if TYPE_CHECKING:
    from segue.cluster.prepare import Prepared

TURN_AWAY_SECONDS = 20.0
"""How long a mistake on the first host keeps it, at most, so that the others hear of it and do not look for it in vain."""


class Gathered:
    """`Several` that were started one by one. Leaving the context ends them, and tells them `code`."""

    ray = ""

    def __init__(self, config_path: Path, overrides: list[str], where: Where) -> None:
        self._path, self._overrides, self._count = config_path, overrides, where.hosts
        self.code = 1
        self.hosts: list[HostFacts] = []
        mine = facts_here(0, resolve(where.address))
        self._head = Head(mine, where.port, where.hosts, where.token or token_of(os.environ), _print)

    def __enter__(self) -> Gathered:
        try:
            config = load_config(self._path, self._overrides)
            check_alone(config, self._count)
        except UserError:
            self._head.turn_away("Host 0 has refused the run, and says there what is to be corrected.", TURN_AWAY_SECONDS)
            raise
        try:
            self.hosts = self._head.gather(config.cluster.join_seconds, config.rollout.engine)
        except BaseException:
            self._head.close(2)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._head.close(2 if isinstance(error, UserError) else self.code)

    def check(self, prepared: Prepared) -> None:
        """See `Several`."""
        with to_be_seen(prepared, self.hosts) as (check, ports):
            self._head.check(check, ports)
        self._logs = str(prepared.run.logs.resolve())
        self._object_store_bytes = prepared.config.cluster.object_store_bytes

    def order_join(self, ray_address: str, environment: dict[str, str], stop_seconds: float) -> None:
        """See `Several`."""
        self._head.order_join(Join(ray_address, environment, self._object_store_bytes, stop_seconds, self._logs))


def _print(line: str) -> None:
    print(line, flush=True)
