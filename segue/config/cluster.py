"""Keys of the cluster wiring and of serial mode."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from segue.config.cores import Cores
from segue.config.section import Section

Role = Literal["scheduler", "learner", "rollout", "envpool"]


class ClusterConfig(Section):
    """`[cluster]`: ports, addresses and deadlines of the processes, and Ray."""

    ports: tuple[int, int] = (20000, 20999)
    """Ports Segue may use, [lo, hi], both included."""
    interface: str = "127.0.0.1"
    """Address that everything listens on."""
    ray: str = ""
    """A Ray that is there already, as KubeRay's: "auto" (the one that this machine is a node of) or its address, host:port. Roles
    go to its nodes, and it goes on when the run ends. "" starts one for the run."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto" gives GPUs to nodes and learner ranks where there are any and `rollout.gpus`, `learner.gpus` are left at 0."""
    start_seconds: float = Field(180.0, gt=0.0)
    """Deadline of the start of all processes."""
    join_seconds: float = Field(300.0, gt=0.0)
    """Deadline for all hosts of a run on several to appear, counted from the call on the first one."""
    absence_seconds: float = Field(600.0, gt=0.0)
    """How long the rollout nodes of a lost host wait for it. Then they begin on another one that has room, or stay away."""
    restarts: int = Field(5, ge=0)
    """How often in an hour one env pool or rollout node may die; then the run ends."""
    hosts: dict[Role, list[int]] = Field(default_factory=dict)
    """On several hosts: which of them (0 is the first) a role may use, for instance { envpool = [2, 3] }; else any with room."""
    stop_seconds: float = Field(15.0, gt=0.0)
    """Deadline of their stop; then they are killed."""
    silence_seconds: float = Field(30.0, gt=0.0)
    """A process that does not answer for this long ends the run with a sentence; a rollout node or env pool is started anew."""
    cores: Cores = []
    """CPU cores (`[0, 1]`) of the driver, of Ray's own processes, and of every role that names none of its own; `[]`: all. Cores
    are those of the machine that a process is on."""
    object_store_bytes: int = Field(100 << 20, ge=80 << 20)
    """Ray's object store."""
    sample_stacks: bool = False
    """Sample the stacks of each role's process, and write at its end into which functions its CPU time went:
    `RUN/profile/<role>-<rank>.json` (`segue bench profile --functions`)."""

    @field_validator("ports")
    @classmethod
    def _ordered(cls, value: tuple[int, int]) -> tuple[int, int]:
        low, high = value
        if not 1024 <= low <= high <= 65535:
            raise ValueError("must be [lo, hi] with 1024 <= lo <= hi <= 65535")
        return value

    @field_validator("ray")
    @classmethod
    def _address(cls, value: str) -> str:
        host, colon, port = value.rpartition(":")
        if (value not in ("", "auto") and not (host and colon and port.isdecimal())) or "://" in value:
            raise ValueError('must be "", "auto" or the address of Ray\'s control store, host:port')
        return value

    @field_validator("hosts")
    @classmethod
    def _some(cls, value: dict[str, list[int]]) -> dict[str, list[int]]:
        for role, ranks in value.items():
            if not ranks or min(ranks) < 0 or len(set(ranks)) < len(ranks):
                raise ValueError(f"{role} must name hosts by number, each once, for instance [0, 1]")
        return value


class SerialConfig(Section):
    """`[serial]`: logical seconds that work takes in serial mode (they shape the interleaving, not the speed)."""

    decode_seconds: float = Field(0.01, gt=0.0)
    """One decoding step of the engine."""
    prefill_seconds_per_token: float = Field(0.0001, gt=0.0)
    """Computing one context token."""
    learner_step_seconds: float = Field(1.0, gt=0.0)
    """One learner step."""
    transfer_seconds: float = Field(0.05, gt=0.0)
    """One weight transfer."""
