"""One log file per process; every record is counted."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from segue.errors import UserError
from segue.logs import ProcessLog, level_name, parse_level
from segue.metrics import Metrics

COUNT = "segue_log_messages_total"


def test_lines_have_time_level_process_and_logger_and_are_counted(tmp_path: Path) -> None:
    metrics = Metrics("rollout", "1", envs=("a",))
    with ProcessLog(tmp_path / "rollout-1.log", "rollout-1", metrics=metrics) as process:
        assert process.path == tmp_path / "rollout-1.log"
        logging.getLogger("rollout.node").info("leased %d", 3)
        logging.getLogger("segue.wire").warning("refused")
        logging.getLogger("rollout.node").debug("not written")
        logging.getLogger("another.package").info("not written either")
        logging.getLogger("chatty").setLevel(logging.DEBUG)  # as bm25s does
        logging.getLogger("chatty").debug("nor this")
        logging.getLogger("another.package").error("but this")
    logging.getLogger("rollout.node").error("after the end")
    lines = (tmp_path / "rollout-1.log").read_text().splitlines()
    assert [re.sub(r"^\S+ ", "", line) for line in lines] == [
        "INFO rollout-1 rollout.node: leased 3",
        "WARNING rollout-1 segue.wire: refused",
        "ERROR rollout-1 another.package: but this",
    ]
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+0000 ", line) for line in lines)
    assert [metrics.value(COUNT, level=level) for level in ("debug", "info", "warning", "error")] == [0, 1, 1, 1]


def test_the_level_is_ours_to_choose_and_is_put_back(tmp_path: Path) -> None:
    before, handlers = logging.getLogger("scheduler").level, list(logging.getLogger().handlers)
    with ProcessLog(tmp_path / "scheduler-0.log", "scheduler-0", level="DEBUG"):
        logging.getLogger("scheduler.core").debug("seen")
    assert "seen" in (tmp_path / "scheduler-0.log").read_text()
    assert logging.getLogger("scheduler").level == before
    assert logging.getLogger().handlers == handlers


def test_an_unknown_level_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no log level 'loud': choose one of debug, info, warning, error, critical"):
        ProcessLog(tmp_path / "scheduler-0.log", "scheduler-0", level="loud")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("number", "name"), [(0, "debug"), (10, "debug"), (15, "debug"), (20, "info"), (35, "warning"), (99, "critical")]
)
def test_levels_between_the_standard_ones_are_counted_too(number: int, name: str) -> None:
    assert level_name(number) == name


def test_parse_level() -> None:
    assert [parse_level(name) for name in ("debug", "INFO", "Warning")] == [10, 20, 30]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_neither_the_role_nor_the_count_and_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "envpool-0.log").symlink_to("/dev/full")
    metrics = Metrics("envpool", envs=("a",))
    with ProcessLog(tmp_path / "envpool-0.log", "envpool-0", metrics=metrics):
        for _ in range(3):
            logging.getLogger("envpool").warning("lost")
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and "cannot be written (No space left on device): log lines are lost." in told[0]
    assert metrics.value(COUNT, level="warning") == 3
