"""Keys of the env pools."""

from __future__ import annotations

from pydantic import Field

from segue.config.cores import CoresEach
from segue.config.section import Section


class EnvPoolConfig(Section):
    """`[envpool]`: pools (one per machine), worker processes per pool, and environment instances per worker.

    A worker that holds a call past its deadline is killed with its process group; the other instances in it fail with it and
    their episodes go on from their snapshots. One instance per worker isolates them; more let cheap environments share a process.
    """

    pools: int = Field(1, ge=1)
    """Env pools, one per machine."""
    max_pools: int = Field(0, ge=0)
    """Up to how many pools there may be when hosts join a run that is under way, one on each; 0: no more than `pools`."""
    workers: int = Field(4, ge=1)
    """Worker processes per pool."""
    instances: int = Field(32, ge=1)
    """Environment instances per worker; 1 isolates them."""
    cores: CoresEach = ()
    """CPU cores of each pool and its workers, a list per pool. Left out: those of `cluster.cores`."""
    create_seconds: float = Field(30.0, gt=0.0)
    """Deadline of building an environment."""
    reset_seconds: float = Field(30.0, gt=0.0)
    """Deadline of a reset or restore."""
    step_seconds: float = Field(30.0, gt=0.0)
    """Deadline of a step."""
    close_seconds: float = Field(5.0, gt=0.0)
    """Deadline of a close."""
    snapshot_bytes: int = Field(256 << 10, ge=0)
    """Larger snapshots are not sent along; the environment is rebuilt by replay."""
    respawns_per_minute: int = Field(60, ge=1)
    """The pool gives up when more workers than this die."""

    @property
    def most(self) -> int:
        """Pools there may be at a time."""
        return max(self.pools, self.max_pools)
