"""The smoke config with its warm start, which is made once and cached for the next call."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from e2e_run import ROOT, segue

SMOKE = Path(os.environ.get("SEGUE_E2E_CONFIG", ROOT / "configs" / "smoke.toml"))


@pytest.fixture(scope="session")
def smoke() -> Path:
    """The path of the smoke config."""
    if "[warmstart]" in SMOKE.read_text():
        made = segue("warmstart", SMOKE, within=600.0)
        assert made.wait() == 0, made.tails()
    return SMOKE
