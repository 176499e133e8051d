"""Tokenizers and chat templates made on the spot, for tests of rendering: no download, no model."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% if tools %}<|im_start|>system\nTools:{% for t in tools %}\n{{ t | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ 'ipython' if m['role'] == 'tool' else m['role'] }}"
    "<|end_header_id|>\n\n{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

# Consecutive tool results share one user turn, as in Qwen's templates; an assistant turn ends with a newline and a close.
GROUPED = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m['content'] }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# The generation prompt opens the thoughts, and history keeps them.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}<think>\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)

# History loses its thoughts, as in many reasoning models' templates.
STRIPPING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Tool schemas move along, in front of the last message.
MOVING_TOOLS = (
    "{% for m in messages %}{% if loop.last and tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Words, one space between them; every turn is closed by a word of the vocabulary.
WORDS = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

USER_ONLY = (
    "{% for m in messages %}{% if m['role'] in ('user', 'assistant') %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% elif m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_CORPUS = [
    "You are a careful assistant. Where is the lamp? The lamp is the one that It is on the table in the hall.",
    "<search> atomic number of iron </search> <information> Iron has the atomic number 26. </information>",
    "<think>\nI should look it up first.\n</think>\n\n<answer> 26 </answer>",
    '{"name": "look", "arguments": {"at": 1}} the quick brown fox jumps over the lazy dog',
]
_SPECIAL = [
    "<|endoftext|>",
    "<|begin_of_text|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]


@cache
def byte_level() -> str:
    """A byte-level BPE (as GPT-2's), serialised."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=[AddedToken(s, normalized=False, special=True) for s in _SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 5, trainer)
    return str(tokenizer.to_str())


@cache
def metaspace() -> str:
    """A BPE whose first piece gets a leading "▁" (as Llama 2's): encoding a piece alone differs from encoding it in place."""
    # No newline in the corpus: merged with what follows, it would make the template's own ids unstable at a turn's start.
    tokenizer = Tokenizer(models.BPE(byte_fallback=False, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", *(AddedToken(s, normalized=False, special=True) for s in _SPECIAL)],
        initial_alphabet=[chr(c) for c in range(32, 127)] + ["\n", "▁"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([line.replace("\n", " ") for line in _CORPUS] * 5, trainer)
    return str(tokenizer.to_str())


@cache
def word_level() -> str:
    """One id per word, as the quickstart's; tags are words, role tags and the end of a turn are special."""
    words = sorted({w for line in _CORPUS for w in line.split()} | {str(n) for n in range(100)})
    special = ["<user>", "<assistant>", "<tool>", "<system>", "<end>"]
    vocabulary = {w: i for i, w in enumerate(["<unk>", *special, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in special])
    return str(tokenizer.to_str())


def make(kind: str, template: str | None, eos: str | None = None, **names: str) -> Any:
    """A tokenizer of `kind` ("byte_level", "metaspace", "word_level") with `template`."""
    source = {"byte_level": byte_level, "metaspace": metaspace, "word_level": word_level}[kind]()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(source), eos_token=eos, **names)
    tokenizer.chat_template = template
    return tokenizer


def chatml(kind: str = "byte_level") -> Any:
    return make(kind, CHATML, eos="<|im_end|>")


def words() -> Any:
    return make("word_level", WORDS, eos="<end>")
