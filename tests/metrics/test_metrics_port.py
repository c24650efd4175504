"""The metrics port: what Prometheus reads, and when a run is called unhealthy."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fourfold import heartbeat
from fourfold.errors import UserError
from fourfold.metrics import Sinks, Step
from fourfold.metrics.prometheus import MetricsPort


def samples(url: str) -> dict[tuple[str, ...], float]:
    """By name and labels, read by the client library's own parser."""
    reply = httpx.get(f"{url}/metrics")
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
    }


def test_numbers_of_a_run(make_step: Callable[..., Step]) -> None:
    port = MetricsPort("127.0.0.1", 0, silence_seconds=60, max_steps=9, start_step=2)
    with Sinks(port) as sinks:
        before = samples(port.url)
        assert before["fourfold_steps_total",] == 2 and before["fourfold_last_step",] == 9
        assert ("fourfold_loss",) not in before
        sinks.end_step(3, 4.5, 512)
        sinks.train(make_step(3, mfu=None, tokens=1536, seconds={"save": 0.25}))
        sinks.evaluation("eval", step=3, epoch=0, batch=0, loss=3.0, seconds=4.0, batches=2)
        sinks.event("save", step=3)
        sinks.event("save", step=3)
        after = samples(port.url)
    assert after["fourfold_steps_total",] == 3 and after["fourfold_loss",] == 4.5
    assert after["fourfold_tokens_total",] == 1536
    assert ("fourfold_model_flops_utilization",) not in after
    assert after["fourfold_phase_seconds", "save"] == 0.25
    assert after["fourfold_evaluation_loss", "eval"] == 3.0
    assert after["fourfold_events_total", "save"] == 2
    with pytest.raises(httpx.ConnectError):
        httpx.get(port.url)


def test_health_is_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    port = MetricsPort("127.0.0.1", 0, silence_seconds=30)
    try:
        heartbeat.beat(7, "forward_backward")
        reply = httpx.get(f"{port.url}/healthz")
        assert (reply.status_code, reply.text) == (200, "ok\n")
        monkeypatch.setattr("fourfold.heartbeat._last_seconds", time.monotonic() - 31)
        reply = httpx.get(f"{port.url}/healthz")
        assert reply.status_code == 503
        assert reply.text.startswith("no progress for 31 s; the last was at step 7 (forward_back")
        heartbeat.alive()
        assert httpx.head(f"{port.url}/healthz").status_code == 200
        assert httpx.get(f"{port.url}/").status_code == 404
    finally:
        port.close()


def test_a_taken_port_is_said_before_the_first_step() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"Engine.metrics_port={number}: .*choose another port"):
            MetricsPort("127.0.0.1", number, silence_seconds=60)
