"""The tokenizer of an export: the right one, whatever its kind, found from anywhere."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import torch
from helpers.foreign_files import megatron_tree, weights
from helpers.sentence_files import tiny_sentence_model
from helpers.tiny_text_run import TEXT, TextRun, make_run
from tokenizers import AddedToken, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as TokenizerFile
from typer.testing import CliRunner

from fourfold import checkpoint
from fourfold.cli import command_line
from fourfold.convert import convert
from fourfold.engine import build_engine
from fourfold.errors import CheckpointError
from fourfold.tokenizer import END_OF_TEXT, Tokenizer, ranks, rules, train
from fourfold.tokenizer.facts import SpecialNames

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TextRun:
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return train(["another text of other words entirely " * 20], 270).save(tmp_path / "other.json")


def test_a_run_keeps_its_tokenizer_so_an_export_finds_it_from_anywhere(
    run: TextRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "output"
    changes = ["Engine.max_steps=1", f"Engine.save_load.output_dir={output}"]
    monkeypatch.chdir(run.directory)
    build_engine(run.load(*changes, "Global.tokenizer=tokenizer.json")).fit()
    monkeypatch.chdir(tmp_path)
    done = convert(output, "hf", "hf")
    assert done.has_tokenizer and not done.notes
    made_with = checkpoint.read_state(output / "step_1")["tokenizer"]
    assert Tokenizer.load(tmp_path / "hf").identity == made_with == run.tokenizer.identity


def test_a_tokenizer_that_lies_in_the_output_directory_is_not_replaced(
    run: TextRun, other: Path, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    mine = Tokenizer.load(other).save(output / "tokenizer.json").read_bytes()
    build_engine(run.load("Engine.max_steps=1", f"Engine.save_load.output_dir={output}")).fit()
    assert (output / "tokenizer.json").read_bytes() == mine
    # Nor is it taken for the model's: the one the run named is.
    convert(output, tmp_path / "hf", "hf")
    assert Tokenizer.load(tmp_path / "hf").identity == run.tokenizer.identity


def test_another_models_tokenizer_is_refused_unless_forced(
    run: TextRun, other: Path, tmp_path: Path
) -> None:
    command = ["convert", str(run.directory / "output"), str(tmp_path / "hf"), "--to", "hf"]
    command += ["--tokenizer", str(other)]
    done = CliRunner().invoke(command_line(), command)
    assert isinstance(done.exception, CheckpointError)
    assert "is another tokenizer" in str(done.exception) and "--force" in str(done.exception)
    assert not (tmp_path / "hf").exists()
    done = CliRunner().invoke(command_line(), [*command, "--force"])
    assert done.exit_code == 0 and "is another tokenizer" in done.output
    assert Tokenizer.load(tmp_path / "hf").identity == Tokenizer.load(other).identity


def test_a_stale_tokenizer_beside_the_checkpoint_is_not_exported(
    run: TextRun, other: Path, tmp_path: Path
) -> None:
    convert(run.directory / "output", tmp_path / "own", "fourfold")
    Tokenizer.load(other).save(tmp_path / "own" / "tokenizer.json")
    with pytest.raises(CheckpointError, match="is another tokenizer"):
        convert(tmp_path / "own", tmp_path / "hf", "hf")
    convert(tmp_path / "own", tmp_path / "hf", "hf", tokenizer=run.directory / "tokenizer.json")
    assert Tokenizer.load(tmp_path / "hf").identity == run.tokenizer.identity


def of_kind(kind: str, place: Path) -> Tokenizer:
    model, trainer = {
        "Unigram": (
            models.Unigram(),
            trainers.UnigramTrainer(vocab_size=60, unk_token="<unk>", special_tokens=["<unk>"]),
        ),
        "WordPiece": (
            models.WordPiece(unk_token="[UNK]"),
            trainers.WordPieceTrainer(vocab_size=60, special_tokens=["[UNK]"]),
        ),
        "BPE": (models.BPE(unk_token="<unk>"), trainers.BpeTrainer(vocab_size=60)),
    }[kind]
    file = TokenizerFile(model)
    file.pre_tokenizer = pre_tokenizers.Whitespace()
    file.train_from_iterator([TEXT] * 20, trainer)
    file.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    file.save(str(place))
    return Tokenizer.load(place)


@pytest.mark.parametrize("kind", ["Unigram", "WordPiece", "BPE"])
def test_every_kind_of_tokenizer_is_exported(tmp_path: Path, kind: str) -> None:
    words = of_kind(kind, tmp_path / "words.json")
    megatron_tree(tmp_path / "source", weights())
    for to in ("hf", "fourfold", "fleetx", "megatron"):
        convert(tmp_path / "source", tmp_path / to, to, tokenizer=tmp_path / "words.json")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert theirs.encode(TEXT) == words.encode(TEXT)
    # Two files that would be read as GPT-2's, and split text by another rule, are not written.
    assert not (tmp_path / "hf" / "vocab.json").exists()
    assert f"Tokenizer: {kind} of" in (tmp_path / "hf" / "README.md").read_text()


def of_family(family: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small tokenizer in the files, and with the rules, of a family."""
    place.mkdir()
    if family == "Llama 3":
        names = SpecialNames(eos="<|end|>", bos="<|begin|>", adds_bos=True)
        small = ranks.RankFamily("small", 256, rules.LLAMA3, names, ("<|begin|>", "<|end|>"))
        monkeypatch.setattr(ranks, "FAMILIES", (small,))
        lines = [b"%s %d" % (base64.b64encode(bytes([one])), one) for one in range(256)]
        (place / "tokenizer.model").write_bytes(b"\n".join(lines))
    elif family == "Mistral":
        (place / "tokenizer.model").write_bytes(tiny_sentence_model())
    else:
        words = train(["the cat sat on the mat"] * 9, 262)
        file = TokenizerFile.from_str(words.to_json())
        file.add_special_tokens(["<begin>", "<end>", "<fill>"])
        file.save(str(place / "tokenizer.json"))
        config = {"eos_token": "<end>", "bos_token": "<begin>", "pad_token": "<fill>"}
        config_file = place / "tokenizer_config.json"
        config_file.write_text(json.dumps(config | {"add_bos_token": family == "DeepSeek"}))
    return place


