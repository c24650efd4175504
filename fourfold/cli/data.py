"""`fourfold data`: prepare, inspect, verify, rewrite and mix token files."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fourfold.cli.options import ConfigFile, Overrides
from fourfold.cli.progress import byte_progress, prepare_progress
from fourfold.errors import DataError, UserError
from fourfold.terminal import count_of

if TYPE_CHECKING:
    from fourfold.tools.prepare.input_files import InputFile

app = typer.Typer(help="Prepare, inspect, verify and mix token files.", no_args_is_help=True)

MOST_BAD_LINES = 100


# -- raw text to token files -----------------------------------------------------------------

Inputs = Annotated[
    list[str],
    typer.Option(
        "--input",
        "-i",
        metavar="PATH",
        help="File, directory (recursive), glob, or - for standard input; may be repeated. Reads "
        ".txt, .jsonl, .json (these also .gz or .zst) and .parquet.",
    ),
]
MoreInputs = Annotated[
    list[str] | None, typer.Argument(metavar="[PATH]...", help="More inputs.", show_default=False)
]
JsonKey = Annotated[str, typer.Option(help="The key, or column, that holds the text.")]
Separator = Annotated[
    Literal["blank-line", "line", "file"], typer.Option(help="What ends a document in .txt files.")
]
MaxDocument = Annotated[
    int, typer.Option(help="Documents longer than this are bad; memory grows with it.")
]
MaxBad = Annotated[
    int | None,
    typer.Option(
        help="Number of bad lines to skip before stopping.", show_default=str(MOST_BAD_LINES)
    ),
]
AllowDamaged = Annotated[
    bool,
    typer.Option(
        "--allow-damaged-files",
        help="Skip what is damaged or cannot be read instead of stopping.",
    ),
]
Strict = Annotated[bool, typer.Option("--strict", help="Stop at the first bad line.")]
StdinKind = Annotated[
    Literal["jsonl", "txt"] | None,
    typer.Option(help="What standard input holds, with `--input -`.", show_default="jsonl"),
]


@app.command()
def prepare(
    inputs: Inputs,
    output_prefix: Annotated[Path, typer.Option(help="Where the token files go, without ending.")],
    tokenizer: Annotated[
        str,
        typer.Option(
            help="tokenizer.json, a SentencePiece .model, merge ranks (*.tiktoken, Llama 3's "
            "tokenizer.model), tekken.json, a directory with one of these or with vocab.json + "
            "merges.txt, or gpt2."
        ),
    ],
    more_inputs: MoreInputs = None,
    append_eod: Annotated[
        bool, typer.Option(help="End each document with the end-of-text id.")
    ] = True,
    prepend_bos: Annotated[
        bool | None,
        typer.Option(
            help="Begin each document with the token that begins a text.",
            show_default="as the tokenizer's family does",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Number of worker processes.", show_default="number of processors"),
    ] = None,
    form: Annotated[str, typer.Option("--format", metavar="megatron|fleetx")] = "megatron",
    json_key: JsonKey = "text",
    document_separator: Separator = "blank-line",
    min_length: Annotated[
        int, typer.Option(help="Leave out documents of this many characters or fewer.")
    ] = 0,
    max_document_mb: MaxDocument = 64,
    max_bad_lines: MaxBad = None,
    allow_damaged_files: AllowDamaged = False,
    strict: Strict = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace existing output, finished or not.")
    ] = False,
    stdin_format: StdinKind = None,
) -> None:
    """Turn raw text into token files; the same command resumes where a killed one stopped."""
    from fourfold.processors import num_processors
    from fourfold.tools.prepare.manifest import PrepareSettings
    from fourfold.tools.prepare.pipeline import dataset_prefix, prepare_files

    settings = PrepareSettings(
        tokenizer=tokenizer,
        format=form,
        append_eod=append_eod,
        prepend_bos=prepend_bos,
        json_key=json_key,
        document_separator=document_separator,
        min_length=min_length,
        max_document_bytes=max_document_mb << 20,
        workers=workers if workers is not None else num_processors(),
        max_bad_lines=_most_bad_lines(max_bad_lines, strict),
        allow_damaged_files=allow_damaged_files,
        overwrite=overwrite,
    )
    prefix = dataset_prefix(output_prefix, form, json_key)
    files = _files(_in_order(inputs, more_inputs), prefix, stdin_format)
    with prepare_progress() as show:
        manifest = prepare_files(files, output_prefix, settings, show)
    _print_summary(prefix, manifest)


@app.command("train-tokenizer")
def train_tokenizer(
    inputs: Inputs,
    output: Annotated[Path, typer.Option(help="The tokenizer.json to write, or its directory.")],
    vocab_size: Annotated[
        int, typer.Option(help="Size of the vocabulary, <|endoftext|> included.")
    ],
    more_inputs: MoreInputs = None,
    json_key: JsonKey = "text",
    document_separator: Separator = "blank-line",
    every: Annotated[int, typer.Option(help="Train on every n-th document only.")] = 1,
    max_document_mb: MaxDocument = 64,
    max_bad_lines: MaxBad = None,
    allow_damaged_files: AllowDamaged = False,
    strict: Strict = False,
    stdin_format: StdinKind = None,
) -> None:
    """Train a byte-level BPE tokenizer, saved as a tokenizer.json that `transformers` loads."""
    from fourfold.tokenizer import train
    from fourfold.tools.prepare.documents import TextRule
    from fourfold.tools.prepare.input_files import WORK_SUFFIX
    from fourfold.tools.prepare.pipeline import read_texts
    from fourfold.tools.prepare.writers import writable

    rule = TextRule(json_key, document_separator, max_document_mb << 20)
    most_bad = _most_bad_lines(max_bad_lines, strict)
    if output.suffix != ".json":
        with writable(output):
            output.mkdir(parents=True, exist_ok=True)
    spool = output if output.is_dir() else output.with_suffix("")
    files = _files(_in_order(inputs, more_inputs), spool, stdin_format)
    try:
        texts = read_texts(files, rule, most_bad, allow_damaged_files)
        trained = train(texts, vocab_size, sys.stderr.isatty(), every)
        with writable(output):
            file = trained.save(output)
    finally:
        if "-" in (*inputs, *(more_inputs or [])):
            shutil.rmtree(f"{spool}{WORK_SUFFIX}", ignore_errors=True)
    print(f"{file}: a vocabulary of {vocab_size:,}")


def _most_bad_lines(given: int | None, strict: bool) -> int:
    if strict and given is not None:
        raise UserError(
            f"--strict stops at the first bad line, --max-bad-lines {given} at a later one; give "
            "one of the two"
        )
    return 0 if strict else MOST_BAD_LINES if given is None else given


def _in_order(inputs: list[str], more_inputs: list[str] | None) -> list[str]:
    """`--input A --input B` or `--input A B`; a mixture of both loses the order."""
    if more_inputs and len(inputs) > 1:
        raise UserError(
            f"{more_inputs[0]}: with several --input, give each path its own --input; only then "
            "is the order of the documents clear"
        )
    return [*inputs, *(more_inputs or [])]


def _files(inputs: list[str], prefix: Path, stdin_format: str | None) -> list[InputFile]:
    """The input files; standard input is first copied to one, so that workers can share it."""
    from fourfold.tools.prepare.input_files import WORK_SUFFIX, find_inputs, spool_stdin
    from fourfold.tools.prepare.writers import writable

    if stdin_format is not None and "-" not in inputs:
        raise UserError(
            f"--stdin-format {stdin_format} is about standard input, which is not read; add "
            "--input -, or leave it out"
        )
    files: list[InputFile] = []
    for name in inputs:
        if name == "-":
            directory = Path(f"{prefix}{WORK_SUFFIX}")
            with writable(prefix):
                files.append(spool_stdin(sys.stdin.buffer, directory, stdin_format or "jsonl"))
        else:
            files += find_inputs([name])
    return files


def _print_summary(prefix: Path, manifest: dict[str, object]) -> None:
    from fourfold.tools.prepare.manifest import dropped_summary

    print(f"{prefix}: {manifest['documents']:,} documents, {manifest['tokens']:,} tokens")
    for line in dropped_summary(manifest):
        print(line)


# -- work on token files ---------------------------------------------------------------------

Format = Literal["megatron", "fleetx", "legacy"]
# As in config/recipe.py; the formats as in data/datasets.py. --help has no time to import either.
Rounding = Literal["megatron_core", "megatron_deepspeed"]
Dataset = Annotated[Path, typer.Argument(help="A prefix, one of its files, or a directory.")]
OutputPrefix = Annotated[Path, typer.Option(help="Name of the files to write, without ending.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace existing outputs.")]


@app.command()
def inspect(
    path: Dataset,
    samples: Annotated[int, typer.Option(min=0, help="Number of documents to show.")] = 3,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Tokenizer to decode the samples with.", show_default="the data's own"),
    ] = None,
    png: Annotated[
        Path | None, typer.Option(help="Draw a histogram of the document lengths to this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """Show what token files hold: counts, lengths, text, and where they came from."""
    from fourfold.data.readers import full_name, open_datasets
    from fourfold.tokenizer import Tokenizer
    from fourfold.tools.tokens.histogram import draw
    from fourfold.tools.tokens.inspect import inspect as report_on
    from fourfold.tools.tokens.inspect import render

    datasets = open_datasets(full_name(path))
    if png is not None and len(datasets) > 1:
        raise DataError(f"{path}: {len(datasets)} datasets, but --png draws one; name one of them")
    decoder = Tokenizer.load(tokenizer) if tokenizer is not None else None
    reports = []
    for dataset in datasets:
        report = report_on(dataset, decoder, samples)
        reports.append(report)
        if png is not None:
            if report["lengths"] is None:
                raise DataError(f"{report['prefix']}: no documents, so there is nothing to draw")
            draw(dataset.sizes, report["lengths"], Path(report["prefix"]).name, png)
        if not as_json:
            print(("\n" if len(reports) > 1 else "") + render(report))
            if png is not None:
                print(f"\n  Picture: {png}")
    if as_json:
        print(json.dumps(reports, indent=2))


@app.command()
def verify(
    path: Dataset,
    vocab_size: Annotated[
        int | None,
        typer.Option(min=1, help="Check ids against this size instead of the manifest's."),
    ] = None,
) -> None:
    """Check every byte of token files against their manifest; exit code 2 if anything is wrong."""
    from fourfold.data.readers import find_prefixes, full_name
    from fourfold.tools.tokens import verify as checking

    bad = False
    for prefix in find_prefixes(full_name(path)):
        with byte_progress(f"verify {prefix.name}") as progress:
            result = checking.verify(prefix, vocab_size, progress)
        for problem in result.problems:
            print(f"problem: {problem}")
        for checked in result.checked:
            print(f"checked: {checked}")
        for unchecked in result.unchecked:
            print(f"not checked: {unchecked}")
        count = len(result.problems)
        verdict = count_of(count, "problem") if count else "good"
        print(f"{prefix}: {verdict}")
        bad = bad or count > 0
    if bad:
        raise typer.Exit(2)


@app.command()
def merge(
    sources: Annotated[list[Path], typer.Argument(help="Datasets, in the order to write them.")],
    output_prefix: OutputPrefix,
    to: Annotated[
        Format | None, typer.Option(help="Format to write; by default the first source's.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Merge even if tokenizers differ or are unknown.")
    ] = False,
    overwrite: Overwrite = False,
) -> None:
    """Write the documents of several datasets as one."""
    from fourfold.data.readers import full_name
    from fourfold.tools.tokens import transform

    named = [full_name(source) for source in sources]
    with byte_progress("merge") as progress:
        manifest = transform.merge(named, output_prefix, to, force, overwrite, progress)
    _print_result(output_prefix, manifest)


@app.command()
def split(
    path: Dataset,
    parts: Annotated[str, typer.Option(help="Shares of train, valid and test.")],
    output_prefix: OutputPrefix,
    rounding: Annotated[
        Rounding,
        typer.Option(help="How split points are rounded; see Data.dataset.split_rounding."),
    ] = "megatron_core",
    overwrite: Overwrite = False,
) -> None:
    """Cut a dataset into PREFIX_train, PREFIX_valid and PREFIX_test, as training would."""
    from fourfold.data.readers import full_name
    from fourfold.tools.tokens import transform

    with byte_progress("split") as progress:
        manifests = transform.split(
            full_name(path), parts, output_prefix, overwrite, progress, rounding
        )
    for part, manifest in manifests.items():
        prefix = Path(f"{output_prefix}_{part}")
        if manifest is None:
            print(f"{prefix}: empty, not written")
        else:
            _print_result(prefix, manifest)


@app.command()
def convert(
    path: Dataset,
    to: Annotated[Format, typer.Option(help="Format to write.")],
    output_prefix: OutputPrefix,
    force: Annotated[
        bool, typer.Option("--force", help="Drop what the format cannot store.")
    ] = False,
    overwrite: Overwrite = False,
) -> None:
    """Write a dataset in another format: Megatron, FleetX, or the legacy .npz."""
    from fourfold.data.readers import full_name
    from fourfold.tools.tokens import transform

    with byte_progress("convert") as progress:
        manifest = transform.convert(full_name(path), to, output_prefix, force, overwrite, progress)
    _print_result(output_prefix, manifest)


def _print_result(prefix: Path, manifest: dict[str, Any]) -> None:
    for note in manifest["derived"]["notes"]:
        print(f"note: {note}")
    print(
        f"{prefix}: {manifest['documents']:,} documents, {manifest['tokens']:,} tokens, "
        f"{manifest['format']}, {manifest['dtype']}"
    )


# -- what a run will read --------------------------------------------------------------------


@app.command()
def index(config: ConfigFile, override: Overrides = None) -> None:
    """Check the data of a run and build its sample and blend indices, without training."""
    from fourfold.config import load_config
    from fourfold.data.splits import check_splits, open_splits

    resolved = load_config(config, override or [])
    parts = open_splits(resolved)
    for remark in [*resolved.notices, *check_splits(resolved, parts)]:
        print(f"notice: {remark}", file=sys.stderr)
    for name, part in parts.items():
        start = time.perf_counter()
        samples = part.open()
        seconds = time.perf_counter() - start
        if len(samples) == 0:
            print(f"{name}: no samples")
            continue
        print(
            f"{name}: {len(samples):,} samples of {samples.seq_len:,} tokens, "
            f"{samples.epochs} epoch(s) of {samples.tokens_per_epoch:,} tokens, in {seconds:.2f} s"
        )
        for place in samples.places:
            print(f"  {place} ({_megabytes(place):.1f} MB)")
        if not samples.places:
            print("  not kept: no directory could be written; set Data.dataset.cache_dir")


@app.command()
def blend(
    config: Annotated[
        Path | None, typer.Option("-c", "--config", help="The YAML file that describes the run.")
    ] = None,
    override: Overrides = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="'W A W B'", help="A mixture, instead of a configuration's."),
    ] = None,
    samples: Annotated[int | None, typer.Option(help="With --data: samples to serve.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="With --data: tokens per sample.")] = None,
) -> None:
    """Show what a mixture will serve: samples, tokens and epochs of each source."""
    from fourfold.config import load_config
    from fourfold.data.splits import open_recipe, open_splits
    from fourfold.errors import UserError
    from fourfold.tools.tokens.inspect import blend_lines

    if config is not None and data is None:
        if samples is not None or seq_len is not None:
            raise UserError("--samples and --seq-len go with --data; a configuration has its own")
        parts = open_splits(load_config(config, override or []))
    elif data is not None and config is None and not override:
        if samples is None or samples < 1 or seq_len is None or seq_len < 1:
            raise UserError("--data needs --samples and --seq-len, both at least 1")
        parts = {"train": open_recipe(data, samples, seq_len)}
    else:
        raise UserError("give either a configuration with -c, or a mixture with --data")
    for name, part in parts.items():
        for line in blend_lines(name, part):
            print(line)


@app.command()
def at(
    run: Annotated[
        Path | None, typer.Argument(help="The output directory of a run, instead of -c.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("-c", "--config", help="The YAML file that describes the run.")
    ] = None,
    step: Annotated[int, typer.Option(min=1, help="Which step, counted from 1 as in the log.")] = 1,
    override: Overrides = None,
    layout: Annotated[
        Literal["batch", "detail"],
        typer.Option(help="detail also says which data rank reads what, in which micro-batch."),
    ] = "batch",
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Tokenizer to decode with.", show_default="the data's own"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Show the samples and documents of a training step, without a model."""
    from fourfold.config import load_config
    from fourfold.data.provenance import DocumentText, step_lines
    from fourfold.engine.run_data import open_run_data
    from fourfold.errors import UserError
    from fourfold.parallel import layout_of
    from fourfold.question.history import RunHistory, samples_of_step, scratch_directory
    from fourfold.tokenizer import Tokenizer

    if (run is None) == (config is None):
        raise UserError("give either the directory of a run, or a configuration with -c")
    with scratch_directory() as scratch:
        if config is not None:
            resolved = load_config(config, override or [])
            opened = open_run_data(resolved, layout_of(resolved))
        else:
            assert run is not None
            segment = RunHistory(run).segment(step)
            resolved = segment.config(scratch, override or [])
            opened = segment.data(resolved)
        decoder = DocumentText(
            opened.tokenizer() if tokenizer is None else Tokenizer.load(tokenizer)
        )
        found = samples_of_step(opened, resolved, step)
        told = found.to_dict(decoder, detail=layout == "detail")
        opened.close()
    if as_json:
        print(json.dumps(told, indent=2))
    else:
        print("\n".join(step_lines(told)))


def _megabytes(directory: Path) -> float:
    return sum(file.stat().st_size for file in directory.iterdir()) / 1e6
