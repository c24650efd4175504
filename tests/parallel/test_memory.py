"""What a rank holds: no more than its share while building, and between micro-batches just what
its sharding stage says, in bytes for each parameter of the model.

docs/parallel_cost.md has the formula and figures of larger models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers.ranks import on_ranks
from helpers.tiny_run import TINY
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker

from fourfold.config import Config, load_config
from fourfold.engine import Engine, build_engine
from fourfold.mesh import connect
from fourfold.parallel import Runner, layout_of, parallelize, preload
from fourfold.parallel.fsdp import sharded_modules
from fourfold.shards import local

CLEAR_REFS = Path("/proc/self/clear_refs")
WIDE = ["Model.vocab_size=4096", "Model.hidden_size=768", "Model.num_layers=8"]
# Twelve layers, so that one is a small part, and few tokens, so that activations are too.
DEEP = ["Model.hidden_size=128", "Model.num_layers=12", "Data.dataset.max_seq_len=4"]
SHARDING = "Distributed.sharding.sharding_degree"
STAGE = "Distributed.sharding.sharding_stage"


def config_of(folder: Path, world: int, overrides: list[str]) -> Config:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY))
    places = [
        f"Engine.save_load.output_dir={folder / 'output'}",
        f"Data.dataset.cache_dir={folder / 'cache'}",
        "Model.hidden_dropout_prob=0.0",
        "Model.attention_probs_dropout_prob=0.0",
        "Data.batch_size.local_batch_size=null",
        "Data.batch_size.micro_batch_size=1",
    ]
    return load_config(path, [*places, *overrides], world_size=world)


# -- building -------------------------------------------------------------------------------


def resident_memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(field + ":")]
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not CLEAR_REFS.exists(), reason="the kernel does not tell the peak")
@pytest.mark.parametrize(
    "layout",
    [[f"{SHARDING}=4", f"{STAGE}=3"], ["Distributed.mp_degree=4"], ["Distributed.pp_degree=4"]],
    ids=["sharding4", "mp4", "pp4"],
)
def test_building_never_holds_the_whole_model(tmp_path: Path, layout: list[str]) -> None:
    """60 million parameters, 240 MB; a rank's share is a quarter of it."""
    config = config_of(tmp_path, 4, [*WIDE, *layout, "Data.batch_size.global_batch_size=4"])
    preload(layout_of(config))

    def build(rank: int) -> tuple[int, int]:
        device = torch.device("cpu")
        mesh = connect(layout_of(config), device)
        CLEAR_REFS.write_text("5")
        before = resident_memory("VmRSS")
        runner = parallelize(config, mesh, device)
        grown = resident_memory("VmHWM") - before
        return storage_bytes(list(runner.masters.values())), grown

    for share, grown in on_ranks(4, build):
        print(f"share {share / 1e6:.0f} MB, grew by {grown / 1e6:.0f} MB at most")
        assert share < 80e6
        assert grown < 1.2 * share + 40e6


# -- training -------------------------------------------------------------------------------


def storage_bytes(tensors: list[Tensor]) -> int:
    """Of the memory behind the tensors, each piece once."""
    storages = [local(tensor.data).untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def held_bytes(engine: Engine) -> tuple[int, int, int]:
    """Weights, gradients and moments on this rank, now."""
    runner = engine.runner
    weights: list[Tensor] = [*runner.masters.values(), *runner.parameters.values()]
    gradients = [parameter.grad for parameter in weights]
    for record in torch_records(runner):
        weights += record.all_gather_outputs
        gradients += [record.unsharded_accumulated_grad, record.unsharded_param.grad]
    present = [gradient for gradient in gradients if gradient is not None]
    moments = list(engine.optimizer.named_moments().values())
    return storage_bytes(weights), storage_bytes(present), storage_bytes(moments)


def torch_records(runner: Runner) -> list[Any]:
    """Torch's records of divided parameters, where the gathered weights are kept."""
    return [
        record
        for module in sharded_modules(runner.parts[0])
        for group in module._get_fsdp_state()._fsdp_param_groups
        for record in group.fsdp_params
    ]


def layout_of_stage(stage: int) -> list[str]:
    batch = "Data.batch_size.global_batch_size=4"
    if stage == 0:
        return [batch, "Distributed.dp_degree=2"]
    return [batch, f"{SHARDING}=2", f"{STAGE}={stage}"]


# Weights, gradients and moments, in bytes for each parameter of the model, over two ranks.
FP32 = {0: (4, 4, 8), 1: (2 + 4, 4, 4), 2: (2 + 4, 2, 4), 3: (2, 2, 4)}
O2 = {0: (4 + 2, 4, 8), 1: (2 + 2, 4, 4), 2: (2 + 2, 2, 4), 3: (2, 2, 4)}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("dtype", "expected"), [("float32", FP32), ("bfloat16", O2)])
def test_a_stage_divides_what_it_says(
    tmp_path: Path, stage: int, dtype: str, expected: dict[int, tuple[float, ...]]
) -> None:
    low = [f"Engine.mix_precision.dtype={dtype}", "Engine.mix_precision.level=O2"]
    config = config_of(tmp_path, 2, [*layout_of_stage(stage), *low])

    def between_micro_batches(rank: int) -> tuple[float, ...]:
        engine, seen = build_engine(config, 2), list[tuple[int, int, int]]()
        engine.runner.run(engine.data.loaders["train"].batch(0), step=1)
        engine.optimizer.zero_grad()
        model = engine.runner.parts[0]
        model.register_forward_pre_hook(lambda *_: seen.append(held_bytes(engine)), prepend=True)
        engine.runner.run(engine.data.loaders["train"].batch(1), step=2)
        whole = sum(torch.Size(held.shape).numel() for held in engine.runner.shards.values())
        return tuple(held / whole for held in seen[1])

    for held in on_ranks(2, between_micro_batches):
        # A shard is of whole rows, which need not divide.
        assert held == pytest.approx(expected[stage], rel=0.005)


# In bytes for each parameter, of which one of twelve layers needs a third for itself. Torch's
# tracker knows one micro-batch only, with which stage 1 is as stage 2.
PEAKS = {0: 16 + 1.5, 2: 12 + 1.5, 3: 8 + 2.5}


@pytest.mark.parametrize("stage", [*(pytest.param(s, marks=pytest.mark.slow) for s in (0, 2)), 3])
def test_the_peak_is_what_is_held_and_a_few_layers(tmp_path: Path, stage: int) -> None:
    one_micro_batch = "Data.batch_size.global_batch_size=2"
    config = config_of(tmp_path, 2, [*DEEP, *layout_of_stage(stage), one_micro_batch])

    def peak(rank: int) -> float:
        engine = build_engine(config, 2)
        engine.runner.run(engine.data.loaders["train"].batch(0), step=1)
        engine.optimizer.zero_grad()
        tracker = MemTracker()
        tracker.track_external(engine.runner.parts[0], *engine.optimizer.named_moments().values())
        with tracker:
            engine.runner.run(engine.data.loaders["train"].batch(1), step=2)
        total = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
        whole = sum(torch.Size(held.shape).numel() for held in engine.runner.shards.values())
        return total / whole

    for bytes_each in on_ranks(2, peak):
        print(f"{bytes_each:.2f} bytes for each parameter")
        assert bytes_each < PEAKS[stage]
