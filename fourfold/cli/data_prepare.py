"""`fourfold data prepare` and `fourfold data train-tokenizer`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fourfold.errors import UserError

if TYPE_CHECKING:
    from fourfold.data.inputs import InputFile

MOST_BAD_LINES = 100

Inputs = Annotated[
    list[str],
    typer.Option(
        "--input",
        "-i",
        metavar="PATH",
        help="File, directory (recursive), glob, or - for standard input; may be given many "
        "times. Read are .txt, .jsonl, .json (these also .gz or .zst) and .parquet.",
    ),
]
MoreInputs = Annotated[
    list[str] | None, typer.Argument(metavar="[PATH]...", help="More inputs.", show_default=False)
]
JsonKey = Annotated[str, typer.Option(help="The key, or column, that holds the text.")]
Separator = Annotated[
    Literal["blank-line", "file"], typer.Option(help="What ends a document in .txt files.")
]
MaxDocument = Annotated[
    int, typer.Option(help="Documents longer than this are bad; memory grows with it.")
]
MaxBad = Annotated[
    int | None,
    typer.Option(
        help="How many bad lines are passed over before stopping.", show_default=str(MOST_BAD_LINES)
    ),
]
AllowDamaged = Annotated[
    bool,
    typer.Option(
        "--allow-damaged-files",
        help="Go on where a file is damaged or nothing of it can be read, without what is lost.",
    ),
]
Strict = Annotated[bool, typer.Option("--strict", help="Stop at the first bad line.")]
StdinKind = Annotated[
    Literal["jsonl", "txt"] | None,
    typer.Option(help="What standard input holds, with `--input -`.", show_default="jsonl"),
]


def prepare(
    inputs: Inputs,
    output_prefix: Annotated[Path, typer.Option(help="Where the token files go, without ending.")],
    tokenizer: Annotated[
        str,
        typer.Option(
            help="tokenizer.json, a directory with one or with vocab.json + merges.txt, or gpt2."
        ),
    ],
    more_inputs: MoreInputs = None,
    append_eod: Annotated[
        bool, typer.Option(help="End each document with the end-of-text id.")
    ] = True,
    workers: Annotated[
        int | None, typer.Option(help="Processes; as many as processors by default.")
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
        bool, typer.Option("--overwrite", help="Replace what is there, begun or finished.")
    ] = False,
    stdin_format: StdinKind = None,
) -> None:
    """Turn raw text into token files; the same command goes on where a killed one stopped."""
    from fourfold.cli.progress import PrepareProgress
    from fourfold.data.prepare import Settings, dataset_prefix, prepare_files
    from fourfold.processors import num_processors

    settings = Settings(
        tokenizer=tokenizer,
        format=form,
        append_eod=append_eod,
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
    with PrepareProgress() as progress:
        manifest = prepare_files(files, output_prefix, settings, progress.show)
    _print_summary(prefix, manifest)


def train_tokenizer(
    inputs: Inputs,
    output: Annotated[Path, typer.Option(help="The tokenizer.json to write, or its directory.")],
    vocab_size: Annotated[int, typer.Option(help="Ids in all, <|endoftext|> included.")],
    more_inputs: MoreInputs = None,
    json_key: JsonKey = "text",
    document_separator: Separator = "blank-line",
    every: Annotated[int, typer.Option(help="Learn from every n-th document only.")] = 1,
    max_document_mb: MaxDocument = 64,
    max_bad_lines: MaxBad = None,
    allow_damaged_files: AllowDamaged = False,
    strict: Strict = False,
    stdin_format: StdinKind = None,
) -> None:
    """Train a byte-level BPE tokenizer, saved as a tokenizer.json that `transformers` loads."""
    from fourfold.data.inputs import WORK_SUFFIX
    from fourfold.data.pieces import writable
    from fourfold.data.prepare import read_texts
    from fourfold.data.text import TextRule
    from fourfold.tokenizer import train

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
    """`--input A --input B` or `--input A B`; a mixture does not tell the order."""
    if more_inputs and len(inputs) > 1:
        raise UserError(
            f"{more_inputs[0]}: with several --input, give each path its own --input; only then "
            "is the order of the documents clear"
        )
    return [*inputs, *(more_inputs or [])]


def _files(inputs: list[str], prefix: Path, stdin_format: str | None) -> list[InputFile]:
    """The input files; standard input is first copied to one, so that workers can share it."""
    from fourfold.data.inputs import WORK_SUFFIX, find_inputs, spool_stdin
    from fourfold.data.pieces import writable

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
    from fourfold.data.provenance import dropped_summary

    print(f"{prefix}: {manifest['documents']:,} documents, {manifest['tokens']:,} tokens")
    for line in dropped_summary(manifest):
        print(line)
