"""Cutting an observation that is too long. A cut names its side and says so in the text; an exact fit is kept whole."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.chat import ChatRenderer
from segue.ports.envpool import ChatMessage

CHARACTERS_PER_TOKEN = 32
"""More than text has on average. What is longer is not tokenized to find out by how much: that may take minutes, and the node's
loop has leases to keep."""


def beyond(messages: Sequence[ChatMessage], tokens: int) -> bool:
    """Whether the messages are so long that they need not be tokenized to know that they are over `tokens`."""
    return sum(len(message.content) for message in messages) > CHARACTERS_PER_TOKEN * max(tokens, 1)


def fit_observation(renderer: ChatRenderer, messages: Sequence[ChatMessage], *, room: int, most: int, action: int) -> list[int]:
    """The ids of an observation that fits into `room` tokens of context and is at most `most` long (0: no such bound).

    It is whole if that leaves room to sample, else cut so that a whole action (`action` tokens) still fits. Where not even the
    note of the cut would fit, the ids fill the room: the episode is out of tokens.
    """
    most = most or room
    if not beyond(messages, room):
        ids = renderer.delta(messages)
        if len(ids) <= min(most, room - 1):
            return ids
    cut = fit_delta(renderer, messages, min(most, room - action))
    if cut is not None:
        return cut
    reach = CHARACTERS_PER_TOKEN * max(room, 1)
    return renderer.delta([ChatMessage(m.role, m.content[:reach]) for m in messages])[: max(room, 0)]


def fit_delta(renderer: ChatRenderer, messages: Sequence[ChatMessage], limit: int) -> list[int] | None:
    """Ids of `renderer.delta(messages)` in at most `limit` tokens; None if even the note of a cut does not fit.

    The longest message loses its end, and a note in its place says how much is shown.
    """
    if not beyond(messages, limit):
        ids = renderer.delta(messages)
        if len(ids) <= limit:
            return ids
    longest = max(range(len(messages)), key=lambda i: len(messages[i].content))
    text = messages[longest].content
    if beyond([*messages[:longest], *messages[longest + 1 :]], limit):
        return None

    def shown(n: int) -> list[int]:
        note = f"{text[:n]} [cut on the right: {n} of {len(text)} characters shown]"
        return renderer.delta([*messages[:longest], ChatMessage(messages[longest].role, note), *messages[longest + 1 :]])

    # More characters never make fewer tokens by much, so a binary search finds a cut that fits; each step is checked as it is.
    low, high = 0, min(len(text), CHARACTERS_PER_TOKEN * max(limit, 1))
    best: list[int] | None = None
    while low < high:
        middle = (low + high) // 2
        ids_shown = shown(middle)
        if len(ids_shown) <= limit:
            best, low = ids_shown, middle + 1
        else:
            high = middle
    return best
