"""One request under way: what it has, where its KV is, and when it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.embedded.sampler import stream_of, uniform
from rollout.sampled import Sampled
from segue.ports.engine import Admission, FinishReason, GenerateRequest

if TYPE_CHECKING:
    from rollout.embedded.slots import Slot


class Sequence(Sampled):
    """The engine's record of a request. The last of its tokens has no KV yet while it decodes.

    lineage     the version whose KV it may read: the request's, then that of the KV it got
    slot        where its KV is while it decodes; None while it waits
    """

    __slots__ = ("_limit", "_stop_tokens", "_stream", "forgotten", "lineage", "slot")

    def __init__(self, request: GenerateRequest, arrival: int) -> None:
        super().__init__(request, arrival)
        self.lineage = request.lineage
        self.slot: Slot | None = None
        self.forgotten = False
        self._limit = len(request.tokens) + request.max_tokens
        self._stop_tokens = frozenset(request.stop_tokens)
        self._stream = stream_of(request.seed) if request.temperature > 0.0 else None

    def noise(self) -> float:
        """The uniform number of the next token; any number for a greedy one."""
        if self._stream is None:
            return 0.5
        request = self.request
        return uniform(self._stream, request.offset + len(self.tokens) - len(request.tokens))

    def admitted(self, admission: Admission, kv_version: int) -> None:
        """It got a slot whose KV is of `kv_version`."""
        assert kv_version == self.kv_version or not self._logprobs, "a chunk has one kv_version; pauses flush"
        self._admissions.append(admission)
        self.lineage = self.kv_version = kv_version

    def append(self, token: int, logprob: float, version: int) -> FinishReason | None:
        """One sampled token, and why the sequence ends with it, if it does."""
        if self._record(token, logprob, version) or token in self._stop_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self._limit else None
