"""vLLM takes long to start: all tests that need one share it, on one event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

if TYPE_CHECKING:
    from vllm_harness import Cores


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def cores(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cores]:
    """A running vLLM per model."""
    from vllm_harness import Cores

    cores = Cores(tmp_path_factory.mktemp("vllm"))
    yield cores
    await cores.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that kills vLLM comes after all others that use it."""
    items.sort(key=lambda item: "vllm" in item.nodeid and "dead_worker" in item.nodeid)
