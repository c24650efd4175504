"""Experiment trackers: TensorBoard and Weights & Biases, and through one small interface MLflow,
Aim, SwanLab and Comet (`Engine.trackers`).

    Tracker            log(step, numbers), end(summary); made by one function for each package
    TrackerSink        a tracker as a sink, in a thread of its own

All of them get the same numbers by the same names (`scalars`). Without a server of their own, which
their environment variables name, they keep files in the run's directory. A resumed run continues
theirs: its id is beside the checkpoints. Packages are imported when they are asked for.
"""

from __future__ import annotations

import json
import math
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from fourfold.errors import UserError
from fourfold.metrics.lines import perplexity

# The names of numbers in all trackers: train/loss, speed/ips, memory/rss_bytes; beside these,
# seconds/<phase>, grad_norm/<group of layers>, eval/loss, eval/ppl, test/loss, test/ppl and
# task/<name>/<number>.
GROUPS = {
    "train": (
        "loss",
        "learning_rate",
        "grad_norm",
        "loss_scale",
        "skipped",
        "tokens",
        "global_batch_size",
    ),
    "speed": ("ips_total", "ips", "mfu", "batch_seconds", "reader_seconds"),
    "memory": ("rss_bytes", "peak_rss_bytes", "device_bytes", "peak_device_bytes"),
}
SECRET_WORDS = ("key", "token", "secret", "password", "passwd", "credential")
REDACTED = "[redacted]"


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record by tracker name; none for events and notices."""
    if record["kind"] in ("eval", "test"):
        kind, loss = record["kind"], record["loss"]
        return {f"{kind}/loss": loss, f"{kind}/ppl": perplexity(loss)}
    if record["kind"] == "task":
        return {f"task/{record['task']}/{name}": one for name, one in record["numbers"].items()}
    if record["kind"] != "train":
        return {}
    named = {f"{group}/{name}": record[name] for group, names in GROUPS.items() for name in names}
    named |= {f"seconds/{phase}": value for phase, value in record["seconds"].items()}
    norms = record.get("layer_norms") or {}
    named |= {f"grad_norm/{group}": value for group, value in norms.items()}
    return {name: value for name, value in named.items() if value is not None}


def redact(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `config` without the values of keys that name a secret, at any depth."""
    return {
        key: REDACTED if _is_secret(str(key), value) else _redact_inside(value)
        for key, value in config.items()
    }


def _redact_inside(value: Any) -> Any:
    if isinstance(value, Mapping):
        return redact(value)
    if isinstance(value, list | tuple):
        return [_redact_inside(item) for item in value]
    return value


def _is_secret(key: str, value: Any) -> bool:
    if value is None or isinstance(value, bool):
        return False
    name = key.lower()
    for innocent in ("tokenizer", "token") if isinstance(value, int | float) else ("tokenizer",):
        name = name.replace(innocent, "")  # numbers of tokens and token ids are no secrets
    return any(word in name for word in SECRET_WORDS)


