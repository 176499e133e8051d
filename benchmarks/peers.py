"""Processes of a benchmark that are told what to do in JSON lines: one order, one answer.

consumes     answers, from each child's stdout
produces     orders, on its stdin
waits for    the answer, at most the order's `seconds`
unblocked by the answer, the end of the child, the deadline; the last two raise `RunFailed`
on cancel    `close` ends the child, which has no children of its own
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from segue.errors import RunFailed

START_SECONDS = 180.0
STOP_SECONDS = 10.0


class Peer:
    """A child that has said it is ready. `ready` is what it said then."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.ready: dict[str, Any] = {}
        self._process = process

    @classmethod
    async def start(
        cls, name: str, module: str, arguments: Sequence[str], *, prefix: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> Peer:
        """Run `python -m module arguments`, behind `prefix` ("ip netns exec …"), and wait until it is ready."""
        process = await asyncio.create_subprocess_exec(
            *prefix,
            sys.executable,
            "-m",
            module,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **(env or {})},
            limit=1 << 20,
        )
        peer = cls(name, process)
        try:
            peer.ready = await peer._answer(START_SECONDS)
        except BaseException:
            await peer.close()
            raise
        return peer

    async def ask(self, do: str, seconds: float = 120.0, **order: Any) -> dict[str, Any]:
        """Tell it to `do` something; its answer. Raises `RunFailed`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **order}).encode() + b"\n")
        return await self._answer(seconds)

    async def _answer(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise RunFailed(self.name, f"{self.name} did not answer within {seconds:g} s.") from None
        if not line:
            raise RunFailed(self.name, f"{self.name} ended (its last words are above).")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise RunFailed(self.name, f"{self.name}: {answer['failed']}")
        return answer

    async def close(self) -> None:
        """End it: it goes when its stdin closes, or it is killed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
