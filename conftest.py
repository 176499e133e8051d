"""One thread per process in tests: two intra-op threads beside another busy process are many times slower than one."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports torch
