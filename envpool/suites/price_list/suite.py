"""The suite `price_list`: a question about prices that only tools know, for language models that were not made for it.

question   What do the lamp and the chair cost together?
action     <tool_call>[{"name": "price", "arguments": {"item": "lamp"}}]</tool_call>           →  37
action     <tool_call>[{"name": "price", "arguments": {"item": "chair"}}]</tool_call>          →  58
action     <tool_call>[{"name": "calculate", "arguments": {"formula": "37+58"}}]</tool_call>   →  95
action     <tool_call>[{"name": "answer", "arguments": {"value": "95"}}]</tool_call>           →  right, reward 1 in all

The schemas of the tools go through the model's chat template. Every task has a price list of its own, so that no memory answers.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from envpool.args import parse_args
from envpool.environment import Demonstration, Environment, Policy, Split, play
from envpool.suites.price_list.calls import CLOSE, FORM, OPEN, Malformed, read_call, write_call
from envpool.suites.price_list.environment import EXAMPLES, INSTRUCTIONS, TOOLS, Shop, chain, examples, question
from envpool.suites.search_qa.calculator import CalculatorError, calculate
from segue.episode import Task
from segue.errors import UserError

ITEMS = (
    *("lamp", "chair", "table", "hat", "book", "cup", "clock", "bag", "coat", "pen", "ring", "box"),
    *("ball", "bed", "door", "fan", "fork", "knife", "plate", "phone", "radio", "shirt", "shoe", "watch"),
)
TASKS = 1 << 20
_WORD = re.compile(r"</?\w+>|[^\W\d_]+|[^\w\s]|_")


class PriceListArgs(msgspec.Struct, frozen=True):
    """`[task.args]` of price_list.

    asked      how many items a question is about: 1, 2, or both
    items      items on a price list
    examples   worked conversations in the prompt (at most 2 per kind of question)
    max_steps  after so many actions the episode is truncated
    """

    asked: Annotated[tuple[int, ...], msgspec.Meta(min_length=1)] = (1, 2)
    items: Annotated[int, msgspec.Meta(ge=2, le=len(ITEMS))] = 6
    examples: Annotated[int, msgspec.Meta(ge=0, le=4)] = 2
    max_steps: Annotated[int, msgspec.Meta(ge=4, le=64)] = 8


class PriceListSuite:
    """See the module."""

    name = "price_list"

    def __init__(self, args: PriceListArgs) -> None:
        if not set(args.asked) <= {1, 2} or len(set(args.asked)) < len(args.asked):
            raise UserError(f"task.args.asked = {list(args.asked)!r} must be [1], [2] or [1, 2]: change it.")
        self.args = args
        self._examples = examples(args.asked, args.examples)

    def tasks(self, split: Split, n: int, seed: int) -> list[Task]:
        """Even numbers train, odd ones are held out."""
        if n > TASKS:
            raise UserError(f"The suite price_list has {TASKS} {split} tasks, and {n} are asked for: ask for fewer.")
        rng = random.Random(f"price_list/{split}/{seed}")
        numbers: dict[int, None] = {}
        while len(numbers) < n:
            numbers[2 * rng.randrange(TASKS) + (split == "eval")] = None
        return [self._task(number) for number in numbers]

    def _task(self, number: int) -> Task:
        rng = random.Random(f"price_list/task/{number}")
        items = rng.sample(ITEMS, self.args.items)
        prices = {item: rng.randint(11, 99) for item in items}
        asked = rng.sample(items, rng.choice(self.args.asked))
        return Task(f"price_list: {number}", self.name, number, {"prices": prices, "asked": asked})

    def make(self, task: Task, member: int, attempt: int = 1) -> Environment:
        return Shop(task, self._examples, self.args.max_steps)

    def oracle(self, task: Task) -> Policy:
        turns = iter(chain({item: task.payload["prices"][item] for item in task.payload["asked"]}))
        return lambda _: next(turns)[0]

    def demonstrate(self, task: Task, rng: random.Random, good_share: float) -> Demonstration:
        """All calls, or with probability 1 − `good_share` an answer that nothing was looked up for."""
        if rng.random() < good_share:
            return play(self.make(task, 0), task, self.oracle(task))
        return play(self.make(task, 0), task, lambda _: write_call("answer", value=str(rng.randint(11, 199))))

    def vocabulary(self) -> list[str]:
        return sorted({word for text in self.texts() for word in _WORD.findall(text)})

    def texts(self) -> Iterator[str]:
        """Every question and call, every reply that is not a number, the instructions and the schemas."""
        yield INSTRUCTIONS
        yield json.dumps([{"type": "function", "function": tool} for tool in TOOLS])
        for item in (*ITEMS, *EXAMPLES[0], *EXAMPLES[1], *EXAMPLES[2]):
            prices = {item: 25}
            yield question([item])
            yield question([item, item])
            yield from (call for call, _ in chain(prices))
        yield from (call for call, _ in chain({"lamp": 12, "cup": 34}))
        yield from _fixed_replies()


def _fixed_replies() -> list[str]:
    """What the environment can say beyond numbers, collected by provoking each."""
    replies = ["right", "wrong", "-1; 0.5", "error: the shop has no such item, only lamp, cup"]
    calls = ("[]", "[1]", '{"name": 1}', '{"name": "x", "arguments": {}}', '{"name": "price", "arguments": {}}', "{")
    arguments = ('"price", "arguments": {"item": 1}', '"answer", "arguments": {"value": []}')
    written = [OPEN + call + CLOSE for call in (*calls, *(f'{{"name": {text}}}' for text in arguments))]
    for action in ("", OPEN, OPEN * 2, OPEN + "x" * 3000, *written):
        try:
            read_call(action, TOOLS)
        except Malformed as error:
            replies.append(f"error: {error}")
    for formula in ("", "x", "1/0", "9**64", "(-1)**0.5", "1" * 99):
        try:
            calculate(formula)
        except CalculatorError as error:
            replies.append(f"error: {error}")
    return [*replies, FORM]


def build(args: dict[str, Any]) -> PriceListSuite:
    """The suite with `[task.args]`. Raises UserError."""
    return PriceListSuite(parse_args("price_list", args, PriceListArgs))
