"""YAML from plain data, the same text every time: mappings, lists and scalars in block style, long strings folded nowhere.

YAML takes JSON's strings as they are, so whatever is not a plain word is written as one.
"""

from __future__ import annotations

import json
import re
from typing import Any

_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./-]*")
_WORDS = ("true", "false", "yes", "no", "on", "off", "null", "y", "n")


def yaml_text(value: Any, note: str = "") -> str:
    """A document of mappings, lists, strings, numbers and booleans; `note` is a comment at its head."""
    head = "".join(f"# {line}\n" for line in note.splitlines())
    return head + "\n".join(_lines(value, "")) + "\n"


def _lines(value: Any, indent: str) -> list[str]:
    if isinstance(value, dict):
        return [line for key, item in value.items() for line in _entry(f"{indent}{key}:", item, indent + "  ")]
    lines: list[str] = []
    for item in value:
        nested = _lines(item, indent + "  ") if _nested(item) else [f"{indent}  {_scalar(item)}"]
        lines += [f"{indent}- {nested[0].lstrip()}", *nested[1:]]
    return lines


def _entry(head: str, item: Any, indent: str) -> list[str]:
    if _nested(item):
        return [head, *_lines(item, indent)]
    if isinstance(item, str) and "\n" in item:
        return [f"{head} |-", *(f"{indent}{line}".rstrip() for line in item.splitlines())]
    return [f"{head} {_scalar(item)}"]


def _nested(item: Any) -> bool:
    return isinstance(item, (dict, list)) and bool(item)


def _scalar(item: Any) -> str:
    if isinstance(item, str) and _PLAIN.fullmatch(item) and item.lower() not in _WORDS:
        return item
    return json.dumps(item, ensure_ascii=False)
