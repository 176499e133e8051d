"""What holds for every test."""

import logging
import os
import signal
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two threads beside another busy process are far slower

import pytest
from hypothesis import HealthCheck, settings

# A slow machine is no failure: no deadline per example, and no health check of how fast examples come.
settings.register_profile("segue", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("segue")

# Tests send these to themselves and to what they start; a command in the background of a shell, or under nohup, ignores them, and
# so would whatever it starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


_LEVEL = logging.getLogger().level


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """Virtual time logs only what is wrong, from its first run in a process on; other tests read more.

    Put right before each test too: a fixture of a whole module may have run virtual time before its first test.
    """
    logging.getLogger().setLevel(_LEVEL)
    yield
    logging.getLogger().setLevel(_LEVEL)
