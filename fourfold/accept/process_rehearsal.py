"""`fourfold rehearse --processes`: the real layout, with all its processes and a narrow network.

What can be wrong with a layout, a schedule, a group or a cut of a tensor is in its degrees and its
depth and not in the width of the matrices. So the network is made narrow until all ranks fit one
machine (`narrowed`): forked from one process that has imported torch, they share its memory until
they write to it. Their losses, gradient norms, gradients and weights are compared with those of a
single process, by each rank for the parts that it holds.
"""

from __future__ import annotations

import json
import math
import os
import resource
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from fourfold.accept.trials import VOCABULARY, write_tokens
from fourfold.config import Config
from fourfold.config.load import ConfigSource
from fourfold.config.yaml_nodes import parse_document
from fourfold.engine import Engine, build_engine
from fourfold.engine.probes import free_memory
from fourfold.errors import RunError, UserError
from fourfold.launch.supervisor import supervise
from fourfold.parallel import layout_of, preload
from fourfold.parallel.stages import count_stages

STEPS = 2
BOUND = 1e-5  # relative, in float32
HEAD_DIM = 8
LEAST_SEQ_LEN = 16
# A process forked from one that has imported torch had 42 to 87 MB, of 128 of them.
RANK_BYTES = 96 << 20
RANK_THREADS = 16
# Connections of gloo: one to each rank for all of them, and those of its groups.
FILES_BASE, FILES_EACH = 128, 4
TIMEOUT_SECONDS = 1800.0

Values = dict[str, Any]


@dataclass
class Apart:
    """The largest relative difference from one process, and of which tensor."""

    most: float = 0.0
    tensor: str = ""

    def take(self, value: float, tensor: str) -> None:
        if not value <= self.most:  # a NaN is the largest
            self.most, self.tensor = value, tensor


@dataclass
class ProcessRehearsal:
    """What all processes computed, and one."""

    layout: str
    processes: int
    micro_batches: int
    narrowed: dict[str, tuple[Any, Any]]  # by key: the file's value and the one computed with
    losses: list[float]
    expected_losses: list[float]
    norms: list[float]
    expected_norms: list[float]
    gradients: Apart  # of the first step
    weights: Apart  # after the last
    seconds: float
    one_process_seconds: float
    memory_bytes: int  # of all processes: the sum of proportional set sizes, at its highest
    largest: Apart = field(default_factory=Apart)

    def __post_init__(self) -> None:
        for name, ours, theirs in (
            ("loss", self.losses, self.expected_losses),
            ("gradient norm", self.norms, self.expected_norms),
        ):
            for step, (value, expected) in enumerate(zip(ours, theirs, strict=True), 1):
                self.largest.take(abs(value / expected - 1), f"{name} of step {step}")
        self.largest.take(self.gradients.most, f"gradient of {self.gradients.tensor}")
        self.largest.take(self.weights.most, f"{self.weights.tensor} after step {STEPS}")

    @property
    def equal(self) -> bool:
        return self.largest.most <= BOUND


def rehearse_processes(config: Config, micro_batches: int | None = None) -> ProcessRehearsal:
    """Train `STEPS` steps on all ranks of the configured layout, and in one process."""
    layout = layout_of(config)
    if layout.world_size == 1:
        raise UserError("--processes compares several processes with one, and this layout has one")
    if micro_batches is None:
        micro_batches = min(config.Engine.accumulate_steps, max(count_stages(config), 2))
    if micro_batches < (stages := count_stages(config)) > 1:
        raise UserError(
            f"--micro-batches {micro_batches}: a pipeline of {stages} stages needs at least as many"
        )
    check_room(layout.world_size)
    with tempfile.TemporaryDirectory(prefix="fourfold-rehearsal-") as folder:
        place = Path(folder)
        write_tokens(place / "data")
        tree, changed = narrowed(config, micro_batches)
        alone = _Run(_load(place, "alone", of_one_process(tree), 1), place / "alone")
        run = _Run(_load(place, "layout", tree, layout.world_size), place / "layout")
        one_process_seconds = alone.start(alone.write)
        seconds = run.start(lambda: run.compare(alone))
        told, answers = alone.answer(0), [run.answer(rank) for rank in range(layout.world_size)]
    return ProcessRehearsal(
        layout=str(layout),
        processes=layout.world_size,
        micro_batches=micro_batches,
        narrowed=changed,
        losses=answers[0]["losses"],
        expected_losses=told["losses"],
        norms=answers[0]["norms"],
        expected_norms=told["norms"],
        gradients=_furthest(answers, "gradients"),
        weights=_furthest(answers, "weights"),
        seconds=seconds,
        one_process_seconds=one_process_seconds,
        memory_bytes=max(map(sum, zip(*(answer["memory"] for answer in answers)))),
    )


