"""The other side of a ceiling: engines that record turns and repeat them at next to no cost, and a trainer that is a sink.

    learner.trainer = "benchmarks.recorded:Sink"    takes every batch at once, and publishes nothing
    rollout.engine = "benchmarks.recorded:record"   the embedded engine; writes FOLDER/NODE.turns at its end
    rollout.engine = "benchmarks.recorded:replay"   those turns again; says in FOLDER/NODE.repeated how many it did not know
    rollout.engine_args = {folder = "FOLDER"}

A turn is told by the seed of its episode's sampling and by the tokens sampled before it, which two runs of one seed share: an
episode repeats what it did. One that was not recorded repeats any turn, in order of recording. Roles know nothing of this module;
a config names it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec

from learner.batches import PreparedBatch
from learner.diagnostics import token_diagnostics
from learner.trainer import StepStats, Trainer
from rollout.embedded import EmbeddedEngine
from rollout.embedded.settings import settings
from rollout.pauses import Pauses
from segue.clock import Compute
from segue.config import Config
from segue.errors import RunFailed
from segue.ports.engine import Admission, Chunk, EngineCounts, FinishReason, GenerateRequest, PauseMode
from segue.ports.weights import StagedWeights
from segue.trajectory import NO_VERSION

SUFFIX = ".turns"
REPEATED = ".repeated"


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """What was sampled from `offset` on in the episode with this sampling seed, log-probabilities in nats, to the turn's end."""

    seed: int
    offset: int
    tokens: list[int]
    logprobs: list[float]
    finish: FinishReason


class Repeated(msgspec.Struct, frozen=True):
    """What a node that repeats gave: turns, and how many of them were not the episode's own."""

    turns: int
    unknown: int


def load_turns(folder: Path) -> list[Turn]:
    """All turns that the nodes of a run recorded. Raises `RunFailed` without one."""
    decoder = msgspec.msgpack.Decoder(list[Turn])
    turns = [turn for file in sorted(folder.glob(f"*{SUFFIX}")) for turn in decoder.decode(file.read_bytes())]
    if not turns:
        raise RunFailed("rollout", f"No turn was recorded in {folder}: the run before this one generated nothing.")
    return turns


def unknown_share(folder: Path) -> float:
    """Of the turns that the nodes of a run repeated, those that were not recorded: any other was given for them."""
    told = [msgspec.json.decode(file.read_bytes(), type=Repeated) for file in folder.glob(f"*{REPEATED}")]
    turns = sum(one.turns for one in told)
    return sum(one.unknown for one in told) / turns if turns else 0.0


# --- recording --------------------------------------------------------------------------------------------------------------


