"""A run's progress for Kubeflow's Trainer, which shows it in the status of the TrainJob (KEP-2779).

Where the controller has set its three variables, rank 0 posts how far the run is, how long it will
take and its newest numbers: at most every 5 seconds, from a thread of its own, so that a server
that is slow, gone or against it costs the run nothing. A failure is said once, as that of any other
sink; what was not sent is not sent later.
"""

from __future__ import annotations

import json
import math
import ssl
import threading
import time
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

URL, TOKEN, CA_CERT = (
    f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "TOKEN", "CA_CERT")
)  # an address, and two paths
SECONDS_BETWEEN = 5.0
REQUEST_SECONDS = 10.0
# Of a training record, by the names the status shows.
METRICS = ("loss", "learning_rate", "grad_norm", "tokens", "ips_total", "mfu")


class KubeflowProgress:
    """Takes the records of a run; a failure of the server is raised by the next `write`."""

    name = "the progress of the TrainJob"

    def __init__(
        self,
        url: str,
        token_file: str | None,
        ca_file: str | None,
        max_steps: int,
        seconds_between: float = SECONDS_BETWEEN,
    ) -> None:
        self._url, self._token_file, self._ca_file = url, token_file, ca_file
        self._max_steps, self._seconds_between = max_steps, seconds_between
        self._metrics: dict[str, str] = {}
        self._body: bytes | None = None  # the newest that was not sent
        self._problem: OSError | None = None
        self._closing = False
        self._changed = threading.Condition()
        # A daemon: a server that never answers must not keep the process.
        self._thread = threading.Thread(target=self._send_all, name="progress", daemon=True)
        self._thread.start()

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str], max_steps: int
    ) -> KubeflowProgress | None:
        """None where no TrainJob asks for it."""
        if not (url := environment.get(URL)):
            return None
        return cls(url, environment.get(TOKEN), environment.get(CA_CERT), max_steps)

    def write(self, record: Mapping[str, Any]) -> None:
        if record["kind"] in ("train", "eval", "test"):
            body = json.dumps({"trainerStatus": self._status(record)}).encode()
            with self._changed:
                self._body = body
                self._changed.notify()
        if (problem := self._problem) is not None:
            raise problem

    def _status(self, record: Mapping[str, Any]) -> dict[str, Any]:
        if record["kind"] == "train":
            found = {name: record.get(name) for name in METRICS}
            left = (self._max_steps - record["step"]) * record["batch_seconds"]
        else:
            found, left = {f"{record['kind']}_loss": record["loss"]}, math.nan
        self._metrics |= {
            name: f"{value:.6g}" for name, value in found.items() if _is_number(value)
        }
        status = {
            "progressPercentage": min(100, 100 * record["step"] // self._max_steps),
            "lastUpdatedTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "metrics": [{"name": name, "value": text} for name, text in self._metrics.items()],
        }
        if math.isfinite(left):
            status["estimatedRemainingSeconds"] = max(0, math.ceil(left))
        return status

    def close(self) -> None:
        """Send what is left, and wait for that as long as one request may take."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(REQUEST_SECONDS)

    def _send_all(self) -> None:
        last = -math.inf
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._body is not None or self._closing)
                # The end is worth a request of its own.
                pause = last + self._seconds_between - time.monotonic()
                self._changed.wait_for(lambda: self._closing, max(0.0, pause))
                body, self._body = self._body, None
                closing = self._closing
            if body is not None:
                last = time.monotonic()
                self._send(body)
            if closing:
                return

    def _send(self, body: bytes) -> None:
        try:
            self._post(body)
            self._problem = None
        except OSError as error:  # HTTP's and TLS's are among them
            self._problem = OSError(str(getattr(error, "reason", None) or error))
        except Exception as error:
            # Whatever a server answers, the run goes on.
            self._problem = OSError(repr(error))

    def _post(self, body: bytes) -> None:
        if not self._url.startswith("https://"):
            raise ValueError(f"{URL}={self._url} is no https:// address")
        headers = {"Content-Type": "application/json"}
        if self._token_file:
            # Read each time: Kubernetes renews it.
            token = Path(self._token_file).read_text(encoding="utf-8").strip()
            headers["Authorization"] = f"Bearer {token}"
        request = urllib.request.Request(self._url, body, headers, method="POST")
        trusted = ssl.create_default_context(cafile=self._ca_file or None)
        with urllib.request.urlopen(request, timeout=REQUEST_SECONDS, context=trusted):
            pass


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
