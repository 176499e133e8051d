"""Environments: the contract, worker processes, the pool, task suites (docs/design.md §6)."""
