"""`monitoring/` is what the catalogue makes of it, names only what is exported, and Prometheus takes all of it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from promtool import needs_prometheus, promtool
from typer.testing import CliRunner

from segue.cli import app
from segue.metrics.catalogue import CATALOGUE
from segue.monitoring import generate
from segue.monitoring.boards import DASHBOARDS, EXEMPT
from segue.monitoring.checks import metrics_behind, names_in, problems
from segue.monitoring.generate import FOLDER
from segue.monitoring.panels import Row, dashboard_json
from segue.monitoring.yaml_text import yaml_text

yaml: Any = pytest.importorskip("yaml", reason="it comes with Ray")
DOCS = FOLDER.parent / "docs"


def test_what_is_committed_is_what_is_made_and_all_of_it_is_declared_shown_and_explained() -> None:
    assert generate.check() == []


def test_the_check_as_a_command() -> None:
    result = CliRunner().invoke(app, ["dashboards", "--check"])
    assert (result.exit_code, result.output) == (0, "")


def test_what_is_wrong_is_found_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "monitoring"
    written = generate.write(folder)
    assert len(written) == len(generate.files()) and generate.write(folder) == [] and generate.stale(folder) == []
    board = folder / "grafana" / "dashboards" / "rollout.json"
    board.write_text("{}")
    (board.parent / "own.json").write_text("{}")
    assert generate.stale(folder) == [
        f"{board} is out of date: run segue dashboards and commit the result.",
        f"{board.parent / 'own.json'} is made by nobody: remove it.",
    ]
    runbook = tmp_path / "runbook.md"
    runbook.write_text((DOCS / "runbook.md").read_text().replace("## Echo trap", "## Echoes"))
    assert generate.unexplained(runbook) == [
        "runbook.md has no entry #echo-trap that names SegueEchoTrap.",
        "runbook.md has no entry #echo-trap that names SegueGradSpike.",
        "runbook.md has an entry #echoes that no alert points to.",
    ]
    page = tmp_path / "page.md"
    page.write_text("Look at overview/Idle time\nby role, learner/Entropy, and learner/batches.py.")
    assert generate.misnamed(page) == []
    page.write_text("Look at learner/Entropy and overview/Entropy of the policy.")
    assert generate.misnamed(page) == ["page.md points to overview/Entropy of the policy.…, which is no panel."]
    monkeypatch.setattr(generate, "DASHBOARDS", DASHBOARDS[1:])
    assert "segue_build_info is on no dashboard: put it on one, or give the reason in EXEMPT." in generate.unshown()
    monkeypatch.setitem(EXEMPT, "segue_build_info", "a test")
    assert not any(what.startswith("segue_build_info ") for what in generate.unshown())
    monkeypatch.setitem(EXEMPT, "segue_nothing", "a test")
    assert any(what.startswith("segue_nothing is exempted") for what in generate.unshown())


def test_a_panel_that_needs_no_gpu_is_not_declared_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Declared ones are excused from having data."""
    panel = next(panel for panel in DASHBOARDS[0].panels if panel.title == "Reward")
    row = Row("R", (replace(panel, gpu=True),))
    monkeypatch.setattr(generate, "DASHBOARDS", (replace(DASHBOARDS[0], rows=(row,)),))
    assert generate.badly_described() == ["The panel overview/Reward is declared to need GPUs, and reads what is there without."]


@pytest.mark.parametrize(
    ("expr", "what"),
    [
        ("rate(segue_steps_total[5m])", "segue_steps_total is in no catalogue"),
        ("segue_env_step_seconds", "segue_env_step_seconds is in no catalogue"),  # a histogram has no series of that name
        ('segue_entropy_nats{env="x"}', "segue_entropy_nats has no label env"),
        ('segue_episodes_dropped_total{reason="old"}', "segue_episodes_dropped_total has no reason='old'"),
        ('segue_worker_state{state=~"wait_.+|idle"}', "segue_worker_state has no state=~'wait_.+|idle'"),
        ('segue_entropy_nats{role="rollout"}', "segue_entropy_nats has no role='rollout'"),
        ("sum by (run, env) (segue_entropy_nats)", "nothing in it has the label env"),
        ("segue_entropy_nats * on (UUID) up", "nothing in it has the label UUID"),
        ("role:segue_idle:ratio", "role:segue_idle:ratio is in no catalogue"),
        ("segue_entropy_nats{run=$run}", "segue_entropy_nats{run=$run} is no list of matchers"),
    ],
)
def test_names_that_nobody_exports_are_found(expr: str, what: str) -> None:
    assert what in problems(expr)


