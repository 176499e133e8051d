"""A deadline on hearing from somebody, on a logical clock."""

from __future__ import annotations

import asyncio

from node_world import run

from rollout.vllm.silence import Silence


def test_only_silence_while_something_is_expected_is_late() -> None:
    async def main() -> list[float]:
        late: list[float] = []
        loop = asyncio.get_running_loop()
        silence = Silence(10.0, lambda: late.append(loop.time()))
        await asyncio.sleep(50.0)
        silence.expect(True)
        for _ in range(5):
            await asyncio.sleep(9.0)
            silence.heard()
        silence.expect(False)
        await asyncio.sleep(50.0)
        assert late == []
        silence.expect(True)
        await asyncio.sleep(4.0)
        silence.heard()
        await asyncio.sleep(50.0)
        silence.rest()
        return late

    assert run(main()) == [159.0]
