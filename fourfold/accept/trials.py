"""Trials: small runs of the real engine in processes of their own, and what they leave behind.

Everything that computes does so in forked ranks, also comparisons and questions about the devices:
a process that has used a GPU, or threads, cannot fork others that do.
"""

from __future__ import annotations

import json
import os
import re
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fourfold import checkpoint
from fourfold.charts import new_figure
from fourfold.config import Config, load_config
from fourfold.engine import Engine, build_engine
from fourfold.launch.supervisor import supervise
from fourfold.metrics.jsonl import FILE_NAME, read_jsonl
from fourfold.parallel import layout_of, preload
from fourfold.shards import is_sharded

STEPS, SAVED_STEP = 4, 2
TOKENS, VOCABULARY = 200_000, 509
HANG_SECONDS = 180.0
PATHS = re.compile(r"(?:[A-Za-z]:)?(?:/[\w.+@~-]+)+/?")

Values = Mapping[str, Any]
Disturb = Callable[[Engine], None]


@dataclass(frozen=True)
class Finished:
    """A run that has ended; `said` is what its ranks last said where it failed."""

    code: int
    directory: Path
    seconds: float
    said: str = ""

    def steps(self) -> list[dict[str, Any]]:
        """The training records, one a step."""
        file = self.directory / FILE_NAME
        records = read_jsonl(file) if file.exists() else []
        return [record for record in records if record["kind"] == "train"]

    def series(self, name: str) -> list[float]:
        return [float(record[name]) for record in self.steps()]

    def checkpoint(self, step: int = STEPS) -> Path:
        return self.directory / f"step_{step}"


