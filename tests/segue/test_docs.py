"""Generated pages are what the code says now."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from segue.config.docs import document as config_page
from segue.docgen import DOCS, table, write_or_check
from segue.metrics.catalogue import CATALOGUE
from segue.metrics.docs import document as metrics_page


@pytest.mark.parametrize(("name", "page"), [("config.md", config_page), ("metrics.md", metrics_page)])
def test_the_committed_page_is_up_to_date(name: str, page: Callable[[], str]) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == page(), f"run python -m segue.{name.removesuffix('.md')}.docs"


def test_the_metrics_page_lists_every_metric_once() -> None:
    catalogue = metrics_page().partition("## Catalogue")[2].partition("## States")[0]
    assert re.findall(r"^\|`(segue_\w+)`\|", catalogue, re.MULTILINE) == list(CATALOGUE)


def test_check_tells_a_stale_page_and_how_to_renew_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.md"
    assert write_or_check(path, "new", "segue.x", ["--check"]) == 1
    assert write_or_check(path, "new", "segue.x", []) == 0
    assert write_or_check(path, "new", "segue.x", ["--check"]) == 0
    path.write_text("old")
    assert write_or_check(path, "new", "segue.x", ["--check"]) == 1
    assert path.read_text() == "old"
    assert write_or_check(path, "new", "segue.x", ["--wrong"]) == 2
    assert f"{path} is out of date: run python -m segue.x and commit the result." in capsys.readouterr().err


def test_tables_escape_bars() -> None:
    assert table(("a", "b"), [("1|2", "3")]) == "|a|b|\n|---|---|\n|1\\|2|3|\n"


def test_the_check_runs_as_a_command() -> None:
    command = [sys.executable, "-m", "segue.metrics.docs", "--check"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_every_variable_that_launch_sh_reads_is_explained() -> None:
    script = (DOCS.parent / "launch.sh").read_text(encoding="utf-8")
    read = {name for name in re.findall(r"\$\{!?([A-Z][A-Z0-9_]+)[:}]", script) if not name.startswith("SLURM")}
    page = (DOCS / "cluster.md").read_text(encoding="utf-8")
    section = page.partition("\n## The environment\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\|`([A-Z0-9_]+)`\|", section, re.M)) == read


def test_the_command_of_promtool_names_files_that_are_there() -> None:
    page = (DOCS / "monitoring.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^\.venv/(\S+/promtool) check rules (.+)$", page, re.M)
    assert command[0] == "opt/prometheus/usr/bin/promtool"
    assert all((DOCS.parent / name).is_file() for name in command[1].split())
