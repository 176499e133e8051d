# See README.md. Every target makes the environment first if it is missing or out of date.
PY := .venv/bin/python

.PHONY: test test-fast test-full lint env
env:
	@./launch.sh --install-only

lint: env
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

test: lint
	$(PY) -m pytest -m "not full"

test-fast: env
	$(PY) -m pytest -m "not processes and not full"

test-full: lint
	$(PY) -m pytest
