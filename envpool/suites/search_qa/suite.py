"""The suite `search_qa`: questions that need two look-ups and one calculation.

question   area of france plus number of iron?
action     <search>france area</search>     →  <information>france area 547</information>
action     <search>iron number</search>     →  <information>iron number 26</information>
action     <calc>547+26</calc>              →  <information>573</information>
action     <answer>573</answer>             →  <information>right</information>, reward 1
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from envpool.args import parse_args
from envpool.environment import Demonstration, Environment, Policy, Split, play
from envpool.suites.search_qa.actions import FORMS, TOOLS, Malformed, parse_action
from envpool.suites.search_qa.calculator import CalculatorError, calculate
from envpool.suites.search_qa.environment import INSTRUCTIONS, SearchQA
from envpool.suites.search_qa.facts import load_facts
from envpool.suites.search_qa.retriever import Retriever
from envpool.suites.search_qa.tasks import SYMBOLS, draw_tasks
from envpool.suites.search_qa.teacher import oracle, teacher
from segue.episode import Task
from segue.errors import UserError

_WORD = re.compile(r"<[^<>\s]+>|[^\W\d_]+|[^\w\s]")


class SearchQAArgs(msgspec.Struct, frozen=True):
    """`[task.args]` of search_qa.

    facts         sources: "elements", "countries", "cities", or paths of JSONL files
    digits        facts with longer values are left out
    operations    out of plus, minus, times
    top           documents returned by a search
    max_steps     after so many actions the episode is truncated
    instructions  True puts a system message with the rules in front, for a model that was not warm-started on the suite
    """

    facts: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = ("elements", "countries")
    digits: Annotated[int, msgspec.Meta(ge=2, le=9)] = 3
    operations: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = ("plus", "minus")
    top: Annotated[int, msgspec.Meta(ge=1, le=3)] = 1
    max_steps: Annotated[int, msgspec.Meta(ge=4, le=64)] = 8
    instructions: bool = False


class SearchQASuite:
    """See the module. Facts and index are built once per process and only read after that."""

    name = "search_qa"

    def __init__(self, args: SearchQAArgs) -> None:
        unknown = [operation for operation in args.operations if operation not in SYMBOLS]
        if unknown or len(set(args.operations)) < len(args.operations):
            raise UserError(
                f"task.args.operations = {list(args.operations)!r} must be different ones out of {', '.join(SYMBOLS)}: change it."
            )
        self.args = args
        self.facts = load_facts(args.facts, args.digits)
        self._retriever = Retriever(self.facts)

    def tasks(self, split: Split, n: int, seed: int) -> list[Task]:
        return draw_tasks(self.facts, self.args.operations, split, n, seed)

    def make(self, task: Task, member: int, attempt: int = 1) -> Environment:
        return SearchQA(task, self._retriever, self.args.top, self.args.max_steps, self.args.instructions)

    def oracle(self, task: Task) -> Policy:
        return oracle(task)

    def demonstrate(self, task: Task, rng: random.Random, good_share: float) -> Demonstration:
        return play(self.make(task, 0), task, teacher(task, self.args.operations, rng, good_share))

    def vocabulary(self) -> list[str]:
        """Names and attributes whole, tags, and every other word and mark that can occur; digits are not among them."""
        words = {fact.name for fact in self.facts} | {fact.attribute for fact in self.facts}
        words |= {f"<{end}{tag}>" for tag in (*TOOLS, "information") for end in ("", "/")}
        for text in self.texts():
            words.update(_WORD.findall(text))
        return sorted(words)

    def texts(self) -> Iterator[str]:
        """Every document and query, a question per fact and operation, the messages about errors, and a number per value."""
        if self.args.instructions:
            yield INSTRUCTIONS
        for fact in self.facts:
            yield f"<search>{fact.key}</search>"
            yield f"<information>{fact.text}</information>"
            for operation, symbol in SYMBOLS.items():
                if operation in self.args.operations:
                    yield f"{fact.attribute} of {fact.name} {operation} {fact.attribute} of {fact.name}?"
                yield f"<calc>{fact.value}{symbol}{fact.value}</calc>"
            yield f"<answer>{fact.value}</answer>"
        yield from (f"<information>{reply}</information>" for reply in _fixed_replies())


def _fixed_replies() -> list[str]:
    """What the environment can say beyond facts and numbers, collected by provoking each."""
    replies = ["right", "wrong", "nothing found", "-1; 0.5"]
    for action in ("", "<calc>", "</calc><calc>", "<calc></calc>", "<calc></calc><calc>"):
        try:
            parse_action(action)
        except Malformed as error:
            replies.append(f"{error}: {FORMS}")
    for formula in ("", "x", "1/0", "9**64", "(-1)**0.5", "1" * 99):
        try:
            calculate(formula)
        except CalculatorError as error:
            replies.append(f"calc failed: {error}")
    return replies


def build(args: dict[str, Any]) -> SearchQASuite:
    """The suite with `[task.args]`. Raises UserError."""
    return SearchQASuite(parse_args("search_qa", args, SearchQAArgs))
