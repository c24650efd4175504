"""Bytes a rank holds, by kind, counted over live tensors; and the formula they are held against.

Letters: N parameters of the model, U of its largest layer, H of the word embedding, d ranks,
w bytes of a weight the network computes with (4 in fp32, 2 in bf16 O2).
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from parallel_ranks import Desk, once, say, table
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fourfold.config import Config
from fourfold.config.batch_schedule import BatchSchedule
from fourfold.engine import Engine, build_engine
from fourfold.metrics import Meter, Sinks
from fourfold.parallel.fsdp import sharded_modules
from fourfold.shards import local
from fourfold.signals import StopRequest

KINDS = ("weights", "gradients", "moments")

# Few tokens, so that activations do not count, and two micro-batches a rank, between which
# sharding stages 1 and 2 differ.
SHAPE = [
    "Model.vocab_size=1024",
    "Model.hidden_size=768",
    "Model.num_layers=16",
    "Model.num_attention_heads=12",
    "Model.max_position_embeddings=64",
    "Data.dataset.max_seq_len=4",
    "Data.batch_size.micro_batch_size=1",
]


@dataclass(frozen=True)
class Case:
    stage: int
    ranks: int
    dtype: str

    def overrides(self) -> list[str]:
        given = [
            f"Data.batch_size.global_batch_size={2 * self.ranks}",
            f"Engine.mix_precision.dtype={self.dtype}",
            "Engine.mix_precision.level=O2",
        ]
        if self.stage == 0:
            return [*given, f"Distributed.dp_degree={self.ranks}"]
        return [
            *given,
            f"Distributed.sharding.sharding_degree={self.ranks}",
            f"Distributed.sharding.sharding_stage={self.stage}",
        ]

    @property
    def weight_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2

    def resident(self) -> dict[str, float]:
        """Bytes for each parameter of the model that a rank holds between two micro-batches."""
        w, d = self.weight_bytes, self.ranks
        if self.stage == 0:
            return {"weights": w + (4 if w == 2 else 0), "gradients": 4, "moments": 8}
        return {
            "weights": 4 / d + (w if self.stage < 3 else 0),
            "gradients": 4 if self.stage == 1 else 4 / d,
            "moments": 8 / d,
        }

    def in_flight(self) -> float:
        """Bytes for each parameter of a layer on top of that when the step needs most.

        Reducing a layer takes the message, gloo's copy of it and the own part of the sum; its
        gradients and, where they are freed, its weights are gone by then.
        """
        w, d = self.weight_bytes, self.ranks
        if self.stage == 0:
            return 4
        if self.stage == 1:
            return max(w / 3, 8 + 4 / d - 4 - w)
        if self.stage == 2:
            return max(8, 8 + 4 / d - w)
        # Or else at the end of a layer's backward pass: its weights, the next layer's, its
        # gradients, and the message of the layer before.
        return max(3 * w + 4, w + 8 + 4 / d)

    def head(self) -> int:
        """Bytes for each weight of the head: its gradient is made in the forward pass, in fp32."""
        return 4 if self.dtype == "float32" else 6

    def peak(self, sizes: Sizes) -> float:
        total = sum(self.resident().values()) * sizes.model
        return total + self.in_flight() * sizes.layer + self.head() * sizes.head


@dataclass(frozen=True)
class Sizes:
    """Numbers of parameters."""

    model: int
    layer: int
    head: int


def memory_table(desk: Desk, dtypes: list[str], worlds: list[int]) -> None:
    rows = []
    for dtype in dtypes:
        for ranks in worlds:
            for stage in range(4):
                case = Case(stage, ranks, dtype)
                say(f"memory: {dtype}, {ranks} ranks, stage {stage}")
                config = desk.config(ranks, case.overrides())
                found = once(ranks, partial(measure, config, ranks))
                rows.append(row(case, found))
    table(
        "dtype | ranks | stage | weights | gradients | moments | peak, MB | formula | ratio "
        "| process",
        rows,
    )


def row(case: Case, found: list[dict[str, Any]]) -> list[str]:
    """The rank with the highest peak; between micro-batches it holds `measured / formula`."""
    worst = max(found, key=lambda figures: figures["peak"])
    sizes: Sizes = worst["sizes"]
    predicted = case.peak(sizes)
    expected = case.resident()
    return [
        "bf16 O2" if case.weight_bytes == 2 else "fp32",
        str(case.ranks),
        str(case.stage),
        *(f"{mega(worst[k])} / {mega(expected[k] * sizes.model)}" for k in KINDS),
        mega(worst["peak"]),
        mega(predicted),
        f"{worst['peak'] / predicted:.3f}",
        mega(worst["rss"]),
    ]


def mega(count: float) -> str:
    return f"{count / 1e6:.0f}"


def measure(config: Config, ranks: int) -> Iterator[dict[str, Any]]:
    """One step as any, one that is watched."""
    give_memory_back()
    before = resident_memory()
    engine = build_engine(config, ranks)
    run_step(engine, 0)
    figures: dict[str, Any] = {"sizes": sizes_of(engine)}
    calls = 0

    def between_micro_batches(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            figures.update(bytes_by_kind(engine))

    engine.runner.parts[0].register_forward_pre_hook(between_micro_batches, prepend=True)
    forget_peak()
    with Ledger(engine) as ledger:
        run_step(engine, 1)
    yield figures | {"peak": ledger.peak, "rss": resident_memory("VmHWM") - before}


def run_step(engine: Engine, step: int) -> None:
    """A training step as the engine does it, without its reports."""
    engine.step = step + 1
    batch = engine.data.loaders["train"].batch(step)
    with StopRequest(engine.output_dir) as stop:
        engine._train_step(batch, Meter(batch_schedule=BatchSchedule(1), seq_len=1), Sinks(), stop)


def sizes_of(engine: Engine) -> Sizes:
    whole = {held.name: torch.Size(held.shape).numel() for held in engine.runner.shards.values()}
    layer = sum(count for name, count in whole.items() if name.startswith("layers.0."))
    return Sizes(sum(whole.values()), layer, whole["embeddings.word.weight"])


def bytes_by_kind(engine: Engine) -> dict[str, int]:
    """What is held now of each kind, each piece of memory counted once."""
    runner, tensors = engine.runner, {kind: list[Tensor]() for kind in KINDS}
    for parameter in [*runner.masters.values(), *runner.parameters.values()]:
        tensors["weights"].append(parameter.data)
        if parameter.grad is not None:
            tensors["gradients"].append(parameter.grad)
    for gathered in gathered_parameters(engine):
        tensors["weights"] += gathered.all_gather_outputs
        for gradient in (gathered.unsharded_accumulated_grad, gathered.unsharded_param.grad):
            if gradient is not None:
                tensors["gradients"].append(gradient)
    for group in engine.optimizer.groups:
        tensors["moments"] += [*group.exp_avg, *group.exp_avg_sq]
    return {kind: storage_bytes(held) for kind, held in tensors.items()}


def storage_bytes(tensors: list[Tensor]) -> int:
    storages = [local(tensor).untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def gathered_parameters(engine: Engine) -> list[Any]:
    """Torch's records of the parameters it divides, where the gathered weights are kept."""
    return [
        parameter
        for part in engine.runner.parts
        for module in sharded_modules(part)
        for group in module._get_fsdp_state()._fsdp_param_groups
        for parameter in group.fsdp_params
    ]


