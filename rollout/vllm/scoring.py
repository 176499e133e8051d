"""One sequence scored by vLLM: log-probabilities of tokens that are given, computed as those of requests are.

All but the last few are a prompt whose log-probabilities vLLM tells: its prefill. The last few are "sampled", each being forced
to be the given one: its decoding. Prompts whose log-probabilities are asked for read no cached KV, and nobody has their salt.
"""

from __future__ import annotations

import asyncio

from rollout.vllm.core import Core, Output, arrival_time, sampling

DECODED = 4
"""So many tokens at the end go the way of decoding."""


class Scoring:
    """See the module. `name` is used once."""

    def __init__(self, tokens: list[int], name: str) -> None:
        given = max(1, len(tokens) - DECODED)
        self._prompt, self._forced = tokens[:given], tokens[given:]
        self._name = name
        self._of_prompt: list[float] = []
        self._of_forced: list[float] = []
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(self, output: Output) -> None:
        """An output of its request."""
        if output.request != self._name:
            return
        if output.scored is not None:
            self._of_prompt += output.scored
        self._of_forced += output.logprobs
        if output.finish and not self._done.done():
            self._done.set_result(None)

    async def run(self, core: Core) -> list[float]:
        """The log-probabilities of all tokens but the first; waits until vLLM is done, so the caller sets a deadline."""
        params = sampling(
            max_tokens=len(self._forced),
            temperature=1.0,
            extra={"force": self._forced},
            score_prompt=len(self._prompt) > 1,
        )
        await core.submit(self._name, self._prompt, params, salt=self._name, priority=0, arrival=arrival_time())
        await self._done
        scored = self._of_prompt + self._of_forced
        expected = len(self._prompt) - 1 + len(self._forced)
        assert len(scored) == expected, f"vLLM gave {len(scored)} log-probabilities of a sequence that has {expected}"
        return scored
