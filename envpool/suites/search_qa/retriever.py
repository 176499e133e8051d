"""BM25 over the facts' documents (bm25s, Lucene's variant)."""

from __future__ import annotations

import re

import bm25s
import numpy as np

from envpool.suites.search_qa.facts import Fact

_WORD = re.compile(r"\w+")


class Retriever:
    """An index over documents, read-only after it was built: instances in many threads share it."""

    def __init__(self, facts: list[Fact]) -> None:
        self._texts = [fact.text for fact in facts]
        self._index = bm25s.BM25()
        self._index.index([_WORD.findall(text) for text in self._texts], show_progress=False)

    def search(self, query: str, top: int) -> list[str]:
        """At most `top` documents, best first; equal scores in the order of the corpus; documents of score 0 are no hits."""
        words = _WORD.findall(query.lower())
        if not words:
            return []
        scores = self._index.get_scores(words)
        order = np.argsort(-scores, kind="stable")[:top]
        return [self._texts[i] for i in order if scores[i] > 0]
