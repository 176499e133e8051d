"""What any engine knows of a request under way: its tokens, what is not yet handed out, and the way to its consumer."""

from __future__ import annotations

from collections.abc import Callable

from rollout.outbound import Outbox
from segue.ports.engine import Admission, Chunk, FinishReason, GenerateRequest


class Sampled:
    """The part of an engine's record of a request that does not depend on the engine.

    tokens      context and everything sampled so far
    kv_version  of the KV that what is pending was sampled on; a chunk has one, so `flush` before it changes
    finished    why it ended; None while it is under way
    stops_text  whether the last of its tokens completes a stop string; None if the request has none
    """

    __slots__ = (
        "_admissions",
        "_given",
        "_logprobs",
        "_spans",
        "arrival",
        "finished",
        "kv_version",
        "out",
        "request",
        "stops_text",
        "tokens",
    )

    def __init__(self, request: GenerateRequest, arrival: int) -> None:
        self.request = request
        self.arrival = arrival
        self.tokens = list(request.tokens)
        self.kv_version = request.lineage
        self.finished: FinishReason | None = None
        self.stops_text: Callable[[list[int]], bool] | None = None
        self.out = Outbox()
        self._given = len(request.tokens)
        self._logprobs: list[float] = []
        self._spans: list[tuple[int, int]] = []
        self._admissions: list[Admission] = []

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: the smaller."""
        return self.request.priority, self.arrival

    @property
    def pending(self) -> int:
        """Tokens sampled and not yet handed out."""
        return len(self._logprobs)

    @property
    def unread(self) -> int:
        """Tokens sampled that the consumer has not taken, handed out or not."""
        return self.pending + self.out.unread

    def _record(self, token: int, logprob: float, version: int) -> bool:
        """Note one sampled token. Returns whether it completes a stop string."""
        self.tokens.append(token)
        self._logprobs.append(logprob)
        spans = self._spans
        if spans and spans[-1][0] == version:
            spans[-1] = (version, spans[-1][1] + 1)
        else:
            spans.append((version, 1))
        return self.stops_text is not None and self.stops_text(self.tokens)

    def flush(self, finish: FinishReason | None = None) -> None:
        """Hand out what is pending; nothing happens if that is nothing and the request goes on."""
        if finish is None and not self._logprobs and not self._admissions:
            return
        chunk = Chunk(self.tokens[self._given :], self._logprobs, self._spans, self.kv_version, self._admissions, finish)
        self._given = len(self.tokens)
        self._logprobs, self._spans, self._admissions = [], [], []
        self.finished = finish
        self.out.put(chunk)
