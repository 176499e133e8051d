"""The contract suite against vLLM (its CPU build), one vLLM per model for the whole module."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from engine_contract import EngineContract
from vllm_harness import Cores, VllmHarness

pytestmark = [
    pytest.mark.processes,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cores(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cores]:
    cores = Cores(tmp_path_factory.mktemp("vllm"))
    yield cores
    await cores.close()


class TestVllm(EngineContract):
    @pytest_asyncio.fixture(loop_scope="module")
    async def harness(self, cores: Cores) -> AsyncIterator[VllmHarness]:
        harness = VllmHarness(cores)
        yield harness
        await harness.close()

    async def test_a_dead_worker_fails_every_request(
        self, harness: VllmHarness
    ) -> None:  # after all others: nothing is left of it
        await super().test_a_dead_worker_fails_every_request(harness)
