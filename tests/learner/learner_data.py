"""Small models and hand-made trajectories for the learner's tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from learner.batches import PreparedBatch, assemble, decode_batch, judge
from segue import wire
from segue.config import Config
from segue.config.root import resolve
from segue.episode import DeltaBody, TurnRecord
from segue.ports.learner import Batch, GroupPayload, MemberPayload
from segue.trajectory import Author, Segment, TokenLog, concat, context, sampled


def tiny_lm(kind: str, seed: int = 0, vocabulary: int = 64, **extra: Any) -> PreTrainedModel:
    """A two-layer model of architecture `kind` with random weights large enough that attention matters."""
    sizes: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if kind == "gpt2":
        sizes = {"vocab_size": vocabulary, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
    torch.manual_seed(seed)
    lm: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**sizes, **extra}))
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
    return lm.eval()


def tiny_llama(seed: int = 0, vocabulary: int = 64, tied: bool = False) -> LlamaForCausalLM:
    """A two-layer Llama of 32 hidden units."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    lm = LlamaForCausalLM(config)
    return lm.eval()


def random_log(
    rng: np.random.Generator, turns: int = 2, versions: list[int] | None = None, vocabulary: int = 64, kept: bool = False
) -> TokenLog:
    """Prompt, then `turns` of a sampled action and an observation; each action's tokens cycle through `versions`."""
    versions = versions or [0]
    parts = [context([int(t) for t in rng.integers(3, vocabulary, int(rng.integers(3, 8)))], Author.USER, -1)]
    for turn in range(turns):
        n = int(rng.integers(2, 9))
        stamps = [versions[(turn + i) % len(versions)] for i in range(n)]
        tokens = [int(t) for t in rng.integers(3, vocabulary, n)]
        logprobs = [float(x) for x in -rng.uniform(0.1, 6.0, n)]
        parts.append(sampled(tokens, logprobs, stamps, [min(stamps)] * n if kept else stamps, turn))
        if turn < turns - 1 or rng.random() < 0.5:
            observation = [int(t) for t in rng.integers(3, vocabulary, int(rng.integers(1, 6)))]
            parts.append(context(observation, Author.OBSERVATION, turn))
    return concat(parts)


def member_payload(
    log: TokenLog,
    rewards: list[float],
    episode: int = 0,
    member: int = 0,
    outcome: str = "terminated",
    info: dict[str, float] | None = None,
    piece: int = 1000,
) -> MemberPayload:
    """`log` cut into deltas as a node cuts them: prompt, then per turn its action in pieces of `piece` tokens and its record."""
    deltas: list[DeltaBody] = []
    at = 0
    turns = len(rewards)
    for turn in range(-1, turns):
        for segment in [s for s in log.segments if s.turn == turn and s.author == Author.ASSISTANT]:
            for start in range(at, at + segment.length, piece):
                end = min(start + piece, at + segment.length)
                deltas.append(DeltaBody(slice_log(log, start, end, segment), action_complete=end == at + segment.length))
            at += segment.length
        rest = [s for s in log.segments if s.turn == turn and s.author != Author.ASSISTANT]
        parts = []
        for segment in rest:
            parts.append(slice_log(log, at, at + segment.length, segment))
            at += segment.length
        reward = rewards[turn] if turn >= 0 else 0.0
        record = TurnRecord(turn, reward, turn == turns - 1, False, "", 0, None, {})
        deltas.append(DeltaBody(concat(parts), record=record))
    assert at == len(log), "segments out of the order of turns"
    return MemberPayload(
        episode=episode,
        member=member,
        outcome=outcome,
        reward=float(sum(rewards)),
        deltas=[wire.encode(delta) for delta in deltas],
        seconds=1.0,
        info=info or {},
    )


def slice_log(log: TokenLog, start: int, end: int, segment: Segment) -> TokenLog:
    """Tokens `start:end`, all of one segment."""
    return TokenLog(
        tokens=log.tokens[start:end],
        mask=log.mask[start:end],
        logprobs=log.logprobs[start:end],
        versions=log.versions[start:end],
        kv_versions=log.kv_versions[start:end],
        segments=[Segment(segment.author, segment.turn, end - start)],
    )


def batch_of(
    groups: list[list[tuple[TokenLog, list[float]]]],
    step: int = 0,
    version_steps: dict[int, int] | None = None,
    temperature: float = 1.0,
    **extra: Any,
) -> Batch:
    """A batch message; members are (log, turn rewards). Episodes are numbered through."""
    payloads, episode = [], 0
    for g, members in enumerate(groups):
        found = []
        for m, (log, rewards) in enumerate(members):
            found.append(member_payload(log, rewards, episode, m, **extra))
            episode += 1
        payloads.append(GroupPayload(g + 10, f"task-{g}", len(members), temperature, found))
    return Batch(step, payloads, version_steps or {0: 0})


def random_batch(
    seed: int = 0,
    groups: int = 3,
    size: int = 3,
    step: int = 3,
    versions: tuple[int, ...] = (0, 1, 2, 3),
    temperature: float = 1.0,
) -> Batch:
    """Groups of random trajectories over several versions (version v is of step v), rewards in {0, .5, 1}."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(groups):
        members = []
        for _ in range(size):
            turns = int(rng.integers(1, 4))
            stamps = sorted(int(v) for v in rng.choice(versions, int(rng.integers(1, 3))))
            rewards = [0.0] * (turns - 1) + [float(rng.integers(0, 3)) / 2]
            members.append((random_log(rng, turns, stamps), rewards))
        made.append(members)
    return batch_of(made, step, {v: v for v in versions}, temperature)


def learner_config(**sections: Any) -> Config:
    """A resolved config; keyword arguments are its sections (`learner={…}`) or keys."""
    data: dict[str, Any] = {
        "steps": 10,
        "task": {"env": "latency"},
        "model": {"path": "m"},
        "group": {"size": 3},
        "batch": {"groups": 3},
        "learner": {"pack_tokens": 64},
    }
    return resolve({**data, **sections}, "test.toml")


def prepare_batch(batch: Batch, config: Config, rank: int = 0, world: int = 1) -> PreparedBatch:
    """What the learner's pipeline makes of a batch, in one call. Raises `BatchRefused`."""
    members, found = judge(decode_batch(batch), batch.step, batch.version_steps, config)
    return assemble(batch.step, members, found, dict(batch.version_steps), config, rank, world)
