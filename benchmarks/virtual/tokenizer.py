"""The modelled model's tokenizer: one token per byte, and one per special token, so that a text of n characters is n tokens and
the production `rollout.chat.ChatRenderer` renders it. The template adds as few tokens as a template can.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ROLES = ("system", "user", "assistant", "tool")
END = "<|end|>"
SPECIAL = {**{f"<|{role}|>": 256 + i for i, role in enumerate(ROLES)}, END: 256 + len(ROLES)}
END_TOKEN = SPECIAL[END]
FILLER = ord("a")
"""What the modelled engine samples, but for the token that ends a turn."""
PROMPT_OVERHEAD = 3
"""Tokens of a prompt of one message beside its text: its role, its end, and the role of the turn that follows."""
OBSERVATION_OVERHEAD = 3
_TEXT_OF = {i: text for text, i in SPECIAL.items()}
_SPECIAL = re.compile("|".join(map(re.escape, SPECIAL)))


@dataclass(frozen=True)
class _Added:
    content: str
    special: bool = True


class ByteTokenizer:
    """What `ChatRenderer` needs of a Hugging Face fast tokenizer."""

    name_or_path = "the modelled model"
    chat_template = "<|role|>content<|end|>"
    unk_token_id = None
    eos_token_id = END_TOKEN

    @property
    def added_tokens_decoder(self) -> dict[int, _Added]:
        return {i: _Added(text) for text, i in SPECIAL.items()}

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, str]],
        *,
        tools: Any = None,
        tokenize: bool = False,
        add_generation_prompt: bool = False,
    ) -> str:
        """The text of a conversation; tools go in front as a system message."""
        assert not tokenize, "the renderer encodes by itself"
        parts = [f"<|system|>{tools}{END}"] if tools else []
        parts += [f"<|{message['role']}|>{message['content']}{END}" for message in messages]
        return "".join(parts) + ("<|assistant|>" if add_generation_prompt else "")

    def encode(self, text: str, *, add_special_tokens: bool = False, split_special_tokens: bool = False) -> list[int]:
        """Ids of a text; special tokens count as such unless they are to be split."""
        if split_special_tokens:
            return list(text.encode())
        ids: list[int] = []
        start = 0
        for match in _SPECIAL.finditer(text):
            ids += text[start : match.start()].encode()
            ids.append(SPECIAL[match[0]])
            start = match.end()
        ids += text[start:].encode()
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False) -> str:
        """The text of ids."""
        try:
            return bytes(ids).decode("latin-1")
        except ValueError:
            return "".join(_TEXT_OF.get(i) or chr(i) for i in ids)