def test_expressions_are_read_as_far_as_names_go() -> None:
    steps = 'sum by (run) (rate(segue_env_step_seconds_bucket{le="1.0", run=~"$run"}[$__rate_interval]))'
    expr = f"{steps} / on (run) role:segue_idle:ratio_rate5m offset 5m"
    assert problems(expr) == []
    assert names_in(expr) == ["segue_env_step_seconds_bucket", "role:segue_idle:ratio_rate5m"]
    assert metrics_behind(expr) == {"segue_env_step_seconds", "segue_worker_state_seconds_total"}


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.name)
def test_dashboards_can_be_provisioned_anywhere(board: Any) -> None:
    made = dashboard_json(board)
    assert made["id"] is None and made["uid"] == f"segue-{board.name}" and "__inputs" not in made
    assert [variable["name"] for variable in made["templating"]["list"]] == ["datasource", "run"]
    places: set[tuple[int, int]] = set()
    for panel in made["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & places and place["x"] + place["w"] <= 24
        places |= cells
        if panel["type"] != "row":
            assert panel["fieldConfig"]["defaults"]["unit"] and panel["description"] and panel["targets"]
            assert panel["datasource"]["uid"] == "${datasource}"
    assert len({panel["id"] for panel in made["panels"]}) == len(made["panels"])
    for panel in board.panels:
        for query in panel.queries:
            known = {label for name in metrics_behind(query.expr) for label in CATALOGUE[name].label_names}
            used = set(re.findall(r"{{(\w+)}}", query.legend))
            assert used <= known | {"run", "role", "rank", "le", "alertname"}, f"{panel.title}: {query.legend}"


@needs_prometheus
def test_prometheus_takes_the_configuration_and_the_rules() -> None:
    folder = FOLDER / "prometheus"
    promtool("check", "config", folder / "prometheus.yml")
    for name in ("recording.yml", "alerts.yml"):
        promtool("check", "rules", "--lint=all", "--lint-fatal", folder / name)


@needs_prometheus
def test_prometheus_takes_the_expression_of_every_panel(tmp_path: Path) -> None:
    rules: list[dict[str, str]] = []
    for board in DASHBOARDS:
        for panel in board.panels:
            for query in panel.queries:
                expr = query.expr.replace("$__rate_interval", "1m").replace("$run", ".*")
                rules.append({"record": f"panel:number_{len(rules)}", "expr": expr})
    file = tmp_path / "panels.yml"
    file.write_text(yaml_text({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", "--lint=all", "--lint-fatal", file)


@pytest.mark.parametrize("path", [path for path in generate.files() if path.endswith(".yml")])
def test_yaml_says_what_was_meant(path: str) -> None:
    assert isinstance(yaml.safe_load(generate.files()[path]), dict)


def test_yaml_keeps_every_value() -> None:
    value = {
        "word": "job_name",
        "odd": 'a: "b" # c',
        "flag": "no",
        "number": "5",
        "real": 5,
        "none": [],
        "lines": "a\n  b: c\n> 0.5",
        "list": [{"a": 1, "b": ["x", "y z"]}, {"c": {"d": True}}, "€ {{ $value | humanize }}"],
    }
    assert yaml.safe_load(yaml_text(value, "a note\nof two lines")) == value


def test_dashboards_are_json_of_the_repository() -> None:
    for board in DASHBOARDS:
        assert json.loads((FOLDER / "grafana" / "dashboards" / f"{board.name}.json").read_text())["title"] == board.title
