"""One request under way in vLLM: under which name, on which KV, and where it stands."""

from __future__ import annotations

from rollout.sampled import Sampled
from rollout.vllm.lineage import Found
from segue.ports.engine import FinishReason, GenerateRequest


class Sequence(Sampled):
    """The engine's record of a request.

    name       under which vLLM knows it; "" while it is held back here
    salt       of the KV it may read and leaves behind
    kv         of so many of its tokens vLLM has KV
    running    it got a slot
    wants      it was told to end so
    given_up   nobody waits for it any more, but vLLM may not know yet
    """

    __slots__ = ("given_up", "kv", "name", "running", "salt", "wants")

    def __init__(self, request: GenerateRequest, arrival: int) -> None:
        super().__init__(request, arrival)
        self.name = ""
        self.salt = ""
        self.kv = 0
        self.running = False
        self.wants: FinishReason | None = None
        self.given_up = False

    def admitted(self, found: Found) -> None:
        """It got a slot, and its context is there."""
        if found.kv_version != self.kv_version:
            self.flush()  # a chunk has one kv_version
        self.running = True
        self.kv = found.admission.context
        self.kv_version = found.kv_version
        self._admissions.append(found.admission)

    def append(self, token: int, logprob: float, version: int) -> bool:
        """One sampled token. Returns whether it completes a stop string."""
        self.kv = len(self.tokens)  # all before it were fed
        return self._record(token, logprob, version)
