"""Chat rendering that only ever appends: the prompt once, then for every turn the ids that follow the sampled ones.

A model's chat template renders whole conversations from text. The episode loop must never decode and encode again what was
sampled (ids change: faults.md F73), so it takes from the template only what nobody sampled:

    prompt     the first messages, up to and including the generation prompt
    delta      what stands between the close token of an assistant turn and the next generation prompt, separator included
    closing    the close tokens that the harness appends to a turn that did not sample them

A delta is found by rendering a dummy conversation followed by the new messages, and cutting behind the dummy's close token.
At construction the template is tried on a conversation of three turns with thoughts and a tool call: if the render of k turns
is not a prefix of the render of k + 1, threading ids would not give what the template means, and the template is refused.

Text of messages is data: special tokens written in it are encoded as ordinary text, so that no tool result can forge a turn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jinja2

from segue.errors import UserError
from segue.ports.envpool import ChatMessage, Observation
from segue.trajectory import Author, TokenLog, concat, context, sampled

_USER = ChatMessage("user", "x")
_DUMMY = [_USER, ChatMessage("assistant", "y")]
_SENTINEL = "zq7Sentinel7qz"
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a place.",
        "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]},
    },
}
_PROBE_ACTIONS = [
    '<think>\nI should look.\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>',
    "<think>\nNow I see it.\n</think>\n\nIt is there.",
    "<think>\nThat was all.\n</think>\n\nYes.",
]
_PROBE_REPLIES = ["A lamp.", "Are you sure?", "Thanks."]


class ChatRenderer:
    """Renders for one tokenizer (a Hugging Face fast tokenizer with a chat template).

    close_tokens   ids that close an assistant turn; the last of them is the end-of-turn token
    stop_tokens    ids that end a turn when they are sampled

    Raises `UserError` when the tokenizer has no chat template, or one that ids cannot be threaded through.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = _backend(tokenizer)
        self.name = str(getattr(tokenizer, "name_or_path", "") or "this model")
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                f"The tokenizer of {self.name} has no chat template: use an instruction-tuned model, "
                "or put a chat_template.jinja into its folder."
            )
        added = tokenizer.added_tokens_decoder
        special = {t.content: i for i, t in added.items() if t.special}
        self._special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True)))) if special else None
        self._special_ids = set(special.values()) - {tokenizer.unk_token_id}
        self._roles: dict[str, str] = {}
        self._close_text = self._find_close()
        self.close_tokens: tuple[int, ...] = tuple(self._encode_template(self._close_text))
        end = self.close_tokens[-1]
        eos = tokenizer.eos_token_id
        self.stop_tokens: tuple[int, ...] = (end,) if eos is None or eos == end else (end, int(eos))
        self._dummy_closes = self._encode(_DUMMY, False).count(end)
        broken = self._probe(None)
        if broken:
            raise UserError(self._refusal(broken))
        self._broken_tools = self._probe([_TOOL])
        self._shows_tools = _SENTINEL in self._render([_USER], True, [_plain({"name": _SENTINEL})])

    # --- what the episode loop uses -------------------------------------------------------------------------------

    def prompt(self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Ids of the first messages, generation prompt included. Raises `UserError` for a role the template does not have."""
        if tools and self._broken_tools:
            raise UserError(self._refusal(self._broken_tools + " once tools are given"))
        if tools and not self._shows_tools:
            raise UserError(
                f"The chat template of {self.name} leaves out tool schemas, and the environment gives some: name a template that "
                "renders them in model.chat_template."
            )
        for message in messages:
            self._check_role(message.role)
        return self._encode(messages, True, [_plain(tool) for tool in tools] or None)

    def delta(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Ids from behind an assistant turn's close token up to and including the next generation prompt."""
        for message in messages:
            self._check_role(message.role)
        ids = self._encode([*_DUMMY, *messages], True)
        at, end = -1, self.close_tokens[-1]
        for _ in range(self._dummy_closes):
            at = ids.index(end, at + 1)
        return ids[at + 1 :]

    def closing(self, sampled_ids: Sequence[int]) -> tuple[int, ...]:
        """The ids a harness must append to a sampled turn: none if it ended with the end-of-turn token."""
        return () if sampled_ids and sampled_ids[-1] == self.close_tokens[-1] else self.close_tokens

    def text(self, sampled_ids: Sequence[int]) -> str:
        """The text of a sampled turn for the environment, without the stop token that ended it."""
        ids = list(sampled_ids)
        if ids and ids[-1] in self.stop_tokens:
            ids.pop()
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def encode_data(self, text: str) -> list[int]:
        """Ids of a text in which special tokens are ordinary text: none of the ids is a special token's."""
        ids = self._encode_plain(text)
        if self._special is None or self._special_ids.isdisjoint(ids):
            return ids
        # A tokenizer that knows special tokens as whole words finds them even so: break those words in two.
        ids = []
        start = 0
        for match in self._special.finditer(text):
            middle = (match.start() + match.end()) // 2
            ids += self._encode_plain(text[start:middle])
            start = middle
        return [i for i in ids + self._encode_plain(text[start:]) if i not in self._special_ids]

    # --- logs of tokens: the same pieces with their authors ---------------------------------------------------------

    def prompt_log(self, prompt: Observation) -> TokenLog:
        """The prompt as a log (turn −1). A system message that the template renders in front is a segment of its own."""
        messages = prompt.messages
        ids = self.prompt(messages, prompt.tools)
        if len(messages) > 1 and messages[0].role == "system":
            try:
                head = self._encode(messages[:1], False, [_plain(tool) for tool in prompt.tools] or None)
            except UserError:  # a template may want a user message in any conversation
                head = []
            if head and ids[: len(head)] == head:
                return concat([context(head, Author.SYSTEM, -1), context(ids[len(head) :], Author.USER, -1)])
        return context(ids, Author.USER, -1)

    def observation_log(self, observation: Observation, turn: int) -> TokenLog:
        """What follows turn `turn`'s close token, as a log."""
        return context(self.delta(observation.messages), Author.OBSERVATION, turn)

    def action_log(self, text: str, turn: int, stop: Sequence[str] = ()) -> TokenLog:
        """A turn written by someone trusted, as if it had been sampled (mask 1, log-probability 0, version 0).

        A text that ends with one of the strings `stop` is closed by the harness (mask 0), any other closes itself (mask 1).
        """
        ids = self._encode_template(text)
        if any(text.endswith(s) for s in stop):
            return concat([_written(ids, turn), context(list(self.close_tokens), Author.ASSISTANT, turn)])
        return _written([*ids, *self.close_tokens], turn)

    def demonstration(self, prompt: Observation, turns: Sequence[tuple[str, Observation | None]]) -> TokenLog:
        """A whole written episode: the prompt, then (assistant text, observation after it or None) per turn.

        Segment by segment the same ids as an episode that sampled these texts.
        """
        parts, stop = [self.prompt_log(prompt)], prompt.stop
        for turn, (text, observation) in enumerate(turns):
            parts.append(self.action_log(text, turn, stop))
            if observation is not None:
                parts.append(self.observation_log(observation, turn))
                stop = observation.stop or stop
        return concat(parts)

    # --- rendering and encoding -------------------------------------------------------------------------------------

    def _render(self, messages: Sequence[ChatMessage], generate: bool, tools: Any = None) -> str:
        plain = [{"role": m.role, "content": m.content} for m in messages]
        try:
            text = self._tokenizer.apply_chat_template(plain, tools=tools, tokenize=False, add_generation_prompt=generate)
        except (jinja2.TemplateError, TypeError) as error:
            roles = ", ".join(m.role for m in messages)
            raise UserError(
                f"The chat template of {self.name} does not render messages of the roles {roles} ({error}): "
                "use roles it has, or give the model another template."
            ) from error
        return str(text)

    def _encode(self, messages: Sequence[ChatMessage], generate: bool, tools: Any = None) -> list[int]:
        """Ids of a rendered conversation; special tokens count only where the template wrote them."""
        special = self._special
        if special is None:
            return self._encode_template(self._render(messages, generate, tools))
        found: dict[str, str] = {}

        def hide(value: Any) -> Any:
            if isinstance(value, str):
                return special.sub(lambda match: found.setdefault(match[0], f"{_SENTINEL}{len(found)}x"), value)
            if isinstance(value, dict):
                return {hide(k): hide(v) for k, v in value.items()}
            return [hide(v) for v in value] if isinstance(value, list) else value

        hidden = [ChatMessage(m.role, hide(m.content)) for m in messages]
        text = self._render(hidden, generate, hide(tools))
        if not found:
            return self._encode_template(text)
        # Someone wrote a special token into a message: encode piece by piece, what stands between the template's own special
        # tokens as data. (Otherwise the whole text goes through at once, which no tokenizer's whitespace rules can tell apart.)
        restore = {sentinel: token for token, sentinel in found.items()}
        hiding = re.compile("|".join(map(re.escape, restore)))
        ids: list[int] = []
        start = 0
        for match in [*special.finditer(text), None]:
            stretch = text[start : match.start() if match else len(text)]
            ids += self.encode_data(hiding.sub(lambda m: restore[m[0]], stretch)) if stretch else []
            if match:
                ids += self._encode_template(match[0])
                start = match.end()
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        return self._ids(text, split=True)

    def _encode_template(self, text: str) -> list[int]:
        return self._ids(text, split=False)

    def _ids(self, text: str, split: bool) -> list[int]:
        """`split`: special tokens in it are ordinary text."""
        if self._backend is None:
            return list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=split))
        self._backend.encode_special_tokens = split
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    # --- checks at start --------------------------------------------------------------------------------------------

    def _find_close(self) -> str:
        """The text that closes an assistant message: up to and including the first special token behind its content."""
        rendered = self._render([_USER, ChatMessage("assistant", _SENTINEL)], False)
        _, found, suffix = rendered.rpartition(_SENTINEL)
        if not found:
            raise UserError(f"The chat template of {self.name} leaves out the text of assistant messages: use another template.")
        close = self._special.search(suffix) if self._special else None
        if close is None:
            raise UserError(
                f"The chat template of {self.name} puts no special token behind an assistant message, so the end of a turn "
                "cannot be sampled: use a template with an end-of-turn token that the tokenizer knows as special."
            )
        return suffix[: close.end()]

    def _check_role(self, role: str) -> None:
        """Refuse a role whose messages the template cannot render or silently leaves out."""
        if role not in self._roles:
            message = ChatMessage(role, _SENTINEL)
            conversation = [message, _USER] if role == "system" else [message] if role == "user" else [*_DUMMY, message]
            try:
                seen = _SENTINEL in self._render(conversation, True)
                self._roles[role] = "" if seen else "leaves out"
            except UserError:
                self._roles[role] = "does not render"
        if self._roles[role]:
            raise UserError(
                f"The chat template of {self.name} {self._roles[role]} messages of role '{role}': "
                "let the environment use a role it has, or give the model another template."
            )

    def _probe(self, tools: Any) -> str:
        """What breaks when ids are threaded through three turns; "" if nothing does."""
        opened = self._render([_USER], True, tools).rstrip().endswith("<think>")
        # A generation prompt may open the thoughts; templates then differ in whether a message's content repeats the tag.
        variants = (
            [(a, a.removeprefix("<think>\n") if opened else a) for a in _PROBE_ACTIONS],
            [(a.removeprefix("<think>\n"),) * 2 for a in _PROBE_ACTIONS],
        )
        broken = ""
        for actions in variants if opened else variants[:1]:
            broken = self._probe_turns(actions, tools)
            if not broken:
                return ""
        return broken

    def _probe_turns(self, actions: Sequence[tuple[str, str]], tools: Any) -> str:
        messages = [ChatMessage("user", "Where is the lamp?")]
        threaded = self._render(messages, True, tools)
        for turn, ((content, written), reply) in enumerate(zip(actions, _PROBE_REPLIES, strict=True)):
            news = [ChatMessage("user", reply)]
            messages += [ChatMessage("assistant", content), *news]
            whole = self._render(messages, True, tools)
            if not whole.startswith(threaded):
                return f"renders turn {turn} otherwise when turn {turn + 1} follows"
            rest = whole[len(threaded) :]
            lead = rest[: len(rest) - len(rest.lstrip())]  # a space in front of the content is the policy's to sample
            if not rest[len(lead) :].startswith(written + self._close_text):
                return f"rewrites what an assistant wrote in turn {turn} (thoughts or a tool call)"
            threaded += lead + written + self._close_text
            dummy = self._render(_DUMMY, False)
            dummy = dummy[: dummy.rindex(self._close_text) + len(self._close_text)]
            tail = self._render([*_DUMMY, *news], True)
            if not tail.startswith(dummy) or whole != threaded + tail[len(dummy) :]:
                return f"renders what follows turn {turn} in a way that depends on earlier turns"
            threaded = whole
        return ""

    def _refusal(self, what: str) -> str:
        return (
            f"The chat template of {self.name} {what}, so that the tokens of a longer conversation do not begin with those of a "
            "shorter one and sampled ids cannot be kept: use an append-only template, for instance one that keeps <think> blocks."
        )


def _backend(tokenizer: Any) -> Any:
    """The tokenizers library's own object, where a tokenizer of transformers adds nothing to its ids; None where it may.

    What transformers does around it for one short text takes several times as long as the text.
    """
    kind = type(tokenizer)
    own = getattr(kind.encode, "__qualname__", ""), getattr(getattr(kind, "_encode_plus", None), "__qualname__", "")
    if own != ("PreTrainedTokenizerBase.encode", "TokenizersBackend._encode_plus"):
        return None
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()  # as transformers sees to at each call
    backend.no_padding()
    return backend


def _written(ids: list[int], turn: int) -> TokenLog:
    n = len(ids)
    return sampled(ids, [0.0] * n, [0] * n, [0] * n, turn)


def _plain(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool schema as templates expect it: wrapped in {"type": "function", "function": …}."""
    return tool if "function" in tool else {"type": "function", "function": tool}
