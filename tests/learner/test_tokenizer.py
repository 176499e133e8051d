"""The word-level tokenizer: texts of the suite come back exactly, names and tags are one token, nothing in data is special."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from envpool.suites import load_suite
from learner.tokenizer import END, PAD, ROLES, SPECIAL, UNKNOWN, build_tokenizer
from rollout.chat import ChatRenderer
from segue.errors import UserError
from segue.ports.envpool import ChatMessage

WORDS = ["<search>", "</search>", "<information>", "</information>", "france", "area", "of", "plus", "tag", "not", "closed", "é"]


@cache
def small() -> Any:
    return build_tokenizer(WORDS)


@cache
def suite() -> Any:
    return load_suite("search_qa", {"operations": ["plus", "minus", "times"], "top": 2, "instructions": True})


@cache
def whole() -> Any:
    return build_tokenizer(suite().vocabulary())


def encode(tokenizer: Any, text: str) -> list[int]:
    """As data: what a renderer does with the text of a message."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    return ids


def pieces(text: str) -> list[str]:
    tokens: list[str] = small().convert_ids_to_tokens(encode(small(), text))
    return tokens


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<search>france area</search>", ["<search>", "france", "area", "</search>"]),
        ("area of france plus area", ["area", "of", "france", "plus", "area"]),
        ("547+26", ["5", "4", "7", "+", "2", "6"]),
        ("france area 547; of 5", ["france", "area", "5", "4", "7", ";", "▁", "of", "5"]),
        ("54 7", ["5", "4", "▁", "7"]),
        ("5 + 4", ["5", "▁", "+", "▁", "4"]),
        ("-1; 0.5", ["-", "1", ";", "▁", "0", ".", "5"]),
        ("tag not closed: <search>", ["tag", "not", "closed", ":", "▁", "<search>"]),
        (" of  plus ", ["▁", "of", "▁", "▁", "plus", "▁"]),
        ("france5", [UNKNOWN]),
        ("", []),
    ],
)
def test_words_digits_marks_and_spaces(text: str, expected: list[str]) -> None:
    assert pieces(text) == expected
    if UNKNOWN not in expected:
        assert small().decode(encode(small(), text)) == text


@given(st.lists(st.sampled_from([*WORDS, *"0123456789+-*/.,:;?<>()=", " ", "  ", "\n"]), max_size=30), st.randoms())
@settings(max_examples=300, deadline=None)
def test_any_text_in_known_words_comes_back(parts: list[str], rng: random.Random) -> None:
    """Words are kept apart, else two would be an unknown third, and from what would make markers of them; all else may touch."""
    text = ""
    for part in parts:
        glued = text and (text[-1].isalnum() and part[0].isalnum()) and not (text[-1].isdigit() and part[0].isdigit())
        marker = text.endswith(("<", "</")) and part[0].isalnum()
        text += (" " if glued or marker else "") + part
    assert UNKNOWN not in pieces(text)
    assert small().decode(encode(small(), text)) == text


def test_everything_that_is_read_or_written_in_the_suite_comes_back() -> None:
    n = 0
    for text in suite().texts():
        ids = encode(whole(), text)
        assert whole().unk_token_id not in ids, text
        assert whole().decode(ids) == text
        n += 1
    assert n > 1000


def test_played_episodes_come_back_action_by_action() -> None:
    rng = random.Random(0)
    for task in suite().tasks("train", 200, 0):
        shown = suite().demonstrate(task, rng, 0.5)
        texts = [message.content for message in shown.prompt.messages]
        texts += [text for turn in shown.turns for text in (turn.action, turn.result.observation.messages[0].content)]
        for text in texts:
            ids = encode(whole(), text)
            assert whole().unk_token_id not in ids and whole().decode(ids) == text


