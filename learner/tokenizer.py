"""A word-level tokenizer made for a task suite: every word it can meet is one token, every digit one.

A policy of a few million parameters learns a task over entity names and numbers far sooner when a name is one token and a
number is spelled digit by digit: a trained BPE splits names, and merges digits as it happens to.

Where a space stands in ordinary text it is not a token: it is left out when encoding and put back when decoding, by one rule that
looks at the characters on its two sides (`_HERE`). A space that stands elsewhere is a token of its own, `▁`. So texts in
known words come back exactly, and a word or a tag costs one token, a number one per digit.

    <search>france area</search>  →  <search> · france · area · </search>
    <calc>547+26</calc>           →  <calc> · 5 · 4 · 7 · + · 2 · 6 · </calc>

Tags are ordinary tokens: the environment sees them in decoded text, and data may contain them. Only the marks of the chat
template are special; written in data they are ordinary text (mostly unknown words), so no tool result can forge a turn.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

UNKNOWN, PAD, END = "<|unk|>", "<|pad|>", "<|end|>"
ROLES = ("system", "user", "assistant", "tool")
SPECIAL = [END, PAD, *(f"<|{role}|>" for role in ROLES)]

CHAT_TEMPLATE = (
    "{%- if tools %}{{ '<|system|>' + (tools | tojson) + '<|end|>' }}{% endif -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}"
    "{{ raise_exception('this template has the roles system, user, assistant and tool') }}"
    "{%- endif -%}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif -%}"
)
"""ChatML's shape with one token per border: `<|role|>content<|end|>`, nothing between messages. Append-only: what stands for a
message never depends on later ones."""

_SPACE = "▁"
_HERE = r"(?:(?<=\w) (?=[^\W\d])|(?<=[^\W\d]) (?=\d))"
"""A space in an ordinary place: between two words, or a word and a number. Digits side by side are one number's: no space."""
_PIECES = r"</?\w+>|\w*[^\W\d]\w*|\d|\s|[^\w\s]"
"""Tags, words (anything with a letter in it), single digits, single marks."""
_ALWAYS = [*"0123456789", _SPACE, *".,:;?!+-*/%()[]{}<>=\"'\n"]


def build_tokenizer(vocabulary: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer with the words, tags and marks in `vocabulary`, all digits and common marks, and `CHAT_TEMPLATE`.

    Deterministic: equal vocabularies in any order give equal ids. An entry that is several words gives one token per word.
    """
    splitter = pre_tokenizers.Split(Regex(_PIECES), "isolated")
    words = {piece for entry in vocabulary for piece, _ in splitter.pre_tokenize_str(entry) if not piece.isspace()}
    names = [UNKNOWN, *_ALWAYS, *sorted(words - {UNKNOWN, *_ALWAYS})]
    core = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=UNKNOWN))
    # A space in an ordinary place goes; any other becomes a token.
    core.normalizer = normalizers.Sequence([normalizers.Replace(Regex(f"(?!{_HERE}) "), _SPACE)])
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), splitter])
    # The way back: a space between any two tokens, the ones out of place removed, and `▁` read as what it stands for.
    core.decoder = decoders.Sequence(
        [
            decoders.WordPiece(prefix="\x00", cleanup=False),
            decoders.Fuse(),
            decoders.Replace(Regex(f"(?!{_HERE}) "), ""),
            decoders.Replace(_SPACE, " "),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token=AddedToken(UNKNOWN, special=True, normalized=False),
        pad_token=AddedToken(PAD, special=True, normalized=False),
        eos_token=AddedToken(END, special=True, normalized=False),
        additional_special_tokens=[
            AddedToken(name, special=True, normalized=False) for name in SPECIAL if name not in (END, PAD)
        ],
        clean_up_tokenization_spaces=False,
        model_max_length=1 << 20,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
