"""`fourfold quickstart`: from nothing to text written by a model of your own, on a CPU, in
minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fourfold.cli.options import Overrides

CONFIG = Path(__file__).with_name("quickstart.yaml")
PROMPTS = ("def read_lines(", "The following example", "class Queue:")


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
    from fourfold.generate.module import GenerationModule

    places = [
        f"Global.tokenizer={directory / 'tokenizer.json'}",
        f"Data.dataset.input_dir={directory / 'data'}",
        f"Engine.save_load.output_dir={directory / 'output'}",
    ]
    resolved = load_config(config, [*places, *(override or [])])
    make_data(directory, resolved.Model.vocab_size, max_mb)
    engine = build_engine(resolved)
    engine.fit()
    if engine.step < resolved.Engine.max_steps:
        print("Stopped before the end; the same command continues from here.")
        return
    module = GenerationModule(resolved)
    for prompt in PROMPTS:
        print(f"\nPrompt: {prompt}\nGeneration: {module.generate(prompt)[0]}")
    print(f"\nThe run is in {directory / 'output'}; its loss curve is loss_curve.png there.")


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
    print("Collecting the text of this Python installation ...")
    corpus = write_corpus(directory, None if max_mb is None else int(max_mb * 1e6))
    print(f"  {corpus}: {corpus.stat().st_size / 1e6:.1f} MB")
    print(f"Training a byte-level BPE tokenizer of {vocab_size} tokens ...")
    tokenizer_file = directory / "tokenizer.json"
    train(read_jsonl(corpus), vocab_size).save(tokenizer_file)
    print("Turning the text into tokens ...")
    manifest = prepare(read_jsonl(corpus), prefix, Tokenizer.load(tokenizer_file))
    print(f"  {manifest['documents']:,} documents, {manifest['tokens']:,} tokens")
