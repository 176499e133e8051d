"""What a config names as "module:name", imported: parts of the user's own. One sentence for whatever is wrong with them."""

from __future__ import annotations

import importlib
from typing import Any

from segue.errors import UserError
from segue.suite_path import extend_path, folders
from segue.users_code import described


def load(path: str, what: str, must_be: str) -> Any:
    """What is called `name` in the module of "module:name"; callable.

    `what` begins the sentence if it cannot be had, and `must_be` says in it what is expected. Raises `UserError`.
    """
    module_name, _, name = path.partition(":")
    refused = f"{what} cannot be imported"
    extend_path()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(f"{refused} ({described(error)}): install what it needs.") from error
        looked = ", ".join([*folders(), "the installed packages"])
        raise UserError(
            f"{refused} (no module {error.name!r} in {looked}): check its name, or put it into one of these."
        ) from None
    except Exception as error:
        raise UserError(f"{refused} ({described(error)}): check its name and mend it.") from error
    found = getattr(module, name, None)
    if not callable(found):
        lacks = f"{name!r} in it is no function" if hasattr(module, name) else f"has no {name!r}"
        raise UserError(f"{refused} ({getattr(module, '__file__', module_name)} was found, but {lacks}): {must_be}.")
    return found
