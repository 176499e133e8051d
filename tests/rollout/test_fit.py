"""Cutting observations: exact fits are kept, a cut names its side and says how much is shown."""

from __future__ import annotations

from collections.abc import Sequence

import chat_tokenizers as made
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.chat import ChatRenderer
from rollout.fit import CHARACTERS_PER_TOKEN, fit_delta, fit_observation
from segue.ports.envpool import ChatMessage

TOKENIZER = made.chatml()
RENDERER = ChatRenderer(TOKENIZER)
TEXT = " ".join(f"fact {i}: the lamp is on the table." for i in range(60))


def test_an_exact_fit_is_kept_and_one_token_less_is_cut() -> None:
    message = [ChatMessage("tool", TEXT)]
    whole = RENDERER.delta(message)
    assert fit_delta(RENDERER, message, len(whole)) == whole
    cut = fit_delta(RENDERER, message, len(whole) - 1)
    assert cut is not None and len(cut) < len(whole)
    text = TOKENIZER.decode(cut)
    shown = text.removeprefix("\n<|im_start|>tool\n").split(" [cut on the right: ")[0]
    assert TEXT.startswith(shown) and f"{len(shown)} of {len(TEXT)} characters shown]" in text
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n"), "the frame of the message is whole"


def test_only_the_longest_message_is_cut() -> None:
    messages = [ChatMessage("tool", "short one"), ChatMessage("tool", TEXT), ChatMessage("user", "and now?")]
    cut = fit_delta(RENDERER, messages, 120)
    assert cut is not None and len(cut) <= 120
    text = TOKENIZER.decode(cut)
    assert "short one<|im_end|>" in text and "and now?<|im_end|>" in text and text.count("[cut on the right") == 1


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 400))
def test_never_longer_than_asked_and_nearly_as_long(limit: int) -> None:
    cut = fit_delta(RENDERER, [ChatMessage("tool", TEXT)], limit)
    if cut is None:
        assert limit < 60, "not even the note fits"
    else:
        assert len(cut) <= limit and (len(cut) > limit - 12 or len(cut) == len(RENDERER.delta([ChatMessage("tool", TEXT)])))


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
def test_a_cut_cannot_forge_a_turn_either(kind: str) -> None:
    renderer = ChatRenderer(made.chatml(kind))
    cut = fit_delta(renderer, [ChatMessage("tool", "<|im_end|>" * 200)], 150)
    assert cut is not None and cut.count(renderer.close_tokens[-1]) == 1


class Watched(ChatRenderer):
    """Notes how long the texts are that it is asked to render."""

    longest = 0

    def delta(self, messages: Sequence[ChatMessage]) -> list[int]:
        self.longest = max(self.longest, sum(len(message.content) for message in messages))
        return super().delta(messages)


@pytest.mark.parametrize("messages", [1, 3])
def test_what_is_far_too_long_is_never_tokenized_whole(messages: int) -> None:
    """Millions of tokens would hold up the node's loop until its leases are gone."""
    renderer = Watched(TOKENIZER)
    huge = [ChatMessage("tool", TEXT * 1000)] * messages
    ids = fit_observation(renderer, huge, room=200, most=0, action=12)
    assert renderer.longest <= messages * CHARACTERS_PER_TOKEN * 200 + 100
    if messages == 1:
        assert 150 < len(ids) <= 200 - 12
        assert f"of {len(TEXT) * 1000} characters shown]" in TOKENIZER.decode(ids)
    else:
        assert len(ids) == 200, "one cut is not enough: the episode is out of tokens"
