"""Keys of the cluster wiring and of serial mode."""

from __future__ import annotations

from pydantic import Field, field_validator

from segue.config.section import Section


class ClusterConfig(Section):
    """`[cluster]`: ports Segue may use (inclusive), where Ray keeps its files, start-up and stop deadlines."""

    ports: tuple[int, int] = (20000, 20999)
    interface: str = "127.0.0.1"
    start_seconds: float = Field(180.0, gt=0.0)
    stop_seconds: float = Field(15.0, gt=0.0)
    silence_seconds: float = Field(30.0, gt=0.0)
    object_store_bytes: int = Field(100 << 20, ge=80 << 20)

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
    prefill_seconds_per_token: float = Field(0.0001, gt=0.0)
    learner_step_seconds: float = Field(1.0, gt=0.0)
    transfer_seconds: float = Field(0.05, gt=0.0)
