"""Stop strings: the sifted check against decoding everything at every token, with tokenizers of three kinds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rollout.stops import StopStrings

TEXTS = [
    "<think> look up copper </think><search>mass of copper</search> then <answer>63</answer>",
    "müßig — naïve 日本語 ✓✓ </search></answer> end of turn",
] * 4


def byte_level() -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def metaspace() -> Any:
    """As in the sentencepiece family: a word carries the space before it, which a lone word's text does not show."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", *[f"<0x{i:02X}>" for i in range(256)]]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False, limit_alphabet=30)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def words() -> Any:
    vocabulary = {w: i for i, w in enumerate(["<unk>", "<answer>", "</answer>", "</search>", "copper", "mass", "of", "6", "3"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


TOKENIZERS = {"byte_level": byte_level(), "metaspace": metaspace(), "words": words()}
STOPS = ("</search>", "</answer>")


def brute(tokenizer: Any, tokens: list[int], strings: tuple[str, ...]) -> bool:
    """Is there an occurrence in the whole text that was not there one token before?"""

    def found(part: list[int]) -> int:
        text = tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return sum(text.count(s) for s in strings)

    return found(tokens) > found(tokens[:-1])


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_it_stops_where_decoding_everything_would(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    stops = StopStrings(tokenizer, len(tokenizer) + 5)
    stops.prepare(STOPS)
    completes = stops.matcher(STOPS)
    assert completes is not None
    pieces = data.draw(
        st.lists(st.sampled_from(["</sea", "rch>", "</answer>", "<", "/search>", " mass", "x日", "é", ">"]), max_size=8)
    )
    tokens = [t for piece in pieces for t in tokenizer.encode(piece, add_special_tokens=False)]
    tokens += data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=6))
    for n in range(1, len(tokens) + 1):
        assert completes(tokens[:n]) == brute(tokenizer, tokens[:n], STOPS), (n, tokens)


def test_only_a_handful_of_tokens_is_looked_at() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    stops = StopStrings(tokenizer, len(tokenizer))
    chosen = [tokenizer.decode([t]) for t in stops.candidates(("</search>",))]
    assert ">" in chosen
    assert len([text for text in chosen if "\ufffd" not in text]) < 0.2 * len(tokenizer)


def test_ids_beyond_the_tokenizers_own_have_no_text() -> None:
    """Models pad their vocabulary."""
    tokenizer = TOKENIZERS["words"]
    stops = StopStrings(tokenizer, len(tokenizer) + 100)
    stops.prepare(("</answer>",))
    completes = stops.matcher(("</answer>",))
    assert completes is not None
    assert not completes([2, len(tokenizer) + 7]) and completes([len(tokenizer) + 7, 2])


def test_sets_of_strings_are_sifted_once_each() -> None:
    stops = StopStrings(TOKENIZERS["words"], 9)
    assert stops.matcher(("a",)) is None
    for i in range(600):
        stops.prepare((str(i),))
    assert stops.matcher(("599",)) is not None and stops.matcher(("0",)) is None
