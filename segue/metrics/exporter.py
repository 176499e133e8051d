"""Serves one role's `/metrics` and `/health`, and tells Prometheus where: `metrics/targets/<role>-<rank>.json`.

The target file is written by temporary file and rename, and removed on a clean exit; a crash leaves it, so that `up == 0`
fires. prometheus_client's own server answers metrics on every path, hence the handler here.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

from prometheus_client.exposition import choose_encoder

from segue.errors import UserError
from segue.files import write_json
from segue.metrics.heartbeat import Heartbeat
from segue.metrics.registry import Metrics

log = logging.getLogger(__name__)

_REQUEST_SECONDS = 10.0
"""How long one request may take to arrive or to be taken away; then its connection is closed."""


class Exporter:
    """Serves until `close`. Scrapes run in threads of their own, so a role whose loop is stuck still answers (with 503).

    `ports` is the inclusive range to find a free one in; `node` names the machine; targets name `advertise` (default: the
    interface). `/health` is 503 once the heartbeat is older than `stale_after` seconds. Raises `UserError` if no port is free.
    """

    def __init__(
        self,
        metrics: Metrics,
        heartbeat: Heartbeat,
        *,
        targets: Path,
        run: str,
        node: str,
        interface: str,
        ports: tuple[int, int],
        stale_after: float,
        advertise: str | None = None,
        extra: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        self._metrics = metrics
        self._heartbeat = heartbeat
        self._run = run
        self._stale_after = stale_after
        self._extra = extra
        self._closing = False
        self._server = _bind(interface, ports, self._respond, self._spent, f"{metrics.role}-{metrics.rank}")
        self.port: int = self._server.server_address[1]
        host = advertise or interface
        self.address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        self._wake = ("127.0.0.1" if interface in ("", "0.0.0.0") else "::1" if interface == "::" else interface, self.port)
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)
        self._thread.start()
        self._target = targets / f"{metrics.role}-{metrics.rank}.json"
        labels = {"run": run, "role": metrics.role, "rank": metrics.rank, "node": node}
        try:
            write_json(self._target, [{"targets": [self.address], "labels": labels}])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Withdraw the target and stop serving; safe to call twice."""
        if self._closing:
            return
        self._closing = True
        self._target.unlink(missing_ok=True)
        try:
            socket.create_connection(self._wake, timeout=1.0).close()  # ends the accept that the thread waits in
        except OSError as error:
            log.warning("the metrics server did not wake up to be closed: %s", error)
        else:
            self._thread.join(timeout=5.0)
        self._server.server_close()

    def __enter__(self) -> Exporter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def health(self) -> tuple[HTTPStatus, dict[str, Any]]:
        """The status and body of `/health`."""
        age = self._heartbeat.age()
        stale = age > self._stale_after
        body: dict[str, Any] = {
            "status": "stale" if stale else "ok",
            "run": self._run,
            "role": self._metrics.role,
            "rank": self._metrics.rank,
            "pid": os.getpid(),
            "heartbeat_age_seconds": round(age, 3),
            "stale_after_seconds": self._stale_after,
        }
        if self._extra is not None:
            body |= self._extra()
        return (HTTPStatus.SERVICE_UNAVAILABLE if stale else HTTPStatus.OK), body

    def _serve(self) -> None:
        while not self._closing:
            self._server.handle_request()

    def _spent(self, seconds: float) -> None:
        self._metrics.add("segue_scrape_cpu_seconds_total", seconds)

    def _respond(self, path: str, accept: str) -> tuple[HTTPStatus, str, bytes]:
        if path == "/metrics":
            encoder, content_type = choose_encoder(accept)
            return HTTPStatus.OK, content_type, encoder(self._metrics.registry)
        if path == "/health":
            status, body = self.health()
            return status, "application/json", (json.dumps(body) + "\n").encode()
        return HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", b"There are /metrics and /health here.\n"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    respond: Callable[[str, str], tuple[HTTPStatus, str, bytes]]
    spent: Callable[[float], None]

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's own asks the name service for the host's name, which can hang

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a scrape from %s was cut off", client_address, exc_info=True)


class _ServerV6(_Server):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_SECONDS
    server: _Server

    def do_GET(self) -> None:
        status, content_type, body = self.server.respond(self.path.split("?", 1)[0], self.headers.get("Accept", ""))
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.server.spent(time.thread_time())  # HTTP/1.0: a thread answers one request, so this is all that it took

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


def _bind(
    interface: str,
    ports: tuple[int, int],
    respond: Callable[[str, str], tuple[HTTPStatus, str, bytes]],
    spent: Callable[[float], None],
    who: str,
) -> _Server:
    low, high = ports
    for port in range(low, high + 1):
        try:
            server = (_ServerV6 if ":" in interface else _Server)((interface, port), _Handler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            raise UserError(
                f"The metrics of {who} cannot be served on cluster.interface = {interface!r} ({error.strerror}): "
                "name an address of this machine."
            ) from None
        server.respond, server.spent = respond, spent
        return server
    raise UserError(
        f"No port of cluster.ports = [{low}, {high}] is free on {interface} for the metrics of {who}: "
        "stop what uses them or set another range."
    )
