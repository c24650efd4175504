"""The metrics port: a run's numbers for Prometheus at /metrics, and its health at /healthz.

/healthz answers 200 while the training loop makes progress and 503 with the reason otherwise: its
heartbeat, which says the same to a supervisor, is older than the longest any operation may take.
The answers come from a thread of their own, from what the last records said; a step costs a
few assignments and waits for nobody.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET6
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fourfold import heartbeat
from fourfold.errors import UserError

# Of a training record: field, name after `fourfold_`, meaning. Names ending in _total are counters.
OF_STEPS = (
    ("learning_rate", "learning_rate", "Learning rate of the next step."),
    ("grad_norm", "gradient_norm", "Norm of the gradient before clipping."),
    ("loss_scale", "loss_scale", "Loss scale of fp16."),
    ("skipped", "skipped_updates_total", "Updates left out for a non-finite loss or gradient."),
    ("tokens", "tokens_total", "Tokens read since the run began, by all ranks."),
    ("samples", "samples_total", "Samples read since the run began, by all ranks."),
    ("global_batch_size", "global_batch_samples", "Samples of a step."),
    ("ips_total", "tokens_per_second", "Tokens a second of all ranks."),
    ("mfu", "model_flops_utilization", "Share of the devices' peak rate, of model FLOPs."),
    ("batch_seconds", "step_seconds", "Time of a step, mean of the last logging window."),
    ("reader_seconds", "reader_seconds", "Of that, waiting for samples."),
    ("rss_bytes", "resident_memory_bytes", "Memory of the process of rank 0."),
    ("peak_rss_bytes", "resident_memory_peak_bytes", "The most it was."),
    ("device_bytes", "device_memory_bytes", "Memory of tensors on the device of rank 0."),
    ("peak_device_bytes", "device_memory_peak_bytes", "The most it was."),
)


class NewestNumbers(Collector):
    """The newest numbers of a run, as Prometheus asks for them."""

    def __init__(self, max_steps: int | None, start_step: int) -> None:
        self._max_steps = max_steps
        self._step = start_step
        self._loss: float | None = None
        self._train: Mapping[str, Any] = {}
        self._evaluations: dict[str, float] = {}
        self._tasks: dict[str, Mapping[str, float]] = {}
        self._events: Counter[str] = Counter()

    def end_step(self, step: int, loss: float) -> None:
        self._step, self._loss = step, loss

    def take(self, record: Mapping[str, Any]) -> None:
        if record["kind"] == "train":
            self._train = record
        elif record["kind"] in ("eval", "test"):
            self._evaluations[record["kind"]] = record["loss"]
        elif record["kind"] == "task":
            self._tasks[record["task"]] = record["numbers"]
        elif record["kind"] == "event":
            self._events[record["event"]] += 1

    def collect(self) -> Iterator[Metric]:
        last = heartbeat.last_beat()
        yield _counter("steps_total", "Optimizer steps done since the run began.", self._step)
        yield _gauge("last_step", "The step at which the run ends.", self._max_steps)
        yield _gauge("loss", "Training loss of the last step.", self._loss)
        for field, name, meaning in OF_STEPS:
            kind = _counter if name.endswith("_total") else _gauge
            yield kind(name, meaning, self._train.get(field))
        phases = GaugeMetricFamily(
            "fourfold_phase_seconds", "Time of a step by what it does.", labels=["phase"]
        )
        for phase, seconds in self._train.get("seconds", {}).items():
            phases.add_metric([phase], seconds)
        yield phases
        norms = GaugeMetricFamily(
            "fourfold_layer_gradient_norm",
            "Norm of the gradient before clipping, by group of layers.",
            labels=["layers"],
        )
        for group, norm in (self._train.get("layer_norms") or {}).items():
            norms.add_metric([group], norm)
        yield norms
        losses = GaugeMetricFamily(
            "fourfold_evaluation_loss", "Loss of the last evaluation.", labels=["split"]
        )
        for split, loss in self._evaluations.copy().items():
            losses.add_metric([split], loss)
        yield losses
        tasks = GaugeMetricFamily(
            "fourfold_task",
            "Last result of a task of Engine.eval_tasks.",
            labels=["task", "number"],
        )
        for task, numbers in self._tasks.copy().items():
            for name, value in numbers.items():
                tasks.add_metric([task, name], value)
        yield tasks
        events = CounterMetricFamily(
            "fourfold_events", "What happened, as metrics.jsonl names it.", labels=["event"]
        )
        for event, count in self._events.copy().items():
            events.add_metric([event], count)
        yield events
        silent = time.monotonic() - last.seconds
        yield _gauge("silent_seconds", "Since the training loop last made progress.", silent)


def _gauge(name: str, meaning: str, value: float | None) -> GaugeMetricFamily:
    """Without a sample while the value is not known."""
    return GaugeMetricFamily(f"fourfold_{name}", meaning, value=value)


def _counter(name: str, meaning: str, value: float | None) -> CounterMetricFamily:
    return CounterMetricFamily(f"fourfold_{name}", meaning, value=value)


class MetricsPort:
    """A sink whose records are asked for: serves until it is closed."""

    name = "the metrics port"

    def __init__(
        self,
        host: str,
        port: int,
        *,
        silence_seconds: float,
        max_steps: int | None = None,
        start_step: int = 0,
    ) -> None:
        """After `silence_seconds` without progress the run is unhealthy. Port 0 is a free one."""
        self._numbers = NewestNumbers(max_steps, start_step)
        self._silence_seconds = silence_seconds
        registry = CollectorRegistry()
        registry.register(self._numbers)
        ours = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    self._reply(HTTPStatus.OK, generate_latest(registry), CONTENT_TYPE_LATEST)
                elif path == "/healthz":
                    trouble = ours.trouble()
                    status = HTTPStatus.SERVICE_UNAVAILABLE if trouble else HTTPStatus.OK
                    self._reply(status, f"{trouble or 'ok'}\n".encode())
                else:
                    self._reply(HTTPStatus.NOT_FOUND, b"/metrics and /healthz are here\n")

            do_HEAD = do_GET

            def _reply(
                self, status: HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8"
            ) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def log_message(self, format: str, *arguments: Any) -> None:
                """Not into the log of the run."""

        class Server(ThreadingHTTPServer):
            address_family = AF_INET6 if ":" in host else ThreadingHTTPServer.address_family
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A client that left is no news."""

        try:
            self._server = Server((host, port), Handler)
        except OSError as error:
            raise UserError(
                f"Engine.metrics_port={port}: nothing can be served at {host} there "
                f"({error.strerror}); choose another port, or 0 for a free one, and an address "
                "of this machine as Engine.metrics_host"
            ) from error
        at, port = self._server.server_address[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else at!s}:{port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics port", daemon=True
        )
        self._thread.start()

    def trouble(self) -> str | None:
        """Why the run is not healthy; None while it makes progress."""
        last = heartbeat.last_beat()
        silent = time.monotonic() - last.seconds
        if silent <= self._silence_seconds:
            return None
        return f"no progress for {silent:.0f} s; the last was at {last}"

    def write(self, record: Mapping[str, Any]) -> None:
        self._numbers.take(record)

    def end_step(self, step: int, loss: float, tokens: int) -> None:
        self._numbers.end_step(step, loss)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
