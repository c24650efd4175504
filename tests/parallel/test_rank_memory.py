"""What every rank holds, told without running any: the same as the ranks themselves tell."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.layout_runs import Runs, notices
from helpers.layout_table import Case
from helpers.rank_tensors import counted_rank, counted_ranks
from helpers.ranks import on_ranks
from helpers.traces import Workshop, whole
from typer.testing import CliRunner

from fourfold.cli import command_line
from fourfold.cost.rank_memory import RankMemory, rank_memory
from fourfold.engine import Engine
from fourfold.model import ModelShape, count_parameters
from fourfold.shards import local

ROOT = Path(__file__).parent.parent.parent
LARGE = ROOT / "configs" / "gpt" / "hybrid_parallel" / "configs_175B_mp8_pp16.yaml"
ODD_VOCABULARY = "Model.vocab_size=1027"
ROW = re.compile(r"\s*(\d+)\s+(\d+)\s+(\d+)\s+(\d+)\s+(\d+)\s+(\d+) from (\d+)\s+([\d,]+)")


def list_layout(*words: str) -> tuple[list[list[int]], str]:
    """The rows of `fourfold layout`, and the line below them.

    Columns: rank, dp, pp, sharding, mp, layers, first layer, parameters.
    """

    def work(_: int) -> str:
        result = CliRunner().invoke(command_line(), ["layout", *words], catch_exceptions=False)
        assert result.exit_code == 0
        return result.stdout

    # In a process of its own: a group of ranks that are not there is for the whole process.
    lines = on_ranks(1, work)[0].splitlines()
    matches = [match for line in lines if (match := ROW.match(line))]
    return [[int(cell.replace(",", "")) for cell in match.groups()] for match in matches], lines[-1]


def test_all_128_ranks_of_the_largest_configuration_are_listed_and_add_up() -> None:
    rows, summary = list_layout("-c", str(LARGE))
    assert [row[0] for row in rows] == list(range(128))
    # Model innermost, then the pipeline: rank = pp * 8 + mp.
    assert [row[1:5] for row in rows] == [[0, rank // 8, 0, rank % 8] for rank in range(128)]
    assert [row[5:7] for row in rows] == [[6, 6 * (rank // 8)] for rank in range(128)]
    hidden, vocabulary, length = 12288, 51200, 1024
    model = 96 * (12 * hidden + 13) * hidden + (vocabulary + length + 2) * hidden
    assert f"of which {model:,} are the model's" in summary
    # Norms, two biases a layer and positions are on all 8; the head has an embedding of its own.
    copies = 7 * (96 * 6 + 2 + length) * hidden + vocabulary * hidden
    assert sum(row[7] for row in rows) == model + copies


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_low_precision_is_listed_too(dtype: str, level: str) -> None:
    precision = [f"Engine.mix_precision.dtype={dtype}", f"Engine.mix_precision.level={level}"]
    words = [word for one in (*precision, "Distributed.dp_degree=2") for word in ("-o", one)]
    rows, _ = list_layout("-c", str(ROOT / "configs" / "gpt" / "quickstart_gpt2.yaml"), *words)
    assert [row[:2] for row in rows] == [[0, 0], [1, 1]]


LAYOUTS = {
    "one": (),
    "pp2 mp2": (ODD_VOCABULARY,),
    "dp2 sh2 stage3": (ODD_VOCABULARY,),
    "pp2 zbv mp2 sp": ("Model.num_layers=5",),
    "sh2 stage2": ("Engine.mix_precision.dtype=bfloat16", "Engine.mix_precision.level=O2"),
    "mp2": ("Engine.mix_precision.dtype=bfloat16", "Engine.mix_precision.level=O2"),
    "pp2 sh2": ("Model.use_recompute=True",),
    "dp2": ("Engine.mix_precision.dtype=bfloat16", "Engine.mix_precision.level=O1"),
}
QUICK = ("pp2 mp2", "dp2 sh2 stage3")


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, marks=() if layout in QUICK else pytest.mark.slow) for layout in LAYOUTS],
)
def test_ranks_that_run_hold_what_was_foretold(layout: str, runs: Runs) -> None:
    case, settings = Case(layout), LAYOUTS[layout]

    def work(engine: Engine) -> tuple[RankMemory, int, int]:
        """What the tensors of this rank add up to, its parameters and its moments."""
        held = counted_rank(engine.config, engine.runner)
        own = sum(local(p.data).numel() for p in engine.runner.masters.values())
        moments = sum(m.numel() * 4 for m in engine.optimizer.named_moments().values())
        engine.data.close()
        engine.mesh.close()
        return held, own, moments

    told = runs.on_ranks(layout, "run", work, *settings)
    config = runs.config(layout, "foretold", *settings)
    foretold = rank_memory(config)
    assert [held for held, _, _ in told] == foretold
    for share, (_, parameters, moment_bytes) in zip(foretold, told, strict=True):
        assert (share.parameters, share.moment_bytes) == (parameters, moment_bytes)
    assert len(foretold) == case.world
    assert sum(share.counted for share in foretold) == count_parameters(ModelShape.of(config.Model))


def test_a_run_tells_the_shares_of_its_ranks_before_the_first_step(runs: Runs) -> None:
    run = runs.fit("pp2 mp2", "run", "Engine.max_steps=1")
    lines = [line for line in notices(run).splitlines() if line.startswith("state:")]
    assert [re.findall(r"rank ([\d, -]+): 2 layer\(s\) from (\d)", line) for line in lines] == [
        [("0-1", "0")],
        [("2-3", "2")],
    ]


def test_ranks_that_were_only_thought_of_leave_nothing_behind(tmp_path: Path) -> None:
    """A process that has been every rank in turn can still become one of them."""
    case, workshop = Case("pp2 sh2 mp2"), Workshop(tmp_path)
    counted_ranks(workshop.config(case.world, "fake", case.overrides()))
    traces = workshop.trace(case)  # saved on the way, which needs every element exactly once
    assert set(whole(trace.initial for trace in traces)) == set(
        whole([workshop.reference(case)[0].initial])
    )
