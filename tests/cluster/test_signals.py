"""SIGTERM to a whole job: who does not hear it, and who does again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from segue.cluster.processes import sigterm_blocked

pytestmark = pytest.mark.processes
SECONDS = 30.0

SLEEPER = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
ROLE = """
import subprocess, sys
from segue.cluster.processes import survive_sigterm, unblock_sigterm
survive_sigterm()
unblock_sigterm()
print(flush=True)
sys.stdin.readline()
child = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"], stdout=subprocess.PIPE)
child.stdout.readline()
child.terminate()
print(child.wait(), flush=True)
"""


def start(*command: str) -> subprocess.Popen[str]:
    """A process that is up: it has printed a line."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_what_starts_while_it_is_blocked_does_not_hear_it_and_what_starts_later_does() -> None:
    with sigterm_blocked():
        deaf = start(*SLEEPER)
    hears = start(*SLEEPER)
    for process in (deaf, hears):
        process.terminate()
    assert hears.wait(SECONDS) == -signal.SIGTERM
    deaf.communicate("", SECONDS)
    assert deaf.returncode == 0, "it went on until it was done"


def test_a_role_survives_it_and_can_end_its_children_by_it() -> None:
    with sigterm_blocked():
        role = start(sys.executable, "-c", ROLE)
    os.kill(role.pid, signal.SIGTERM)
    said, _ = role.communicate("go on\n", SECONDS)
    assert (role.returncode, said.split()) == (0, [str(-signal.SIGTERM)])
