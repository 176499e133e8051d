"""The contract suite against vLLM (its CPU build)."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from engine_contract import EngineContract
from engine_updates import ManyUpdates
from vllm_harness import Cores, VllmHarness

pytestmark = [
    pytest.mark.processes,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


class TestVllm(EngineContract, ManyUpdates):
    @pytest_asyncio.fixture(loop_scope="session")
    async def harness(self, cores: Cores) -> AsyncIterator[VllmHarness]:
        harness = VllmHarness(cores)
        yield harness
        await harness.close()