def write_tokens(folder: Path) -> None:
    """Documents whose tokens depend on those before them, so that there is a loss to lower."""
    if folder.exists():
        return
    folder.mkdir()
    drawn = np.random.default_rng(7).integers(1, 40, TOKENS)
    tokens = (np.cumsum(drawn) * 7 % (VOCABULARY - 1) + 1).astype(np.uint16)
    lengths = np.full(TOKENS // 200, 200, np.int32)
    np.save(folder / "trial_ids.npy", tokens)
    np.savez(folder / "trial_idx.npz", lens=lengths, docs=np.arange(len(lengths) + 1))


class Ground:
    """A directory in which trials run, with data of its own."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder = folder
        self.device = device
        self.data = folder / "data"
        self.finished: dict[str, Finished] = {}
        write_tokens(self.data)
        # Every run ends with a picture; imported here, matplotlib is there in all of them.
        new_figure(1, 1)
        self.file = folder / "trial.yaml"
        self.file.write_text(yaml.safe_dump(self._base()))

    def _base(self) -> dict[str, Any]:
        return {
            "Global": {"device": self.device, "seed": 1234},
            "Engine": {
                "max_steps": STEPS,
                "logging_freq": 1,
                "eval_freq": 0,
                "test_iters": 0,
                "tensorboard": False,
                "mix_precision": {"dtype": "float32"},
                "save_load": {"save_steps": SAVED_STEP, "keep_last": 0},
            },
            "Data": {
                "batch_size": {"global_batch_size": 16, "micro_batch_size": 1},
                "dataset": {
                    "input_dir": str(self.data),
                    "cache_dir": str(self.folder / "cache"),
                    "split": "1",
                    "max_seq_len": 32,
                    "eos_token_id": 0,
                },
            },
            "Model": {
                "vocab_size": VOCABULARY,
                "hidden_size": 64,
                "num_layers": 4,
                "num_attention_heads": 4,
                "max_position_embeddings": 32,
                "hidden_dropout_prob": 0.0,
                "attention_probs_dropout_prob": 0.0,
                "use_recompute": False,
            },
            # A large epsilon: Adam turns the rounding of a gradient that is zero into a step.
            "Optimizer": {"adam_epsilon": 1e-4, "lr": {"max_lr": 1e-3, "min_lr": 1e-4}},
        }

    def config(self, name: str, world: int, values: Values) -> Config:
        given = {"Engine.save_load.output_dir": str(self.folder / "runs" / name), **values}
        words = [f"{key}={_text(value)}" for key, value in given.items()]
        return load_config(self.file, words, world_size=world)

    def run(
        self,
        name: str,
        world: int,
        values: Values,
        *,
        restarts: int = 0,
        disturb: Disturb | None = None,
    ) -> Finished:
        """Train in `world` processes; `disturb` is given each rank's engine before it starts."""
        config = self.config(name, world, values)
        directory = Path(config.Engine.save_load.output_dir)
        preload(layout_of(config))

        def work() -> None:
            engine = build_engine(config, world)
            if disturb is not None:
                disturb(engine)
            engine.fit()

        said: list[str] = []
        started = time.monotonic()
        code = supervise(
            work,
            world,
            self.folder / "logs" / name,
            max_restarts=restarts,
            hang_seconds=HANG_SECONDS,
            first_pause_seconds=0.1,
            echo=lambda _: None,
            tell=said.append,
        )
        finished = Finished(code, directory, time.monotonic() - started, "\n".join(said))
        self.finished[name] = finished
        return finished

    def ask(self, world: int, work: Callable[[], Any]) -> list[Any]:
        """What `work` returns on each of `world` ranks, as JSON would; raises `TrialError`."""
        answers = self.folder / "answers"
        answers.mkdir(exist_ok=True)
        for old in answers.iterdir():
            old.unlink()

        def answer() -> None:
            given = work()
            (answers / os.environ["RANK"]).write_text(json.dumps(given))

        said: list[str] = []
        code = supervise(
            answer,
            world,
            self.folder / "logs" / "questions",
            hang_seconds=HANG_SECONDS,
            echo=lambda _: None,
            tell=said.append,
        )
        if code:
            raise TrialError(without_paths("\n".join(said)))
        return [json.loads((answers / str(rank)).read_text()) for rank in range(world)]

    def difference(self, one: Path, other: Path, *, low: bool = False) -> float:
        """The largest between the tensors of two checkpoints, relative to the largest value of
        each; 0 only where all bits are equal.

        In low precision a gradient that is nearly zero is rounding, of which Adam makes a whole
        step: so there weights are compared and not moments, and each by its norm, not by the one
        element that is furthest off.
        """
        return float(self.ask(1, lambda: _difference(one, other, low))[0])


class TrialError(Exception):
    """A trial that could not be run to its end; the message says what the ranks said."""


def _text(value: object) -> str:
    return "null" if value is None else str(value)


def without_paths(said: str) -> str:
    """The last sentences, with nothing in them that tells where they were written."""
    lines = [line.strip() for line in PATHS.sub("<path>", said).splitlines() if line.strip()]
    return " / ".join(lines[-3:])[-400:]


def _difference(one: Path, other: Path, low: bool) -> float:
    names, theirs = checkpoint.tensor_names(one), checkpoint.tensor_names(other)
    if names != theirs:
        return float("inf")
    names = {name: which for name, which in names.items() if not low or _kind(name) == "model"}
    size = _norm if low else _largest
    held = []
    for directory in (one, other):
        tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in names.items()}
        checkpoint.load(directory, tensors, "model." if low else "")
        held.append(tensors)
    kinds = {name: _kind(name) for name in names}
    scales = dict.fromkeys(kinds.values(), 0.0)
    for name, tensor in held[0].items():
        scales[kinds[name]] = max(scales[kinds[name]], size(tensor))
    differences = [0.0]
    for name, tensor in held[0].items():
        if not torch.equal(tensor, held[1][name]):
            # Some gradients are zero but for rounding (a key's bias moves every score of a row
            # alike), so a tensor counts with a thousandth of the largest of its kind at least.
            scale = max(size(tensor), 1e-3 * scales[kinds[name]], 1e-30)
            differences.append(size(tensor.double() - held[1][name].double()) / scale)
    return max(differences)


def _kind(name: str) -> str:
    """Weights, or which of the optimizer's moments."""
    return "model" if name.startswith("model.") else name.rpartition(".")[2]


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _norm(tensor: Tensor) -> float:
    return float(tensor.double().norm())


# -- memory -----------------------------------------------------------------------------------


@dataclass
class _Count:
    now: int = 0
    most: int = 0
    seen: set[int] = field(default_factory=set)


class LiveBytes(TorchDispatchMode):
    """Counts the memory behind all tensors made while it is active, each piece once."""

    def __init__(self) -> None:
        super().__init__()
        self._count = _Count()

    @property
    def most(self) -> int:
        return self._count.most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(given):
            # A sharded tensor's piece is seen on its own.
            if isinstance(tensor, Tensor) and not is_sharded(tensor) and not tensor.is_meta:
                self._see(tensor.untyped_storage())
        self._count.most = max(self._count.most, self._count.now)
        return given

    def _see(self, memory: torch.UntypedStorage) -> None:
        count, which, size = self._count, memory._cdata, memory.nbytes()
        if which in count.seen:
            return
        count.seen.add(which)
        count.now += size

        def forget() -> None:
            count.seen.discard(which)
            count.now -= size

        weakref.finalize(memory, forget)