class RecordingEngine(EmbeddedEngine):
    """The embedded engine; writes the turns that it sampled whole when it is stopped."""

    def __init__(self, *arguments: Any, file: Path, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._file = file
        self._recorded: list[Turn] = []

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        tokens: list[int] = []
        logprobs: list[float] = []
        async with aclosing(super().generate(request)) as chunks:  # type: ignore[type-var]  # the port says iterator; it is a generator
            async for chunk in chunks:
                tokens += chunk.tokens
                logprobs += chunk.logprobs
                if chunk.finish in (FinishReason.STOP, FinishReason.LENGTH):
                    self._recorded.append(Turn(request.seed, request.offset, tokens, logprobs, chunk.finish))
                yield chunk

    async def stop(self) -> None:
        await super().stop()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_bytes(msgspec.msgpack.encode(self._recorded))


def record(
    config: Config, *, node: str, model_path: str, device: str, compute: Compute, tokenizer: Any, folder: Path | None = None
) -> RecordingEngine:
    """See the module."""
    return RecordingEngine(
        model_path,
        device=device,
        compute=compute,
        tokenizer=tokenizer,
        file=(folder or Path(config.rollout.engine_args["folder"])) / f"{node}{SUFFIX}",
        **settings(config),
    )


# --- repeating --------------------------------------------------------------------------------------------------------------


class ReplayEngine:
    """`segue.ports.engine.Engine` without a model: a request is answered at once, with a whole turn in one chunk.

    Stamps are true: tokens carry the version that is loaded. KV is counted as an engine would that keeps all of it until the next
    weights. It passes the probe with the learner's own answer, so that the learner is not spared that work.
    """

    def __init__(self, turns: Sequence[Turn], told: Path | None = None) -> None:
        """`told`: the file that says at the end what was given."""
        self._told = told
        self._turns = {(turn.seed, turn.offset): turn for turn in turns}
        self._any = itertools.cycle(turns)
        self._version = NO_VERSION
        self._pauses = Pauses()
        self._open = asyncio.Event()
        self._probe: list[float] = []
        self._kv: dict[int, tuple[int, int]] = {}
        self._prefilled = self._cached = self._decoded = self._scored = 0
        self.given = self.unknown = 0

    @property
    def version(self) -> int:
        return self._version

    async def start(self) -> None:
        self._open.set()

    async def stop(self) -> None:
        self._open.set()
        if self._told is not None:
            self._told.write_bytes(msgspec.json.encode(Repeated(self.given, self.unknown)))

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        while self._pauses.paused:
            await self._open.wait()
        self.given += 1
        turn = self._turns.get((request.seed, request.offset))
        if turn is None:
            self.unknown += 1
            turn = next(self._any)
        tokens = turn.tokens[: request.max_tokens]
        finish = turn.finish if len(tokens) == len(turn.tokens) else FinishReason.LENGTH
        yield Chunk(
            tokens=tokens,
            logprobs=turn.logprobs[: len(tokens)],
            spans=[(self._version, len(tokens))],
            kv_version=self._version,
            admissions=[self._admit(request, len(tokens))],
            finish=finish,
        )

    def _admit(self, request: GenerateRequest, sampled: int) -> Admission:
        context = len(request.tokens) - 1
        version, length = self._kv.get(request.episode, (NO_VERSION, 0))
        cached = min(length, context) if version == self._version else 0
        self._kv[request.episode] = (self._version, context + sampled)
        self._cached += cached
        self._prefilled += context - cached
        self._decoded += sampled
        return Admission(context, cached, context - cached, "weight_update" if length and version != self._version else "")

    async def abort(self, request_id: str) -> bool:
        """Nothing is ever under way."""
        return False

    async def pause(self, mode: PauseMode, epoch: int) -> None:
        if self._pauses.counts(epoch):
            self._pauses.pause(mode, epoch)
            self._open.clear()

    async def load(self, version: int, weights: StagedWeights) -> None:
        probe = weights.manifest.probe
        self._probe = list(probe.logprobs) if probe is not None else []
        self._version = version

    async def score(self, tokens: list[int]) -> list[float]:
        self._scored += len(tokens)
        return self._probe

    async def resume(self, epoch: int) -> None:
        if self._pauses.counts(epoch):
            self._pauses.resume(epoch)
            self._open.set()

    def forget(self, episode: int) -> None:
        self._kv.pop(episode, None)

    def counts(self) -> EngineCounts:
        return EngineCounts(
            prefill_tokens=self._prefilled,
            cached_tokens=self._cached,
            decode_tokens=self._decoded,
            prefill_seconds=0.0,
            decode_seconds=0.0,
            busy_seconds=0.0,
            running=0,
            waiting=0,
            preemptions=0,
            evictions=0,
            scored_tokens=self._scored,
        )


def replay(config: Config, *, node: str, **_: Any) -> ReplayEngine:
    """See the module."""
    folder = Path(config.rollout.engine_args["folder"])
    return ReplayEngine(load_turns(folder), folder / f"{node}{REPEATED}")


# --- a sink -----------------------------------------------------------------------------------------------------------------


class Sink(Trainer):
    """Takes a batch and computes nothing; the weights stay what they were, so that none are published."""

    def train(self, batch: PreparedBatch, version: int | None = None, enter: Callable[[str], None] | None = None) -> StepStats:
        assert batch.step == self.step, f"the batch of step {batch.step} came at step {self.step}"
        self.step += 1
        stats = {**batch.stats, **token_diagnostics([]), "loss": 0.0, "grad_norm": 0.0}
        return StepStats(batch.step, stats, batch.ages, {}, updated=False)
