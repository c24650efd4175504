"""The other families planned: the dry run agrees with the formulas, Llama 3.1 8B byte for byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.planned_networks import FAMILIES, LLAMA
from typer.testing import CliRunner

from fourfold.cli import command_line
from fourfold.config import Config, load_config
from fourfold.config.rules import divides_model
from fourfold.cost.flops import flops_per_token, megatron_deepspeed_flops_per_token
from fourfold.cost.memory import holding_of, stage_parameters
from fourfold.cost.rank_memory import rank_memory
from fourfold.cost.traffic import traffic_of
from fourfold.cost.workload import spread_of, workload_of
from fourfold.model import ModelShape, count_parameters, table_of
from fourfold.plan.cluster import parse_cluster
from fourfold.plan.dry_run import DryRun, dry_run
from fourfold.plan.planner import plan

MP, PP = "Distributed.mp_degree", "Distributed.pp_degree"
DP, SHARDING = "Distributed.dp_degree", "Distributed.sharding.sharding_degree"
STAGE, SP = "Distributed.sharding.sharding_stage", "Model.sequence_parallel=True"
MICRO = "Data.batch_size.micro_batch_size"
O1, O2 = (
    ["Engine.mix_precision.dtype=bfloat16", f"Engine.mix_precision.level={level}"]
    for level in ("O1", "O2")
)
FULL = ["Model.use_recompute=True"]
OPERATIONS = [*FULL, "Model.recompute_granularity=ops"]
ATTENTION = [*FULL, "Model.recompute_granularity=full_attn"]


def written(folder: Path, model: dict[str, Any], **sections: dict[str, Any]) -> Path:
    path = folder / "network.yaml"
    path.write_text(yaml.safe_dump({"Model": model, **sections}))
    return path


def wire_bytes(ran: DryRun) -> dict[str, int]:
    """By axis, as traffic_of counts them."""
    moved: dict[str, int] = {}
    for (axis, kind), size in ran.traffic.bytes_.items():
        if axis != "control":
            moved[axis] = moved.get(axis, 0) + (2 if kind == "all-reduce" else 1) * size
    return moved


def check(config: Config, rank: int) -> None:
    """Parameters, weights, master weights, gradients, moments and messages, all to the byte."""
    ran = dry_run(config, rank)
    place = ran.layout.coordinates(rank)
    workload, spread = workload_of(config), spread_of(config)
    network, software = workload.network, workload.software
    assert ran.parameters == stage_parameters(network, spread, place["pp"], place["mp"])
    held = holding_of(network, spread, software, place["pp"], place["mp"])
    assert {name: getattr(ran.holding, name) for name in held} == held
    planned = traffic_of(network, spread, software, place["pp"])
    assert wire_bytes(ran) == {axis: size for axis, size in planned.items() if size}


# -- small networks of all families ---------------------------------------------------------------

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_layers": 4,
    "num_attention_heads": 8,
    "ffn_hidden_size": 128,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "use_recompute": False,
}
REST = {
    "Global": {"device": "cpu"},
    "Engine": {"max_steps": 1, "mix_precision": {"dtype": "float32"}},
    "Data": {
        "batch_size": {"global_batch_size": 16, "micro_batch_size": 4},
        "dataset": {"input_dir": "unused", "max_seq_len": 16},
    },
}
LAYOUTS = {
    "mp4": [f"{MP}=4", f"{DP}=1", f"{MICRO}=4"],
    "mp8 sp, attention again": [f"{MP}=8", f"{DP}=1", SP, f"{MICRO}=4", *O2, *ATTENTION],
    "mp4 O1, all recomputed": [f"{MP}=4", f"{DP}=1", f"{MICRO}=4", *O1, *FULL],
    "mp2 sp O1, operations kept": [f"{MP}=2", f"{DP}=1", SP, f"{MICRO}=4", *O1, *OPERATIONS],
    "stage 3 O2": [f"{SHARDING}=4", f"{STAGE}=3", f"{DP}=1", f"{MICRO}=4", *O2],
    "stage 2 O1, mp4 sp": [f"{SHARDING}=2", f"{STAGE}=2", f"{DP}=1", f"{MP}=4", SP, *O1],
    "mp2 pp2 sp": [f"{MP}=2", f"{PP}=2", f"{DP}=1", SP, f"{MICRO}=4"],
}  # fmt: skip
QUICK = {
    ("Llama 3", "mp8 sp, attention again"),
    ("multi-query", "mp4"),
    ("Qwen3", "stage 2 O1, mp4 sp"),
    ("OLMo 2", "mp4 O1, all recomputed"),
}


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(
            family, layout, marks=() if (family, layout) in QUICK else pytest.mark.slow
        )
        for family in FAMILIES
        for layout in LAYOUTS
    ],
)  # fmt: skip
def test_formulas_agree_with_the_real_code(family: str, layout: str, tmp_path: Path) -> None:
    path = written(tmp_path, {**SMALL, **FAMILIES[family]}, **REST)
    config = load_config(path, LAYOUTS[layout])
    check(config, int(spread_of(config).world) - 1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mp", [1, 2, 4, 8])
def test_ranks_add_up_to_the_network(family: str, mp: int, tmp_path: Path) -> None:
    """And what a formula says of a rank is what the table says."""
    path = written(tmp_path, {**SMALL, **FAMILIES[family]}, **REST)
    config = load_config(path, [f"{MP}={mp}", f"{DP}=1", f"{MICRO}=4"])
    shares, shape = rank_memory(config), ModelShape.of(config.Model)
    assert sum(share.counted for share in shares) == count_parameters(shape)
    network, spread = workload_of(config).network, spread_of(config)
    held = [stage_parameters(network, spread, 0, rank) for rank in range(mp)]
    assert held == [share.parameters for share in shares]
    shared = [row for row in table_of(shape).layer() if row.pieces(mp) < mp and row.split_dim == 0]
    assert bool(shared) == (shape.key_value_heads < mp)


def test_degrees_that_divide_heads_of_keys_or_are_their_multiple() -> None:
    legal = [mp for mp in (1, 2, 3, 4, 6, 8, 12, 24) if divides_model(mp, 24, 48, 6)]
    assert legal == [1, 2, 3, 6, 12, 24]


# -- Llama 3.1 8B on eight A100s ------------------------------------------------------------------

LLAMA_8B = {
    **LLAMA,
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "ffn_hidden_size": 14336,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "use_recompute": False,
}
ON_A100 = {
    "Global": {"device": "gpu"},
    "Engine": {"max_steps": 1, "mix_precision": {"dtype": "bfloat16"}},
    "Data": {
        "batch_size": {"global_batch_size": 16, "micro_batch_size": 1},
        "dataset": {"input_dir": "unused", "max_seq_len": 8192},
    },
}
KEYS = "Model.num_key_value_heads"
LARGE = {
    "mp8": [f"{MP}=8", f"{DP}=1"],
    "mp8, kv 4": [f"{MP}=8", f"{DP}=1", f"{KEYS}=4"],
    "mp8 sp, kv 2": [f"{MP}=8", f"{DP}=1", f"{KEYS}=2", SP, *FULL],
    "stage 3": [f"{SHARDING}=8", f"{STAGE}=3", f"{DP}=1"],
    "stage 3, recomputed": [f"{SHARDING}=8", f"{STAGE}=3", f"{DP}=1", *FULL],
    "mp2 pp2 dp2 sp": [f"{MP}=2", f"{PP}=2", f"{DP}=2", SP],
    "mp2 pp2 dp2 sp, recomputed": [f"{MP}=2", f"{PP}=2", f"{DP}=2", SP, *FULL],
}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return written(tmp_path, LLAMA_8B, **ON_A100)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "mp8" else pytest.mark.slow) for name in LARGE],
)
def test_a_rank_of_llama_8b_to_the_byte(name: str, llama: Path) -> None:
    config = load_config(llama, LARGE[name])
    check(config, 7)


def test_the_dry_run_says_so(llama: Path) -> None:
    words = [f"-o{one}" for one in [*LARGE["mp8"], "Model.num_layers=2"]]
    said = CliRunner().invoke(command_line(), ["plan", "--dry-run", "-c", str(llama), *words])
    assert said.exit_code == 0, said.output
    (line,) = [line for line in said.output.splitlines() if "holds at the update" in line]
    counted, planned = line.rpartition(": ")[2].removesuffix(" planned)").split(" bytes (")
    assert counted == planned


def test_a_plan_of_llama_8b(llama: Path) -> None:
    """8.03 billion parameters, of which sharding or slicing must leave a rank 80 GB's worth."""
    made = plan(load_config(llama, []), parse_cluster("8xA100-80G"))
    assert made.workload.parameters == 8_030_261_248
    assert made.best is not None and made.best.fit == "fits"
    assert 0.3 < made.best.mfu < 0.65
    assert made.own is not None and made.own.fit == "no"  # data parallelism alone: 18 bytes each


