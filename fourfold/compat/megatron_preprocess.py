"""The command line of Megatron's `tools/preprocess_data.py`, over `fourfold.tools.prepare`.

    {output-prefix}_{key}_document.bin  .idx    for each of --json-keys
    {output-prefix}_{key}_document.json         what they were made from, and with which tokenizer

Megatron reads these files. With --append-eod the length of a document includes its end, which some
versions of Megatron's own script do not count. Documents keep the order of the input, whatever the
number of workers and partitions.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fourfold.compat.flags import Flag, FlagParser, Flags, whole
from fourfold.errors import UserError, report

if TYPE_CHECKING:
    from fourfold.tools.prepare.manifest import PrepareSettings
    from fourfold.tools.prepare.pipeline import PrepareProgress

PROGRAM = "preprocess_data.py"
REQUIRED = ("--input", "--output-prefix", "--tokenizer-type", "--workers")
_WHOLE_DOCUMENTS = "documents are stored whole, as GPT training reads them; leave it out"
_TOKENIZERS = "GPT2BPETokenizer or HuggingFaceTokenizer"
REFUSED = {
    "--split-sentences": _WHOLE_DOCUMENTS,
    "--keep-newlines": _WHOLE_DOCUMENTS,
    "--lang": _WHOLE_DOCUMENTS,
    "--vocab-size": f"it belongs to NullTokenizer; choose {_TOKENIZERS}",
    "--find-optimal-num-workers": "give --workers as many as there are processors",
    "--workers-to-check": "give --workers as many as there are processors",
    "--max-documents": "it belongs to --find-optimal-num-workers; cut the input instead",
    "--tokenizer-special-tokens": "write them into the tokenizer.json of --tokenizer-model",
    "--trust-remote-code": "no code of a tokenizer is run; name its tokenizer.json",
}


FLAGS = (
    Flag("--input", str, "JSON lines (also .gz or .zst), or a glob in quotes", metavar="PATH"),
    Flag("--output-prefix", str, "where the token files go, without key and ending"),
    Flag("--json-keys", str, "keys that hold text; files for each", ["text"], "KEY", nargs="+"),
    Flag("--tokenizer-type", str, _TOKENIZERS, metavar="TYPE"),
    Flag("--vocab-file", str, "GPT-2's vocab.json", metavar="FILE"),
    Flag("--merge-file", str, "GPT-2's merges.txt", metavar="FILE"),
    Flag("--tokenizer-model", str, "a tokenizer.json or its directory", metavar="PATH"),
    Flag("--append-eod", "switch", "end each document with <|endoftext|>"),
    Flag("--workers", whole, "number of processes"),
    Flag("--partitions", whole, "divides --workers; changes nothing else", 1),
    Flag("--keep-sequential-samples", "switch", "keep the order of the input; always so"),
    Flag("--dataset-impl", str, "format of the files", "mmap", metavar="mmap"),
    Flag("--log-interval", whole, "documents between lines of progress", 1000),
    Flag("--overwrite", "switch", "replace what is there, begun or finished"),
)


def read_flags(arguments: Sequence[str]) -> Flags:
    about = "JSON lines to the token files Megatron and Fourfold train on."
    flags = FlagParser(PROGRAM, about, FLAGS).read(arguments, REQUIRED, REFUSED)
    _check(flags)
    return flags


def tokenizer_path(flags: Flags) -> str | tuple[str, str]:
    """Where `Tokenizer.load` finds what --tokenizer-type and the flags beside it name."""
    kind = flags["--tokenizer-type"]
    if kind == "GPT2BPETokenizer":
        wanted = ["--vocab-file", "--merge-file"]
    elif kind == "HuggingFaceTokenizer":
        wanted = ["--tokenizer-model"]
    else:
        raise UserError(f"--tokenizer-type {kind} is not supported; choose {_TOKENIZERS}")
    missing = [flag for flag in wanted if flag not in flags]
    if missing:
        raise UserError(f"--tokenizer-type {kind} needs {' and '.join(missing)}; add it")
    for flag in ("--vocab-file", "--merge-file", "--tokenizer-model"):
        if flag in flags and flag not in wanted:
            raise UserError(f"{flag} does not go with --tokenizer-type {kind}; leave it out")
    if len(wanted) == 1:
        return str(flags[wanted[0]])
    return str(flags[wanted[0]]), str(flags[wanted[1]])


def preprocess(arguments: Sequence[str]) -> None:
    """Write the files of every key; one that was finished before is left as it is."""
    from fourfold.tools.prepare.input_files import find_inputs
    from fourfold.tools.prepare.manifest import dropped_summary
    from fourfold.tools.prepare.pipeline import dataset_prefix, prepare_files

    flags = read_flags(arguments)
    if flags["--partitions"] > 1:
        print(
            f"--partitions {flags['--partitions']} changes nothing: all workers share the input "
            "without copies of it, and documents keep its order",
            file=sys.stderr,
        )
    files = find_inputs([flags["--input"]], kind="json")
    for key in flags["--json-keys"]:
        lines = ProgressLines(flags["--log-interval"])
        manifest = prepare_files(files, flags["--output-prefix"], _settings(flags, key), lines.show)
        prefix = dataset_prefix(flags["--output-prefix"], "megatron", key)
        print(f"{prefix}: {manifest['documents']:,} documents, {manifest['tokens']:,} tokens")
        for line in dropped_summary(manifest):
            print(line)


def main(arguments: Sequence[str] | None = None) -> None:
    try:
        preprocess(sys.argv[1:] if arguments is None else arguments)
    except (UserError, KeyboardInterrupt) as error:
        sys.exit(report(error))


class ProgressLines:
    """Megatron's line of progress, on standard error, about every `interval` documents.

    Documents are counted when a part of the input is finished, so a line may come late.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._begin = time.monotonic()
        self._shown = 0

    def show(self, progress: PrepareProgress) -> None:
        if progress.documents // self._interval == self._shown // self._interval:
            return
        self._shown = progress.documents
        seconds = max(time.monotonic() - self._begin, 1e-9)
        print(
            f"Processed {progress.documents} documents ({progress.documents / seconds:.2f} docs/s, "
            f"{progress.text_bytes / 2**20 / seconds:.2f} MB/s).",
            file=sys.stderr,
            flush=True,
        )


def _settings(flags: Flags, key: str) -> PrepareSettings:
    from fourfold.tools.prepare.manifest import PrepareSettings

    return PrepareSettings(
        tokenizer=tokenizer_path(flags),
        append_eod="--append-eod" in flags,
        prepend_bos=False,
        json_key=key,
        workers=flags["--workers"],
        overwrite="--overwrite" in flags,
    )


def _check(flags: Flags) -> None:
    tokenizer_path(flags)
    for flag in ("--workers", "--partitions", "--log-interval"):
        if flags[flag] < 1:
            raise UserError(f"{flag} {flags[flag]}: choose 1 or more")
    form = flags["--dataset-impl"]
    if form != "mmap":
        raise UserError(
            f"--dataset-impl {form} is a format that nothing reads any more; leave the flag out, "
            "which is mmap"
        )
    partitions = flags["--partitions"]
    if flags["--workers"] % partitions:
        raise UserError(
            f"--partitions {partitions} does not divide --workers {flags['--workers']}; leave it "
            "out: all workers share all of the input"
        )
