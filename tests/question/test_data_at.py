"""`fourfold data at`: the documents of a step are those that training reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.tiny_run import FIXTURE, Configure
from helpers.tiny_text_run import make_run

from fourfold.config import Config
from fourfold.config.batch_schedule import LeftOut, ranges_of
from fourfold.data.provenance import pieces_of
from fourfold.engine import build_engine
from fourfold.errors import DataError
from fourfold.question.history import RunHistory, samples_of_step

BLEND = FIXTURE.parent / "megatron_blend"
MIXTURE = (
    f"Data.dataset.input_dir=0.35 {BLEND / 'part0_text_document'} "
    f"0.65 {BLEND / 'part1_text_document'}"
)
Read = dict[int, tuple[list[int], np.ndarray]]


def train(config: Config) -> Read:
    """Samples and tokens that each step was given."""
    engine, read = build_engine(config), {}
    run = engine.runner.run

    def watched(batch, step, *given):  # type: ignore[no-untyped-def]
        read[step] = (batch.sample_ids.tolist(), batch.tokens.numpy().copy())
        return run(batch, step, *given)

    engine.runner.run = watched  # type: ignore[method-assign]
    engine.fit()
    return read


def assert_answers(run: Path, read: Read, scratch: Path) -> None:
    for step, (ids, tokens) in read.items():
        segment = RunHistory(run).segment(step)
        config = segment.config(scratch)
        data = segment.data(config)
        found = samples_of_step(data, config, step)
        assert found.ids == ids
        for sample, row in zip(found.ids, tokens, strict=True):
            pieces = pieces_of(found.samples, sample)
            laid = np.concatenate([piece.ids() for piece in pieces])
            assert [piece.first for piece in pieces] == np.cumsum(
                [0, *(piece.stop - piece.start for piece in pieces)]
            ).tolist()[:-1]
            assert np.array_equal(laid[:-1], row)


@pytest.mark.parametrize("order", ["megatron", "fleetx", "elastic"])
@pytest.mark.parametrize("source", [MIXTURE, f"Data.dataset.input_dir={FIXTURE}"])
def test_a_step_is_what_training_read(
    configure: Configure, tmp_path: Path, order: str, source: str
) -> None:
    """Over several epochs, with samples left out, from every checkpoint."""
    keys = [f"Data.dataset.order={order}", source, "Data.dataset.leave_out=[[5,9],[20,21]]"]
    read = train(configure("run", *keys, "Engine.eval_freq=0", "Engine.test_iters=0"))
    assert len(read) == 8 and 5 not in read[1][0] and 20 not in read[3][0]
    assert_answers(tmp_path / "run", read, tmp_path)


def test_after_a_resume_with_another_batch_and_other_weights(
    configure: Configure, tmp_path: Path
) -> None:
    keys = ["Data.dataset.order=elastic", "Engine.eval_freq=0", "Engine.test_iters=0", MIXTURE]
    read = train(configure("run", *keys, "Engine.max_steps=4"))
    other = MIXTURE.replace("0.35", "0.8").replace("0.65", "0.2")
    batch = [f"Data.batch_size.{key}_batch_size=4" for key in ("global", "local", "micro")]
    read |= train(configure("run", *keys, other, *batch))
    assert sorted(read) == [*range(1, 9)] and len(read[4][0]) == 8 and len(read[5][0]) == 4
    assert_answers(tmp_path / "run", read, tmp_path)


def test_samples_that_were_read_cannot_be_left_out(configure: Configure) -> None:
    build_engine(configure("run", "Engine.max_steps=2")).fit()
    with pytest.raises(DataError, match="read or passed already"):
        build_engine(configure("run", "Data.dataset.leave_out=[[3,4]]")).fit()
    build_engine(configure("run", "Data.dataset.leave_out=[[30,34]]")).fit()


def test_what_is_left_out() -> None:
    left = LeftOut.of([(7, 9), (3, 5), (4, 6), (9, 10), (8, 8)])
    assert left.ranges == ((3, 6), (7, 10)) and len(left) == 6
    read = [sample for sample in range(30) if not 3 <= sample < 6 and not 7 <= sample < 10]
    assert [left.sample_at(place) for place in range(24)] == read
    assert [left.end_of(count) for count in range(6)] == [0, 1, 2, 3, 7, 11]
    assert left.samples_at(range(2, 6)) == [2, 6, 10, 11]
    assert LeftOut().samples_at(range(2, 6)) == range(2, 6)
    assert ranges_of([4, 2, 3, 9]) == [(2, 5), (9, 10)]


def test_the_command(tmp_path: Path, command: Callable[..., tuple[int, str, str]]) -> None:
    run = make_run(tmp_path)
    output = tmp_path / "output"
    _, out, _ = command("data", "at", output, "--step", 4, "--json", "--layout", "detail")
    told = json.loads(out)
    assert told["global_batch_size"] == 8 and told["samples"][0]["data_rank"] == 0
    first = told["samples"][0]["documents"][0]
    assert run.tokenizer.decode(first["ids"]) == first["text"]
    _, shown, _ = command("data", "at", "-c", run.config, "--step", 4)
    assert f"document {first['document']}, tokens" in shown and "words.bin" in shown
    code, _, said = command("data", "at", "-c", run.config, "--step", 31)
    assert code == 2 and "the steps 1 to 30" in said
