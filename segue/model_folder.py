"""Whether a model folder gave a model all of its weights. Light: it reads what the loader reports, and imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from segue.errors import UserError

log = logging.getLogger(__name__)


def check_loaded(path: str, parts: Collection[str], report: Mapping[str, Any]) -> None:
    """Raises `UserError` if the model that was made from the folder is not the one that was saved in it.

    `report` is what transformers gives with `output_loading_info`: it has left out tied weights, which need not be there, and
    what it knows to be superfluous. `parts` are the names of the model's direct children: an unexpected tensor inside one of
    them (another layer, a bias) belongs to another computation and is refused; a part of its own (a value head) only warns.

    transformers itself would fill in random numbers for what is missing and go on.
    """
    missing = sorted(report["missing_keys"])
    shapes = {name: (list(saved), list(wanted)) for name, saved, wanted in report["mismatched_keys"]}
    unexpected = sorted(report["unexpected_keys"])
    inside = [name for name in unexpected if name.partition(".")[0] in parts]
    remedy = "copy it again whole, or name another folder in model.path."
    if missing:
        also = f", and it has {_some(unexpected)}, which that model lacks" if unexpected else ""
        raise UserError(
            f"The weights in {path} are not those of the model in its config.json: {_some(missing)} "
            f"{_be(missing)} missing{also}; {remedy}"
        )
    if shapes:
        first = min(shapes)
        saved, wanted = shapes[first]
        more = f", and {len(shapes) - 1} more do not fit either" if len(shapes) > 1 else ""
        raise UserError(
            f"The weights in {path} are not those of the model in its config.json: {first} has the shape {saved} "
            f"instead of {wanted}{more}; {remedy}"
        )
    if inside:
        raise UserError(
            f"The weights in {path} are not those of the model in its config.json, which has no {_some(inside)}: {remedy}"
        )
    if unexpected:
        log.warning("%s has weights that the model does not use: %s", path, _some(unexpected))


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _be(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"
