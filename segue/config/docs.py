"""docs/config.md: every key with its default and meaning, from the models. `python -m segue.config.docs [--check]`."""

from __future__ import annotations

import json
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from segue.config.root import Config
from segue.config.section import Section
from segue.docgen import DOCS, table, write_or_check

_INTRO = """\
# Configuration

Generated from `segue/config/` by `python -m segue.config.docs`; do not edit.

A config is a TOML file. Keys that are left out have the defaults below; an unknown key, a value out of range and a
combination that cannot work are refused with one sentence. `--set table.key=value` overrides a key on the command line; the
value is TOML, and what is not valid TOML is taken as a string. `segue config CONFIG` prints the resolved config, which a run
also keeps as `config.toml`.
"""


def sections() -> Iterator[tuple[str, type[Section]]]:
    """(table name, model) of all tables, the top level ("") first."""
    yield "", Config
    for name, field in Config.model_fields.items():
        if (kind := section_of(field)) is not None:
            yield name, kind


def section_of(field: FieldInfo) -> type[Section] | None:
    """The model of a key that is a table."""
    candidates = (field.annotation, *typing.get_args(field.annotation))
    return next((kind for kind in candidates if isinstance(kind, type) and issubclass(kind, Section)), None)


def keys(kind: type[Section]) -> Iterator[tuple[str, FieldInfo]]:
    """The keys of a table that are values."""
    return ((name, field) for name, field in kind.model_fields.items() if section_of(field) is None)


def document() -> str:
    """The whole page."""
    parts = [_INTRO]
    for name, kind in sections():
        about = " ".join((kind.__doc__ or "").split())
        parts.append(f"## `[{name}]`\n" if name else "## The top level\n")
        about = about.removeprefix(f"`[{name}]`: ")
        parts.append(about[0].upper() + about[1:] + "\n")
        rows = [
            (f"`{key}`", _default(field), _values(field), " ".join((field.description or "").split()))
            for key, field in keys(kind)
        ]
        parts.append(table(("Key", "Default", "Values", "Meaning"), rows))
    return "\n".join(parts)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "–" if value is None else f"`{_toml(value)}`"


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value)  # for these types JSON and TOML are the same


def _values(field: FieldInfo) -> str:
    bounds = ""
    for rule in field.metadata:
        for kind, sign in ((Ge, "≥"), (Gt, ">"), (Le, "≤"), (Lt, "<")):
            if isinstance(rule, kind):
                bounds += f", {sign} {getattr(rule, kind.__name__.lower())}"
    return _kind(field.annotation) + bounds


def _kind(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _kind(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{_toml(value)}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_kind(argument) for argument in arguments if argument is not type(None))
    if origin is tuple:
        inner = [argument for argument in arguments if argument is not Ellipsis]
        return f"list of {_kind(inner[0])}" if len(inner) == 1 else f"[{', '.join(map(_kind, inner))}]"
    if origin is list:
        return f"list of {_kind(arguments[0])}"
    if origin is dict:
        return "table"
    return {int: "integer", float: "number", str: "string", bool: "`true`, `false`"}[annotation]


if __name__ == "__main__":
    sys.exit(write_or_check(DOCS / "config.md", document(), "segue.config.docs", sys.argv[1:]))
