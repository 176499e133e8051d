"""`segue report --html`: what the curves are, how they are drawn, and that the page needs nothing beside it."""

from __future__ import annotations

import math
import re
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from exported_run import line_of, write_run
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from segue.cli import app
from segue.files import read_jsonl
from segue.report.curves import MOST, SMOOTHING, Chart, Series, charts, smoothed, thinned
from segue.report.page import page_of
from segue.report.svg import HEIGHT, LEFT, RIGHT, TOP, WIDTH, nice, svg
from segue.rundir import RunDir

NOON = datetime(2026, 1, 2, 12, 0, 0)
EVALS: dict[str, Any] = {"before": {"success": 0.25, "n": 4, "failed": 0}, "after": None}


def called(*arguments: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `segue report`."""
    result = CliRunner().invoke(app, ["report", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


class Page(HTMLParser):
    """Checks that every tag is closed, and gathers attributes and texts."""

    VOID = {"meta"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.titles: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [str(value) for name, value in attrs if name in ("src", "href", "xlink:href", "data", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h3":
            self.titles.append(data)


TITLES = {
    "Reward and success",
    "Entropy",
    "Gradient norm",
    "Log-probability gap",
    "Staleness",
    "Idle share by role",
    "Prefill by cause",
    "Queue and episodes in flight",
    "Environment latency",
    "Step time",
    "Tokens per second",
}


def test_the_page_of_a_finished_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 12, 12, done=True)
    assert called(run.path, "--html") == (0, f"{run.path}/report.html\n", "")
    text = (run.path / "report.html").read_text()
    page = Page(text)
    assert set(page.titles) == TITLES
    assert page.links == [] and "http" not in text.replace("http-equiv", "") and not {"script", "link", "img"} & {*page.tags}
    assert "It is done: 12 of 12 steps in 24 s." in text and "2026-01-02 03:04:05" in text
    assert "before training 0.250 (n = 4), after training 0.750" in text, "the table of the summary"
    assert "max_age = 4" in text, "the config"
    assert "Left out" not in text


def test_the_page_of_a_run_that_goes_on_or_told_less(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 3, 12, told=False)
    run.lock()
    text = page_of(run, NOON)
    assert "It goes on: 3 of 12 steps" in text and "page of</dt><dd>2026-01-02 12:00:00" in text
    left_out = "does not tell (yet): Idle share by role, Prefill by cause, Environment latency."
    assert left_out in text and set(Page(text).titles) == TITLES - {
        "Idle share by role",
        "Prefill by cause",
        "Environment latency",
    }
    run.unlock()
    empty = write_run(tmp_path / "empty", 0, 12)
    assert "No step is trained yet." in page_of(empty, NOON) and Page(page_of(empty, NOON)).titles == []


def test_what_users_wrote_is_text_and_no_markup(tmp_path: Path) -> None:
    run = write_run(tmp_path / "<b>run", 1, 2)
    text = page_of(run, NOON)
    Page(text)
    assert "&lt;b&gt;run" in text and "<b>run" not in text


def test_the_page_goes_where_it_is_asked_to(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 1, 2)
    there = tmp_path / "page.html"
    assert called(run.path, "--html", there) == (0, f"{there}\n", "")
    assert there.read_text().startswith("<!DOCTYPE html>") and not (run.path / "report.html").exists()
    for arguments, sentence in (
        ((run.path, "--html", tmp_path / "none" / "page.html"), f"there is no folder {tmp_path}/none"),
        ((run.path, "--html", tmp_path), "it is a folder"),
        ((run.path, there), "add --html"),
        ((run.path, "--html", "--json"), "ask for one at a time"),
        ((tmp_path, "--html"), "is no run directory"),
    ):
        code, out, err = called(*arguments)
        assert (code, out) == (2, "") and err.count("\n") == 1 and sentence in err, arguments


def test_a_new_run_in_the_directory_takes_the_old_ones_page_away(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 0, 2)
    assert called(run.path, "--html")[0] == 0 and run.page.is_file()
    RunDir.create(run.path, run.config.read_text()).unlock()
    assert not run.page.exists()


# --- curves -------------------------------------------------------------------------------------------------------------------


def curve(made: list[Chart], title: str, name: str) -> tuple[tuple[float, float], ...]:
    (chart,) = [chart for chart in made if chart.title == title]
    return next(series.points for series in chart.series if series.name == name)


def test_curves_hold_what_the_lines_say(tmp_path: Path) -> None:
    lines = read_jsonl(write_run(tmp_path / "run", 4, 9).metrics)
    made, missing = charts(lines, 4, EVALS)
    assert missing == []
    assert curve(made, "Reward and success", "reward") == tuple((step + 1.0, 0.1 * step) for step in range(4))
    assert curve(made, "Reward and success", "held-out success") == ((0.0, 0.25),)
    assert curve(made, "Staleness", "mean")[0] == (1.0, 250 / 300)
    assert curve(made, "Staleness", "max")[0] == (1.0, 2.0)
    assert dict(curve(made, "Idle share by role", "rollout")) == pytest.approx(dict.fromkeys((1.0, 2.0, 3.0, 4.0), 0.25))
    assert curve(made, "Prefill by cause", "turn")[1] == (2.0, 120.0)
    (prefill,) = [chart for chart in made if chart.title == "Prefill by cause"]
    assert [series.name for series in prefill.series] == ["turn", "weight_update"], "causes that never came are left out"
    assert curve(made, "Tokens per second", "sampled")[0] == (1.0, 200.0)
    assert 0.1 < curve(made, "Environment latency", "p50")[0][1] <= 0.25


def test_what_is_not_known_is_no_point() -> None:
    lines = [line_of(0), line_of(1, logprob_gap_mean=float("nan"), logprob_gap_max=0.0), line_of(2, reward_mean=float("nan"))]
    made, _ = charts(lines, 4, {})
    assert [x for x, _ in curve(made, "Log-probability gap", "mean")] == [1.0, 3.0]
    assert [x for x, _ in curve(made, "Log-probability gap", "max")] == [1.0, 3.0], "a logarithmic axis has no 0"
    assert [x for x, _ in curve(made, "Reward and success", "reward")] == [1.0, 2.0]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=2000))
def test_long_curves_are_thinned_and_keep_their_maximum(values: list[float]) -> None:
    points = [(float(i), y) for i, y in enumerate(values)]
    thin = thinned(points, max)
    assert len(thin) <= MOST and max(y for _, y in thin) == max(values)
    assert thin[-1][0] == len(values) - 1 and thin == sorted(thin, key=lambda point: point[0])
    assert thinned(points, max, len(values)) == points


def test_smoothing_is_the_mean_with_the_neighbours() -> None:
    points = [(float(i), float(i % 2)) for i in range(2 * SMOOTHING)]
    smooth, of = smoothed(points)
    assert of == 5 and smooth[10][1] == pytest.approx(2 / 5) and smooth[0][1] == pytest.approx(1 / 3)
    assert smoothed(points[: SMOOTHING - 1]) == (points[: SMOOTHING - 1], 1)


# --- drawing ------------------------------------------------------------------------------------------------------------------


def drawn(chart: Chart) -> ElementTree.Element:
    return ElementTree.fromstring(svg(chart))


def spots(element: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in element.attrib["points"].split())]


def test_a_curve_lies_where_its_values_are() -> None:
    chart = Chart("T", "", "u", (Series("a", ((1.0, 0.0), (3.0, 5.0), (5.0, 10.0))),), level=("bound", 10.0))
    (line,) = drawn(chart).iter("polyline")
    (x0, y0), (x1, y1), (x2, y2) = spots(line)
    assert (x0, x2) == (LEFT, WIDTH - RIGHT) and x1 == (x0 + x2) / 2
    assert y2 == TOP and y1 == (y0 + y2) / 2
    (level,) = [e for e in drawn(chart).iter("line") if e.get("class") == "level"]
    assert float(level.attrib["y1"]) == y2


def test_areas_stand_on_each_other_and_a_zone_tells_each_ones_own_figure() -> None:
    chart = Chart("T", "", "u", (Series("a", ((1.0, 4.0), (2.0, 4.0))), Series("b", ((1.0, 6.0), (2.0, 1.0)))), stack=True)
    behind, front = drawn(chart).iter("polygon")
    assert (behind.get("class"), front.get("class")) == ("area s1", "area s0")
    floor = spots(front)[0][1]
    top_of_a, top_of_both = floor - spots(front)[1][1], floor - spots(behind)[1][1]
    assert top_of_both == pytest.approx(top_of_a * 10 / 4)
    assert [title.text for title in drawn(chart).iter("title")] == ["step 1\na 4\nb 6", "step 2\na 4\nb 1"]


def test_a_logarithmic_axis_has_a_tick_per_power_of_ten() -> None:
    chart = Chart("T", "", "nats", (Series("a", ((1.0, 1e-6), (2.0, 1e-4))),), log=True)
    assert {"1e-6", "1e-5", "1e-4"} <= {text.text for text in drawn(chart).iter("text")}
    (line,) = drawn(chart).iter("polyline")
    assert spots(line)[1][1] == TOP
    assert "1e-7" in svg(Chart("T", "", "nats", (Series("a", ((1.0, 1e-7),)),), log=True)), "a single value"


finite = st.floats(-1e12, 1e12, allow_nan=False).map(lambda y: 0.0 if abs(y) < 1e-9 else y)


@given(st.lists(st.tuples(st.integers(1, 10_000), finite), min_size=1, max_size=60, unique_by=lambda point: point[0]))
def test_whatever_the_values_are_everything_stays_inside_the_picture(points: list[tuple[int, float]]) -> None:
    series = Series("a", tuple((float(x), y) for x, y in sorted(points)))
    for chart in (Chart("T", "", "u", (series,)), Chart("T", "", "u", (series,), stack=True)):
        for element in drawn(chart).iter():
            for name, value in element.attrib.items():
                limit = WIDTH if name.startswith(("x", "cx")) else HEIGHT
                if name in ("x1", "x2", "cx", "y1", "y2", "cy"):
                    assert -0.1 <= float(value) <= limit + 0.1, (element.tag, name, value)
            if "points" in element.attrib:
                assert all(LEFT - 0.1 <= x <= WIDTH - RIGHT + 0.1 and TOP - 0.1 <= y <= HEIGHT for x, y in spots(element))


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 10))
def test_ticks_are_round_inside_and_neither_few_nor_many(low: float, width: float, most: int) -> None:
    high = low + width
    if high - low <= 1e-6 * abs(low):
        return  # no figures of a run are told apart so finely
    ticks = nice(low, high, most)
    assert 2 <= len(ticks) <= most + 2
    assert ticks == sorted(ticks) and low - 1e-6 * width <= ticks[0] and ticks[-1] <= high + 1e-6 * width
    step = (ticks[-1] - ticks[0]) / (len(ticks) - 1)
    digits = step / 10.0 ** math.floor(math.log10(step) + 1e-9)
    assert len(ticks) == 2 or any(digits == pytest.approx(d, rel=1e-4) for d in (1.0, 2.0, 5.0, 10.0))


def test_every_chart_of_a_run_is_well_formed_and_labelled(tmp_path: Path) -> None:
    lines = read_jsonl(write_run(tmp_path / "run", 50, 60).metrics)
    for chart in charts(lines, 4, EVALS)[0]:
        texts = [text.text for text in drawn(chart).iter("text")]
        assert "step" in texts and chart.unit in texts, chart.title
        assert re.search(r"\d", "".join(filter(None, texts)))
