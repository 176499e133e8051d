"""A GGUF file as a Hugging Face folder: weights dequantised to float32 and saved as safetensors, with its tokenizer and template.

`python -m segue.cluster.gguf FILE` prints {"folder": …, "sentence": …} as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from segue.cluster.cache import make_folder
from segue.cluster.models import folder_of, is_converted, recipe_of
from segue.errors import UserError
from segue.model_folder import some


def convert(gguf: Path) -> Path:
    """The folder of the converted file; makes it. Raises `UserError`: it is damaged, or of a kind transformers does not know."""
    recipe = recipe_of(gguf)
    folder = folder_of(gguf, recipe)
    if not is_converted(folder):
        make_folder(folder, recipe, is_converted, lambda aside: _write(gguf, aside))
    return folder


def _write(gguf: Path, folder: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    _check_whole(gguf)
    where: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **where)
        loaded, report = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), dtype=torch.float32, output_loading_info=True, **where
        )
    except Exception as error:  # gguf, tokenizers and transformers each raise classes of their own
        raise UserError(
            f"The GGUF file {gguf} cannot be converted ({_first_line(error)}): name another model in model.path."
        ) from error
    missing = sorted({*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])})
    if missing:
        raise UserError(f"The GGUF file {gguf} lacks weights of its model ({some(missing)}): get it again whole.")
    config = loaded.config
    del config.quantization_config  # it says that the weights are still those of the file, and that nothing can be saved
    config._name_or_path = ""
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    plain.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


def _check_whole(gguf: Path) -> None:
    """Raises `UserError` for a file that was cut short. transformers would fail somewhere inside, after seconds."""
    from gguf import GGUFReader

    try:
        GGUFReader(str(gguf))
    except Exception as error:  # numpy's, struct's or its own, by where the cut is
        raise UserError(
            f"The GGUF file {gguf} is damaged or cut short ({gguf.stat().st_size} bytes): "
            "get it again whole, or name another model in model.path."
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(".:")


def main() -> None:
    """See the module."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the libraries print
    folder, sentence = None, None
    try:
        folder = str(convert(Path(sys.argv[1])))
    except UserError as error:
        sentence = str(error)
    with answer:
        json.dump({"folder": folder, "sentence": sentence}, answer)


if __name__ == "__main__":
    main()
