"""The hosts of a run on several, however they came together: what the supervisor asks of them."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from segue.cluster.hosts.layout import lay_out
from segue.cluster.hosts.messages import Check, HostFacts
from segue.cluster.ports import ports_needed
from segue.config import Config
from segue.errors import UserError

if TYPE_CHECKING:
    from segue.cluster.prepare import Prepared


class Several(Protocol):
    """A context: entering it finds all hosts and raises `UserError` or `RunFailed` unless they fit; leaving it lets them go.

    `hosts` are then in order, the driver's first. `ray` is the address of the Ray that they are nodes of already, "" where one is
    to be started. `code` is the exit code of the run, 1 unless it is set.
    """

    code: int
    hosts: list[HostFacts]
    ray: str

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /) -> None: ...

    def check(self, prepared: Prepared) -> None:
        """All hosts see the run directory and the model, and have ports enough. The run is discarded where they do not."""
        ...

    def order_join(self, ray_address: str, environment: dict[str, str], stop_seconds: float) -> None:
        """The run's Ray is at `ray_address`: hosts that are not in it yet are to join it, in this environment."""
        ...


@contextmanager
def to_be_seen(prepared: Prepared, hosts: Sequence[HostFacts]) -> Iterator[tuple[Check, dict[int, int]]]:
    """What all hosts must see, and how many ports each must have. The run is discarded if an error leaves the block."""
    config, run = prepared.config, prepared.run
    handle, name = tempfile.mkstemp(dir=run.path, prefix=".seen-by-all-")
    words = secrets.token_hex(8)
    with os.fdopen(handle, "w") as file:
        file.write(words)
    os.chmod(name, 0o644)  # hosts may be there under another user
    roles: dict[int, list[str]] = defaultdict(list)
    for seat in lay_out(config, hosts):
        roles[seat.host].append(seat.role)
    files = {str(Path(name).resolve()): words, str(Path(prepared.model).resolve()): ""}
    check = Check(files, str(run.path.resolve()), config.cluster.ports)
    try:
        yield check, {rank: ports_needed(names) for rank, names in roles.items()}
    except BaseException:
        Path(name).unlink(missing_ok=True)
        if not prepared.resume:
            run.discard()
        raise
    Path(name).unlink(missing_ok=True)


def check_alone(config: Config, hosts: int) -> None:
    """Raises `UserError` where a run is to gather hosts and to use a Ray that has its own."""
    if config.cluster.ray and hosts > 1:
        raise UserError(
            f"cluster.ray = '{config.cluster.ray}' runs on the nodes of a Ray that is there, and --hosts (NUM_NODES) gathers "
            "others: leave one of them out."
        )
