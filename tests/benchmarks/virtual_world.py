"""A small virtual world for tests: seconds of work, a few hundred turns."""

from __future__ import annotations

from typing import Any

from benchmarks.virtual.scenario import World, build_world, merged

SMALL: dict[str, Any] = {
    "name": "small",
    "config": {
        "mode": "async",
        "steps": 6,
        "group": {"size": 4},
        "batch": {"groups": 2},
        "staleness": {"max_age": 2},
        "rollout": {
            "nodes": 3,
            "slots": 4,
            "max_episodes": 8,
            "max_turns": 20,
            "max_tokens": 2000,
            "max_turn_tokens": 100,
            "wall_seconds": 3000.0,
        },
        "envpool": {"step_seconds": 60.0},
    },
    "engine": {
        "decode_seconds": 0.05,
        "decode_seconds_per_request": 0.002,
        "decode_seconds_per_kv_token": 1e-6,
        "prefill_seconds_per_token": 1e-4,
        "kv_tokens": 6000,
        "swap_seconds": 0.5,
    },
    "env": {"step_seconds": {"kind": "lognormal", "mean": 3.0, "spread": 1.0, "high": 40.0}, "reset_seconds": {"mean": 0.5}},
    "workload": {
        "turns": {"kind": "lognormal", "mean": 4.0, "spread": 0.7, "low": 1.0, "high": 20.0},
        "prompt_tokens": {"mean": 120.0},
        "action_tokens": {"kind": "lognormal", "mean": 40.0, "spread": 0.6, "group_share": 0.3},
        "observation_tokens": {"mean": 30.0},
    },
    "learner": {"step_seconds": 4.0, "seconds_per_token": 1e-4, "gather_seconds": 0.5},
    "weights": {"seconds": 1.0},
}

TINY: dict[str, Any] = merged(
    SMALL,
    {
        "about": "for a test",
        "assumptions": ["A <small> world."],
        "config": {
            "steps": 10,
            "envpool": {"step_seconds": 3600.0},
            "rollout": {"nodes": 1, "slots": 8, "max_turns": 60, "max_tokens": 6000},
        },
        "engine": {"kv_tokens": 20000},
        "workload": {"turns": {"high": 60.0}},
    },
)
"""For a whole sweep: long enough for the window of its arms, and for a point of several times the mean."""


def small(**tables: Any) -> World:
    """The small world with some tables laid over, for instance `config={"mode": "sync"}`."""
    return build_world(merged(SMALL, tables), "the test's scenario")
