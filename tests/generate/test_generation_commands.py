"""`fourfold generate` and `GenerationModule` on a run of their own: what a user sees."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.forked import fourfold
from helpers.tiny_text_run import TextRun, make_run, sentences
from typer.testing import CliRunner

from fourfold.cli import command_line
from fourfold.cli.generate import write
from fourfold.errors import CheckpointError, DataError, UserError
from fourfold.generate.module import GenerationModule
from fourfold.tokenizer import train

NO_TOKENIZER = ["-o", "Global.tokenizer=null"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TextRun:
    return make_run(tmp_path_factory.mktemp("text_run"))


def command(run: TextRun, *words: str) -> list[str]:
    return [sys.executable, "-m", "fourfold", "generate", "-c", str(run.config), *words]


def generated(run: TextRun, *words: str) -> str:
    """What the command prints, run in this process; its errors are raised."""
    arguments = ["generate", "-c", str(run.config), *words]
    return CliRunner().invoke(command_line(), arguments, catch_exceptions=False).stdout


def test_generate_returns_prompt_and_continuation(run: TextRun) -> None:
    module = GenerationModule(run.load("Generation.num_return_sequences=3"), lambda _: None)
    texts = module.generate("the cat")
    assert len(texts) == 3 and all(text.startswith("the cat") for text in texts)
    assert len(set(texts)) > 1
    assert module.generate("the cat") == texts
    together = module.complete(["a dog", "the cat"])
    assert ["the cat" + one.text for one in together[1]] == texts


def test_the_command_prints_what_the_document_shows(run: TextRun) -> None:
    expected = GenerationModule(run.load(), lambda _: None).generate("the cat")[0]
    result = fourfold("generate", "-c", run.config, "--prompt", "the cat")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"Prompt: the cat\nGeneration: {expected}\n"
    default = generated(run)
    assert default.startswith("Prompt: Hi, GPT2. Tell me who Jack Ma is.\nGeneration: Hi, GPT2.")


def test_without_compiled_kernels_the_text_is_the_same_and_a_line_says_why(run: TextRun) -> None:
    with_kernels = fourfold("generate", "-c", run.config, "--prompt", "the cat")
    command_line_words = command(run, "--prompt", "the cat", "-o", "Inference.draft_tokens=3")
    plain = subprocess.run(
        command_line_words,
        capture_output=True,
        text=True,
        env={**os.environ, "FOURFOLD_NATIVE": "0"},
    )
    assert plain.returncode == 0, plain.stderr
    assert plain.stdout == with_kernels.stdout
    assert "without compiled kernels: FOURFOLD_NATIVE is set to 0" in plain.stderr
    assert "Inference.draft_tokens=3 has no effect" in plain.stderr


def test_prompts_from_files(run: TextRun, tmp_path: Path) -> None:
    module = GenerationModule(run.load(), lambda _: None)
    text, lines = tmp_path / "prompt.txt", tmp_path / "prompts.jsonl"
    text.write_text("rain fell\nover\n")
    lines.write_text('{"prompt": "the dog"}\n\n{"text": "old\\nstone"}\n')
    for file, prompts in ((text, ["rain fell\nover"]), (lines, ["the dog", "old\nstone"])):
        assert generated(run, "--prompt-file", str(file)) == "".join(
            f"Prompt: {prompt}\nGeneration: {module.generate(prompt)[0]}\n" for prompt in prompts
        )
    lines.write_text('{"prompt": 3}\n')
    with pytest.raises(DataError, match=r"prompts\.jsonl:1: no prompt here"):
        generated(run, "--prompt-file", str(lines))


def test_a_terminal_is_asked_for_prompts(run: TextRun) -> None:
    expected = GenerationModule(run.load(), lambda _: None).generate("the cat")[0]
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        command(run), stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    os.close(theirs)
    long = "the cat " * 60
    os.write(ours, f"the cat\n{long}\n\n".encode())
    output, errors = child.communicate(timeout=300)
    os.close(ours)
    assert child.returncode == 0, errors
    assert f"Prompt: the cat\nGeneration: {expected}\n" in output
    assert "shorten the prompt" in errors


@pytest.mark.parametrize(
    "overrides",
    [
        ["Generation.decode_strategy=greedy_search", "Inference.weights=int8"],
        ["Generation.decode_strategy=beam_search", "Generation.num_beams=3"],
        ["Inference.weights=bfloat16", 'Generation.stop=["ca"]'],
    ],
    ids=lambda words: words[0],
)
def test_other_strategies_and_weights_run(run: TextRun, overrides: list[str]) -> None:
    if "beam" in overrides[0]:
        overrides = [*overrides, "Generation.top_k=0"]
    [text] = GenerationModule(run.load(*overrides), lambda _: None).generate("the dog")
    assert text.startswith("the dog")
    assert "stop" not in overrides[-1] or "ca" not in text


# Bad input


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "the cat " * 60], "shorten the prompt"),
        (["-o", "Generation.topk=5"], "Generation.topk: unknown key"),
        (["-o", "Generation.max_dec_len=-3"], "Generation.max_dec_len=-3"),
        (["-o", "Generation.top_p=1.5"], "Generation.top_p=1.5"),
        (["-o", "Global.tokenizer=nowhere.json"], "nowhere.json"),
        (["-o", "Data.dataset.input_dir=x", *NO_TOKENIZER], "Global.tokenizer is not set"),
        (["-o", "Engine.save_load.ckpt_dir=./nothing"], "nothing"),
        (["--prompt-file", "missing.txt"], "missing.txt"),
        (
            ["-o", "Generation.decode_strategy=beam_search", "-o", "Generation.num_beams=2"],
            "top_k=20 does not go with decode_strategy='beam_search'",
        ),
        (["-o", 'Generation.stop=[""]'], "empty stop string"),
    ],
    ids=lambda value: value[-1][:40] if isinstance(value, list) else None,
)
def test_bad_input_is_refused_in_a_sentence(
    run: TextRun, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        generated(run, *words)
    assert "Generation:" not in capsys.readouterr().out


def test_another_tokenizer_than_the_checkpoints_is_refused(run: TextRun, tmp_path: Path) -> None:
    other = train([*sentences(80, seed=5), "zebra quagga"], 290)
    file = other.save(tmp_path / "other.json")
    with pytest.raises(DataError, match="trained on data of another tokenizer"):
        GenerationModule(run.load(f"Global.tokenizer={file}"))
    notices: list[str] = []
    allowed = "Data.dataset.allow_tokenizer_mismatch=True"
    GenerationModule(run.load(f"Global.tokenizer={file}", allowed), notices.append)
    assert any("another tokenizer" in notice for notice in notices)
    with pytest.raises(DataError, match="300 tokens and the model knows 280"):
        GenerationModule(run.load("Model.vocab_size=280"))


def test_a_checkpoint_of_another_model_is_refused(run: TextRun) -> None:
    with pytest.raises(CheckpointError, match="of another model"):
        GenerationModule(run.load("Model.num_layers=3"))


def test_a_hugging_face_directory_is_a_checkpoint_too(run: TextRun, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    peer = GPT2LMHeadModel(
        GPT2Config(vocab_size=310, n_positions=40, n_embd=24, n_layer=1, n_head=3)
    )
    peer.eval().save_pretrained(tmp_path)
    notices: list[str] = []
    overrides = [
        f"Engine.save_load.ckpt_dir={tmp_path}",
        "Generation.decode_strategy=greedy_search",
    ]
    module = GenerationModule(run.load(*overrides), notices.append)
    ids = module.tokenizer.encode("the cat")
    peer.generation_config.eos_token_id = peer.generation_config.pad_token_id = None
    expected = peer.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=12)[0].tolist()
    [[found]] = module.complete(["the cat"])
    # Ids beyond the tokenizer's are never written here, so compare up to the first of them.
    new = expected[len(ids) :]
    known = next((n for n, one in enumerate(new) if one >= 299), len(new))
    assert known > 0 and found.ids[:known] == new[:known]
    assert any("hidden_size=24" in notice for notice in notices)


def test_options_of_a_section_keep_what_was_written(run: TextRun) -> None:
    from fourfold.generate import Options

    beams = ["Generation.decode_strategy=beam_search", "Generation.num_beams=2"]
    with pytest.raises(UserError, match="top_k=20"):
        Options.of(run.load(*beams).Generation, 0)
    assert Options.of(run.load(*beams, "Generation.top_k=0").Generation, 0).top_k == 0
    section = run.load("Generation.num_beams=4", "Generation.seed=9").Generation
    assert Options.of(section, 5).seed == 9
    assert json.loads(section.model_dump_json())["num_beams"] == 4


@pytest.mark.parametrize(
    ("strategy", "named"),
    [
        ("sampling", ["length_penalty", "num_beams"]),
        ("greedy_search", ["length_penalty", "num_beams", "top_k", "top_p"]),
    ],
)
def test_keys_of_another_strategy_are_named(run: TextRun, strategy: str, named: list[str]) -> None:
    keys = ["num_beams=4", "length_penalty=0.6", "top_k=9", "top_p=0.9", "max_dec_len=1"]
    words = [f"Generation.{key}" for key in (f"decode_strategy={strategy}", *keys)]
    arguments = ["generate", "-c", str(run.config), "--prompt", "the"]
    arguments += [part for word in words for part in ("-o", word)]
    said = CliRunner().invoke(command_line(), arguments, catch_exceptions=False).stderr
    found = re.findall(r"Generation\.(\w+) has no effect with decode_strategy=(\w+)", said)
    assert sorted(found) == [(name, strategy) for name in named]


def test_control_characters_are_escaped_on_a_terminal_only(
    run: TextRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = GenerationModule(run.load())
    prompts = ["\x1b[31mthe cat", "one\nline"]
    write(module, prompts)
    assert "\x1b[31mthe cat" in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    write(module, prompts)
    write(module, prompts[:1])
    told = capsys.readouterr().out
    assert "\x1b" not in told and told.count("\\x1b[31mthe cat") == 4 and "one\nline" in told
