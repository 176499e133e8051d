"""One request under way in vLLM: what it has sampled, what is not yet handed out, and where it stands."""

from __future__ import annotations

from collections.abc import Callable

from rollout.outbound import Outbox
from rollout.vllm.lineage import Found
from segue.ports.engine import Admission, Chunk, FinishReason, GenerateRequest


class Sequence:
    """The engine's record of a request.

    name       under which vLLM knows it; "" while it is held back here
    salt       of the KV it may read and leaves behind
    tokens     context and everything sampled so far
    kv         of so many of its tokens vLLM has KV
    running    it got a slot
    wants      it was told to end so
    finished   why it ended; None while it is under way
    given_up   nobody waits for it any more, but vLLM may not know yet
    """

    __slots__ = (
        "_admissions",
        "_given",
        "_logprobs",
        "_spans",
        "arrival",
        "finished",
        "given_up",
        "kv",
        "kv_version",
        "name",
        "out",
        "request",
        "running",
        "salt",
        "stops_text",
        "tokens",
        "wants",
    )

    def __init__(self, request: GenerateRequest, arrival: int) -> None:
        self.request = request
        self.arrival = arrival
        self.name = ""
        self.salt = ""
        self.tokens = list(request.tokens)
        self.kv = 0
        self.kv_version = request.lineage
        self.running = False
        self.wants: FinishReason | None = None
        self.finished: FinishReason | None = None
        self.given_up = False
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
        self.tokens.append(token)
        self._logprobs.append(logprob)
        spans = self._spans
        if spans and spans[-1][0] == version:
            spans[-1] = (version, spans[-1][1] + 1)
        else:
            spans.append((version, 1))
        return self.stops_text is not None and self.stops_text(self.tokens)

    def flush(self, finish: FinishReason | None = None) -> None:
        """Hand out what is pending; nothing happens if that is nothing and the sequence goes on."""
        if finish is None and not self._logprobs and not self._admissions:
            return
        chunk = Chunk(self.tokens[self._given :], self._logprobs, self._spans, self.kv_version, self._admissions, finish)
        self._given = len(self.tokens)
        self._logprobs, self._spans, self._admissions = [], [], []
        self.finished = finish
        self.out.put(chunk)
