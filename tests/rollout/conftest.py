"""pytest looks for fixtures here; they are in a module that mypy can tell from the other conftest.py."""

from vllm_fixtures import cores, pytest_collection_modifyitems

__all__ = ["cores", "pytest_collection_modifyitems"]
