"""The dry run: the real parallel code on nothing, and the planner's formulas against it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from helpers.planned_networks import gpt
from typer.testing import CliRunner

from fourfold.cli import command_line
from fourfold.config import Config, load_config
from fourfold.cost.memory import layers_of_stage, memory_of, stage_parameters
from fourfold.cost.traffic import traffic_of
from fourfold.cost.workload import Spread, spread_of, workload_of
from fourfold.errors import UserError
from fourfold.parallel import layout_of
from fourfold.parallel.stages import layers_of_stages, stages_of_rank
from fourfold.plan.dry_run import DryRun, Traffic, dry_run

CONFIGS = Path(__file__).parent.parent.parent / "configs" / "gpt"
SMALL = {
    "Global": {"device": "cpu"},
    "Engine": {"max_steps": 1, "mix_precision": {"dtype": "float32"}},
    "Data": {
        "batch_size": {"global_batch_size": 16},
        "dataset": {"input_dir": "unused", "max_seq_len": 16},
    },
    "Model": {
        "vocab_size": 101,  # divides by nothing
        "hidden_size": 32,
        "num_layers": 7,
        "num_attention_heads": 4,
        "max_position_embeddings": 16,
        "use_recompute": False,
    },
}
MP, PP = "Distributed.mp_degree", "Distributed.pp_degree"
DP, SHARDING = "Distributed.dp_degree", "Distributed.sharding.sharding_degree"
STAGE, SP = "Distributed.sharding.sharding_stage", "Model.sequence_parallel=True"
SCHEDULE, VIRTUAL = "Distributed.pp_schedule", "Distributed.virtual_pp_degree"
MICRO = "Data.batch_size.micro_batch_size"
O2 = ["Engine.mix_precision.dtype=bfloat16", "Engine.mix_precision.level=O2"]
O1 = ["Engine.mix_precision.dtype=bfloat16", "Engine.mix_precision.level=O1"]
INTERLEAVED = [f"{SCHEDULE}=Interleaved1F1B", f"{VIRTUAL}=3"]
FULL = ["Model.use_recompute=True"]
OPERATIONS = [*FULL, "Model.recompute_granularity=ops"]
NUMBER, BLOCK = "Model.recompute_num_layers", "Model.recompute_method=block"
FULL_ATTENTION = [*FULL, "Model.recompute_granularity=full_attn"]

LAYOUTS = {
    "one process": [f"{MICRO}=4"],
    "dp4": [f"{DP}=4", f"{MICRO}=2"],
    "mp4, vocabulary uneven": [f"{MP}=4", f"{DP}=1", f"{MICRO}=4"],
    "mp2 sp O1": [f"{MP}=2", f"{DP}=1", SP, f"{MICRO}=4", *O1],
    "mp2 O1, all recomputed": [f"{MP}=2", f"{DP}=1", f"{MICRO}=4", *O1, *FULL],
    "mp4 sp O2, attention again": [f"{MP}=4", f"{DP}=1", SP, f"{MICRO}=4", *O2, *FULL_ATTENTION],
    "mp2 sp O1, operations kept": [f"{MP}=2", f"{DP}=1", SP, f"{MICRO}=4", *O1, *OPERATIONS],
    "mp2 sp, three together": [f"{MP}=2", f"{DP}=1", SP, f"{MICRO}=4", *FULL, f"{NUMBER}=3"],
    "mp2, two recomputed": [f"{MP}=2", f"{DP}=1", f"{MICRO}=4", *FULL, BLOCK, f"{NUMBER}=2"],
    "pp3 uneven O2": [f"{PP}=3", f"{DP}=1", f"{MICRO}=4", *O2],
    "pp4 mp2 sp": [f"{PP}=4", f"{MP}=2", f"{DP}=1", SP, f"{MICRO}=2"],
    "interleaved": [f"{PP}=2", f"{DP}=1", *INTERLEAVED, f"{MICRO}=2"],
    "a V": [f"{PP}=2", f"{DP}=1", f"{SCHEDULE}=ZBVZeroBubble", f"{VIRTUAL}=2", f"{MICRO}=2"],
    "stage 1 dp2": [f"{SHARDING}=2", f"{STAGE}=1", f"{DP}=2", f"{MICRO}=2"],
    "stage 2 O2": [f"{SHARDING}=4", f"{STAGE}=2", f"{DP}=1", f"{MICRO}=2", *O2],
    "stage 2 O1": [f"{SHARDING}=4", f"{STAGE}=2", f"{DP}=1", f"{MICRO}=2", *O1],
    "stage 3 mp2": [f"{SHARDING}=2", f"{STAGE}=3", f"{MP}=2", f"{DP}=1", f"{MICRO}=2"],
    "all four axes": [f"{DP}=2", f"{PP}=2", f"{SHARDING}=2", f"{STAGE}=2", f"{MP}=2", f"{MICRO}=1"],
}  # fmt: skip
# Together they meet every axis, stage, kind of schedule and precision.
QUICK = {
    "one process",
    "mp4 sp O2, attention again",
    "interleaved",
    "a V",
    "stage 2 O1",
    "all four axes",
}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    return path


def wire_bytes(traffic: Traffic) -> dict[str, int]:
    """By axis, as traffic_of counts them."""
    moved: dict[str, int] = {}
    for (axis, kind), size in traffic.bytes_.items():
        if axis != "control":
            moved[axis] = moved.get(axis, 0) + (2 if kind == "all-reduce" else 1) * size
    return moved


@pytest.mark.parametrize(
    "degrees",
    [
        [f"{MP}=2", f"{DP}=1"],
        [f"{DP}=4"],
        [f"{SHARDING}=2", f"{STAGE}=3", f"{MP}=2", f"{DP}=1"],
        pytest.param(
            [f"{DP}=2", f"{PP}=2", f"{SHARDING}=2", f"{MP}=2", *O2], marks=pytest.mark.slow
        ),
    ],
    ids=" ".join,
)
def test_muons_messages_are_the_planned_ones(small: Path, degrees: list[str]) -> None:
    """Of all ranks of a stage together: single ones own a matrix more or less."""
    config = load_config(small, ["Optimizer.name=Muon", f"{MICRO}=1", *degrees])
    workload, spread = workload_of(config, on_cpu=True), spread_of(config)
    for stage in range(int(spread.pp)):
        layout = layout_of(config)
        ranks = [
            rank for rank in range(layout.world_size) if layout.coordinates(rank)["pp"] == stage
        ]
        ran = [dry_run(config, rank) for rank in ranks]
        planned = traffic_of(workload.network, spread, workload.software, stage)["muon"]
        sent = sum(wire_bytes(one.traffic)["muon"] for one in ran)
        assert sent == pytest.approx(float(planned) * len(ranks))
        for one in ran:
            check_holding(config, one)


def check_holding(config: Config, ran: DryRun) -> None:
    """Parameters to the last one; bytes too, but that a shard is of whole rows."""
    workload, spread = workload_of(config), spread_of(config)
    place = ran.layout.coordinates(ran.share.rank)
    parameters = stage_parameters(workload.network, spread, place["pp"], place["mp"])
    assert ran.parameters == parameters
    memory = memory_of(workload.network, spread, workload.software, place["pp"])
    optimizer = ran.holding.masters + ran.holding.moments
    if ran.layout.sharding == 1:
        # memory_of is about the first of the model-parallel ranks, which may have one word more.
        row = 0 if place["mp"] == 0 else config.Model.hidden_size * 2
        assert ran.holding.weights == pytest.approx(memory["weights"], abs=4 * row)
        assert ran.holding.gradients == pytest.approx(memory["gradients"], abs=4 * row)
        assert optimizer == pytest.approx(memory["optimizer"], abs=12 * row)
    else:
        rounding = 1 + ran.layout.sharding / config.Model.hidden_size
        assert optimizer == pytest.approx(memory["optimizer"], rel=rounding - 1)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LAYOUTS],
)
def test_formulas_agree_with_the_real_code(small: Path, name: str) -> None:
    config = load_config(small, LAYOUTS[name])
    workload, spread = workload_of(config), spread_of(config)
    world = int(spread.world)
    for rank in sorted({0, world // 2, world - 1} if spread.pp > 1 else {0, world - 1}):
        ran = dry_run(config, rank)
        check_holding(config, ran)
        pp_rank = ran.layout.coordinates(rank)["pp"]
        planned = traffic_of(workload.network, spread, workload.software, pp_rank)
        counted = wire_bytes(ran.traffic)
        for axis, size in planned.items():
            row = 2 * 4 * config.Model.hidden_size  # of the vocabulary, which not all ranks have
            expected = pytest.approx(float(size), rel=0.005, abs=row)
            assert counted.get(axis, 0) == expected, (axis, rank)


def test_sharding_gathers_each_layer_in_one_message_and_in_low_precision(small: Path) -> None:
    """But for the norms at O1, which are computed with in fp32: a second, small one."""
    layout, kind = [f"{SHARDING}=2", f"{STAGE}=3", f"{MICRO}=8"], ("sharding", "all-gather")
    wide, autocast, low = (
        dry_run(load_config(small, [*layout, *precision]), 0).traffic for precision in ([], O1, O2)
    )
    assert wide.calls[kind] == low.calls[kind] == 2 * 7 + 1  # forward, backward, and the ends
    assert autocast.calls[kind] == 2 * 2 * 7 + 1
    assert low.bytes_[kind] == wide.bytes_[kind] / 2
    assert low.bytes_[kind] < autocast.bytes_[kind] < 0.6 * wide.bytes_[kind]


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "DualPipeV"])
@pytest.mark.parametrize("layers", [8, 9, 13, 14])
def test_layers_of_a_stage_are_those_of_the_real_code(schedule: str, layers: int) -> None:
    virtual = {"1F1B": 1, "Interleaved1F1B": 2, "DualPipeV": 2}[schedule]
    spread = Spread(pp=4, virtual=virtual, schedule=schedule)
    stages = layers_of_stages(layers, 4 * virtual)
    for rank in range(4):
        held = sum(len(stages[stage]) for stage in stages_of_rank(rank, 4, schedule, virtual))
        assert layers_of_stage(gpt(layers, 32, 4, 128, 64, 16), spread, rank) == held


@pytest.mark.parametrize("rank", [0, 64, 127])
def test_a_rank_of_175b(rank: int) -> None:
    config = load_config(CONFIGS / "hybrid_parallel" / "configs_175B_mp8_pp16.yaml")
    ran = dry_run(config, rank)
    check_holding(config, ran)
    assert ran.timeline is not None
    assert (ran.timeline.idle, ran.timeline.slots) == (45, 3 * (1536 + 15))
    assert ran.timeline.text().startswith("F0 B0" if rank == 127 else "F0 F1")


def test_the_report(small: Path) -> None:
    overrides = LAYOUTS["pp4 mp2 sp"]
    said = CliRunner().invoke(
        command_line(),
        ["plan", "--dry-run", "-c", str(small), "--rank", "7", *(f"-o{o}" for o in overrides)],
    )
    assert said.exit_code == 0, said.output
    assert "rank 7 of 8" in said.output
    assert "F0 B0 F1 B1" in said.output
    assert "reduce-scatter" in said.output


def test_a_rank_that_is_not_there(small: Path) -> None:
    with pytest.raises(UserError, match="has the ranks 0 to 0"):
        dry_run(load_config(small, [f"{MICRO}=4"]), 1)
