"""Keys of the env pools."""

from __future__ import annotations

from pydantic import Field

from segue.config.section import Section


class EnvPoolConfig(Section):
    """`[envpool]`: pools (one per machine), worker processes per pool, and environment instances per worker.

    A worker that holds a call past its deadline is killed with its process group; the other instances in it fail with it and
    their episodes go on from their snapshots. One instance per worker isolates them; more let cheap environments share a process.
    """

    pools: int = Field(1, ge=1)
    workers: int = Field(4, ge=1)
    instances: int = Field(32, ge=1)
    create_seconds: float = Field(30.0, gt=0.0)
    reset_seconds: float = Field(30.0, gt=0.0)
    step_seconds: float = Field(30.0, gt=0.0)
    close_seconds: float = Field(5.0, gt=0.0)
    snapshot_bytes: int = Field(256 << 10, ge=0)
    respawns_per_minute: int = Field(60, ge=1)