def _furthest(answers: list[Values], what: str) -> Apart:
    found = Apart()
    for answer in answers:
        found.take(*answer[what])
    return found


def check_room(processes: int) -> None:
    """Refuse what this machine has no memory or no processes for."""
    needed, free = processes * RANK_BYTES, free_memory()
    if 0 < free < needed:
        raise UserError(
            f"{processes} processes need about {needed / 1e9:.1f} GB, and this machine has "
            f"{free / 1e9:.1f} GB left; rehearse without --processes, which needs none of them, or "
            "with smaller degrees"
        )
    threads = processes * RANK_THREADS
    for name, most in (("ulimit -u", _soft(resource.RLIMIT_NPROC)), ("pids.max", _pids_left())):
        if threads > most:
            raise UserError(
                f"{processes} processes have about {threads:,} threads, and {name} allows "
                f"{most:,.0f} here; raise it, or rehearse without --processes"
            )
    files = FILES_BASE + FILES_EACH * processes
    if files > (most := _soft(resource.RLIMIT_NOFILE)):
        raise UserError(
            f"each of {processes} processes opens about {files:,} connections, and ulimit -n "
            f"allows {most:,.0f}; raise it, or rehearse without --processes"
        )


def _soft(limit: int) -> float:
    most = resource.getrlimit(limit)[0]
    return math.inf if most == resource.RLIM_INFINITY else most


def _pids_left() -> float:
    """What the container's limit of processes and threads leaves; infinite without one."""
    group = Path("/sys/fs/cgroup")
    try:
        return int((group / "pids.max").read_text()) - int((group / "pids.current").read_text())
    except (OSError, ValueError):
        return math.inf


# -- the narrow network -----------------------------------------------------------------------


