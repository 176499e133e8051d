"""A run's processes are asked directly, whatever proxy the environment names, and an answer that says no can be told apart."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from segue.metrics import Metrics
from segue.metrics.exporter import Exporter
from segue.metrics.heartbeat import Heartbeat
from segue.metrics.scrape import Scraper, get, scrape
from segue.rundir import RunDir


class Refusing(ThreadingHTTPServer):
    """Answers everything with 503, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(handler) -> None:
                self.asked.append(handler.path)
                handler.send_response(503)
                handler.end_headers()
                handler.wfile.write(b"not yet")

            def log_message(handler, format: str, *args: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


@pytest.fixture
def refusing() -> Iterator[Refusing]:
    with Refusing() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_a_proxy_of_the_environment_is_not_asked(refusing: Refusing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, refusing.url)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(urllib.request, "_opener", None)  # what `urlopen` made of the environment before
    run = RunDir.create(tmp_path / "run", "")
    metrics = Metrics("scheduler", envs=("e",))
    place = {"targets": run.targets, "run": run.name, "node": "here", "interface": "127.0.0.1", "ports": (21000, 21999)}
    with Exporter(metrics, Heartbeat(metrics), **place, stale_after=60.0):  # type: ignore[arg-type]
        assert "segue_build_info" in "".join(scrape(run.path)["scheduler-0"])
        assert [*Scraper(run, 5.0).ask()[0]] == ["scheduler-0"]
    assert refusing.asked == []
    run.unlock()


def test_an_answer_that_says_no_is_text_or_an_error_as_one_asks(refusing: Refusing) -> None:
    assert get(f"{refusing.url}/health") == "not yet"
    with pytest.raises(OSError, match="503"):
        get(f"{refusing.url}/-/ready", well=True)
