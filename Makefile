# See README.md. Every target makes the environment first if it is missing or out of date.
PY := .venv/bin/python

# Tests that start no processes share the cores; those that start whole runs come one after the other, since a run fills the machine.
FAST := -m "not processes and not full" -n logical --maxprocesses 4 --dist loadfile

.PHONY: test test-fast test-full test-vllm lint env
env:
	@./launch.sh --install-only

lint: env
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

test: lint
	$(PY) -m pytest $(FAST)
	$(PY) -m pytest -m "processes and not full"

test-fast: env
	$(PY) -m pytest $(FAST)

test-full: test
	$(PY) -m pytest -m full

# The tests that need vLLM; where it is installed, the other targets run them too, else they are skipped. Its CPU build takes 2 GB.
test-vllm:
	@SEGUE_VLLM=1 ./launch.sh --install-only
	$(PY) -m pytest tests/rollout -k vllm
