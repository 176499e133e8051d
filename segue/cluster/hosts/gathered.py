"""The hosts of one run from the first one's point of view: collected, checked against each other, and told how it ended."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections import defaultdict
from pathlib import Path
from types import TracebackType

from segue.cluster.hosts.facts import facts_here
from segue.cluster.hosts.head import Head
from segue.cluster.hosts.layout import lay_out
from segue.cluster.hosts.messages import Check, HostFacts, Join
from segue.cluster.hosts.where import Where, resolve, token_of
from segue.cluster.ports import ports_needed
from segue.cluster.prepare import Prepared
from segue.config import load_config
from segue.errors import UserError

TURN_AWAY_SECONDS = 20.0
"""How long a mistake on the first host keeps it, at most, so that the others hear of it and do not look for it in vain."""


class Gathered:
    """A context: entering it waits for all hosts and raises `UserError` or `RunFailed` unless they fit; leaving it ends them.

    `code` is what they are told: the exit code of the run, 1 unless it is set.
    """

    def __init__(self, config_path: Path, overrides: list[str], where: Where) -> None:
        self._path, self._overrides = config_path, overrides
        self.code = 1
        self.hosts: list[HostFacts] = []
        mine = facts_here(0, resolve(where.address))
        self._head = Head(mine, where.port, where.hosts, where.token or token_of(os.environ), _print)

    def __enter__(self) -> Gathered:
        try:
            self._config = load_config(self._path, self._overrides)
        except UserError:
            self._head.turn_away("Host 0 has refused the run, and says there what is to be corrected.", TURN_AWAY_SECONDS)
            raise
        try:
            self.hosts = self._head.gather(self._config.cluster.join_seconds, self._config.rollout.engine)
        except BaseException:
            self._head.close(2)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._head.close(2 if isinstance(error, UserError) else self.code)

    def check(self, prepared: Prepared) -> None:
        """All hosts see the run directory and the model, and have ports enough. The run is discarded where they do not."""
        config, run = prepared.config, prepared.run
        handle, name = tempfile.mkstemp(dir=run.path, prefix=".seen-by-all-")
        words = secrets.token_hex(8)
        with os.fdopen(handle, "w") as file:
            file.write(words)
        roles: dict[int, list[str]] = defaultdict(list)
        for seat in lay_out(config, self.hosts):
            roles[seat.host].append(seat.role)
        files = {str(Path(name).resolve()): words, str(Path(prepared.model).resolve()): ""}
        try:
            check = Check(files, str(run.path.resolve()), config.cluster.ports)
            self._head.check(check, {rank: ports_needed(names) for rank, names in roles.items()})
        except BaseException:
            if not prepared.resume:
                run.discard()
            raise
        finally:
            Path(name).unlink(missing_ok=True)
        self._logs = str(run.logs.resolve())
        self._object_store_bytes = config.cluster.object_store_bytes

    def order_join(self, ray_address: str, environment: dict[str, str], stop_seconds: float) -> None:
        """Ray runs at `ray_address`: all hosts are to join it, in this environment."""
        self._head.order_join(Join(ray_address, environment, self._object_store_bytes, stop_seconds, self._logs))


def _print(line: str) -> None:
    print(line, flush=True)
