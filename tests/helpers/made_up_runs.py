"""Run directories without a run: records in the form a run writes them, for pages and tables."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

COMPLETE = "The training process is complete."
START = 1_790_000_000.0


@dataclass
class MadeUpRun:
    """Writes `metrics.jsonl` record by record; `clock` is when the next one is written."""

    directory: Path
    clock: float = START
    step: int = 0
    ranks: int = 1
    records: list[dict[str, Any]] = field(default_factory=list)

    def add(self, kind: str, after: float = 0.0, **fields: Any) -> None:
        self.clock += after
        when = datetime.fromtimestamp(self.clock, UTC).isoformat(timespec="milliseconds")
        self.records.append({"kind": kind, "step": self.step, "time": when, **fields})

    def start(self, after: float = 0.0) -> None:
        self.add(
            "run",
            after,
            layout=f"dp{self.ranks} x pp1 x sharding1 x mp1",
            world_size=self.ranks,
            peak_flops=None,
            peak_source="n/a",
        )

    def train(
        self, seconds: float = 1.0, steps: int = 1, loss: float | None = None, **more: Any
    ) -> None:
        """A window of `steps` steps of `seconds` each. `save` are the seconds of a save in it, and
        `evaluated` those of an evaluation, whose record the clock has passed already."""
        save, evaluated = more.pop("save", 0.0), more.pop("evaluated", 0.0)
        between = {"evaluate": evaluated, "save": save}
        self.step += steps
        noise = random.Random(self.step).gauss(0, 0.05)
        fields = {
            "loss": 3 + 4 * math.exp(-self.step / 60) + noise if loss is None else loss,
            "learning_rate": 3e-4 * min(1, self.step / 20),
            "grad_norm": math.exp(noise * 4),
            "loss_scale": None,
            "skipped": 0,
            "tokens": 1024 * self.step,
            "reader_seconds": 0.1 * seconds,
            "batch_seconds": seconds,
            "ips_total": 1024 / max(seconds, 1e-9) * (1 + noise / 2),
            "mfu": 0.41 * (1 + noise / 2),
            "rss_bytes": 361_000_000 + 10_000 * self.step,
            "device_bytes": None,
            "seconds": {name: value / steps for name, value in between.items() if value},
            "ranks": None,
        }
        if self.ranks > 1:
            fields["ranks"] = {
                "busy_seconds_least": 0.7 * seconds,
                "busy_seconds_median": 0.75 * seconds,
                "busy_seconds_most": (0.8 + abs(noise)) * seconds,
                "slowest_rank": 1,
                "communication_share": 0.12 + noise / 10,
                "bubble_share": 0.04,
            }
        self.add("train", seconds * steps + save, **fields | more)

    def evaluate(self, seconds: float = 2.0, kind: str = "eval") -> None:
        loss = 3.1 + 4 * math.exp(-self.step / 60)
        self.add(kind, seconds, loss=loss, seconds=seconds, batches=2)

    def task(self, name: str, seconds: float = 1.0, **numbers: float) -> None:
        self.add("task", seconds, task=name, measure="cloze", seconds=seconds, numbers=numbers)

    def samples(self, *texts: tuple[str, str]) -> None:
        """Prompts and what the run wrote after them."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "samples.jsonl").open("a") as file:
            for prompt, text in texts:
                row = {"step": self.step, "prompt": prompt, "text": text}
                file.write(json.dumps(row) + "\n")
        self.add("samples", 0.5, number=len(texts), seconds=0.5)

    def notice(self, text: str, level: str = "INFO", after: float = 0.0) -> None:
        self.add("notice", after, level=level, text=text)

    def spike(self, report: dict[str, Any] | None = None) -> None:
        name = f"spikes/step_{self.step}.json"
        if report is not None:
            (self.directory / "spikes").mkdir(parents=True, exist_ok=True)
            (self.directory / name).write_text(json.dumps(report))
        self.add(
            "event",
            event="spike",
            action="warn",
            sample_ids=[1, 2],
            loss=8.25,
            grad_norm=31.0,
            loss_limit=4.1,
            norm_limit=5.5,
            report=name if report is not None else None,
        )

    def write(self, *, torn: bool = False) -> Path:
        self.directory.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(record) + "\n" for record in self.records)
        (self.directory / "metrics.jsonl").write_text(text + ('{"kind": "tr' if torn else ""))
        return self.directory


def whole_run(directory: Path, steps: int = 120, ranks: int = 1, seconds: float = 1.0) -> MadeUpRun:
    """A run with evaluations and saves, up to its end."""
    run = MadeUpRun(directory, ranks=ranks)
    run.start()
    for step in range(1, steps + 1):
        is_after = step % 20 == 1 and step > 1
        run.train(seconds, save=1.5 if is_after else 0.0, evaluated=2.0 if is_after else 0.0)
        if step % 20 == 0:
            run.evaluate(2.0)
    run.evaluate(kind="test")
    run.notice(COMPLETE, after=0.5)
    return run


def norms_at(step: int, layers: int = 12) -> dict[str, float]:
    """Norms by layer, as a record has them."""
    noise = [random.Random(step * 100 + layer).gauss(1, 0.08) for layer in range(layers + 2)]
    falls = 0.4 + 2 * math.exp(-step / 50)
    blocks = {f"layers.{n}": falls * (0.3 + 0.06 * n) * noise[n] for n in range(layers)}
    return {"embeddings": falls * noise[-1], **blocks, "norm": 0.05 * falls * noise[-2]}


def watched_run(directory: Path, steps: int = 120, text: str = "once upon a time") -> MadeUpRun:
    """A run with everything switched on: norms by layer, tasks, samples."""
    run = MadeUpRun(directory)
    run.start()
    for step in range(1, steps + 1):
        run.train(layer_norms=norms_at(step))
        if step % 20 == 0:
            run.evaluate()
            run.task("lambada", accuracy=0.3 * (1 - math.exp(-step / 80)), examples=5153)
            run.task("wikitext", perplexity=30 + 900 * math.exp(-step / 30), bits_per_byte=1.2)
            run.samples(
                ("The cat", f" sat {text} at step {step}."), ("2 + 2 =", f" {step % 7}\n" * 3)
            )
    run.notice(COMPLETE, after=0.5)
    return run


DOCUMENTS: dict[str, Any] = {
    "documents": [
        {
            "sample": 7,
            "file": "/data/books/part_3.bin",
            "document": 41,
            "share": 0.62,
            "excess": 812.5,
            "mean": 11.9,
            "worst": [{"loss": 17.2, "text": "ÿÿ\x00\x00 qqqq qqqq >>> zxkj 0x7f qqqq"}],
        },
        {
            "sample": 3,
            "file": "/data/web/part_0.bin",
            "document": 5,
            "share": 0.05,
            "excess": 3.25,
            "mean": 4.2,
            "worst": [{"loss": 9.1, "text": "the cat sat on a mat and the dog"}],
        },
    ],
    "gradient_norms": {"embedding": 4.5, "layer 0": 12.25, "layer 1": 26.5, "head": 3.0},
}
