"""The tools of search_qa, one by one: calculator, verifier, retriever."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envpool.suites.search_qa.calculator import CalculatorError, calculate
from envpool.suites.search_qa.facts import Fact, load_facts
from envpool.suites.search_qa.retriever import Retriever
from envpool.suites.search_qa.verifier import matches


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("547+26", "573"),
        (" 5 4 7 + 2 6 ", "573"),
        ("26-547", "-521"),
        ("2*(3+4)", "14"),
        ("7/2", "3.5"),
        ("6/2", "3"),
        ("1/3", "0.333333"),
        ("-7//2", "-4"),
        ("2**10", "1024"),
        ("1 . 5 + 1", "2.5"),
    ],
)
def test_calculator(text: str, value: str) -> None:
    assert calculate(text) == value


@pytest.mark.parametrize(
    "text",
    ["", "  ", "x", "1+", "1/0", "1%0", "9**9**9", "2**65", "9**64", "1e3", "(-1)**0.5", "__import__('os').getpid()",
     "[1][0]", "'a'*3", "True+1", "1 if 1 else 2", "1;2", "lambda: 1", "(" * 60, "1" * 65, "1_0", "0x10\0", "nan"],
)  # fmt: skip
def test_calculator_refuses(text: str) -> None:
    with pytest.raises(CalculatorError):
        calculate(text)


@given(st.text(max_size=80) | st.text("0123456789+-*/%(). ", max_size=70))
def test_calculator_never_raises_anything_else(text: str) -> None:
    with contextlib.suppress(CalculatorError):
        calculate(text)


@given(st.integers(-999, 999), st.integers(-999, 999), st.sampled_from("+-*"))
def test_calculator_agrees_with_python(a: int, b: int, symbol: str) -> None:
    assert calculate(f"{a}{symbol}({b})") == str({"+": a + b, "-": a - b, "*": a * b}[symbol])


@pytest.mark.parametrize(
    ("answer", "truth", "equal"),
    [
        ("573", "573", True),
        (" 573 ", "573", True),
        ("5 7 3", "573", True),
        ("573.0", "573", True),
        ("+573", "573", True),
        ("0573", "573", True),
        ("1,234", "1234", True),
        ("12,34", "1234", False),
        ("-5", "5", False),
        ("3.5", "35", False),
        ("1", "21", False),
        ("21", "1", False),
        ("", "1", False),
        (None, "1", False),
        ("573 574", "573", False),
        ("the Eiffel Tower", "eiffel tower!", True),
        ("", "", False),
        ("the", "a", False),
        ("paris", "paris france", False),
        ("nan", "nan", True),
        ("1e3", "1000", False),
    ],
)
def test_verifier(answer: str | None, truth: str, equal: bool) -> None:
    assert matches(answer, truth) is equal


@given(st.text(max_size=40), st.text(max_size=40))
def test_verifier_never_raises(answer: str, truth: str) -> None:
    matches(answer, truth)


def test_retriever_finds_every_fact_first_by_its_words_and_drops_what_does_not_match() -> None:
    facts = load_facts(["elements", "countries", "cities"], 3)
    retriever = Retriever(facts)
    for fact in facts:
        assert retriever.search(fact.key, 3)[0] == fact.text
        assert len(retriever.search(fact.key, 3)) <= 3
    for nothing in ("zzzz", "", "?!", "zzzz yyyy"):
        assert retriever.search(nothing, 3) == []
    assert retriever.search("iron zzzz", 3) == ["iron number 26", "iron weight 56"]
    assert retriever.search("IRON Number", 1) == ["iron number 26"]


def test_equal_scores_come_in_the_order_of_the_corpus() -> None:
    facts = [Fact(f"n{i}", "height", 10 + i) for i in range(30)]
    assert Retriever(facts).search("height", 3) == [fact.text for fact in facts[:3]]


def test_facts_are_real() -> None:
    by_key = {fact.key: fact.value for fact in load_facts(["elements", "countries", "cities"], 5)}
    assert by_key["iron number"] == 26 and by_key["gold weight"] == 197
    assert 500 < by_key["france area"] < 700 and 600 < by_key["france population"] < 720
    assert by_key["tokyo people"] > 8000
