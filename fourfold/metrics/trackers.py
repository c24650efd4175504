"""TensorBoard and Weights & Biases: the numbers of training and evaluation, by name and step.

    train/loss  train/learning_rate  train/grad_norm  train/loss_scale  train/skipped  train/tokens
    speed/ips_total  speed/ips  speed/mfu  speed/batch_seconds  speed/reader_seconds
    seconds/<phase>  memory/rss_bytes ...  eval/loss  eval/ppl  test/loss  test/ppl

The configuration goes along with whatever looks like a secret blanked out.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fourfold.errors import UserError
from fourfold.metrics.perplexity import perplexity

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
    if record["kind"] != "train":
        return {}
    named = {f"{group}/{name}": record[name] for group, names in GROUPS.items() for name in names}
    named |= {f"seconds/{phase}": value for phase, value in record["seconds"].items()}
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
                "tracking with Weights & Biases was asked for, but the package is not installed; "
                "run: pip install 'fourfold[wandb]', or turn it off"
            ) from error
        id_file = output_dir / self.ID_FILE
        if not (resume_step and id_file.exists()):
            id_file.write_text(uuid.uuid4().hex[:12])
        self._run = wandb.init(
            project="fourfold",
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
