"""Faults put into a layout, one at a time: `bisect` names the tensor they are first seen in."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers.layout_table import CASES, DOCUMENTS, DROPOUT, Case
from helpers.ranks import on_ranks
from helpers.tiny_run import TINY
from helpers.traces import Workshop
from torch import Tensor
from torch.nn import functional as F

from fourfold.config import Config
from fourfold.data import Loader, loader
from fourfold.engine import Engine
from fourfold.parallel import Runner, data_parallel, runner, tensor
from fourfold.question.bisect import TensorFinding, Verdict
from fourfold.question.noise import (
    OF_REFERENCE,
    RoundedStep,
    record_reference,
    record_rounded,
    record_update,
)
from fourfold.question.screening import judge
from fourfold.question.step_trace import StepTrace, record_step

SMALL = (
    "Data.batch_size.global_batch_size=4",
    "Model.num_layers=2",
    "Engine.eval_freq=0",
    "Engine.test_iters=0",
)


class Bench:
    """Traces of steps; what was traced once is not traced again."""

    def __init__(self, folder: Path) -> None:
        self.workshop = Workshop(folder)
        self.made: dict[tuple[object, ...], Path] = {}

    def overrides(self, case: Case, *, shared: bool) -> list[str]:
        sizes = [one for one in case.extras if "micro_batch_size" in one]
        own = [*case.shared(), *sizes] if shared else case.overrides()
        return [*SMALL, *own]

    def alone(
        self, given: list[str], record: Callable[[Config, Path], object], *key: object
    ) -> Path:
        """What `record` writes in one process."""
        if (*given, *key) not in self.made:
            name = f"reference_{len(self.made)}"
            directory = self.workshop.folder / name
            config = self.workshop.config(1, f"{name}_run", given)
            on_ranks(1, lambda rank: record(config, directory))
            self.made[*given, *key] = directory
        return self.made[*given, *key]

    def side(self, case: Case, step: int, fault: Fault | None = None) -> StepTrace:
        given = self.overrides(case, shared=False)
        key = (*given, step, None if fault is None else fault.name)
        if key not in self.made:
            name = f"side_{len(self.made)}"
            directory = self.workshop.folder / name

            def work(rank: int) -> None:
                if case.dtype == "float64":
                    torch.set_default_dtype(torch.float64)
                if fault is not None and fault.before_build:
                    fault.inject(None)
                around = None if fault is None or fault.before_build else fault.around
                config = self.workshop.config(case.world, f"{name}_run", given)
                record_step(config, case.world, directory, step, around=around)

            on_ranks(case.world, work)
            self.made[key] = directory
        return StepTrace(self.made[key])

    def compare(self, case: Case, step: int, fault: Fault | None = None) -> Verdict:
        """One process against the layout of a case, with a fault in it."""
        alone = Case("dp1", case.settings, (), case.dtype, case.level, network=case.network)
        alone = replace(alone, extras=tuple(one for one in case.extras if "micro_batch" in one))
        sides = {"A": self.side(alone, step), "B": self.side(case, step, fault)}
        if case.dtype == "float64":  # torch's default there, and no precision of the table
            for trace in sides.values():
                trace.facts["dtype"] = "float64"
        return judge(sides, InFloat64(self, case, step, sides["A"]))


@dataclass(frozen=True)
class InFloat64:
    """The references of a case."""

    bench: Bench
    case: Case
    step: int
    side: StepTrace

    def given(self, row: int | None = None) -> list[str]:
        given = [*self.bench.overrides(self.case, shared=True), *OF_REFERENCE]
        if row is not None and not set(DROPOUT) & set(self.case.settings):
            given.append("Data.batch_size.micro_batch_size=1")
        return given

    def exact(self, row: int | None) -> StepTrace:
        def record(config: Config, directory: Path) -> object:
            return record_reference(config, directory, self.step, row=row)

        return StepTrace(self.bench.alone(self.given(row), record, self.step, row))

    def rounded(self, exact: StepTrace, roundoff: float, row: int | None) -> RoundedStep:
        def record(config: Config, directory: Path) -> object:
            return record_rounded(config, directory, exact, roundoff, row=row)

        made = self.bench.alone(self.given(row), record, self.step, row, roundoff)
        return RoundedStep.read(made)

    def update(self) -> StepTrace:
        def record(config: Config, directory: Path) -> object:
            return record_update(config, directory, self.side)

        made = self.bench.alone(self.given(), record, "update", self.side.directory)
        return StepTrace(made)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bisect"))


# -- the bank -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    name: str
    layout: str
    inject: Callable[[Any], None]  # given the engine, or before it is built nothing
    phase: str
    tensor: str  # a pattern of its name
    settings: tuple[str, ...] = ()
    step: int = 1
    ranks: tuple[int, ...] | None = None  # those that are wrong, where not all of them are
    before_build: bool = False
    quick: bool = False
    network: str | None = None
    dtype: str = "float32"
    level: str | None = None

    @contextmanager
    def around(self, engine: Engine) -> Iterator[None]:
        if not hasattr(engine, "has_fault"):
            engine.has_fault = True
            self.inject(engine)
        yield

    @property
    def case(self) -> Case:
        return Case(self.layout, self.settings, (), self.dtype, self.level, network=self.network)


FAULTS: list[Fault] = []


def fault(
    name: str, layout: str, phase: str, tensor: str, **more: Any
) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    def add(inject: Callable[[Any], None]) -> Callable[[Any], None]:
        FAULTS.append(Fault(name, layout, inject, phase, tensor, **more))
        return inject

    return add


def module(engine: Engine, path: str) -> Any:
    """A module of this rank, or something to which nothing matters."""
    for part in engine.runner.parts:
        if path in dict(part.named_modules()):
            return part.get_submodule(path)
    return type("Elsewhere", (), {"forward": None})()


def through(engine: Engine, path: str, change: Callable[..., Any]) -> None:
    """`change(forward, *args)` in place of a module's forward."""
    found = module(engine, path)
    forward = found.forward
    found.forward = lambda *args, **named: change(forward, *args, **named)


