"""The command line of Megatron's `tools/preprocess_data.py`, over `fourfold.tools.prepare`.

    {output-prefix}_{key}_document.bin  .idx    for each of --json-keys
    {output-prefix}_{key}_document.json         what they were made from, and with which tokenizer

The files are what Megatron reads, and what it should have written: with --append-eod the end of
each document is counted in its length. Documents keep the order of the input whatever the number
of workers and partitions.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fourfold.compat.flags import FlagParser, whole
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


def read_flags(arguments: Sequence[str]) -> dict[str, Any]:
    flags = FlagParser(PROGRAM, "JSON lines to the token files Megatron and Fourfold train on.")
    flags.value("--input", "JSON lines (also .gz or .zst), or a glob in quotes.", metavar="PATH")
    flags.value("--output-prefix", "Where the token files go, without key and ending.")
    flags.value("--json-keys", "Keys that hold text; files for each.", nargs="+", metavar="KEY")
    flags.value("--tokenizer-type", f"{_TOKENIZERS}.", metavar="TYPE")
    flags.value("--vocab-file", "GPT-2's vocab.json.", metavar="FILE")
    flags.value("--merge-file", "GPT-2's merges.txt.", metavar="FILE")
    flags.value("--tokenizer-model", "A tokenizer.json or its directory.", metavar="PATH")
    flags.switch("--append-eod", "End each document with <|endoftext|>.")
    flags.value("--workers", "Processes.", type=whole)
    flags.value("--partitions", "Divides --workers; changes nothing else.", type=whole)
    flags.switch("--keep-sequential-samples", "Keep the order of the input; always so.")
    flags.value("--dataset-impl", "mmap.", metavar="mmap")
    flags.value("--log-interval", "Documents between lines of progress (1000).", type=whole)
    flags.switch("--overwrite", "Replace what is there, begun or finished.")
    given = flags.read(arguments, REFUSED)
    missing = [flag for flag in REQUIRED if flag not in given]
    if missing:
        raise UserError(f"{' and '.join(missing)} missing; {PROGRAM} --help lists all flags")
    _check(given)
    return given


def tokenizer_place(given: dict[str, Any]) -> str | tuple[str, str]:
    """Where `Tokenizer.load` finds what --tokenizer-type and the flags beside it name."""
    kind = given["--tokenizer-type"]
    if kind == "GPT2BPETokenizer":
        wanted = ["--vocab-file", "--merge-file"]
    elif kind == "HuggingFaceTokenizer":
        wanted = ["--tokenizer-model"]
    else:
        raise UserError(f"--tokenizer-type {kind} is not supported; choose {_TOKENIZERS}")
    missing = [flag for flag in wanted if flag not in given]
    if missing:
        raise UserError(f"--tokenizer-type {kind} needs {' and '.join(missing)}; add it")
    for flag in ("--vocab-file", "--merge-file", "--tokenizer-model"):
        if flag in given and flag not in wanted:
            raise UserError(f"{flag} does not go with --tokenizer-type {kind}; leave it out")
    if len(wanted) == 1:
        return str(given[wanted[0]])
    return str(given[wanted[0]]), str(given[wanted[1]])


def preprocess(arguments: Sequence[str]) -> None:
    """Write the files of every key; one that was finished before is left as it is."""
    from fourfold.tools.prepare.input_files import find_inputs
    from fourfold.tools.prepare.manifest import dropped_summary
    from fourfold.tools.prepare.pipeline import dataset_prefix, prepare_files

    given = read_flags(arguments)
    if given.get("--partitions", 1) > 1:
        print(
            f"--partitions {given['--partitions']} changes nothing: all workers share the input "
            "without copies of it, and documents keep its order",
            file=sys.stderr,
        )
    files = find_inputs([given["--input"]], kind="json")
    for key in given.get("--json-keys", ["text"]):
        lines = ProgressLines(given.get("--log-interval", 1000))
        manifest = prepare_files(files, given["--output-prefix"], _settings(given, key), lines.show)
        prefix = dataset_prefix(given["--output-prefix"], "megatron", key)
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

    Documents are counted where a part of the input is finished, so a line may be late.
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


def _settings(given: dict[str, Any], key: str) -> PrepareSettings:
    from fourfold.tools.prepare.manifest import PrepareSettings

    return PrepareSettings(
        tokenizer=tokenizer_place(given),
        append_eod="--append-eod" in given,
        json_key=key,
        workers=given["--workers"],
        overwrite="--overwrite" in given,
    )


def _check(given: dict[str, Any]) -> None:
    tokenizer_place(given)
    for flag in ("--workers", "--partitions", "--log-interval"):
        if given.get(flag, 1) < 1:
            raise UserError(f"{flag} {given[flag]}: choose 1 or more")
    form = given.get("--dataset-impl", "mmap")
    if form != "mmap":
        raise UserError(
            f"--dataset-impl {form} is a format that nothing reads any more; leave the flag out, "
            "which is mmap"
        )
    partitions = given.get("--partitions", 1)
    if given["--workers"] % partitions:
        raise UserError(
            f"--partitions {partitions} does not divide --workers {given['--workers']}; leave it "
            "out: all workers share all of the input"
        )
