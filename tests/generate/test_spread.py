"""A model spread over ranks writes what it writes on one: sampling, greedy and beam search."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ranks import on_ranks
from tiny_text_run import TextRun, make_run

from fourfold.config import load_config
from fourfold.convert import convert
from fourfold.generate.module import GenerationModule
from fourfold.mesh import connect, select_device
from fourfold.parallel import layout_of

PROMPTS = ["the cat", "a dog ran after the old", "rain"]


def pipeline(schedule: str) -> tuple[int, list[str]]:
    stages = ["Distributed.pp_degree=2", "Distributed.virtual_pp_degree=2"]
    return 2, [*stages, f"Distributed.pp_schedule={schedule}"]


LAYOUTS = {
    "mp2": (2, ["Distributed.mp_degree=2"]),
    "pp2": (2, ["Distributed.pp_degree=2"]),
    "pp2 interleaved": pipeline("Interleaved1F1B"),
    # A V: the first rank has both ends, and with them both copies of the embedding.
    "pp2 zbv": pipeline("ZBVZeroBubble"),
    "pp2 dualpipe": pipeline("DualPipeV"),
    "sharding2": (
        2,
        [
            "Distributed.sharding.sharding_degree=2",
            "Distributed.sharding.sharding_stage=3",
        ],
    ),
}
STRATEGIES = {
    "sampling": ["Generation.decode_strategy=sampling", "Generation.top_k=20"],
    "greedy": ["Generation.decode_strategy=greedy_search", "Generation.repetition_penalty=1.8"],
    "beam": [
        "Generation.decode_strategy=beam_search",
        "Generation.num_beams=3",
        "Generation.top_k=0",
    ],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TextRun:
    return make_run(tmp_path_factory.mktemp("text"), num_layers=4)


def texts_of(run: TextRun, size: int, overrides: list[str]) -> list[list[str]]:
    """What every rank writes, by rank."""

    def work(rank: int) -> list[str]:
        sizes = ["Data.batch_size.micro_batch_size=1"]
        config = load_config(run.config, [*sizes, *overrides], world_size=size)
        mesh = connect(layout_of(config), select_device("cpu"), 60.0)
        module = GenerationModule(config, lambda text: None, mesh)
        written = [one.text for each in module.complete(PROMPTS) for one in each]
        mesh.close()
        return written

    return on_ranks(size, work)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_text_as_one_process(layout: str, strategy: str, run: TextRun) -> None:
    size, degrees = LAYOUTS[layout]
    (alone,) = texts_of(run, 1, STRATEGIES[strategy])
    assert all(alone) and len(alone) == len(PROMPTS)
    for written in texts_of(run, size, [*degrees, *STRATEGIES[strategy]]):
        assert written == alone


@pytest.mark.parametrize("layout", ["mp2", "pp2 zbv"])
def test_a_foreign_checkpoint_is_spread_too(layout: str, run: TextRun, tmp_path: Path) -> None:
    convert(run.directory / "output", tmp_path / "hf", "hf", tokenizer=None)
    places = [f"Engine.save_load.ckpt_dir={tmp_path / 'hf'}", *STRATEGIES["greedy"]]
    (alone,) = texts_of(run, 1, STRATEGIES["greedy"])
    for written in texts_of(run, 2, [*LAYOUTS[layout][1], *places]):
        assert written == alone


def test_data_parallel_ranks_are_refused(run: TextRun) -> None:
    with pytest.raises(AssertionError, match="would all write the same"):
        texts_of(run, 2, ["Distributed.dp_degree=2"])


def test_the_command_starts_the_ranks(run: TextRun) -> None:
    degrees = [word for text in LAYOUTS["mp2"][1] for word in ("-o", text)]
    command = ["-m", "fourfold", "generate", "-c", str(run.config), "--prompt", "the cat"]
    alone, spread = (
        subprocess.run(
            [sys.executable, *command, *more], capture_output=True, text=True, check=True
        )
        for more in ([], ["--nproc", "2", *degrees])
    )
    assert alone.stdout.startswith("Prompt: the cat\nGeneration: the cat")
    assert spread.stdout == alone.stdout
