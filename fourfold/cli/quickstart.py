"""`fourfold quickstart`: from nothing to text written by a model of your own, on a CPU, in
minutes."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from fourfold.cli.options import Overrides
from fourfold.terminal import duration, is_terminal

CONFIG = Path(__file__).with_name("quickstart.yaml")
# Openings of what the corpus is made of: a function, a help topic, a class.
PROMPTS = (
    'def read_lines(self, path):\n    """',
    'The "import" statement',
    "class Robot(",
)
# Of the recipe that is shipped, on a processor that is fast in it.
BFLOAT16 = ("Engine.mix_precision.dtype=bfloat16", "Optimizer.muon.ns_dtype=bfloat16")
WIDTH = 72  # of the lines around what it writes


def quickstart(
    override: Overrides = None,
    directory: Annotated[
        Path, typer.Option("--dir", help="Where corpus, data, checkpoints and pictures go.")
    ] = Path("runs/quickstart"),
    max_mb: Annotated[
        float | None, typer.Option(help="Use at most this many megabytes of the text.")
    ] = None,
    config: Annotated[
        Path,
        typer.Option(
            "-c", "--config", help="The YAML file of the run.", show_default="the one shipped"
        ),
    ] = CONFIG,
) -> None:
    """Train a small GPT on the text that ships with Python, and let it write."""
    from fourfold.config import load_config
    from fourfold.engine import build_engine
    from fourfold.evaluate.in_loop import WeightsInLoop
    from fourfold.generate.module import GenerationModule

    begin = time.monotonic()
    settings = [
        f"Global.tokenizer={directory / 'tokenizer.json'}",
        f"Data.dataset.input_dir={directory / 'data'}",
        f"Engine.save_load.output_dir={directory / 'output'}",
    ]
    if config.resolve() == CONFIG.resolve() and has_fast_bfloat16():
        settings += BFLOAT16
    resolved = load_config(config, [*settings, *(override or [])])
    make_data(directory, resolved.Model.vocab_size, max_mb)
    engine = build_engine(resolved, open_in_loop=WeightsInLoop)
    engine.fit()
    if engine.step < resolved.Engine.max_steps:
        print("Stopped before the end; the same command continues from here.")
        return
    module = GenerationModule(resolved)
    for prompt in PROMPTS:
        (continuation,) = module.complete([prompt])[0][:1]
        show(prompt, continuation.text, is_cut=continuation.finish == "length")
    print(f"{'─' * WIDTH}")
    took = duration(time.monotonic() - begin, short=True)
    print(f"Done in {took}. The model and its loss curve are in {engine.output_dir}")


def has_fast_bfloat16() -> bool:
    """Whether this is a CPU that multiplies in bfloat16 about twice as fast as in float32."""
    import torch

    from fourfold.parallel.precision import slow_dtype_notice

    on_gpu = torch.cuda.is_available()
    return not on_gpu and slow_dtype_notice(torch.bfloat16, torch.device("cpu")) is None


def show(prompt: str, text: str, *, is_cut: bool) -> None:
    """What the model wrote after `prompt`, which stands out on a terminal."""
    bold, plain = ("\x1b[1m", "\x1b[0m") if is_terminal(sys.stdout) else ("", "")
    print(f"{'─' * WIDTH}\n{bold}{prompt}{plain}{text.rstrip()}{' ...' if is_cut else ''}\n")


def make_data(directory: Path, vocab_size: int, max_mb: float | None) -> None:
    """Corpus, tokenizer and token files; what an earlier run finished is kept."""
    from fourfold.tokenizer import Tokenizer, train
    from fourfold.tools.prepare.corpus import write_corpus
    from fourfold.tools.prepare.pipeline import prepare, read_jsonl

    prefix = directory / "data" / "python_text_document"
    if prefix.with_suffix(".json").exists():
        kept = "" if max_mb is None else "; --max-mb has no effect on what is there"
        print(f"Token files are in {prefix.parent}{kept}")
        return
    directory.mkdir(parents=True, exist_ok=True)
    print("Collecting the documentation in this Python installation ...")
    corpus = write_corpus(directory, None if max_mb is None else int(max_mb * 1e6))
    print(f"  {corpus}: {corpus.stat().st_size / 1e6:.1f} MB")
    print(f"Training a byte-level BPE tokenizer of {vocab_size} tokens ...")
    tokenizer_file = directory / "tokenizer.json"
    train(read_jsonl(corpus), vocab_size).save(tokenizer_file)
    print("Turning the text into tokens ...")
    manifest = prepare(read_jsonl(corpus), prefix, Tokenizer.load(tokenizer_file))
    print(f"  {manifest['documents']:,} documents, {manifest['tokens']:,} tokens")
