# See README.md. Every target makes the environment first if it is missing or out of date; vLLM (2 GB on a CPU),
# SmolLM2 and Prometheus are part of it.
PY := .venv/bin/python

# Some machines ask Python to keep no compiled modules; the tests start hundreds of processes, and reading the sources each time
# takes twice as long as what they then do.
export PYTHONDONTWRITEBYTECODE :=

# Tests that start no processes share the cores. Those that start whole runs come two files at a time: a run fills a core or two, and
# waits for its processes to start half of the time.
FAST := -m "not processes and not full" -n logical --maxprocesses 4 --dist loadfile
WHOLE := -m "processes and not full and not cluster" -n 2 --dist loadfile

.PHONY: test test-fast test-full test-cluster test-vllm lint env
env:
	@SEGUE_VLLM=1 SEGUE_SMOLLM2=1 SEGUE_PROMETHEUS=1 ./launch.sh --install-only

lint: env
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

test: lint
	$(PY) -m pytest $(FAST)
	$(PY) -m pytest $(WHOLE)

test-fast: env
	$(PY) -m pytest $(FAST)

test-full: test
	$(PY) -m pytest -m "full and not cluster"

# Hosts made of network namespaces, and a SLURM of several nodes, on this machine. As root, with Debian's iproute2, slurm-wlm and munge;
# what is missing is skipped with its reason.
test-cluster: env
	$(PY) -m pytest -m processes -rs tests/cluster/test_namespaces.py tests/cluster/test_slurm.py

# The tests that need vLLM alone.
test-vllm: env
	$(PY) -m pytest tests/rollout -k vllm
