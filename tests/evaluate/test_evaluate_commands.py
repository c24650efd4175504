"""`fourfold evaluate` on a run of its own: the three measures, as table and JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from helpers.tiny_text_run import MODERN, TextRun, make_run, sentences
from typer.testing import CliRunner

from fourfold.cli import command_line
from fourfold.errors import UserError
from fourfold.evaluate import evaluate
from fourfold.generate.loading import load_trained


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TextRun:
    return make_run(tmp_path_factory.mktemp("text_run"))


@pytest.fixture(scope="module")
def modern(tmp_path_factory: pytest.TempPathFactory) -> TextRun:
    return make_run(tmp_path_factory.mktemp("modern_run"), **MODERN)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "valid.txt"
    file.write_text("\n".join(sentences(12, seed=9)))
    return file


def quiet(_: str) -> None:
    """Progress is not looked at."""


def total_loss(run: TextRun, tokens: list[int], seq_len: int) -> float:
    model = load_trained(run.load(), quiet).model
    total = 0.0
    for start in range(0, len(tokens) - 1, seq_len):
        row = torch.tensor([tokens[start : start + seq_len + 1]])
        total += float(model(row[:, :-1], row[:, 1:]))
    return total


@pytest.mark.parametrize(("weights", "within"), [("float32", 1e-4), ("int8", 2e-2)])
def test_perplexity_of_a_modern_network(
    weights: str, within: float, text_file: Path, modern: TextRun
) -> None:
    """Longer than its window, with capped logits."""
    config = modern.load(f"Eval.eval_path={text_file}", f"Inference.weights={weights}")
    tokens = modern.tokenizer.encode(text_file.read_text())
    loss = total_loss(modern, tokens, 32) / (len(tokens) - 1)
    assert evaluate(config, quiet).numbers["loss"] == pytest.approx(loss, rel=within)


def test_perplexity_of_a_text(run: TextRun, text_file: Path) -> None:
    result = evaluate(run.load(f"Eval.eval_path={text_file}", "Eval.batch_size=3"), quiet)
    text = text_file.read_text()
    tokens = run.tokenizer.encode(text)
    loss = total_loss(run, tokens, 32) / (len(tokens) - 1)
    ratio = (len(tokens) - 1) / (len(text.split(" ")) - 1)
    assert result.measure == "perplexity"
    assert result.numbers["loss"] == pytest.approx(loss, rel=1e-4)
    assert result.numbers["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    assert result.numbers["token_ratio"] == pytest.approx(ratio)
    assert result.numbers["adjusted_perplexity"] == pytest.approx(math.exp(loss * ratio), rel=1e-4)
    first = len(run.tokenizer.decode(tokens[:1]))
    bits = loss * (len(tokens) - 1) / math.log(2) / (len(text) - first)
    assert result.numbers["bits_per_byte"] == pytest.approx(bits, rel=1e-4)
    overlapped = evaluate(run.load(f"Eval.eval_path={text_file}", "Eval.overlapping_eval=4"), quiet)
    assert overlapped.numbers["loss"] != pytest.approx(loss, rel=1e-4)
    assert overlapped.numbers["tokens"] == result.numbers["tokens"]


def test_loss_on_prepared_data(run: TextRun) -> None:
    result = evaluate(run.load("Data.dataset.eod_mask_loss=False"), quiet)
    texts = sentences(200, seed=1)[180:]
    tokens = [one for text in texts for one in [*run.tokenizer.encode(text), run.tokenizer.eos_id]]
    expected = total_loss(run, tokens, 32)
    first = len(run.tokenizer.decode(tokens[:1]))
    assert result.numbers["tokens"] == len(tokens) - 1
    assert result.numbers["loss"] == pytest.approx(expected / (len(tokens) - 1), rel=1e-4)
    assert result.numbers["bits_per_byte"] == pytest.approx(
        expected / math.log(2) / (sum(map(len, texts)) - first), rel=1e-4
    )
    masked = evaluate(run.load(), quiet)
    assert masked.numbers["tokens"] == len(tokens) - 1 - (len(texts) - 1)
    # The first word of each text is not predicted, and so its bytes are not counted.
    firsts = sum(len(run.tokenizer.decode(run.tokenizer.encode(text)[:1])) for text in texts)
    assert masked.numbers["bits_per_byte"] == pytest.approx(
        masked.numbers["loss"]
        * masked.numbers["tokens"]
        / math.log(2)
        / (sum(map(len, texts)) - firsts)
    )
    few = evaluate(run.load("Eval.max_tokens=50", "Eval.part=train"), quiet)
    assert 40 < few.numbers["tokens"] <= 49


def test_prepared_data_needs_no_tokenizer(run: TextRun) -> None:
    result = evaluate(run.load("Global.tokenizer=null"), quiet)
    assert "bits_per_byte" not in result.numbers and result.numbers["loss"] > 0


def test_narrow_weights_can_be_judged(run: TextRun) -> None:
    exact = evaluate(run.load(), quiet).numbers["loss"]
    for weights, allowed in (("float16", 1e-3), ("bfloat16", 1e-2), ("int8", 5e-2)):
        result = evaluate(run.load(f"Inference.weights={weights}"), quiet)
        assert result.weights == weights
        assert result.numbers["loss"] == pytest.approx(exact, rel=allowed)


def test_the_command_prints_a_table_or_json(run: TextRun, tmp_path: Path) -> None:
    file, output = tmp_path / "cloze.jsonl", tmp_path / "results" / "cloze.json"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences(6, seed=3)))
    words = ["evaluate", "-c", str(run.config), "-o", f"Eval.eval_path={file}"]
    words += ["-o", "Eval.cloze_eval=True", "-o", "Eval.logging_freq=1", "-o", "Eval.batch_size=4"]
    result = CliRunner().invoke(
        command_line(), [*words, "--output", str(output)], catch_exceptions=False
    )
    lines = dict(line.split("  ", 1) for line in result.stdout.splitlines())
    assert lines["examples"].strip() == "6"
    assert "2 batches done" in result.stderr
    content = json.loads(output.read_text())
    assert content["measure"] == "cloze" and content["numbers"]["examples"] == 6
    again = CliRunner().invoke(command_line(), [*words, "--json"], catch_exceptions=False)
    assert json.loads(again.stdout) == content


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["Data.dataset.input_dir=null"], "nothing to evaluate on"),
        (["Eval.eval_path=missing.txt"], "missing.txt: there is no such file"),
        (["Eval.part=test"], "the test part of the data holds 0 tokens"),
        (["Eval.ckpt_dir=./nowhere"], "nowhere"),
        (["Eval.max_seq_len=64"], "Eval.max_seq_len=64 is longer than"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_cannot_be_evaluated_is_said(run: TextRun, overrides: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        evaluate(run.load(*overrides), quiet)


def test_keys_without_effect_are_named(run: TextRun, text_file: Path) -> None:
    notices: list[str] = []
    overrides = [f"Eval.eval_path={text_file}", "Eval.max_tokens=9", "Eval.overlapping_eval=8"]
    evaluate(run.load(*overrides), notices.append)
    assert notices == ["Eval.max_tokens has no effect on this measure"]


def test_a_file_that_is_no_text_is_refused(run: TextRun, tmp_path: Path) -> None:
    file = tmp_path / "noise.txt"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not UTF-8"):
        evaluate(run.load(f"Eval.eval_path={file}"), quiet)
