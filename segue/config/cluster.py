"""Keys of the cluster wiring and of serial mode."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from segue.config.cores import Cores
from segue.config.section import Section


class ClusterConfig(Section):
    """`[cluster]`: ports, addresses and deadlines of the processes, and Ray."""

    ports: tuple[int, int] = (20000, 20999)
    """Ports Segue may use, [lo, hi], both included."""
    interface: str = "127.0.0.1"
    """Address that everything listens on."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto" gives GPUs to nodes and learner ranks where there are any and `rollout.gpus`, `learner.gpus` are left at 0."""
    start_seconds: float = Field(180.0, gt=0.0)
    """Deadline of the start of all processes."""
    stop_seconds: float = Field(15.0, gt=0.0)
    """Deadline of their stop; then they are killed."""
    silence_seconds: float = Field(30.0, gt=0.0)
    """A process that does not answer for this long ends the run with a sentence."""
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