def after_reduction(engine: Engine, change: Callable[[Runner], None]) -> None:
    reduce = engine.runner.reduce_gradients

    def reduced() -> None:
        reduce()
        change(engine.runner)

    engine.runner.reduce_gradients = reduced


# -- gradients and their reduction


@fault("all-reduce left out", "dp2", "gradient", r"embeddings\.word\.weight", quick=True)
def _(engine: Engine) -> None:
    def send(bucket: data_parallel.Bucket) -> None:
        bucket.is_sent = True

    data_parallel.Bucket.send = send


@fault("all-reduce of one layer left out", "dp2", "gradient", r"layers\.1")
def _(engine: Engine) -> None:
    bucket = engine.runner.replicas.buckets[-1]
    assert any(one is engine.runner.masters["layers.1.mlp.up.weight"] for one in bucket.parameters)
    bucket.send = lambda: setattr(bucket, "is_sent", True)


@fault("gradient scaled by dp", "dp2", "gradient", r"embeddings\.word\.weight")
def _(engine: Engine) -> None:
    after_reduction(engine, lambda runner: [one.grad.div_(2) for one in runner.masters.values()])


@fault("sharded gradient averaged", "sh2 stage3", "gradient", r"layers\.1\.norm2\.weight")
def _(engine: Engine) -> None:
    def average(runner: Runner) -> None:
        gradient = runner.shards["layers.1.norm2.weight"].gradient
        assert gradient is not None
        gradient.div_(2)

    after_reduction(engine, average)


@fault("tied gradient not summed", "pp2", "gradient", r"embeddings\.word\.weight", quick=True)
def _(engine: Engine) -> None:
    runner.sum_tied = lambda *given: None


