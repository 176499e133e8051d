"""Exact match after normalisation, in the manner of Search-R1 (case, punctuation, articles, spaces), with numbers as numbers."""

from __future__ import annotations

import re
import string
from decimal import Decimal, InvalidOperation

from envpool.suites.search_qa.calculator import join_digits

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def as_number(text: str) -> Decimal | None:
    """`text` as a number (`1,234` and `1 2 3 4` are 1234), None if it is not exactly one."""
    text = join_digits(_THOUSANDS.sub("", text.strip()))
    if not _NUMBER.fullmatch(text):
        return None
    try:
        return Decimal(text)
    except InvalidOperation:
        return None


def normalise(text: str) -> str:
    """Lower case, without punctuation, articles and surplus spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def matches(answer: str | None, truth: str) -> bool:
    """Whether `answer` is `truth`: equal as numbers where `truth` is one, else equal after `normalise`. Nothing matches empty."""
    if answer is None:
        return False
    number = as_number(truth)
    if number is not None:
        return as_number(answer) == number
    expected = normalise(truth)
    return bool(expected) and normalise(answer) == expected