@pytest.mark.parametrize("family", ["Llama 3", "Mistral", "DeepSeek", "Qwen"])
def test_every_family_is_exported_as_transformers_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    place = of_family(family, tmp_path / "words", monkeypatch)
    words = Tokenizer.load(place)
    assert bool(words.begin_ids) == (family != "Qwen")
    megatron_tree(tmp_path / "source", weights(vocabulary=words.vocab_size))
    convert(tmp_path / "source", tmp_path / "hf", "hf", tokenizer=place)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in ("ab aab  ba", "the cat's 1234 (x)\n\n", "北京"):
        assert theirs.encode(text) == words.encode_prompt(text)
        assert theirs.decode(words.encode(text)) == words.decode(words.encode(text))
    assert (theirs.eos_token_id, theirs.eos_token) == (words.eos_id, words.eos_token)
    described = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert described["eos_token_id"] == words.eos_id
    assert described["bos_token_id"] == theirs.bos_token_id
    again = Tokenizer.load(tmp_path / "hf")
    assert (again.identity, again.begin_ids) == (words.identity, words.begin_ids)
    # Our own form keeps it too, with what its one file does not say.
    convert(tmp_path / "hf", tmp_path / "own", "fourfold")
    kept = Tokenizer.load(tmp_path / "own" / "tokenizer.json")
    assert (kept.identity, kept.begin_ids, kept.eos_id) == (
        words.identity,
        words.begin_ids,
        words.eos_id,
    )


def test_exported_tokenizer_pads_batches(run: TextRun, tmp_path: Path) -> None:
    convert(run.directory / "output", tmp_path / "hf", "hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    batch = theirs(["the cat", "the cat sat on a mat"], padding=True, return_tensors="pt")
    assert batch["input_ids"][0, -1] == run.tokenizer.eos_id
    assert torch.equal(batch["attention_mask"].sum(1) > 0, torch.ones(2, dtype=torch.bool))
    written = transformers.pipeline("text-generation", model=str(tmp_path / "hf"))(
        ["the cat", "the dog ran after it"], batch_size=2, max_new_tokens=3
    )
    assert len(written) == 2