class Ledger(TorchDispatchMode):
    """Follows every tensor an operator makes; `peak` is the most bytes alive after any operator.

    Torch frees gathered weights by resizing them, which is no operator, so these are looked up.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.peak = 0
        self.alive = 0
        self.known: dict[int, weakref.ref[Any]] = {}
        gathered = gathered_parameters(engine)
        self.resized = [t.untyped_storage() for p in gathered for t in p.all_gather_outputs]
        self.resized_keys = {storage._cdata for storage in self.resized}
        for thing in gc.get_objects():
            if issubclass(type(thing), Tensor):
                self.note(thing)

    def note(self, tensor: Tensor) -> None:
        storage = local(tensor).untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.known or key in self.resized_keys or storage.device.type == "meta":
            return

        def forget(_: object) -> None:
            self.alive -= size
            del self.known[key]

        self.known[key] = weakref.ref(storage, forget)
        self.alive += size

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # it runs operators on its local part, which come here
        result = operator(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.note(leaf)
        gathered = sum(storage.nbytes() for storage in self.resized)
        self.peak = max(self.peak, self.alive + gathered)
        return result


def give_memory_back() -> None:
    """Make large tensors blocks of their own, so that resident memory follows what is alive.

    Left alone, the C library soon keeps freed blocks of up to 32 MB for later.
    """
    mmap_threshold = -3
    ctypes.CDLL(None).mallopt(mmap_threshold, 1 << 20)


def resident_memory(field: str = "VmRSS") -> int:
    """Of this process, as the kernel counts it; `VmHWM` is the most since `forget_peak`."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
