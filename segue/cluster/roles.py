"""What the wiring needs to know about a role before it builds one: its name, its place, and the life every shell leads."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Protocol

from segue.errors import RunFailed, UserError
from segue.ports.engine import EngineDead
from segue.ports.rpc import Failure, Peer, Rpc
from segue.rundir import RunDir
from segue.wire import Message


class RoleSpec(Message, frozen=True):
    """One role process to be: everything its builder needs, as bytes that cross to it once.

    `role` is scheduler, envpool, rollout or learner. `resume` is a checkpoint folder or "". `address` is what it listens on where
    that is not the config's (on several hosts); `start` counts the processes of this role in this attempt of the run, from 1;
    `restarts` says how often each reason (`RESTART_REASONS`) took one of those before it.
    `rendezvous` is where learner ranks meet (host:port), once that is known.
    """

    role: str
    rank: int
    world: int
    run_dir: str
    config: str
    model_path: str
    rendezvous: str = ""
    resume: str = ""
    attempt: int = 1
    address: str = ""
    start: int = 1
    restarts: dict[str, int] = {}

    @property
    def name(self) -> str:
        """For instance "rollout-1"."""
        return f"{self.role}-{self.rank}"

    @property
    def log(self) -> Path:
        """Its log file."""
        return RunDir(Path(self.run_dir)).log_of(self.name, self.attempt, self.start)


class Role(Protocol):
    """A shell and its life: connect, start, run until it ends or fails, stop."""

    async def handle(self, method: str, body: bytes) -> bytes: ...

    def connect(self, name: str, peer: Peer) -> None: ...

    async def start(self) -> None: ...

    async def run(self) -> None:
        """Return when the role is done by itself (the learner), or when it was stopped; raise when it failed."""
        ...

    async def stop(self) -> None: ...


def failure_of(error: BaseException, part: str) -> Failure:
    """An error as a value: the part that failed first, and the sentence."""
    if isinstance(error, RunFailed):
        return Failure("run", error.part, error.sentence)
    if isinstance(error, UserError):
        return Failure("user", part, str(error))
    fault: Literal["run", "internal"] = "run" if isinstance(error, EngineDead) else "internal"
    return Failure(fault, part, f"{part} failed: {type(error).__name__}: {error} (its log has the traceback).")


class GetFacts(Message, frozen=True):
    """Ask a role process for its metrics (those of `names` alone, if there are any) and state seconds."""

    names: list[str] = []


class Facts(Message, frozen=True):
    """A role's metric values (`Metrics.snapshot`) and seconds per state, by target name; plain JSON-like."""

    metrics: dict[str, dict[str, float]]
    states: dict[str, dict[str, float]]
    pid: int


GET_FACTS = Rpc("get_facts", GetFacts, Facts)
