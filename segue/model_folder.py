"""Whether a model folder has all of its weights, and gave a model all of them. Light: it imports no torch."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from segue.errors import UserError

log = logging.getLogger(__name__)


REMEDY = "copy it again whole, or name another folder in model.path."


def check_weight_files(folder: Path) -> None:
    """Raises `UserError` if a safetensors file in `folder` was cut short, or one that its index names is not there.

    A file begins with the length of its header (8 bytes, little-endian) and the header (JSON), which says where each tensor ends.
    What cannot be read at all is left to the loader's own words.
    """
    for path in sorted(folder.glob("*.safetensors")):
        has = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = file.read(min(length, has))
        needs = 8 + length
        if has >= needs > 8:
            try:
                tensors = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
                needs += max((entry["data_offsets"][1] for entry in tensors), default=0)
            except (ValueError, KeyError, TypeError, AttributeError):
                raise UserError(f"The weights in {path} are damaged (their header cannot be read): {REMEDY}") from None
        if has < needs:
            raise UserError(f"The weights in {path} are cut short ({has} bytes of at least {needs}): {REMEDY}")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            named = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{index} is damaged, which says where the weights are: {REMEDY}") from None
        lost = [name for name in named if not (folder / name).is_file()]
        if lost:
            raise UserError(f"The weights in {folder} are not whole ({some(lost)} {_be(lost)} missing): {REMEDY}")


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
    remedy = REMEDY
    if missing:
        also = f", and it has {some(unexpected)}, which that model lacks" if unexpected else ""
        raise UserError(
            f"The weights in {path} are not those of the model in its config.json: {some(missing)} "
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
            f"The weights in {path} are not those of the model in its config.json, which has no {some(inside)}: {remedy}"
        )
    if unexpected:
        log.warning("%s has weights that the model does not use: %s", path, some(unexpected))


def some(names: list[str]) -> str:
    """The first name, and how many more there are."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _be(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"