class TensorBoard:
    """Event files in `directory`; on resume, points after `resume_step` are hidden by purging."""

    name = "TensorBoard"

    def __init__(self, directory: Path, config: Mapping[str, Any], resume_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge_step = resume_step + 1 if directory.exists() else None
        self._writer = SummaryWriter(str(directory), purge_step=purge_step, flush_secs=30)
        shown = json.dumps(redact(config), indent=2, default=str, ensure_ascii=False)
        indented = "\n".join("    " + line for line in shown.splitlines())
        self._writer.add_text("config", indented, resume_step)
        self._directory = directory

    def rewind(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer.close()
        self._writer = SummaryWriter(str(self._directory), purge_step=step + 1, flush_secs=30)

    def write(self, record: Mapping[str, Any]) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One W&B run per run directory: its id is kept there, so a resumed run continues it."""

    name = "Weights & Biases"
    ID_FILE = "wandb_run_id.txt"

    def __init__(
        self, output_dir: Path, run_name: str | None, config: Mapping[str, Any], resume_step: int
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                "tracking with Weights & Biases is on, but the package is not installed; "
                "run: pip install 'fourfold[wandb]', or turn it off"
            ) from error
        id_file = output_dir / self.ID_FILE
        if not (resume_step and id_file.exists()):
            id_file.write_text(uuid.uuid4().hex[:12])
        self._run = wandb.init(
            project=PROJECT,
            name=run_name,
            id=id_file.read_text().strip(),
            resume="allow",
            dir=str(output_dir),
            config=redact(config),
        )
        # Steps as a metric of their own: W&B refuses to log an earlier step of its own counter,
        # which a run resumed from a checkpoint has to do.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Mapping[str, Any]) -> None:
        if numbers := scalars(record):
            self._run.log({"step": record["step"], **numbers})

    def close(self) -> None:
        self._run.finish()


# -- one interface for the others -----------------------------------------------------------------

PROJECT = "fourfold"
Config = Mapping[str, Any]


class Tracker(Protocol):
    """A run of a tracker."""

    id: str  # by which the run can be continued

    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def end(self, summary: Mapping[str, float]) -> None:
        """The last call; `summary` are the newest numbers, and the least loss of an evaluation."""


# Directory of the run, id of the tracker's run that is continued, configuration.
OpenTracker = Callable[[Path, str | None, Config], Tracker]


class MLflow:
    """To MLFLOW_TRACKING_URI, else to a database in the run's directory; to files there where the
    package is mlflow-skinny, which has no database."""

    def __init__(self, directory: Path, run_id: str | None, config: Config) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or self._local(directory))
        if run_id is not None:
            self.id = run_id
            self._client.update_run(run_id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        run_name = directory.resolve().name
        self.id = str(self._client.create_run(experiment, run_name=run_name).info.run_id)
        params = [Param(key, value[:500]) for key, value in flat(config)]
        for start in range(0, len(params), 100):  # more at once are refused
            self._client.log_batch(self.id, params=params[start : start + 100])

    @staticmethod
    def _local(directory: Path) -> str:
        place = directory.resolve()
        if find_spec("sqlalchemy") is not None and find_spec("alembic") is not None:
            return f"sqlite:///{place / 'mlflow.db'}"
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        return (place / "mlruns").as_uri()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(key, float(value), now, step) for key, value in numbers.items()]
        self._client.log_batch(self.id, metrics=metrics)

    def end(self, summary: Mapping[str, float]) -> None:
        for key, value in summary.items():
            self._client.set_tag(self.id, f"summary/{key}", f"{value:.6g}")
        self._client.set_terminated(self.id)


class Aim:
    """To the repository that AIM_REPO names, else to one in the run's directory."""

    def __init__(self, directory: Path, run_id: str | None, config: Config) -> None:
        from aim import Repo, Run

        place = os.environ.get("AIM_REPO") or str(directory.resolve() / "aim")
        if "://" not in place:
            Path(place).mkdir(parents=True, exist_ok=True)
            if not Repo.exists(place):
                Repo.from_path(place, init=True)
        self._run = Run(
            run_hash=run_id,
            repo=place,
            experiment=PROJECT,
            system_tracking_interval=None,
            log_system_params=False,
            capture_terminal_logs=False,
        )
        self.id = str(self._run.hash)
        if run_id is None:
            self._run["config"] = dict(flat(config))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for key, value in numbers.items():
            self._run.track(float(value), name=key, step=step)

    def end(self, summary: Mapping[str, float]) -> None:
        self._run["summary"] = dict(summary)
        self._run.close()


class SwanLab:
    """As SWANLAB_MODE says; else offline, to files in the run's directory that `swanlab sync`
    sends later. A run that is continued has another directory there under the same id."""

    def __init__(self, directory: Path, run_id: str | None, config: Config) -> None:
        import swanlab

        self._package = swanlab
        self.id = run_id or uuid.uuid4().hex[:21]  # that many it must be
        place = directory.resolve() / "swanlab"
        place.mkdir(exist_ok=True)
        swanlab.init(
            project=PROJECT,
            experiment_name=directory.resolve().name,
            config=dict(flat(config)),
            logdir=str(place),
            mode=os.environ.get("SWANLAB_MODE", "offline"),
            id=self.id,
            resume="allow",
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._package.log(dict(numbers), step=step)

    def end(self, summary: Mapping[str, float]) -> None:
        self._package.config.update({f"summary/{key}": value for key, value in summary.items()})
        self._package.finish()


class Comet:
    """With COMET_API_KEY to the service; else offline, to archives in the run's directory that
    `comet upload` sends later, in the order of their times."""

    def __init__(self, directory: Path, run_id: str | None, config: Config) -> None:
        import comet_ml

        options: dict[str, Any] = dict.fromkeys(
            (
                *("log_code", "log_graph", "log_git_metadata", "log_git_patch", "log_env_details"),
                *("auto_param_logging", "auto_metric_logging", "parse_args", "auto_output_logging"),
            ),
            False,
        )
        options |= {"project_name": PROJECT, "display_summary_level": 0}
        if run_id is not None:
            options["experiment_key"] = run_id
        if os.environ.get("COMET_API_KEY"):
            kinds = comet_ml.Experiment, comet_ml.ExistingExperiment
        else:
            kinds = comet_ml.OfflineExperiment, comet_ml.ExistingOfflineExperiment
            options["offline_directory"] = str(directory.resolve() / "comet")
        self._experiment = kinds[run_id is not None](**options)
        self.id = str(self._experiment.get_key())
        if run_id is None:
            self._experiment.set_name(directory.resolve().name)
            self._experiment.log_parameters(dict(flat(config)))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._experiment.log_metrics(dict(numbers), step=step)

    def end(self, summary: Mapping[str, float]) -> None:
        self._experiment.log_others({f"summary/{key}": value for key, value in summary.items()})
        self._experiment.end()


TRACKERS: dict[str, OpenTracker] = {
    "mlflow": MLflow,
    "aim": Aim,
    "swanlab": SwanLab,
    "comet": Comet,
}
PACKAGES = {"mlflow": "mlflow", "aim": "aim", "swanlab": "swanlab", "comet": "comet-ml"}


def id_file(tracker: str) -> str:
    """Where a run's directory keeps the id by which the tracker's run is continued."""
    return f"{tracker}_run_id.txt"


def flat(config: Config, prefix: str = "") -> Iterator[tuple[str, str]]:
    """The values of a configuration by their dotted names, as texts."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


class TrackerSink:
    """A tracker as a sink. Whatever it does, the run goes on: it works in a thread, which is handed
    records and waited for at the end only; what it cannot do is an `OSError` of the next record,
    which `Sinks` tells once."""

    OPEN_SECONDS, END_SECONDS = 60.0, 60.0
    MOST_WAITING = 10_000  # records, of a server that does not answer

    def __init__(self, name: str, output_dir: Path, config: Config, resume_step: int = 0) -> None:
        self.name = name
        self._id_file = output_dir / id_file(name)
        self._records: queue.Queue[Mapping[str, Any] | None] = queue.Queue(self.MOST_WAITING)
        self._trouble: str | None = None
        self._is_over = False  # nothing more will be taken
        self._is_told = False  # of the trouble there is, until something works again
        self._summary: dict[str, float] = {}
        opened = threading.Event()
        self._thread = threading.Thread(
            target=self._work,
            args=(output_dir, redact(config), resume_step, opened),
            name=f"tracker {name}",
            daemon=True,
        )
        self._thread.start()
        if not opened.wait(self.OPEN_SECONDS):
            self._trouble = f"it does not answer for {self.OPEN_SECONDS:.0f} s"

    def write(self, record: Mapping[str, Any]) -> None:
        if scalars(record) and not self._is_over:
            try:
                self._records.put_nowait(record)
            except queue.Full:
                self._trouble = f"{self.MOST_WAITING} records wait for it, and newer ones are lost"
        self._complain()

    def close(self) -> None:
        with suppress(queue.Full):
            self._records.put(None, timeout=1.0)
        self._thread.join(self.END_SECONDS)
        if self._thread.is_alive() and self._trouble is None:
            self._trouble = f"it has not ended after {self.END_SECONDS:.0f} s"
        self._complain()

    def _complain(self) -> None:
        trouble, self._trouble = self._trouble, None
        if trouble is not None and not self._is_told:
            self._is_told = True
            raise OSError(trouble)

    # -- in its thread ------------------------------------------------------------------------

    def _work(
        self, output_dir: Path, config: Config, resume_step: int, opened: threading.Event
    ) -> None:
        try:
            tracker = self._open(output_dir, config, resume_step)
        except ImportError:
            package = PACKAGES[self.name]
            self._fail(f"the package is not installed; run: pip install {package}")
        except BaseException as error:  # also what a package ends a program with
            self._fail(_words(error))
        opened.set()
        if self._is_over:
            return
        while (record := self._records.get()) is not None:
            try:
                tracker.log(record["step"], self._taken(record))
                self._is_told = False
            except Exception as error:
                self._trouble = _words(error)
        try:
            tracker.end(self._summary)
        except BaseException as error:
            self._trouble = _words(error)

    def _open(self, output_dir: Path, config: Config, resume_step: int) -> Tracker:
        known = self._id_file.read_text().strip() if self._id_file.exists() else None
        tracker = TRACKERS[self.name](output_dir, known if resume_step else None, config)
        self._id_file.write_text(tracker.id)
        return tracker

    def _fail(self, trouble: str) -> None:
        self._trouble, self._is_over = trouble, True

    def _taken(self, record: Mapping[str, Any]) -> dict[str, float]:
        """The numbers of a record that are some; the newest are the summary."""
        named = scalars(record).items()
        numbers = {key: float(value) for key, value in named if math.isfinite(value)}
        self._summary |= {key: one for key, one in numbers.items() if key.startswith("task/")}
        for key in ("train/loss", "eval/loss", "test/loss"):
            if key in numbers:
                self._summary[key] = numbers[key]
        if "eval/loss" in numbers:
            least = self._summary.get("eval/least_loss", math.inf)
            self._summary["eval/least_loss"] = min(least, numbers["eval/loss"])
        self._summary["step"] = record["step"]
        return numbers


def _words(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
