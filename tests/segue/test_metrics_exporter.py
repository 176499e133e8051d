"""A role's /metrics and /health, and the target file that tells Prometheus where they are."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from segue.clock import LogicalLoop
from segue.errors import UserError
from segue.metrics import Metrics
from segue.metrics.exporter import Exporter
from segue.metrics.heartbeat import Heartbeat, LoopMonitor

HEARTBEAT = "segue_worker_heartbeat_timestamp_seconds"


class Fixture:
    def __init__(self, folder: Path, role: str = "scheduler", rank: str = "0") -> None:
        self.monotonic, self.wall = 50.0, 1_700_000_000.0
        self.targets = folder
        self.metrics = Metrics(role, rank, envs=("a",))
        self.heartbeat = Heartbeat(self.metrics, lambda: self.monotonic, lambda: self.wall)

    def exporter(self, **changes: Any) -> Exporter:
        given: dict[str, Any] = {
            "targets": self.targets,
            "run": "demo",
            "node": "host-a",
            "interface": "127.0.0.1",
            "ports": (20000, 20999),
            "stale_after": 30.0,
        }
        return Exporter(self.metrics, self.heartbeat, **(given | changes))


def get(exporter: Exporter, path: str, **headers: str) -> tuple[int, str, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", exporter.port, timeout=10)
    try:
        connection.request("GET", path, headers=headers)
        reply = connection.getresponse()
        return reply.status, reply.headers["Content-Type"], reply.read()
    finally:
        connection.close()


def test_metrics_and_health_are_served_and_nothing_else(tmp_path: Path) -> None:
    fixture = Fixture(tmp_path)
    fixture.metrics.add("segue_episodes_trained_total", 7)
    with fixture.exporter() as exporter:
        assert 20000 <= exporter.port <= 20999
        status, kind, body = get(exporter, "/metrics")
        values = {f.name: f.samples[0].value for f in text_string_to_metric_families(body.decode())}
        assert status == 200 and kind.startswith("text/plain") and values["segue_episodes_trained"] == 7
        assert values[HEARTBEAT] == 1_700_000_000.0
        status, kind, body = get(exporter, "/metrics", Accept="application/openmetrics-text;version=1.0.0")
        assert status == 200 and kind.startswith("application/openmetrics-text") and body.endswith(b"# EOF\n")
        assert get(exporter, "/")[0] == 404
        status, _, body = get(exporter, "/health?x=1")
        health = json.loads(body)
        assert status == 200 and (health["status"], health["role"], health["rank"]) == ("ok", "scheduler", "0")


def test_answering_a_scrape_is_counted_by_its_own_thread(tmp_path: Path) -> None:
    fixture = Fixture(tmp_path)
    with fixture.exporter() as exporter:
        get(exporter, "/metrics")
        get(exporter, "/metrics")
        after = fixture.metrics.value("segue_scrape_cpu_seconds_total")
    assert 0.0 < after < time.process_time()


def test_health_is_503_once_the_heartbeat_is_stale_and_recovers(tmp_path: Path) -> None:
    fixture = Fixture(tmp_path)
    with fixture.exporter(extra=lambda: {"step": 4}) as exporter:
        fixture.monotonic += 30.0
        assert get(exporter, "/health")[0] == 200
        fixture.monotonic += 0.5
        status, _, body = get(exporter, "/health")
        health = json.loads(body)
        assert status == 503 and health["status"] == "stale" and health["heartbeat_age_seconds"] == 30.5 and health["step"] == 4
        assert get(exporter, "/metrics")[0] == 200
        fixture.heartbeat.beat()
        assert get(exporter, "/health")[0] == 200


def test_the_target_file_is_what_prometheus_reads_and_goes_on_a_clean_exit(tmp_path: Path) -> None:
    fixture = Fixture(tmp_path, "weightsync", "learner-0")
    exporter = fixture.exporter(advertise="10.0.0.7")
    path = tmp_path / "weightsync-learner-0.json"
    labels = {"run": "demo", "role": "weightsync", "rank": "learner-0", "node": "host-a"}
    assert json.loads(path.read_text()) == [{"targets": [f"10.0.0.7:{exporter.port}"], "labels": labels}]
    assert list(tmp_path.iterdir()) == [path], "a temporary file is left"
    exporter.close()
    exporter.close()
    assert not path.exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", exporter.port), timeout=5)


def test_taken_ports_are_skipped_and_a_full_range_is_one_sentence(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError) as refused:
            Fixture(tmp_path).exporter(ports=(port, port))
        assert str(refused.value) == (
            f"No port of cluster.ports = [{port}, {port}] is free on 127.0.0.1 for the metrics of scheduler-0: "
            "stop what uses them or set another range."
        )
    assert not list(tmp_path.iterdir())
    with Fixture(tmp_path).exporter() as first, Fixture(tmp_path, "learner").exporter() as second:
        assert first.port != second.port


def test_an_interface_that_is_not_ours_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be served on cluster.interface = '203.0.113.9' .*name an address"):
        Fixture(tmp_path).exporter(interface="203.0.113.9")


def test_an_idle_connection_does_not_keep_others_out(tmp_path: Path) -> None:
    fixture = Fixture(tmp_path)
    with fixture.exporter() as exporter, socket.create_connection(("127.0.0.1", exporter.port), timeout=5):
        assert get(exporter, "/health")[0] == 200


def test_the_loop_monitor_measures_how_late_timers_run_and_beats() -> None:
    metrics = Metrics("scheduler", envs=("a",))
    loop = LogicalLoop()
    heartbeat = Heartbeat(metrics, loop.time, loop.time)
    monitor = LoopMonitor(metrics, (heartbeat,), interval=1.0)

    def block(seconds: float) -> None:
        loop._logical_now += seconds  # what a callback that blocks the loop looks like from outside

    async def run() -> None:
        monitor.start()
        loop.call_later(0.5, block, 0.75)  # the tick of second 1 runs at 1.25
        await asyncio.sleep(5.0)
        monitor.stop()

    loop.run_until_complete(run())
    loop.close()
    assert metrics.sum("segue_event_loop_lag_seconds") == pytest.approx(0.25)
    assert metrics.value("segue_event_loop_lag_seconds") in (3, 4)
    assert metrics.value(HEARTBEAT) > 4.0


def test_a_monitor_beats_once_per_interval_and_no_more() -> None:
    metrics = Metrics("scheduler", envs=("a",))
    loop = LogicalLoop()

    async def run() -> None:
        monitor = LoopMonitor(metrics, interval=1.0)
        monitor.start()
        await asyncio.sleep(100.5)
        monitor.stop()

    loop.run_until_complete(run())
    loop.close()
    assert metrics.value("segue_event_loop_lag_seconds") == 100
