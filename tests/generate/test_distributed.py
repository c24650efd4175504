"""A model spread over ranks writes what it writes on one: sampling, greedy and beam search."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.forked import fourfold
from helpers.ranks import on_ranks
from helpers.tiny_text_run import MODERN, TextRun, make_run

from fourfold.config import load_config
from fourfold.convert import convert
from fourfold.device import select_device
from fourfold.generate import Decoder
from fourfold.generate.distributed import DistributedDecoder
from fourfold.generate.module import GenerationModule
from fourfold.mesh import connect
from fourfold.parallel import layout_of

MICRO = "Data.batch_size.micro_batch_size=1"
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
    # A vocabulary that two ranks cannot divide.
    return make_run(tmp_path_factory.mktemp("text"), num_layers=4, vocab_size=321)


def texts_of(
    run: TextRun,
    size: int,
    overrides: list[str],
    prepare: Callable[[int, Decoder], object] = lambda rank, decoder: None,
) -> list[list[str]]:
    """What every rank writes, by rank."""

    def work(rank: int) -> list[str]:
        config = load_config(run.config, [MICRO, *overrides], world_size=size)
        mesh = connect(layout_of(config), select_device("cpu"), 60.0)
        module = GenerationModule(config, lambda text: None, mesh)
        prepare(rank, module.decoder)
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


@pytest.fixture(scope="module")
def modern(tmp_path_factory: pytest.TempPathFactory) -> TextRun:
    return make_run(tmp_path_factory.mktemp("modern"), 4, 321, **MODERN)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", ["mp2", "pp2", "pp2 zbv", "sharding2"])
def test_a_modern_network_too(layout: str, strategy: str, modern: TextRun) -> None:
    size, degrees = LAYOUTS[layout]
    (alone,) = texts_of(modern, 1, STRATEGIES[strategy])
    assert all(alone) and len(alone) == len(PROMPTS)
    for written in texts_of(modern, size, [*degrees, *STRATEGIES[strategy]]):
        assert written == alone


@pytest.mark.parametrize("layout", ["mp2", "pp2 zbv"])
def test_a_foreign_checkpoint_is_spread_too(layout: str, run: TextRun, tmp_path: Path) -> None:
    convert(run.directory / "output", tmp_path / "hf", "hf", tokenizer=None)
    places = [f"Engine.save_load.ckpt_dir={tmp_path / 'hf'}", *STRATEGIES["greedy"]]
    (alone,) = texts_of(run, 1, STRATEGIES["greedy"])
    for written in texts_of(run, 2, [*LAYOUTS[layout][1], *places]):
        assert written == alone


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_whose_numbers_differ_write_one_text(strategy: str, run: TextRun) -> None:
    """As on unlike machines, though there by the last bits: rank 0 chooses for all."""

    def spoil(decoder: Decoder) -> None:
        read, advance = decoder.read, decoder.advance
        decoder.read = lambda prompts: -read(prompts)  # type: ignore[method-assign]
        decoder.advance = lambda tokens: -advance(tokens)  # type: ignore[method-assign]

    (alone,) = texts_of(run, 1, STRATEGIES[strategy])
    degrees = [*LAYOUTS["mp2"][1], *STRATEGIES[strategy]]
    assert texts_of(run, 2, degrees, lambda rank, decoder: rank and spoil(decoder)) == [alone] * 2


@pytest.mark.parametrize("weights", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["mp2", "pp2", "pp2 zbv", "sharding2"])
def test_narrower_weights_are_spread_too(layout: str, weights: str, run: TextRun) -> None:
    """Close to the model in float32, on every rank alike, and not kept in float32 beside that."""

    def work(world: int, overrides: list[str]) -> Callable[[int], tuple[torch.Tensor, set[str]]]:
        def logits(rank: int) -> tuple[torch.Tensor, set[str]]:
            config = load_config(run.config, [MICRO, *overrides], world_size=world)
            mesh = connect(layout_of(config), select_device("cpu"), 60.0)
            decoder = GenerationModule(config, lambda text: None, mesh).decoder
            decoder.reserve(2, 16)
            first = decoder.read([[5, 6, 7], [8, 9]])
            second = decoder.advance([1, 2])
            mesh.close()
            return torch.stack([first, second]), dtypes_of(decoder)

        return logits

    size, degrees = LAYOUTS[layout]
    [(expected, _)] = on_ranks(1, work(1, []))
    given = on_ranks(size, work(size, [*degrees, f"Inference.weights={weights}"]))
    for found, dtypes in given:
        assert torch.equal(found, given[0][0])
        error = float((found - expected).norm() / expected.norm())
        assert 1e-5 < error < 2e-2
        # Sharded weights are gathered in the narrow format, a layer at a time.
        assert layout == "sharding2" or dtypes == {weights}


def dtypes_of(decoder: Decoder) -> set[str]:
    if not isinstance(decoder, DistributedDecoder):
        return set()
    runner = decoder.runner
    assert all(runner.masters[name] is one for name, one in runner.parameters.items())
    return {str(one.dtype).removeprefix("torch.") for one in runner.parameters.values()}


def test_int8_is_refused_before_anything_is_read(run: TextRun) -> None:
    with pytest.raises(AssertionError, match="weights=int8 runs in one process"):
        texts_of(run, 2, ["Distributed.mp_degree=2", "Inference.weights=int8"])


def test_what_only_the_originals_inference_reads_is_named(run: TextRun) -> None:
    said: list[str] = []
    GenerationModule(run.load(), said.append)
    assert not any("no effect" in text for text in said)
    # Three ranks do not divide the heads, which matters to nobody.
    GenerationModule(
        run.load("Inference.mp_degree=3", "Inference.model_dir=/exported"), said.append
    )
    told = [text.split(":")[0] for text in said if "no effect" in text]
    assert told == [
        "Inference.model_dir=/exported has no effect",
        "Inference.mp_degree=3 has no effect",
    ]


def test_data_parallel_ranks_are_refused(run: TextRun) -> None:
    with pytest.raises(AssertionError, match="would all write the same"):
        texts_of(run, 2, ["Distributed.dp_degree=2"])


def test_the_command_starts_the_ranks(run: TextRun) -> None:
    degrees = [word for text in LAYOUTS["mp2"][1] for word in ("-o", text)]
    command = ["generate", "-c", run.config, "--prompt", "the cat"]
    alone, spread = (fourfold(*command, *more) for more in ([], ["--nproc", "2", *degrees]))
    assert alone.stdout.startswith("Prompt: the cat\nGeneration: the cat")
    assert spread.stdout == alone.stdout
