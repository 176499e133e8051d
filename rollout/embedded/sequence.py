"""One request under way: what it has, and what it has sampled and not yet handed out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rollout.embedded.sampler import uniforms
from rollout.outbound import Outbox
from segue.ports.engine import Admission, Chunk, FinishReason, GenerateRequest

if TYPE_CHECKING:
    from rollout.embedded.slots import Slot


class Sequence:
    """The engine's record of a request.

    tokens      context and everything sampled so far; the last one has no KV yet while the sequence decodes
    lineage     the version whose KV it may read: the request's, then that of the KV it got
    slot        where its KV is while it decodes; None while it waits
    finished    why it ended; None while it is under way
    stops_text  whether the last of its tokens completes a stop string; None if the request has none
    """

    __slots__ = (
        "_admissions",
        "_given",
        "_limit",
        "_logprobs",
        "_noise",
        "_spans",
        "_stop_tokens",
        "arrival",
        "finished",
        "forgotten",
        "kv_version",
        "lineage",
        "out",
        "request",
        "slot",
        "stops_text",
        "tokens",
    )

    def __init__(self, request: GenerateRequest, arrival: int) -> None:
        self.request = request
        self.arrival = arrival
        self.tokens = list(request.tokens)
        self.lineage = request.lineage
        self.kv_version = request.lineage
        self.slot: Slot | None = None
        self.finished: FinishReason | None = None
        self.forgotten = False
        self.out = Outbox()
        self._limit = len(request.tokens) + request.max_tokens
        self._given = len(request.tokens)
        self._logprobs: list[float] = []
        self._spans: list[tuple[int, int]] = []
        self._admissions: list[Admission] = []
        self._stop_tokens = frozenset(request.stop_tokens)
        self.stops_text: Callable[[list[int]], bool] | None = None
        self._noise = uniforms(request.seed, request.offset, request.max_tokens) if request.temperature > 0.0 else None

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: the smaller."""
        return self.request.priority, self.arrival

    @property
    def pending(self) -> int:
        """Tokens sampled and not yet handed out."""
        return len(self._logprobs)

    def noise(self) -> float:
        """The uniform number of the next token; any number for a greedy one."""
        return 0.5 if self._noise is None else self._noise[len(self.tokens) - len(self.request.tokens)]

    def admitted(self, admission: Admission, kv_version: int) -> None:
        """It got a slot whose KV is of `kv_version`."""
        assert kv_version == self.kv_version or not self._logprobs, "a chunk has one kv_version; pauses flush"
        self._admissions.append(admission)
        self.lineage = self.kv_version = kv_version

    def append(self, token: int, logprob: float, version: int) -> FinishReason | None:
        """One sampled token, and why the sequence ends with it, if it does."""
        self.tokens.append(token)
        self._logprobs.append(logprob)
        spans = self._spans
        if spans and spans[-1][0] == version:
            spans[-1] = (version, spans[-1][1] + 1)
        else:
            spans.append((version, 1))
        if token in self._stop_tokens or (self.stops_text is not None and self.stops_text(self.tokens)):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self._limit else None

    def flush(self, finish: FinishReason | None = None) -> None:
        """Hand out what is pending; nothing happens if that is nothing and the sequence goes on."""
        if finish is None and not self._logprobs and not self._admissions:
            return
        chunk = Chunk(self.tokens[self._given :], self._logprobs, self._spans, self.kv_version, self._admissions, finish)
        self._given = len(self.tokens)
        self._logprobs, self._spans, self._admissions = [], [], []
        self.finished = finish
        self.out.put(chunk)
