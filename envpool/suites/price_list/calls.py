"""Tool calls written as text, and the schemas they must satisfy.

    <tool_call>[{"name": "price", "arguments": {"item": "lamp"}}]</tool_call>

That is how SmolLM2-Instruct writes them; a bare object in place of the list, as the Hermes family writes it, is read too.
Nothing is guessed: JSON that does not parse, two calls, an unknown tool or an argument of another type are mistakes with a
sentence, and a call that was cut off (no closing tag) is never run.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FORM = f'{OPEN}[{{"name": tool, "arguments": {{...}}}}]{CLOSE}'
MAX_CHARACTERS = 2000
_TYPES: dict[str, tuple[type, ...]] = {"string": (str,), "number": (int, float)}

Schema = dict[str, Any]
"""A JSON schema of a function: name, description, parameters."""


class Call(msgspec.Struct, frozen=True):
    """A well-formed call: its arguments fit the tool's schema."""

    name: str
    arguments: dict[str, Any]


class Malformed(ValueError):
    """Not a call that could be run; the text says what is wrong, in a few words meant for the policy."""


def schema(name: str, description: str, **parameters: str) -> Schema:
    """The schema of a function whose parameters are all required: name → JSON type, several joined by "|"."""
    properties = {key: {"type": kind.split("|") if "|" in kind else kind} for key, kind in parameters.items()}
    return {
        "name": name,
        "description": description,
        "parameters": {"type": "object", "properties": properties, "required": list(parameters)},
    }


def write_call(name: str, **arguments: Any) -> str:
    """A call as `read_call` reads it."""
    return f"{OPEN}{json.dumps([{'name': name, 'arguments': arguments}])}{CLOSE}"


def read_call(action: object, schemas: list[Schema]) -> Call:
    """The one call in `action`, which may have text before it. Raises `Malformed`."""
    if not isinstance(action, str) or OPEN not in action:
        raise Malformed(f"no tool call: write {FORM}")
    if len(action) > MAX_CHARACTERS:
        raise Malformed("too long")
    if action.count(OPEN) > 1 or action.count(CLOSE) > 1:
        raise Malformed("more than one tool call")
    body, closed, _ = action.partition(OPEN)[2].partition(CLOSE)
    if not closed:
        raise Malformed(f"the tool call is not closed with {CLOSE}")
    try:
        data = json.loads(body, object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise Malformed("the tool call is not valid JSON") from None
    if isinstance(data, list):
        if len(data) != 1:
            raise Malformed("write exactly one tool call")
        data = data[0]
    if not isinstance(data, dict) or set(data) != {"name", "arguments"} or not isinstance(data["arguments"], dict):
        raise Malformed("a tool call has a name and arguments")
    return _checked(data["name"], data["arguments"], schemas)


def _checked(name: Any, arguments: dict[str, Any], schemas: list[Schema]) -> Call:
    known = {wanted["name"]: wanted["parameters"]["properties"] for wanted in schemas}
    if not isinstance(name, str) or name not in known:
        raise Malformed(f"no such tool: use {', '.join(known)}")
    properties: dict[str, Any] = known[name]
    if set(arguments) != set(properties):
        raise Malformed(f"{name} takes {', '.join(properties)}")
    for key, value in arguments.items():
        kinds = properties[key]["type"]
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if isinstance(value, bool) or not isinstance(value, tuple(kind for word in kinds for kind in _TYPES[word])):
            raise Malformed(f"{key} of {name} is a {' or '.join(kinds)}")
    return Call(name, arguments)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key twice")
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")
