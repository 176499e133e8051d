"""The model and its slots: every heavy operation of the engine, plain functions on tensors. One caller at a time."""

from __future__ import annotations

from time import perf_counter
from typing import Any, NamedTuple

import torch

from rollout.embedded.cache import SLOTS, SlotCache, Step, running
from rollout.embedded.sampler import log_probabilities, sample
from rollout.embedded.sequence import Sequence
from rollout.embedded.slots import Placement
from rollout.fitting import Bindings
from segue.trajectory import NO_VERSION

PREFILL_TOKENS = 1024
"""Tokens of one prefill pass, padding included. Larger ones fall out of a CPU's caches (4096 took a third longer per token), and
longer contexts go in pieces, so that no mask grows with their square."""
PADDING_TOKENS = 64
"""A row that would add more padding than this to a prefill pass starts another: a pass costs about as much."""
SCORE_ROWS = 64
"""Positions that one pass scores: more would only hold more logits at a time."""


class Decoded(NamedTuple):
    """What a decode step gave, row by row: tokens, log-probabilities (nats); the version of the weights that gave them; and the
    seconds it took."""

    tokens: list[int]
    logprobs: list[float]
    version: int
    forward_seconds: float
    sample_seconds: float


class DecodeBatch:
    """The rows of a decode step: rows 0, 1, …, one sequence each or a hole. Lives until who is in it changes."""

    def __init__(self, rows: list[Sequence | None], trash: int, device: str) -> None:
        """`trash`: the column that takes the writes of holes."""
        self.rows = rows
        self.sequences = [s for s in rows if s is not None]
        count = len(rows)
        lengths = [0 if s is None else len(s.tokens) - 1 for s in rows]
        self.length = max(lengths) + 1
        self._steps = torch.tensor([[0 if s is None else 1] for s in rows], device=device)
        self.ids = torch.tensor([[0 if s is None else s.tokens[-1]] for s in rows], device=device)
        self.positions = torch.tensor(lengths, device=device)[:, None]
        self.columns = torch.tensor([trash if s is None else n for s, n in zip(rows, lengths, strict=True)], device=device)[
            :, None
        ]
        self.slots = torch.arange(count, device=device)
        heats = [1.0 if s is None or s.request.temperature <= 0.0 else s.request.temperature for s in rows]
        self.temperature = None if all(h == 1.0 for h in heats) else torch.tensor(heats, device=device)[:, None]
        cold = [s is not None and s.request.temperature <= 0.0 for s in rows]
        self.greedy = torch.tensor(cold, device=device) if any(cold) else None

    def uniform(self) -> torch.Tensor:
        """The noise of this step's tokens."""
        noise = [0.5 if s is None else s.noise() for s in self.rows]
        return torch.tensor(noise, dtype=torch.float64, device=self.ids.device)

    def advance(self, tokens: torch.Tensor) -> None:
        """Each sequence has one more token."""
        self.ids = tokens[:, None]
        self.positions = self.positions + self._steps
        self.columns = self.columns + self._steps
        self.length += 1