def narrowed(config: Config, micro_batches: int) -> tuple[Values, dict[str, tuple[Any, Any]]]:
    """The configuration with a narrow network, made-up data and float32, as a tree; and by key
    what was changed that matters to the layout.

    Degrees, schedule, layers, recomputation, dropout of hidden states, sharding, the optimizer and
    every option of the block stay as they are; so does what divides what: heads by model-parallel
    ranks, a vocabulary that does not divide by them.
    """
    layout, model = layout_of(config), config.Model
    micro_batch_size = min(config.Data.batch_size.micro_batch_size, 2)
    heads, key_value_heads = _narrow_heads(
        model.num_attention_heads, model.num_key_value_heads, layout.mp
    )
    width = heads * HEAD_DIM
    seq_len = -(-LEAST_SEQ_LEN // layout.mp) * layout.mp
    chosen: Values = {
        "Model.hidden_size": width,
        "Model.num_attention_heads": heads,
        "Model.num_key_value_heads": key_value_heads,
        "Model.head_dim": HEAD_DIM,
        "Model.ffn_hidden_size": 4 * width,
        "Model.vocab_size": -(-VOCABULARY // layout.mp) * layout.mp + model.vocab_size % layout.mp,
        "Model.max_position_embeddings": seq_len,
        "Model.attention_probs_dropout_prob": 0.0,
        "Data.dataset.max_seq_len": seq_len,
        "Data.batch_size.micro_batch_size": micro_batch_size,
        "Data.batch_size.global_batch_size": micro_batches * micro_batch_size * layout.data_degree,
        "Engine.mix_precision.dtype": "float32",
        "Engine.graph_mode": "dynamic",
    }
    if model.sliding_window is not None:
        chosen["Model.sliding_window"] = min(model.sliding_window, seq_len // 2)
    if model.rope_scaling.original_max_position_embeddings is not None:
        chosen["Model.rope_scaling.original_max_position_embeddings"] = seq_len // 2
    if model.mup_base_width is not None:
        chosen["Model.mup_base_width"] = width // 2
    if model.sequence_parallel:  # masks are drawn for each rank's positions
        chosen["Model.hidden_dropout_prob"] = 0.0
    written: Values = {
        name: getattr(config, name).model_dump(mode="json")
        for name in ("Model", "Distributed", "Fused")
    }
    optimizer = config.Optimizer.model_dump(mode="json")
    # A large epsilon: Adam turns the rounding of a gradient that is zero into a step.
    optimizer |= {"adam_epsilon": 1e-2, "lr": {"max_lr": 1e-2, "min_lr": 1e-2, "warmup_rate": 0.0}}
    written |= {
        "Global": {"device": "cpu", "seed": config.Global.seed},
        "Optimizer": optimizer,
        "Engine": {"max_steps": STEPS, "eval_freq": 0, "test_iters": 0, "tensorboard": False},
        "Data": {
            "dataset": {
                "split": "1",
                "eos_token_id": 0,
                "eod_mask_loss": config.Data.dataset.eod_mask_loss,
                "reset_position_ids": config.Data.dataset.reset_position_ids,
                "reset_attention_mask": config.Data.dataset.reset_attention_mask,
            }
        },
    }
    written["Distributed"]["timeout_seconds"] = TIMEOUT_SECONDS
    changed = {}
    for key, value in chosen.items():
        own = _find(config, key)
        _set(written, key, value)
        if own != value:
            changed[key] = (own, value)
    return written, changed


def _narrow_heads(heads: int, key_value_heads: int, mp: int) -> tuple[int, int]:
    """As few as leave two on each model-parallel rank, or one where the file has one, and shared
    among queries where the file's are."""
    if key_value_heads < mp:  # ranks have the same keys and values
        return mp * min(heads // mp, 2), key_value_heads
    narrow = mp * min(key_value_heads // mp, 2)
    return narrow * min(heads // key_value_heads, 2), narrow


def of_one_process(tree: Mapping[str, Any]) -> Values:
    """The same network, batch and update without the layout and what must not change numbers."""
    alone: Values = json.loads(json.dumps(tree))
    alone["Distributed"] = {}
    alone["Fused"] = {}
    alone["Model"] |= {"sequence_parallel": False, "use_recompute": False}
    alone["Model"] |= {"recompute_granularity": None, "offload_activations": False}
    return alone


def _find(config: Config, key: str) -> Any:
    found: Any = config
    for name in key.split("."):
        found = getattr(found, name)
    return found


def _set(tree: Values, key: str, value: Any) -> None:
    *outer, last = key.split(".")
    for name in outer:
        tree = tree.setdefault(name, {})
    tree[last] = value


def _load(place: Path, name: str, tree: Values, world: int) -> Config:
    given: Values = json.loads(json.dumps(tree))
    _set(given, "Engine.save_load.output_dir", str(place / name))
    _set(given, "Data.dataset.input_dir", str(place / "data"))
    _set(given, "Data.dataset.cache_dir", str(place / "cache"))
    title = "the narrow network"
    source = ConfigSource(title, parse_document(yaml.safe_dump(given), title).value)
    return source.load(world)


# -- the processes ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """Some steps of a configuration, in as many processes as it has ranks."""

    config: Config
    directory: Path

    def start(self, work: Any) -> float:
        """`work` on every rank; how many seconds it took."""
        layout = layout_of(self.config)
        preload(layout)
        self.directory.mkdir(exist_ok=True)
        said: list[str] = []
        started = time.monotonic()
        code = supervise(
            work,
            layout.world_size,
            self.directory / "logs",
            hang_seconds=TIMEOUT_SECONDS,
            threads=1,
            echo=lambda line: None,
            tell=said.append,
        )
        if code:
            raise RunError("the processes could not be run to their end:\n" + "\n".join(said))
        return time.monotonic() - started

    def answer(self, rank: int) -> Values:
        told: Values = json.loads((self.directory / f"answer_{rank}.json").read_text())
        return told

    def write(self) -> None:
        """Of one process: all numbers and tensors, for the ranks to compare theirs with."""
        scales: dict[str, dict[str, float]] = {"gradients": {}, "weights": {}}

        def keep(what: str, name: str, tensor: Tensor) -> None:
            np.save(self.directory / f"{what}_{name}.npy", tensor.numpy())
            scales[what][name] = float(tensor.abs().max())

        self._compute(keep, scales=scales)

    def compare(self, alone: _Run) -> None:
        """Of many: the numbers, and how far this rank's parts of tensors are from one process's."""
        scales = alone.answer(0)["scales"]
        apart = {"gradients": Apart(), "weights": Apart()}
        # Some gradients are zero but for rounding (a key's bias moves every score of a row alike),
        # so a tensor counts with at least a thousandth of the largest of all.
        least = {what: 1e-3 * max(each.values()) for what, each in scales.items()}
        shards: dict[str, Any] = {}

        def look(what: str, name: str, tensor: Tensor) -> None:
            whole = np.load(alone.directory / f"{what}_{name}.npy", mmap_mode="r")
            box = shards[name].box
            within = tuple(slice(a, a + b) for a, b in zip(box.offsets, box.shape))
            expected = torch.from_numpy(np.array(whole[within]))
            if tensor.numel():
                most = float((tensor.double() - expected).abs().max())
                apart[what].take(most / max(scales[what][name], least[what]), name)

        self._compute(
            look,
            shards,
            gradients=apart["gradients"],
            weights=apart["weights"],
        )

    def _compute(self, take: Any, shards: dict[str, Any] | None = None, **more: Any) -> None:
        engine = build_engine(self.config, layout_of(self.config).world_size)
        if shards is not None:
            shards.update({shard.name: shard for shard in engine.runner.shards.values()})
        memory = [proportional_bytes()]

        def look(batch: Any, scale: float) -> None:
            memory.append(proportional_bytes())
            if engine.step == 1:
                for shard in engine.runner.shards.values():
                    assert shard.gradient is not None
                    take("gradients", shard.name, shard.gradient / scale)

        results = []
        for _ in range(STEPS):
            results.append(engine.advance(look))
            memory.append(proportional_bytes())
        for shard in engine.runner.shards.values():
            take("weights", shard.name, shard.local)
        told = {
            "losses": [result.loss for result in results],
            "norms": [result.norm for result in results],
            "memory": memory,
            **{name: _plain(value) for name, value in more.items()},
        }
        (self.directory / f"answer_{engine.mesh.rank}.json").write_text(json.dumps(told))
        _close(engine)


def _plain(value: Any) -> Any:
    return [value.most, value.tensor] if isinstance(value, Apart) else value


def _close(engine: Engine) -> None:
    engine.data.close()
    if engine.claim is not None:
        engine.claim.release()
    engine.mesh.close()


def proportional_bytes() -> int:
    """Memory of this process, shared pages by their share (PSS); 0 where the kernel does not say.

    The sum over processes is what they take together.
    """
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    found = [int(line.split()[1]) for line in lines if line.startswith("Pss:")]
    return found[0] * 1024 if found else 0


# -- for a terminal ---------------------------------------------------------------------------


def process_rehearsal_lines(told: ProcessRehearsal) -> Iterator[str]:
    """What `fourfold rehearse --processes` prints."""
    yield (
        f"layout {told.layout}: {told.processes:,} processes on {os.cpu_count()} core(s), "
        f"{told.micro_batches} micro-batch(es), {STEPS} steps"
    )
    changes = [f"{key} {own} -> {value}" for key, (own, value) in told.narrowed.items()]
    yield "narrowed: " + ", ".join(changes)
    for step in range(STEPS):
        yield (
            f"step {step + 1}: loss {told.losses[step]:.7f}, gradient norm {told.norms[step]:.7f}; "
            f"one process {told.expected_losses[step]:.7f}, {told.expected_norms[step]:.7f}"
        )
    yield (
        f"furthest apart, relative: gradients of the first step {told.gradients.most:.2g} "
        f"({told.gradients.tensor}), weights after the last {told.weights.most:.2g} "
        f"({told.weights.tensor})"
    )
    verdict = "equal to one process" if told.equal else f"NOT equal: {told.largest.tensor}"
    yield f"{verdict}: {told.largest.most:.2g} apart at most, {BOUND:g} allowed"
    yield (
        f"{told.seconds:.0f} s and {told.memory_bytes / 1e9:.2f} GB for {told.processes:,} "
        f"processes ({told.memory_bytes / told.processes / 1e6:.0f} MB each, shared pages by their "
        f"share); {told.one_process_seconds:.0f} s for one"
    )