@fault(
    "tied gradient not summed in a V",
    "pp2 zbv",
    "gradient",
    r"embeddings\.word\.weight",
    settings=("Model.num_layers=4",),
)
def _(engine: Engine) -> None:
    runner.sum_tied = lambda *given: None


def _without(name: str) -> None:
    whole = data_parallel.sum_across_model

    def without(table: Any, masters: Any, *given: Any) -> None:
        whole(table, {key: one for key, one in masters.items() if key != name}, *given)

    runner.sum_across_model = without


@fault("norm not reduced under sp", "mp2 sp", "gradient", r"layers\.1\.norm2\.weight", quick=True)
def _(engine: Engine) -> None:
    _without("layers.1.norm2.weight")


@fault("bias not reduced under sp", "mp2 sp", "gradient", r"layers\.0\.mlp\.down\.bias")
def _(engine: Engine) -> None:
    _without("layers.0.mlp.down.bias")


@fault(
    "shared keys' gradient",
    "mp4",
    "gradient",
    r"layers\.0\.attn\.in_proj\.k\.weight",
    network="llama",
)
def _(engine: Engine) -> None:
    _without("layers.0.attn.in_proj.k.weight")


@fault("accumulation overwrites", "dp1", "gradient", r"layers\.0\.mlp\.up\.weight")
def _(engine: Engine) -> None:
    weight = engine.runner.masters["layers.0.mlp.up.weight"]

    kept = torch.zeros_like(weight)

    def forget(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad -= kept
        kept.copy_(parameter.grad)

    weight.register_post_accumulate_grad_hook(forget)


@fault("bias gradient doubled", "mp2", "gradient", r"layers\.1\.norm1\.bias")
def _(engine: Engine) -> None:
    engine.runner.masters["layers.1.norm1.bias"].register_hook(lambda gradient: 2 * gradient)


# -- the batch


@fault("last micro-batch lost", "dp1", "forward", r"embeddings\.word", quick=True)
def _(engine: Engine) -> None:
    cut = Runner._micro_batches
    Runner._micro_batches = lambda self, *given: iter(list(cut(self, *given))[:-1])


@fault(
    "positions reset wrongly", "dp2", "input", "position ids", settings=DOCUMENTS, before_build=True
)
def _(engine: None) -> None:
    made = loader.positions_in_documents
    loader.positions_in_documents = lambda ends: made(ends.copy() & False)


@fault("both ranks read the same", "dp2", "input", "tokens", ranks=(1,))
def _(engine: Engine) -> None:
    engine.data.loaders["train"]._rank = 0
    engine.data.loaders["train"]._pending.clear()


@fault("labels not shifted", "dp2", "input", "labels")
def _(engine: Engine) -> None:
    make = Loader._make
    Loader._make = lambda self, step: (lambda one: replace(one, labels=one.tokens))(
        make(self, step)
    )
    engine.data.loaders["train"]._pending.clear()


@fault("mean of means", "dp2", "backward", "norm")
def _(engine: Engine) -> None:
    run = engine.runner.run

    def of_own(batch: Any, *given: Any) -> Tensor:
        own = float(batch.loss_mask.sum()) * (1.02 if engine.mesh.rank else 0.98)
        return run(replace(batch, global_valid_tokens=2 * own), *given)

    engine.runner.run = of_own


@fault("labels of the micro-batch before", "pp2", "loss", "token losses")
def _(engine: Engine) -> None:
    through(
        engine, "head", lambda forward, x, w, labels, *given: forward(x, w, labels.roll(1), *given)
    )


# -- the forward pass


@fault("dropout seed by rank", "mp2", "forward", "embeddings", settings=DROPOUT, ranks=(1,))
def _(engine: Engine) -> None:
    seeds = engine.runner.dropout_seeds
    rank = engine.mesh.coordinates["mp"]
    engine.runner.dropout_seeds = lambda *given: [one + rank for one in seeds(*given)]


@fault("dropout left out in a layer", "dp2", "forward", r"layers\.1", settings=DROPOUT)
def _(engine: Engine) -> None:
    module(engine, "layers.1").dropout = 0.0


@fault("mask off by one", "dp2", "forward", r"layers\.1\.attn\.core", quick=True)
def _(engine: Engine) -> None:
    def sees_the_next(forward: Any, q: Tensor, k: Tensor, v: Tensor, *given: Any) -> Tensor:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    through(engine, "layers.1.attn.core", sees_the_next)


@fault("q, k, v in another order", "mp2", "forward", r"layers\.1\.attn\.core")
def _(engine: Engine) -> None:
    attention = module(engine, "layers.1.attn")
    project = attention.project
    attention.project = lambda x: [project(x)[i] for i in (0, 2, 1)]


@fault("no rotation in a layer", "pp2", "forward", r"layers\.1\.attn\.core", network="llama")
def _(engine: Engine) -> None:
    through(engine, "layers.1.attn.core", lambda forward, q, k, v, m, turns: forward(q, k, v, m))


@fault("bf16 where fp32 was meant", "dp2", "forward", r"layers\.1\.mlp\.up", quick=True)
def _(engine: Engine) -> None:
    def low(forward: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return forward(x).float()

    through(engine, "layers.1.mlp.up", low)


@fault("a kernel's wrong row", "dp2", "forward", r"layers\.0\.norm1")
def _(engine: Engine) -> None:
    def off(forward: Any, x: Tensor) -> Tensor:
        y = forward(x).clone()
        y[:, 11] *= 1.001
        return y

    through(engine, "layers.0.norm1", off)


@fault("a kernel's wrong element", "sh2 stage3", "forward", r"layers\.1\.mlp\.down", ranks=(1,))
def _(engine: Engine) -> None:
    def off(forward: Any, x: Tensor) -> Tensor:
        y = forward(x).clone()
        y[0, 3, 5] += 1e-3 * engine.mesh.rank
        return y

    through(engine, "layers.1.mlp.down", off)


@fault("another GELU", "mp2", "forward", r"layers\.1\.mlp\.act")
def _(engine: Engine) -> None:
    # At widths of the tests inputs are near zero, where the two are alike to 1e-4.
    through(engine, "layers.1.mlp.act", lambda forward, x: F.gelu(x, approximate="none") * 1.0)


@fault("residual lost", "dp2", "forward", r"layers\.0")
def _(engine: Engine) -> None:
    block = module(engine, "layers.0")

    def without(forward: Any, x: Tensor, *given: Any) -> Tensor:
        return block.mlp(block.norm2(block.attn(block.norm1(x), *given[:2])))

    through(engine, "layers.0", without)


@fault("another epsilon", "pp2", "forward", "norm")
def _(engine: Engine) -> None:
    module(engine, "norm").eps = 1e-3


@fault("partial sums not added", "mp2", "forward", r"layers\.1\.mlp\.down")
def _(engine: Engine) -> None:
    found = module(engine, "layers.1.mlp.down")
    found.forward = lambda x: F.linear(x, found.weight, found.bias)


@fault("rows of others not masked", "mp2", "forward", r"embeddings\.word")
def _(engine: Engine) -> None:
    found = module(engine, "embeddings.word")
    rows = found.weight.shape[0]
    found.forward = lambda tokens: tensor.reduce_from_tp(
        F.embedding(tokens % rows, found.weight), engine.mesh.group("mp"), False
    )


@fault("positions of another rank", "mp2 sp", "forward", r"embeddings\.position")
def _(engine: Engine) -> None:
    through(engine, "embeddings.position", lambda forward, ids: forward(ids.flip(-1)).flip(1))


@fault("gathered in another order", "mp2 sp", "forward", r"layers\.0\.attn\.qkv")
def _(engine: Engine) -> None:
    gathered = tensor._gathered
    tensor._gathered = lambda x, group: gathered(x, group).roll(x.shape[1], 1)


@fault("stage sends an old tensor", "pp2", "forward", r"layers\.1\.norm1")
def _(engine: Engine) -> None:
    through(engine, "layers.1", lambda forward, x, *given: forward(x.roll(1, 1), *given))


# -- the backward pass


@fault("gradient not summed over mp", "mp2", "backward", "norm")
def _(engine: Engine) -> None:
    tensor._SumGradient.backward = staticmethod(lambda ctx, gradient: (gradient, None))


@fault("attention's backward", "dp2", "backward", r"layers\.1\.attn\.qkv")
def _(engine: Engine) -> None:
    def slope(forward: Any, *given: Any) -> Tensor:
        y = forward(*given)
        return y.detach() + 1.01 * (y - y.detach())

    through(engine, "layers.1.attn.core", slope)


@fault("mask of the loss ignored", "dp2", "backward", "norm")
def _(engine: Engine) -> None:
    through(
        engine,
        "head",
        lambda forward, x, w, labels, mask, scale: forward(x, w, labels, mask.roll(3), scale),
    )


@fault("norm's backward", "pp2", "backward", r"layers\.0")
def _(engine: Engine) -> None:
    def slope(forward: Any, x: Tensor) -> Tensor:
        y = forward(x)
        return y.detach() + 0.9 * (y - y.detach())

    through(engine, "layers.1.norm1", slope)


# -- norm, rule, update


@fault("replicas counted twice in the norm", "dp2", "norm", "gradient norm")
def _(engine: Engine) -> None:
    squares = engine.runner.squared_norm
    engine.runner.squared_norm = lambda: squares() * 2 if engine.mesh.rank == 0 else squares()


@fault("weight decay on a bias", "dp2", "rule", r"layers\.0\.norm1\.bias", before_build=True)
def _(engine: None) -> None:
    decayed = Runner.decayed
    Runner.decayed = lambda self: decayed(self) | {"layers.0.norm1.bias"}


@fault("learning rate one step late", "dp2", "rule", r"embeddings\.word\.weight", step=2)
def _(engine: Engine) -> None:
    kind = type(engine.schedule)
    rate = kind.lr_at
    kind.lr_at = lambda self, step: rate(self, step - (step > 1))


@fault("stale shard after an update", "dp2", "update", r"layers\.1\.mlp\.up\.weight", ranks=(1,))
def _(engine: Engine) -> None:
    update, weight = engine.optimizer.update, engine.runner.masters["layers.1.mlp.up.weight"]

    def stale(*given: Any) -> None:
        before = weight.data.clone()
        update(*given)
        if engine.mesh.rank == 1:
            weight.data.copy_(before)

    engine.optimizer.update = stale


@fault(
    "low-precision weights not renewed", "dp2", "forward", r"layers\.0\.mlp\.up",
    step=2, dtype="bfloat16", level="O2", settings=("Optimizer.lr.max_lr=1.0e-2",),
)  # fmt: skip
def _(engine: Engine) -> None:
    sync, weight = engine.runner.sync_weights_from_masters, None
    weight = engine.runner.parameters["layers.0.mlp.up.weight"]

    def stale() -> None:
        before = weight.data.clone()
        sync()
        weight.data.copy_(before)

    engine.runner.sync_weights_from_masters = stale


@fault("epsilon of Adam", "sh2 stage3", "update", r"embeddings\.word\.weight")
def _(engine: Engine) -> None:
    engine.optimizer.epsilon = 1e-6


@fault("no clipping", "dp2", "update", r"embeddings\.word\.weight")
def _(engine: Engine) -> None:
    engine.optimizer.grad_clip = 0.0


@fault(
    "a rank begins with other weights", "dp2", "weight", r"layers\.0\.attn\.qkv\.weight", ranks=(1,)
)
def _(engine: Engine) -> None:
    engine.runner.masters["layers.0.attn.qkv.weight"].data[5, 7] += 1e-4 * engine.mesh.rank


def named(found: TensorFinding | None, fault: Fault) -> bool:
    if found is None or found.phase != fault.phase or found.wrong != ["B"]:
        return False
    if fault.ranks is not None and found.sides["B"].ranks != list(fault.ranks):
        return False
    return re.match(rf"{fault.tensor}(\.|$)", found.name) is not None


def told(verdict: Verdict) -> str:
    first = verdict.first
    return "equal" if first is None else f"{first.phase} {first.name} {first.sides}"


@pytest.mark.parametrize("fault", [one for one in FAULTS if one.quick], ids=lambda one: one.name)
def test_a_fault_is_named(bench: Bench, fault: Fault) -> None:
    verdict = bench.compare(fault.case, fault.step, fault)
    assert named(verdict.first, fault), told(verdict)


@pytest.mark.slow
def test_nearly_all_faults_of_the_bank_are_named(bench: Bench) -> None:
    assert len(FAULTS) >= 30
    missed = {}
    for fault in FAULTS:
        try:
            verdict = bench.compare(fault.case, fault.step, fault)
        except AssertionError as error:
            missed[fault.name] = str(error)[-300:]
            continue
        if not named(verdict.first, fault):
            missed[fault.name] = told(verdict)
    shown = "\n".join(f"{name}: {what}" for name, what in missed.items())
    print(f"{len(FAULTS) - len(missed)} of {len(FAULTS)} faults named", shown, sep="\n")
    assert len(missed) <= 0.05 * len(FAULTS), shown


ALIKE = [Case("dp2 mp2"), Case("pp2 mp2 sp", network="llama"), Case("sh2 stage3")]


@pytest.mark.parametrize("case", ALIKE, ids=lambda case: case.name)
def test_no_false_alarm(bench: Bench, case: Case) -> None:
    verdict = bench.compare(case, 1)
    assert verdict.first is None, told(verdict)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_false_alarm_over_the_table(tmp_path: Path, case: Case) -> None:
    if case.dtype == "float64":
        pytest.skip("the reference itself")
    layers = replace(case, settings=("Model.num_layers=4", *case.settings))
    sizes = replace(layers, settings=("Data.batch_size.global_batch_size=8", *layers.settings))
    verdict = Bench(tmp_path).compare(sizes, 1)
    assert verdict.first is None, told(verdict)


# -- the command ----------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY))
    return path


def settings(tmp_path: Path) -> list[str]:
    given = [*SMALL, f"Data.dataset.cache_dir={tmp_path / 'cache'}", "Model.num_layers=1"]
    given += ["Data.batch_size.local_batch_size=null", "Model.attention_probs_dropout_prob=0"]
    return [word for one in given for word in ("-o", one)]


def test_the_command(tmp_path: Path, file: Path, command: Callable[..., Any]) -> None:
    words = ["bisect", "-c", file, *settings(tmp_path)]
    code, shown, _ = command(*words, "--b-override", "Engine.mix_precision.dtype=bfloat16")
    assert code == 0 and "equal: " in shown
    assert "reference: one process in float64" in shown and "times A's step" in shown
    other = ["--b-override", "Model.norm_epsilon=1.0e-3"]
    code, shown, _ = command(*words, *other, "--json", "--keep", tmp_path / "kept")
    found = json.loads(shown)
    assert code == 1 and not found["equal"]
    first = found["first"]
    assert (first["phase"], first["name"], first["wrong"]) == ("forward", "layers.0.norm1", ["B"])
    assert (tmp_path / "kept" / "A" / "step.json").exists()


def test_masks_that_cannot_agree_are_refused(
    tmp_path: Path, file: Path, command: Callable[..., Any]
) -> None:
    code, _, said = command("bisect", "-c", file)
    assert code == 2 and "attention_probs_dropout_prob=0" in said
    sizes = ["--b-override", "Data.batch_size.micro_batch_size=2"]
    code, _, said = command("bisect", "-c", file, *settings(tmp_path), *sizes)
    assert code == 2 and "hidden_dropout_prob=0" in said