class Runner:
    """Runs one model over the slots of one cache. `version` is that of the weights in it, set when they are."""

    def __init__(self, model: Any, slots: int, max_tokens: int, device: str) -> None:
        self.model = model
        self.version = NO_VERSION
        self.vocabulary: int = model.get_input_embeddings().weight.shape[0]
        self._device = device
        self._trash = max_tokens
        self._text_config = model.config.get_text_config(decoder=True)
        self.cache = SlotCache(self._text_config, slots, max_tokens)

    def batch(self, rows: list[Sequence | None]) -> DecodeBatch:
        return DecodeBatch(rows, self._trash, self._device)

    @torch.inference_mode()
    def decode(self, batch: DecodeBatch, noise: torch.Tensor) -> Decoded:
        """One token for each row."""
        began = perf_counter()
        step = Step(batch.slots, batch.positions, batch.columns, batch.length, first=0)
        logits = self._logits(step, batch.ids, batch.positions, self.cache)
        computed = perf_counter()
        tokens, logprobs = sample(logits, batch.temperature, batch.greedy, noise)
        batch.advance(tokens)
        drawn, said = tokens.tolist(), logprobs.tolist()  # on a GPU this is where the host waits
        return Decoded(drawn, said, self.version, computed - began, perf_counter() - computed)

    def _logits(self, step: Step, ids: torch.Tensor, positions: torch.Tensor, cache: SlotCache) -> torch.Tensor:
        """Logits [N, V] after one more token of each row."""
        with running(step):
            logits: torch.Tensor = self.model(
                input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True
            ).logits[:, -1]
        return logits

    @torch.inference_mode()
    def admit(self, placements: list[Placement]) -> None:
        """Carry out a plan: copy shared prefixes and compute the rest, wave by wave."""
        for wave in range(1 + max(p.wave for p in placements)):
            here = [p for p in placements if p.wave == wave]
            for placement in here:
                if placement.cached and placement.source != placement.slot.row:
                    self.cache.copy(placement.source, placement.slot.row, placement.cached)
            self.prefill([(p.slot.row, p.cached, p.prefill) for p in here])

    @torch.inference_mode()
    def prefill(self, parts: list[tuple[int, int, list[int]]]) -> None:
        """Compute the KV of (row, first position, token ids), in as few passes as padding allows."""
        parts = [part for part in parts if part[2]]
        while parts:
            heads = [(row, start, ids[:PREFILL_TOKENS]) for row, start, ids in parts]
            parts = [
                (row, start + PREFILL_TOKENS, ids[PREFILL_TOKENS:]) for row, start, ids in parts if len(ids) > PREFILL_TOKENS
            ]
            heads.sort(key=lambda part: (-len(part[2]), part[0]))
            while heads:
                width = len(heads[0][2])
                padding, size = 0, 1
                while size < len(heads) and (size + 1) * width <= PREFILL_TOKENS:
                    padding += width - len(heads[size][2])
                    if padding > PADDING_TOKENS:
                        break
                    size += 1
                # the base model alone: nobody needs logits here
                self._pass(sorted(heads[:size]), width, self.cache, self.model.base_model)
                heads = heads[size:]

    def _pass(self, parts: list[tuple[int, int, list[int]]], width: int, cache: SlotCache, model: Any) -> Any:
        ids, positions, columns = [], [], []
        for _, start, tokens in parts:
            n, pad = len(tokens), width - len(tokens)
            ids.append(tokens + [0] * pad)
            positions.append([*range(start, start + n), *[0] * pad])
            columns.append([*range(start, start + n), *[cache.max_tokens] * pad])
        rows = [row for row, _, _ in parts]
        place = torch.tensor(positions, device=self._device)
        step = Step(
            torch.tensor(rows, device=self._device),
            place,
            torch.tensor(columns, device=self._device),
            length=max(start + len(tokens) for _, start, tokens in parts),
            first=rows[0] if rows[-1] - rows[0] + 1 == len(rows) else None,
        )
        with running(step):
            return model(
                input_ids=torch.tensor(ids, device=self._device),
                position_ids=place,
                past_key_values=cache,
                use_cache=True,
            )

    @torch.inference_mode()
    def score(self, tokens: list[int]) -> list[float]:
        """Log-probabilities of `tokens[1:]`, each given all before it, at temperature 1, in a cache of its own.

        By the passes that requests take: half of the context is prefilled (with logits, for once), and decoding feeds the rest,
        every position as a row. These rows read what prefill has stored, and what the rows before them store.
        """
        context, scored = tokens[:-1], []
        half = len(context) // 2
        cache = SlotCache(self._text_config, 1, len(context))
        starts = [*range(0, half, SCORE_ROWS), *range(half, len(context), SCORE_ROWS)]
        for start, end in zip(starts, [*starts[1:], len(context)], strict=True):
            ids, targets = context[start:end], tokens[start + 1 : end + 1]
            if start < half:
                logits = self._pass([(0, start, ids)], len(ids), cache, self.model).logits[0]
            else:
                at = torch.arange(start, end, device=self._device)[:, None]
                step = Step(torch.zeros_like(at[:, 0]), at, at, end, first=None)
                logits = self._logits(step, torch.tensor(ids, device=self._device)[:, None], at, cache)
            scored.append(log_probabilities(logits).gather(1, torch.tensor(targets, device=self._device)[:, None])[:, 0])
        result: list[float] = torch.cat(scored).tolist()
        return result

    @torch.inference_mode()
    def move(self, moves: list[tuple[int, int, int]]) -> None:
        """Exchange rows, as `SlotPolicy.compact` says."""
        for a, b, length in moves:
            self.cache.swap(a, b, length)

    @torch.inference_mode()
    def load(self, version: int, bindings: Bindings) -> None:
        """Put checked weights in."""
        self.write(bindings)
        self.version = version

    @torch.inference_mode()
    def write(self, bindings: Bindings) -> None:
        """Put some of them in; what runs is of no version before all are in."""
        for target, source in bindings:
            target.copy_(source, non_blocking=True)
        if self._device != "cpu":
            torch.cuda.synchronize(self._device)  # the staged tensors are the receiver's again when this returns

    @torch.inference_mode()
    def self_test(self) -> float:
        """How far log-probabilities through slots are from those of a plain forward pass: mean |Δ| in nats.

        Two sequences of different lengths, prefilled together and decoded for two steps, in slots that are empty afterwards.
        """
        most = self._trash
        token = [(7 * i + 3) % self.vocabulary for i in range(most)]
        texts = [token[: min(9, most)], token[1 : 1 + min(6, most)]][: self.cache.slots]
        given = [max(1, len(text) - 1) for text in texts]
        self.prefill([(row, 0, text[: n - 1]) for row, (text, n) in enumerate(zip(texts, given, strict=True))])
        worst = 0.0
        for extra in range(2):
            ends = [min(n + extra, len(text)) for n, text in zip(given, texts, strict=True)]
            at = torch.tensor([[end - 1] for end in ends], device=self._device)
            ids = torch.tensor([[text[end - 1]] for text, end in zip(texts, ends, strict=True)], device=self._device)
            step = Step(torch.arange(len(texts), device=self._device), at, at, max(ends), first=0)
            through = self._logits(step, ids, at, self.cache)
            for row, (text, end) in enumerate(zip(texts, ends, strict=True)):
                gap = torch.log_softmax(through[row].double(), -1) - torch.log_softmax(self._plain(text[:end]).double(), -1)
                worst = max(worst, float(gap.abs().mean()))
        return worst

    def _plain(self, tokens: list[int]) -> torch.Tensor:
        """Logits after `tokens` [V] by the model's own eager attention, without a cache."""
        self.model.set_attn_implementation("eager")
        try:
            logits: torch.Tensor = self.model(input_ids=torch.tensor([tokens], device=self._device), use_cache=False).logits[
                0, -1
            ]
            return logits
        finally:
            self.model.set_attn_implementation(SLOTS)
