"""Tool calls written as text, and the shop behind them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from envpool.environment import play
from envpool.suites import load_suite
from envpool.suites.price_list.calls import Call, Malformed, read_call, write_call
from envpool.suites.price_list.environment import TOOLS, Shop
from segue.episode import Task
from segue.errors import UserError

PRICES = {"lamp": 37, "chair": 58, "hat": 12}


def shop(*asked: str, max_steps: int = 8) -> Shop:
    task = Task("t", "price_list", 0, {"prices": PRICES, "asked": list(asked)})
    made = Shop(task, [], max_steps)
    made.reset(task, 0)
    return made


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ('<tool_call>[{"name": "price", "arguments": {"item": "lamp"}}]</tool_call>', Call("price", {"item": "lamp"})),
        ('<tool_call>{"arguments": {"item": "a b"}, "name": "price"}</tool_call>', Call("price", {"item": "a b"})),
        (
            'Well.\n<tool_call>\n[{"name": "answer",\n"arguments": {"value": 3}}]\n</tool_call> bye',
            Call("answer", {"value": 3}),
        ),
        (write_call("calculate", formula='1+"é'), Call("calculate", {"formula": '1+"é'})),
    ],
)
def test_well_formed_calls(text: str, call: Call) -> None:
    assert read_call(text, TOOLS) == call


GOOD = '[{"name": "price", "arguments": {"item": "lamp"}}]'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no tool call: write <tool_call>"),
        (None, "no tool call"),
        (GOOD, "no tool call"),
        (f"<tool_call>{GOOD}", "not closed with </tool_call>"),
        (f"</tool_call><tool_call>{GOOD}", "not closed"),
        (f"<tool_call>{GOOD}</tool_call><tool_call>{GOOD}</tool_call>", "more than one"),
        (f"<tool_call>{GOOD}</tool_call></tool_call>", "more than one"),
        ("<tool_call></tool_call>", "not valid JSON"),
        ("<tool_call>{'name': 'price', 'arguments': {'item': 'lamp'}}</tool_call>", "not valid JSON"),
        ("<tool_call>" + "[" * 1900 + "</tool_call>", "not valid JSON"),
        ("<tool_call>" + "x" * 2000 + "</tool_call>", "too long"),
        ('<tool_call>[{"name": "answer", "arguments": {"value": NaN}}]</tool_call>', "not valid JSON"),
        (f'<tool_call>{{"name": "price", {GOOD[2:-1]}</tool_call>', "not valid JSON"),
        ("<tool_call>[]</tool_call>", "exactly one"),
        (f"<tool_call>[{GOOD[1:-1]}, {GOOD[1:-1]}]</tool_call>", "exactly one"),
        ("<tool_call>7</tool_call>", "a name and arguments"),
        ('<tool_call>[{"name": "price"}]</tool_call>', "a name and arguments"),
        ('<tool_call>[{"name": "price", "arguments": "lamp"}]</tool_call>', "a name and arguments"),
        ('<tool_call>[{"name": "prices", "arguments": {}}]</tool_call>', "no such tool: use price, calculate, answer"),
        ('<tool_call>[{"name": ["price"], "arguments": {}}]</tool_call>', "no such tool"),
        ('<tool_call>[{"name": "price", "arguments": {}}]</tool_call>', "price takes item"),
        ('<tool_call>[{"name": "price", "arguments": {"item": "lamp", "x": 1}}]</tool_call>', "price takes item"),
        ('<tool_call>[{"name": "price", "arguments": {"item": 1}}]</tool_call>', "item of price is a string"),
        ('<tool_call>[{"name": "answer", "arguments": {"value": true}}]</tool_call>', "value of answer is a string or number"),
    ],
)
def test_nothing_is_guessed(text: Any, why: str) -> None:
    with pytest.raises(Malformed) as refused:
        read_call(text, TOOLS)
    assert why in str(refused.value) and "\n" not in str(refused.value)


def test_the_way_to_the_answer_pays_step_by_step() -> None:
    made = shop("lamp", "chair")
    steps = [
        ("I do not know", -0.02, "error: no tool call"),
        (write_call("calculate", formula="1+1"), 0.1, "2"),
        (write_call("price", item="Lamp "), 0.1, "37"),
        (write_call("price", item="lamp"), 0.0, "37"),
        (write_call("price", item="hat"), 0.0, "12"),
        (write_call("price", item="cow"), 0.0, "error: the shop has no such item, only lamp, chair, hat"),
        (write_call("price", item="chair"), 0.1, "58"),
    ]
    for action, reward, reply in steps:
        result = made.step(action)
        assert result.reward == pytest.approx(reward)
        assert (result.terminated, result.truncated) == (False, False)
        assert result.observation.messages[0].content.startswith(reply)
        assert result.observation.messages[0].role == "tool"
    last = made.step(write_call("answer", value=95))
    assert last.reward == pytest.approx(0.7) and last.terminated and last.info["success"] == 1.0
    assert last.info["found"] == 1.0


def test_nothing_is_paid_twice_and_a_guess_ends_it() -> None:
    """A loop of good calls earns one first call; a wrong answer, and no answer, earn less than a lookup."""
    made = shop("lamp", max_steps=64)
    assert sum(made.step(write_call("price", item="hat")).reward for _ in range(60)) == pytest.approx(0.1)
    made = shop("lamp")
    guess = made.step(write_call("answer", value="38"))
    assert guess.reward == pytest.approx(0.1)
    assert (guess.terminated, guess.observation.messages[0].content) == (True, "wrong")
    made = shop("lamp", max_steps=4)
    assert [made.step("").truncated for _ in range(4)] == [False, False, False, True]


def test_the_prompt_shows_the_tools_and_worked_examples_of_what_is_asked() -> None:
    for asked, count, per_example in (([1], 2, 5), ([2], 1, 9)):
        suite = load_suite("price_list", {"asked": asked, "examples": count})
        task = suite.tasks("train", 1, 0)[0]
        prompt = suite.make(task, 0).reset(task, 0)
        roles = [message.role for message in prompt.messages]
        assert roles == ["system", *(["user", *["assistant", "tool"] * (per_example // 2)] * count), "user"]
        assert [tool["name"] for tool in prompt.tools] == ["price", "calculate", "answer"] and prompt.stop == ["</tool_call>"]
        assert json.loads(json.dumps(prompt.tools)) == prompt.tools
        assert not any(item in message.content for item in task.payload["asked"] for message in prompt.messages[1:-1])
        shown = play(suite.make(task, 0), task, suite.oracle(task))
        assert len(shown.turns) == (2 if asked == [1] else 4) and shown.reward == pytest.approx(1.0)


def test_arguments_that_cannot_be() -> None:
    for asked in ([3], [1, 1], [0, 1]):
        with pytest.raises(UserError, match=r"task\.args\.asked = .* must be \[1\], \[2\] or \[1, 2\]: change it"):
            load_suite("price_list", {"asked": asked})
    with pytest.raises(UserError, match="1048576 train tasks"):
        load_suite("price_list").tasks("train", 2_000_000, 0)
