"""One customer: looks prices up, calculates, answers.

Reward of an episode, at most 1, so that a small language model finds the first part of it by chance and has something to climb:

    0.1  for the first call that is well-formed, whichever
    0.2  for looking up what was asked about, a share for each item, once
    0.7  for the right answer

less 0.02 for each action that is no well-formed call. Well-formed calls are paid for once, so that repeating them pays nothing,
and a wrong answer ends the episode without the largest part.
"""

from __future__ import annotations

from typing import Any

import msgspec

from envpool.environment import DataError
from envpool.suites.price_list.calls import CLOSE, Malformed, read_call, schema, write_call
from envpool.suites.search_qa.calculator import CalculatorError, calculate
from envpool.suites.search_qa.verifier import matches
from segue.episode import Task
from segue.ports.envpool import ChatMessage, Observation, Resume, StepResult

FIRST_CALL, FOUND, RIGHT, FORMAT_PENALTY = 0.1, 0.2, 0.7, 0.02
TOOLS = [
    schema("price", "Price of one item.", item="string"),
    schema("calculate", "Value of a formula.", formula="string"),
    schema("answer", "Answer the question.", value="string|number"),
]
INSTRUCTIONS = "You work in a shop. Use exactly one tool in each turn."
EXAMPLES = ({"bread": 24}, {"milk": 17, "salt": 52}, {"soap": 31}, {"soap": 31, "bread": 24})
"""What the worked examples in the prompt ask about; no task does."""


class _State(msgspec.Struct):
    """Everything that a snapshot holds."""

    steps: int = 0
    called: bool = False
    found: list[str] = []
    ended: bool = False
    last: str = ""


class Shop:
    """Deterministic: no random state."""

    resume = Resume.SNAPSHOT

    def __init__(self, task: Task, examples: list[ChatMessage], max_steps: int) -> None:
        self._task = task
        self._examples = examples
        self._max_steps = max_steps
        self._state = _State()

    def reset(self, task: Task, seed: int) -> Observation:
        self._task = task
        self._state = _State()
        return self._prompt()

    def step(self, action: str) -> StepResult:
        state = self._state
        if state.ended:
            raise RuntimeError("step after the end of the episode")
        prices, asked, truth = self._payload()
        state.steps += 1
        reward, success, malformed = 0.0, 0.0, 0.0
        try:
            call = read_call(action, TOOLS)
        except Malformed as error:
            malformed, reward, state.last = 1.0, -FORMAT_PENALTY, f"error: {error}"
        else:
            reward += 0.0 if state.called else FIRST_CALL
            state.called = True
            if call.name == "answer":
                success = float(matches(str(call.arguments["value"]), truth))
                reward += RIGHT * success
                state.ended = True
                state.last = "right" if success else "wrong"
            elif call.name == "price":
                item = call.arguments["item"].strip().lower()
                if item in asked and item not in state.found:
                    state.found.append(item)
                    reward += FOUND / len(asked)
                state.last = (
                    str(prices[item]) if item in prices else f"error: the shop has no such item, only {', '.join(prices)}"
                )
            else:
                state.last = _calculated(call.arguments["formula"])
        terminated = state.ended
        truncated = not terminated and state.steps >= self._max_steps
        state.ended = terminated or truncated
        info = {
            "success": success,
            "malformed": malformed,
            "called": float(state.called),
            "found": len(state.found) / len(asked),
        }
        return StepResult(self._observation(), reward, terminated, truncated, info)

    def snapshot(self) -> bytes:
        return msgspec.msgpack.encode(self._state)

    def restore(self, snapshot: bytes) -> Observation:
        self._state = msgspec.msgpack.decode(snapshot, type=_State)
        return self._observation() if self._state.steps else self._prompt()

    def close(self) -> None:
        pass

    def _payload(self) -> tuple[dict[str, int], list[str], str]:
        payload: dict[str, Any] = self._task.payload
        prices, asked = payload.get("prices"), payload.get("asked")
        if not isinstance(prices, dict) or not isinstance(asked, list) or not asked or not set(asked) <= set(prices):
            raise DataError(f"the task {self._task.id} does not say what is asked and what it costs")
        return prices, asked, str(sum(prices[item] for item in asked))

    def _prompt(self) -> Observation:
        _, asked, _ = self._payload()
        messages = [ChatMessage("system", INSTRUCTIONS), *self._examples, ChatMessage("user", question(asked))]
        return Observation(messages, tools=TOOLS, stop=[CLOSE])

    def _observation(self) -> Observation:
        return Observation([ChatMessage("tool", self._state.last)], stop=[CLOSE])


def question(asked: list[str]) -> str:
    """What the customer wants to know."""
    if len(asked) == 1:
        return f"What does the {asked[0]} cost?"
    return f"What do the {' and the '.join(asked)} cost together?"


def chain(prices: dict[str, int]) -> list[tuple[str, str]]:
    """The calls that answer a question about all of `prices`, each with what the tool says."""
    turns = [(write_call("price", item=item), str(price)) for item, price in prices.items()]
    total = sum(prices.values())
    if len(prices) > 1:
        turns.append((write_call("calculate", formula="+".join(map(str, prices.values()))), str(total)))
    return [*turns, (write_call("answer", value=str(total)), "right")]


def examples(asked: tuple[int, ...], count: int) -> list[ChatMessage]:
    """`count` worked conversations of the kinds that are `asked`: what a model that nobody trained for this goes by."""
    shown = [prices for prices in EXAMPLES if len(prices) in asked]
    messages: list[ChatMessage] = []
    for prices in shown[:count]:
        messages.append(ChatMessage("user", question(list(prices))))
        for call, reply in chain(prices):
            messages += [ChatMessage("assistant", call), ChatMessage("tool", reply)]
    return messages


def _calculated(formula: str) -> str:
    try:
        return calculate(formula)
    except CalculatorError as error:
        return f"error: {error}"
