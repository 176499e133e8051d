"""Stop strings at the level of tokens: does this token complete one?

Decoding the tail of every row at every step would cost more than the step. So the vocabulary is sifted once per set of strings:
a token can complete a string only if its text contains the string, or begins with some tail of it. Only those tokens, a handful,
are then looked at in their context.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Matcher = Callable[[list[int]], bool]
"""`completes(tokens)`: does the last of `tokens` complete a stop string?"""

_KEPT = 256  # sets of strings whose sifting is remembered
_UNKNOWN = "\ufffd"  # what a tokenizer shows for bytes that are no whole character


class StopStrings:
    """Finds stop strings in growing lists of token ids, with a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        """`vocabulary`: ids 0 … vocabulary − 1 may be sampled; those the tokenizer does not know have no text."""
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._texts: list[str] | None = None
        self._matchers: dict[tuple[str, ...], Matcher] = {}

    def matcher(self, strings: tuple[str, ...]) -> Matcher | None:
        """What `prepare` made of `strings`; None before that."""
        return self._matchers.get(strings)

    def prepare(self, strings: tuple[str, ...]) -> None:
        """Sift the vocabulary for `strings`: up to a second of work for a large one, so not for the event loop."""
        if len(self._matchers) >= _KEPT:
            self._matchers.clear()
        self._matchers[strings] = self._matcher(strings)

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _text(self, token: int) -> str:
        try:
            return self._decode([token])
        except (IndexError, KeyError, TypeError, OverflowError):  # an id beyond the tokenizer's own vocabulary
            return ""

    def candidates(self, strings: tuple[str, ...]) -> frozenset[int]:
        """The tokens that can complete one of `strings`; some of them never do."""
        if self._texts is None:
            self._texts = [self._text(token) for token in range(self._vocabulary)]
        tails = {string[i:] for string in strings for i in range(len(string))}
        # a tokenizer may put a space before a word, or leave it out where the word stands alone
        starts = tuple(tails | {tail.lstrip() for tail in tails if tail.strip()} | {" " + tail for tail in tails})
        return frozenset(
            token
            for token, text in enumerate(self._texts)
            if text.startswith(starts) or _UNKNOWN in text or any(string in text for string in strings)
        )

    def _matcher(self, strings: tuple[str, ...]) -> Matcher:
        """The part of the string that earlier tokens make up may lie before the request began: then a request that goes on after
        an interruption stops where it would have stopped without.
        """
        candidates = self.candidates(strings)
        window = max(len(string.encode()) for string in strings) + 4  # no token has less than a byte, but for a few special ones

        def completes(tokens: list[int]) -> bool:
            if tokens[-1] not in candidates:
                return False
            before, text = self._decode(tokens[-window:-1]), self._decode(tokens[-window:])
            same = len(before) if text.startswith(before) else _common(before, text)
            return any(text.find(string, max(0, same - len(string) + 1)) >= 0 for string in strings)

        return completes


def _common(a: str, b: str) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
