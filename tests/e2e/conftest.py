"""Runs that several tests look at, each made once. The warm start is made once too, and cached for the next call."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from e2e_run import ROOT, segue

SMOKE = Path(os.environ.get("SEGUE_E2E_CONFIG", "configs/smoke.toml"))

LONG = ("--set", "steps=100000", "--set", "eval.tasks=0", "--set", "checkpoint.every=1", "--set", "rollout.nodes=1")
"""Overrides of a run that goes on until something ends it."""


@pytest.fixture(scope="session")
def smoke() -> Path:
    """The smoke config, its warm start in the cache."""
    if "warmstart" in (ROOT / SMOKE).read_text():
        made = segue("warmstart", SMOKE)
        assert made.wait() == 0, made.tails()
    return SMOKE
