"""The inference engine as the rollout node sees it: token ids in, chunks of token ids with log-probabilities and versions out.

One owner drives pause, load and resume (the node's update procedure, one at a time). Every method is called on the node's
event loop; none blocks it. One contract test suite (tests/rollout/engine_contract.py) runs against every engine.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec

if TYPE_CHECKING:
    from segue.ports.weights import ArrivingWeights, StagedWeights


class FinishReason(enum.StrEnum):
    """Why a request ended. PAUSED: the engine paused and gave back what it had; ABORTED: `abort` was called."""

    STOP = "stop"
    LENGTH = "length"
    PAUSED = "paused"
    ABORTED = "aborted"


class PauseMode(enum.StrEnum):
    """What a pause does with requests in flight.

    ABORT ends them with all tokens so far (PAUSED); FREEZE keeps them, to go on with the KV they have after `resume`.
    """

    ABORT = "abort"
    FREEZE = "freeze"


class GenerateRequest(msgspec.Struct, frozen=True):
    """One action to be sampled.

    tokens        the whole context, ids; at least one
    max_tokens    at most this many new tokens, at least 1
    temperature   0 is greedy (log-probabilities are then those at temperature 1)
    stop_tokens   ids that end the turn; the one that did is kept, with its log-probability
    stop_strings  texts that end the turn with the token that completes one; all tokens are kept
    seed          of this episode's sampling; together with `offset` (tokens of the episode sampled before) it fixes the noise
    priority      lower runs first; a request may displace the KV of one with a higher number
    episode       keeps its KV between turns under this key; `group` may share a common prefix
    lineage       the weight version whose KV may be read; KV of any other version is never used for this request
    """

    id: str
    tokens: list[int]
    max_tokens: int
    temperature: float
    stop_tokens: tuple[int, ...]
    stop_strings: tuple[str, ...]
    seed: int
    offset: int
    priority: int
    episode: int
    group: int
    lineage: int


class Admission(msgspec.Struct, frozen=True):
    """One time a request got (or got back) a slot: its context then, split into `cached` and `prefilled` tokens.

    `context` = `cached` + `prefilled`. `lost` says why KV that this episode had on this engine was gone, as far as the
    engine knows: "" (nothing lost), "preemption", "eviction", "weight_update". `block` of the prefilled tokens are the tail
    of a cached prefix that did not fill a whole block. A request of n tokens has a context of n − 1: its last token, fed to
    sample the first new one, counts as decoded.
    """

    context: int
    cached: int
    prefilled: int
    lost: str = ""
    block: int = 0


class Chunk(msgspec.Struct, frozen=True):
    """Newly sampled tokens of one request, in order; a chunk may straddle an update.

    `spans` is `[(version, n)]` over `tokens`, from the engine's own record at each step; `kv_version` is the version of the KV
    lineage they were sampled on. `admissions` are those since the last chunk. `finish` is set in the last chunk only.
    """

    tokens: list[int]
    logprobs: list[float]
    spans: list[tuple[int, int]]
    kv_version: int
    admissions: list[Admission] = []
    finish: FinishReason | None = None


class EngineCounts(msgspec.Struct, frozen=True):
    """Totals since start. `prefill_tokens` is the engine's own count of context tokens it computed outside decoding.

    `scored_tokens` are those that `score` was asked about; they are in none of the other token counts. `discarded_tokens` are in
    `decode_tokens` and reached nobody: sampled beyond a stop string, or for a consumer that was gone. `unclaimed_tokens` of the
    prefilled ones are in no chunk: they were computed for a request after its last chunk, before it was gone from the engine.
    `phases` are seconds by `segue.metrics.vocabulary.ENGINE_PHASES`, where an engine measures them.
    """

    prefill_tokens: int
    cached_tokens: int
    decode_tokens: int
    prefill_seconds: float
    decode_seconds: float
    busy_seconds: float
    running: int
    waiting: int
    preemptions: int
    evictions: int
    scored_tokens: int = 0
    discarded_tokens: int = 0
    unclaimed_tokens: int = 0
    phases: dict[str, float] = {}


class EngineDead(Exception):
    """The engine is gone; every open request raises this."""


class Engine(Protocol):
    """See the module's docstring. `generate` is cancelled by closing its iterator, which frees what the request held."""

    @property
    def version(self) -> int:
        """The version of the weights in the engine; `NO_VERSION` before the first load."""
        ...

    async def start(self) -> None: ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]: ...

    async def abort(self, request_id: str) -> bool:
        """End a request with all tokens so far (ABORTED). False if the engine does not know the id."""
        ...

    async def pause(self, mode: PauseMode, epoch: int) -> None:
        """Return when the engine is idle and every output is delivered. Requests that arrive meanwhile wait for `resume`.

        Idempotent per epoch; an epoch older than the newest seen is ignored.
        """
        ...

    async def load(self, version: int, weights: StagedWeights) -> None:
        """Swap weights while paused. KV of older versions is not read again except by requests of that lineage.

        Raises `ValueError` before anything changes when names or shapes do not fit.
        """
        ...

    async def score(self, tokens: list[int]) -> list[float]:
        """Log-probabilities (nats, temperature 1) of each of `tokens[1:]` given all before it, under the weights in the engine.

        Computed as requests are: by the engine's own prefill, attention and decoding, on fresh KV that nothing else reads. KV of
        requests is not touched. Only while paused, once weights were loaded. Raises `ValueError` for a sequence that the engine
        cannot hold, or of fewer than 2 tokens.
        """
        ...

    async def resume(self, epoch: int) -> None: ...

    def forget(self, episode: int) -> None:
        """The episode left this engine: its KV may go at once."""
        ...

    def counts(self) -> EngineCounts: ...

    async def stop(self) -> None: ...


@runtime_checkable
class StreamingEngine(Engine, Protocol):
    """An engine that can do without a second copy of the weights (`weightsync.staging` = "none")."""

    async def load_arriving(self, weights: ArrivingWeights) -> None:
        """As `load`, bucket by bucket as they arrive.

        Raises `ValueError` before anything changes when names or shapes do not fit. Once the first bucket is in, any failure,
        of the transfer too, ends the engine (`EngineDead`): its weights are a mixture. Before that they are the old ones,
        whatever else is raised.
        """
        ...
