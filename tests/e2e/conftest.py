"""The smoke config with its warm start, which is made once and cached for the next call."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

import pytest
from e2e_run import ROOT, segue

SMOKE = Path(os.environ.get("SEGUE_E2E_CONFIG", ROOT / "configs" / "smoke.toml"))


@pytest.fixture(scope="session")
def smoke() -> Path:
    """The path of the smoke config."""
    if "[warmstart]" in SMOKE.read_text():
        with open(Path(tempfile.gettempdir()) / f"segue-tests-{os.getuid()}.lock", "w") as one_at_a_time:
            fcntl.flock(one_at_a_time, fcntl.LOCK_EX)  # of the processes that share these tests, the first makes it
            made = segue("warmstart", SMOKE, within=600.0)
            assert made.wait() == 0, made.tails()
    return SMOKE
