"""A run's processes are asked directly, whatever proxy the environment names, and an answer that says no can be told apart."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from segue.metrics import Metrics
from segue.metrics.exporter import Exporter
from segue.metrics.heartbeat import Heartbeat
from segue.metrics.scrape import get
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


def test_a_proxy_of_the_environment_is_not_asked(refusing: Refusing, tmp_path: Path) -> None:
    """In a process of its own: Python reads the proxies of its environment once."""
    run = RunDir.create(tmp_path / "run", "")
    metrics = Metrics("scheduler", envs=("e",))
    place = {"targets": run.targets, "run": run.name, "node": "here", "interface": "127.0.0.1", "ports": (21000, 21999)}
    environment = {name: value for name, value in os.environ.items() if name.lower() != "no_proxy"}
    environment |= dict.fromkeys(("http_proxy", "HTTP_PROXY", "all_proxy"), refusing.url)
    code = (
        "import sys; from pathlib import Path; from segue.metrics.scrape import Scraper, scrape\n"
        "from segue.rundir import RunDir\n"
        "run = Path(sys.argv[1]); assert 'segue_metric_writes_total' in scrape(run)['scheduler-0']\n"
        "print(*Scraper(RunDir(run), 30.0).ask())"
    )
    with Exporter(metrics, Heartbeat(metrics), **place, stale_after=60.0):  # type: ignore[arg-type]
        command = [sys.executable, "-c", code, str(run.path)]
        child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (child.returncode, refusing.asked) == (0, []), child.stderr
    assert "'scheduler-0'" in child.stdout and child.stdout.rstrip().endswith("{}"), "all answered"
    run.unlock()


def test_an_answer_that_says_no_is_text_or_an_error_as_one_asks(refusing: Refusing) -> None:
    assert get(f"{refusing.url}/health") == "not yet"
    with pytest.raises(OSError, match="503"):
        get(f"{refusing.url}/-/ready", well=True)