def test_what_the_environment_parses_survives_sampled_digits() -> None:
    """The oracle's actions, sampled token by token, win: the number in an answer is not broken up by the way back."""
    for task in suite().tasks("eval", 50, 0):
        environment, policy = suite().make(task, 0), suite().oracle(task)
        observation, reward, done = environment.reset(task, task.seed), 0.0, False
        while not done:
            ids = encode(whole(), policy(observation))
            assert len(ids) <= 14
            result = environment.step(whole().decode(ids))
            observation, reward, done = result.observation, reward + result.reward, result.terminated
        assert reward == 1.0


def test_names_and_tags_are_one_ordinary_token_each() -> None:
    vocabulary = suite().vocabulary()
    special = set(whole().all_special_ids)
    for word in vocabulary:
        ids = encode(whole(), word)
        assert len(ids) == 1 and ids[0] not in special, word
    assert len({encode(whole(), word)[0] for word in vocabulary}) == len(vocabulary)


def test_equal_vocabularies_give_equal_tokenizers() -> None:
    again = build_tokenizer([*reversed(WORDS), *WORDS])
    assert again.get_vocab() == small().get_vocab()
    assert again.backend_tokenizer.to_str() == small().backend_tokenizer.to_str()


def test_an_entry_of_several_words_gives_a_token_for_each() -> None:
    made = build_tokenizer(["costa rica", "rica"])
    assert made.convert_ids_to_tokens(encode(made, "costa rica")) == ["costa", "rica"]
    assert len(made) == len(build_tokenizer(["costa", "rica"]))


def test_only_the_marks_of_the_template_are_special_and_none_of_them_in_data() -> None:
    assert set(small().all_special_tokens) == {UNKNOWN, *SPECIAL}
    assert small().eos_token == END and small().pad_token == PAD
    special = set(small().all_special_ids) - {small().unk_token_id}
    for mark in [END, PAD, *(f"<|{role}|>" for role in ROLES)]:
        assert not special & set(encode(small(), f"area {mark} of{mark}area"))
        assert encode(small(), mark) != [small().convert_tokens_to_ids(mark)]


def test_the_template_renders_and_threads() -> None:
    renderer = ChatRenderer(small())
    end = small().eos_token_id
    assert renderer.close_tokens == (end,) and renderer.stop_tokens == (end,)
    ids = renderer.prompt([ChatMessage("system", "not of"), ChatMessage("user", "area of france")])
    assert small().convert_ids_to_tokens(ids) == [
        *("<|system|>", "not", "of", "<|end|>", "<|user|>", "area", "of", "france", "<|end|>", "<|assistant|>")
    ]
    delta = renderer.delta([ChatMessage("tool", "<information>5</information>")])
    assert small().convert_ids_to_tokens(delta) == [
        "<|tool|>",
        "<information>",
        "5",
        "</information>",
        "<|end|>",
        "<|assistant|>",
    ]
    with pytest.raises(UserError, match="does not render messages of role 'critic'"):
        renderer.prompt([ChatMessage("critic", "area")])


def test_tools_are_part_of_the_prompt() -> None:
    tokenizer = build_tokenizer([*WORDS, "type", "function", "name"])
    tool = {"type": "function", "function": {"name": "area"}}
    ids = ChatRenderer(tokenizer).prompt([ChatMessage("user", "of")], [tool])
    schema = '[{"type": "function", "function": {"name": "area"}}]'
    assert tokenizer.decode(ids) == f"<|system|>{schema}<|end|><|user|>of<|end|><|assistant|>"


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    whole().save_pretrained(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')  # as in the model's folder, whose class must not matter
    loaded = AutoTokenizer.from_pretrained(str(tmp_path))
    assert loaded.get_vocab() == whole().get_vocab() and loaded.all_special_tokens == whole().all_special_tokens
    assert loaded.chat_template == whole().chat_template and loaded.eos_token_id == whole().eos_token_id
    for text in list(suite().texts())[:200]:
        assert encode(loaded, text) == encode(whole(), text) and loaded.decode(encode(loaded, text)) == text
