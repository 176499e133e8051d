"""What holds for every test."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two threads beside another busy process are far slower

from hypothesis import HealthCheck, settings

# A slow machine is no failure: no deadline per example, and no health check of how fast examples come.
settings.register_profile("segue", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("segue")
