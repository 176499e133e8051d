"""The learner's half of the probe: which tokens, and what every published version makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_data import learner_config, random_batch, tiny_lm
from learner_scheduler import Learner, on_logical_loop
from transformers import AutoModelForCausalLM

from learner.model import wrap_model
from learner.probe import draw_probe, score_probe, vocabulary_of
from segue.errors import UserError
from segue.ports.learner import Batch
from segue.ports.weights import Probe


def plain(lm: Any, tokens: list[int]) -> list[float]:
    """Log-probabilities of `tokens[1:]` by a forward pass of the model alone, token by token."""
    found = []
    with torch.no_grad():
        logits = lm(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].double()
        for at, token in enumerate(tokens[1:]):
            found.append(float(logits[at, token] - torch.logsumexp(logits[at], 0)))
    return found


# --- the tokens -----------------------------------------------------------------------------------------------------------


def test_the_probe_depends_on_the_seed_alone_and_avoids_special_tokens() -> None:
    tokens = draw_probe(100, {0, 1, 50, 99, 7000}, 64, seed=3)
    assert tokens == draw_probe(100, [99, 50, 1, 0], 64, seed=3) != draw_probe(100, {0, 1, 50, 99}, 64, seed=4)
    assert len(set(tokens)) == 64 and set(tokens) <= set(range(100)) - {0, 1, 50, 99}
    assert draw_probe(100, {0, 1, 50, 99}, 16, seed=3) == tokens[:16]


def test_a_small_vocabulary_comes_round_again() -> None:
    tokens = draw_probe(12, {0, 1}, 25, seed=0)
    assert sorted(tokens[:10]) == sorted(tokens[10:20]) == list(range(2, 12)) and len(tokens) == 25


def test_a_vocabulary_of_special_tokens_only_cannot_be_probed() -> None:
    with pytest.raises(UserError, match="probe_tokens = 0"):
        draw_probe(3, {0, 1, 2}, 64, seed=0)


WORDS = {f"w{i}": i for i in range(60)}
SPECIAL = [{"id": 58, "special": True}, {"id": 59, "special": False}, {"id": 60, "special": True}]


@pytest.mark.parametrize(
    ("tokenizer", "vocabulary", "special"),
    [
        (None, 64, {1, 2, 9}),
        ({}, 64, {1, 2, 9}),
        ({"model": {"vocab": WORDS}}, 60, {1, 2, 9}),
        ({"model": {"vocab": WORDS}, "added_tokens": SPECIAL}, 61, {1, 2, 9, 58, 60}),
        ({"model": {"vocab": [["piece", -1.5]] * 50}, "added_tokens": []}, 50, {1, 2, 9}),
        ({"model": {"vocab": {f"w{i}": i for i in range(80)}}}, 64, {1, 2, 9}),
    ],
)
def test_only_ids_that_model_and_tokenizer_know_are_used(tokenizer: Any, vocabulary: int, special: set[int]) -> None:
    """Embeddings are often padded beyond the tokenizer, and a config may name several ends."""
    model = wrap_model(tiny_lm("llama", eos_token_id=[2, 9]), "tiny")
    files = {} if tokenizer is None else {"tokenizer.json": json.dumps(tokenizer).encode()}
    assert vocabulary_of(model, files) == (vocabulary, special)


@pytest.mark.parametrize("content", [b"not json", b"[]", b'{"added_tokens": [{"id": "x", "special": true}]}', b"\xff\xfe"])
def test_a_broken_tokenizer_is_a_sentence(content: bytes) -> None:
    model = wrap_model(tiny_lm("llama"), "tiny")
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be read"):
        vocabulary_of(model, {"tokenizer.json": content})


# --- the log-probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "extra"), [("llama", {}), ("llama", {"tie_word_embeddings": True}), ("gpt2", {}), ("cohere", {"logit_scale": 0.3})]
)
def test_scores_are_those_of_a_plain_forward_pass(kind: str, extra: dict[str, Any]) -> None:
    lm = tiny_lm(kind, seed=4, **extra)
    tokens = draw_probe(64, {1, 2}, 40, seed=0)
    expected = plain(lm, tokens)
    model = wrap_model(lm, kind, chunk_tokens=16)
    probe = score_probe(model, tokens)
    assert probe.tokens == tokens and probe.logprobs == pytest.approx(expected, abs=2e-5, rel=0)


# --- through the shell ----------------------------------------------------------------------------------------------------


def batch_of_step(step: int) -> Batch:
    return random_batch(seed=step, step=step, versions=(max(0, step - 1), step))


def published(folder: Path, learner: Learner) -> dict[int, Probe]:
    """The probes by step, each checked against a model that has exactly the tensors published with it."""
    probes = {}
    for step, probe in learner.sender.probes.items():
        assert probe is not None
        lm = AutoModelForCausalLM.from_pretrained(folder).eval()
        lm.load_state_dict(learner.sender.published[step])
        assert probe.logprobs == pytest.approx(plain(lm, probe.tokens), abs=2e-5, rel=0), step
        probes[step] = probe
    return probes


def run(run_dir: Path, model: Path, resume: Path | None = None, **keys: Any) -> Learner:
    async def work() -> Learner:
        given = {"lr": 0.01, "pack_tokens": 64, "minibatches": 2}
        config = learner_config(steps=4, checkpoint={"every": 2}, learner=given, **keys)
        learner = Learner(run_dir, model, batch_of_step, config, resume)
        learner.scheduler.trained = 2 if resume else 0
        await learner.run()
        return learner

    return on_logical_loop(work)


@pytest.mark.parametrize("tied", [False, True])
def test_every_version_is_published_with_what_it_makes_of_one_and_the_same_probe(tmp_path: Path, tied: bool) -> None:
    folder = tmp_path / "model"
    tiny_lm("llama", seed=1, tie_word_embeddings=tied).save_pretrained(folder)
    probes = published(folder, run(tmp_path / "run", folder))
    assert sorted(probes) == [0, 1, 2, 3, 4]
    assert len({tuple(p.tokens) for p in probes.values()}) == 1 and len(probes[0].tokens) == 64
    assert not {1, 2} & set(probes[0].tokens)
    for before, after in zip(range(4), range(1, 5), strict=True):
        moved = max(abs(a - b) for a, b in zip(probes[before].logprobs, probes[after].logprobs, strict=True))
        assert moved > 0.01, "a step that changes the weights shows"
    again = published(folder, run(tmp_path / "again", folder, tmp_path / "run" / "checkpoints" / "step_2"))
    assert sorted(again) == [2, 3, 4] and again[2] == probes[2], "a resumed run goes on with its probe"


def test_length_and_seed_are_the_configs(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_lm("llama", seed=1).save_pretrained(folder)
    short, other = (run(tmp_path / str(seed), folder, weightsync={"probe_tokens": 5}, seed=seed) for seed in (0, 1))
    first, second = (published(folder, learner)[0].tokens for learner in (short, other))
    assert len(first) == len(second) == 5 and first != second


def test_without_a_probe_none_is_scored_or_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    tiny_lm("llama", seed=1).save_pretrained(folder)
    monkeypatch.setattr("learner.shell.score_probe", None)
    learner = run(tmp_path / "run", folder, weightsync={"probe_tokens": 0})
    assert learner.sender.probes == dict.fromkeys(range(5))
