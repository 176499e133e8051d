"""Reading an action: exactly one tag pair in the ReAct manner, with any thoughts before it. Nothing else is ever executed."""

from __future__ import annotations

import re

import msgspec

TOOLS = ("search", "calc", "answer")
_TAG = re.compile(r"</?(search|calc|answer)>")
FORMS = "write <search>words</search>, <calc>sum</calc> or <answer>number</answer>"


class Action(msgspec.Struct, frozen=True):
    """A well-formed action: which tool, and the text between its tags."""

    tool: str
    text: str


class Malformed(ValueError):
    """Not a well-formed action; the text says what is wrong in a few words meant for the policy."""


def parse_action(action: object) -> Action:
    """The one action in `action`. Raises `Malformed`: no tag, an unclosed one, several, an empty one, or no text at all."""
    if not isinstance(action, str):
        raise Malformed("no action")
    tags = list(_TAG.finditer(action))
    if not tags:
        raise Malformed("no action")
    if len(tags) == 1 or (len(tags) == 2 and not tags[1][0].startswith("</")):
        raise Malformed("tag not closed")
    if len(tags) > 2:
        raise Malformed("more than one action")
    first, last = tags
    if first[0].startswith("</") or first[1] != last[1]:
        raise Malformed("tags do not match")
    text = action[first.end() : last.start()].strip()
    if not text:
        raise Malformed("empty action")
    return Action(first[1], text)