# -- FLOPs ----------------------------------------------------------------------------------------


def test_model_flops_of_llama_8b(llama: Path) -> None:
    """6 for each parameter that multiplies, and 12 T for each number of queries in each layer."""
    shape = ModelShape.of(load_config(llama, []).Model)
    table = table_of(shape)
    matrices = sum(row.numel for name, row in table if row.is_matrix)
    attention = 12 * 8192 * 32 * 32 * 128
    assert flops_per_token(shape, 8192) == 6 * matrices + attention
    assert flops_per_token(shape, 8192, causal=True) == 6 * matrices + attention / 2
    wider = replace(shape, head_dim=256)
    assert flops_per_token(wider, 8192) > flops_per_token(shape, 8192) + attention
    theirs = megatron_deepspeed_flops_per_token(shape, 8192, recomputes=True)
    assert theirs == flops_per_token(shape, 8192, recompute="full")


def test_windows_shorten_what_is_attended_to(llama: Path) -> None:
    whole = ModelShape.of(load_config(llama, []).Model)
    all_layers = replace(whole, sliding_window=1024)
    half = replace(all_layers, sliding_window_layers=tuple(range(0, 32, 2)))
    unit = 12 * 32 * 32 * 128
    assert flops_per_token(whole, 8192) - flops_per_token(all_layers, 8192) == unit * (8192 - 1024)
    assert flops_per_token(whole, 8192) - flops_per_token(half, 8192) == unit * (8192 - 1024) / 2
    assert flops_per_token(all_layers, 512) == flops_per_token(whole, 512)
    seen = sum(min(1024, position + 1) for position in range(8192)) / 8192
    causal = flops_per_token(whole, 8192, causal=True) - unit * 8192 / 2
    found = flops_per_token(all_layers, 8192, causal=True) - causal
    assert found == pytest.approx(unit * seen, rel=1e-3)
