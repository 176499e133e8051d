"""Reading `[task.args]`: typed, with unknown keys refused, and one sentence for whatever is wrong."""

from __future__ import annotations

import difflib
from typing import Any, TypeVar

import msgspec

from segue.errors import UserError

A = TypeVar("A", bound=msgspec.Struct)


def parse_args(suite: str, args: dict[str, Any], kind: type[A]) -> A:
    """`args` as a `kind`. Raises UserError naming the key, the value and the remedy."""
    fields = [field.name for field in msgspec.structs.fields(kind)]
    for key, value in args.items():
        if key not in fields:
            close = difflib.get_close_matches(key, fields, n=1)
            remedy = f"did you mean task.args.{close[0]}?" if close else f"remove it; {suite} knows {', '.join(fields)}."
            raise UserError(f"The suite {suite} has no argument task.args.{key} = {value!r}: {remedy}")
    for key, value in args.items():
        try:
            msgspec.convert({key: value}, kind)
        except msgspec.ValidationError as error:
            what = str(error).partition(" - at ")[0].replace("`", "")
            raise UserError(f"The suite {suite} cannot use task.args.{key} = {value!r} ({what}): change it.") from None
    return msgspec.convert(args, kind)
