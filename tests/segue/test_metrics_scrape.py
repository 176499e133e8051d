"""A run's processes are asked directly, whatever proxy the environment names, and an answer that says no can be told apart."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any

import pytest

from segue.files import write_json
from segue.metrics import Metrics
from segue.metrics.exporter import Exporter
from segue.metrics.heartbeat import Heartbeat
from segue.metrics.scrape import Scraper, get
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


@contextmanager
def answering(*pieces: bytes, repeat: int = 0, pause: float = 0.0) -> Iterator[str]:
    """The URL of a server that sends these pieces, the last one `repeat` times more after `pause` seconds each, and hangs up."""
    over = threading.Event()

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline().strip():
                pass
            with suppress(OSError):
                for piece in (*pieces, *[pieces[-1]] * repeat):
                    self.wfile.write(piece)
                    if over.wait(pause):
                        return

    class Server(ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        over.set()
        server.shutdown()


HEAD = b"HTTP/1.0 200 OK\r\n"


@pytest.mark.parametrize("begun", [(HEAD, b"X-Much: a", b"a"), (HEAD + b"\r\n", b"a")], ids=["header", "body"])
def test_an_answer_that_drips_has_one_deadline(begun: tuple[bytes, ...]) -> None:
    """It would end well after ten times that long."""
    with answering(*begun, repeat=60, pause=0.05) as url, pytest.raises(TimeoutError):
        get(url, seconds=0.3)


def test_an_answer_without_end_is_given_up() -> None:
    with answering(HEAD + b"\r\n", bytes(1 << 20), repeat=20) as url, pytest.raises(OSError, match="more than 16 MB"):
        get(url, seconds=60.0)


@pytest.mark.parametrize("status", ["200 OK", "404 Not Found"])
@pytest.mark.parametrize("form", ["Content-Length: 99\r\n\r\nshort", "Transfer-Encoding: chunked\r\n\r\n63\r\nshort"])
def test_an_answer_that_is_cut_off_is_none(status: str, form: str) -> None:
    with answering(f"HTTP/1.1 {status}\r\n{form}".encode()) as url, pytest.raises(OSError, match="IncompleteRead"):
        get(url)


def test_ctrl_c_does_not_wait_for_who_does_not_answer(tmp_path: Path) -> None:
    asked, gone = threading.Event(), threading.Event()

    def serve() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(1)
            asked.set()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            while connection.recv(4096):
                pass
            gone.set()

    run = RunDir.create(tmp_path / "run", "")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = threading.Thread(target=serve)
        serving.start()
        write_json(run.targets / "learner-0.json", [{"targets": [f"127.0.0.1:{listening.getsockname()[1]}"], "labels": {}}])
        with pytest.raises(KeyboardInterrupt):
            Scraper(run, 3.0).ask()
        assert asked.is_set() and not gone.is_set(), "the question is still open"
        serving.join(60.0)
    assert gone.is_set(), "until its deadline"
    run.unlock()
