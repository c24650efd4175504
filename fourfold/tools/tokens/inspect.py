"""Inspection of token files: counts, lengths, samples of the text, and where they came from.

`inspect` measures one dataset and returns a dict of plain values, ready for JSON; `render` writes
it for a terminal of 80 columns and `fourfold.tools.tokens.histogram` draws its lengths. Every token
is read once; memory is a few bytes per document. `preview_blend` says what a mixture will serve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from fourfold.data.datasets import (
    TokenDataset,
    files_of,
    manifest_section,
    passing_blocks,
    prefix_of,
)
from fourfold.data.mixture import SourceShare, choose_sources, normalised
from fourfold.data.readers import document_index, empty_groups
from fourfold.data.splits import SplitData
from fourfold.data.tokenizer_check import find_tokenizer
from fourfold.errors import DataError, UserError
from fourfold.terminal import table_lines
from fourfold.tokenizer import Tokenizer
from fourfold.tools.tokens.histogram import bars, count_lengths

SAMPLE_TOKENS = 96
SAMPLE_ROWS = 8
MOST_LISTED = 5
SAMPLE_COLUMNS = 73
TERMINAL_BINS = 22


def inspect(
    dataset: TokenDataset, tokenizer: Tokenizer | None = None, samples: int = 3
) -> dict[str, Any]:
    """Everything worth knowing of a dataset. `tokenizer` decodes the samples; without one the
    tokenizer the manifest names is looked for."""
    form = dataset.format
    prefix = prefix_of(dataset.path)
    files = files_of(prefix, form)
    decoder, problem = tokenizer, None
    if decoder is None:
        decoder, problem = find_tokenizer(dataset)
    made_with = manifest_section(dataset.manifest, "tokenizer")
    if decoder is not None and not (
        made_with.get("identity") is None or decoder.is_known_as(made_with["identity"])
    ):
        problem = "the tokenizer given is not the one the data was made with; samples may be wrong"
    eos_id = made_with.get("eos_id")
    if not isinstance(eos_id, int):
        eos_id = decoder.eos_id if decoder is not None else None
    largest, terminated = _scan(dataset, eos_id)
    index = document_index(dataset)
    return {
        "prefix": str(prefix),
        "format": form,
        "files": {file.name: file.stat().st_size for file in files},
        "documents": len(dataset),
        "groups": None if index is None else len(index) - 1,
        "empty_groups": empty_groups(index),
        "tokens": dataset.num_tokens,
        "dtype": dataset.dtype.name,
        "bytes": sum(file.stat().st_size for file in files),
        "max_id": largest,
        "eos_id": eos_id,
        "eos_terminated": terminated,
        "lengths": length_statistics(dataset.sizes),
        "histogram": count_lengths(dataset.sizes, TERMINAL_BINS),
        "tokenizer": made_with or None,
        "tokenizer_note": problem,
        "samples": [
            _sample(dataset, document, decoder) for document in _spread(len(dataset), samples)
        ],
        "manifest": dataset.manifest,
    }


def length_statistics(sizes: np.ndarray) -> dict[str, float] | None:
    """Tokens per document; the 99th percentile is the length of a document, not between two."""
    count = len(sizes)
    if count == 0:
        return None
    middle = [(count - 1) // 2, count // 2]
    high = -(-99 * count // 100) - 1
    ordered = np.partition(sizes, sorted({*middle, high}))
    return {
        "min": int(sizes.min()),
        "median": float(ordered[middle].mean()),
        "mean": float(sizes.mean(dtype=np.float64)),
        "p99": int(ordered[high]),
        "max": int(sizes.max()),
    }


def _scan(dataset: TokenDataset, eos_id: int | None) -> tuple[int, float | None]:
    """The largest id, and the share of documents whose last token is the end-of-text id."""
    ends = np.cumsum(dataset.sizes, dtype=np.int64)[dataset.sizes > 0]
    largest, terminated, start = -1, 0, 0
    for block in passing_blocks(dataset.ids):
        largest = max(largest, int(block.max()))
        first, stop = np.searchsorted(ends, [start, start + len(block)], side="right")
        terminated += int(np.count_nonzero(block[ends[first:stop] - 1 - start] == eos_id))
        start += len(block)
    if eos_id is None or len(dataset) == 0:
        return largest, None
    return largest, terminated / len(dataset)


def _spread(documents: int, samples: int) -> list[int]:
    """Numbers of documents from the first to the last, evenly spaced."""
    if samples < 0:
        raise DataError(f"samples={samples}: at least 0 can be shown")
    count = min(samples, documents)
    return [round(at) for at in np.linspace(0, documents - 1, count)] if count else []


def _sample(dataset: TokenDataset, document: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    size = int(dataset.sizes[document])
    ids = dataset.tokens(document, 0, min(size, SAMPLE_TOKENS)).tolist()
    sample: dict[str, Any] = {"document": document, "tokens": size, "ids": ids, "text": None}
    if tokenizer is not None:
        try:
            sample["text"] = tokenizer.decode(ids)
        except UserError as error:
            sample["problem"] = str(error)
    return sample


def render(report: dict[str, Any]) -> str:
    """The report for people; every control character of foreign text is escaped."""
    lines = [_clean(report["prefix"])]
    lines += [f"  {name:<11}{_clean(text)}" for name, text in _facts(report)]
    if report["lengths"] is not None:
        lines += ["", "  Documents by length in tokens"]
        lines += [f"  {line}" for line in bars(report["histogram"])]
    for sample in report["samples"]:
        lines += ["", *_sample_lines(sample)]
    if report["samples"] and report["tokenizer_note"]:
        lines += ["", f"  Note: {_clean(report['tokenizer_note'])}"]
    return "\n".join(lines)


def _facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    documents = f"{report['documents']:,}"
    empty = report["empty_groups"]
    if report["groups"] is not None and report["groups"] - empty != report["documents"]:
        documents += f" sequences of {report['groups']:,} documents"
    elif empty:
        documents += f", and {empty:,} empty"
    facts = [
        ("format", f"{report['format']} ({', '.join(report['files'])})"),
        ("documents", documents),
        ("tokens", f"{report['tokens']:,}, largest id {report['max_id']:,}"),
        ("size", f"{report['bytes']:,} bytes, ids as {report['dtype']}"),
    ]
    if report["lengths"] is not None:
        names = ("min", "median", "mean", "p99", "max")
        lengths = [f"{name} {_number(report['lengths'][name])}" for name in names]
        facts.append(("lengths", ", ".join(lengths)))
    if report["eos_terminated"] is None:
        facts.append(("endings", "unknown (neither manifest nor tokenizer gives the end id)"))
    else:
        share = report["eos_terminated"]
        facts.append(("endings", f"{share:.2%} of documents end with id {report['eos_id']}"))
    return facts + _origin(report)


def _origin(report: dict[str, Any]) -> list[tuple[str, str]]:
    """What the manifest says; it may have been edited, so nothing about its values is assumed."""
    manifest = report["manifest"]
    if manifest is None:
        return [("origin", "unknown (no manifest)")]
    facts = []
    if report["tokenizer"]:
        tokenizer = report["tokenizer"]
        name = next((tokenizer[key] for key in ("name", "path") if tokenizer.get(key)), None)
        described = f"{tokenizer.get('vocab_size', '?')} tokens"
        described += f", identity {str(tokenizer.get('identity'))[:16]}"
        facts.append(("tokenizer", f"{name}, {described}" if name else described))
    origin = f"fourfold {manifest.get('fourfold')}"
    if isinstance(manifest.get("append_eod"), bool):
        origin += ", end of text appended" if manifest["append_eod"] else ", no end of text"
    if manifest.get("begin_ids"):
        origin += f", each begins with {manifest['begin_ids']}"
    derived = manifest_section(manifest, "derived")
    if derived:
        origin += f", {derived.get('command')}"
    facts.append(("origin", origin))
    facts += _listed("input", manifest.get("inputs"), _input_line)
    dropped = manifest_section(manifest, "dropped").get("count")
    if isinstance(dropped, int) and dropped:
        facts.append(("dropped", f"{dropped:,} lines that could not be read"))
    if isinstance(short := manifest.get("short_documents"), int) and short:
        facts.append(("dropped", f"{short:,} documents below the minimum length"))
    facts += _listed("source", derived.get("sources"), _source_line)
    facts += _listed("note", derived.get("notes"), str)
    return facts


def _listed(name: str, entries: Any, line: Callable[[Any], str]) -> list[tuple[str, str]]:
    if not isinstance(entries, list):
        return []
    facts = [(name, line(entry)) for entry in entries[:MOST_LISTED]]
    if len(entries) > MOST_LISTED:
        facts.append((name, f"... and {len(entries) - MOST_LISTED:,} more"))
    return facts


def _input_line(entry: Any) -> str:
    if not isinstance(entry, dict):
        return str(entry)
    size = entry.get("bytes")
    return f"{entry.get('path', '?')}" + (f", {size:,} bytes" if isinstance(size, int) else "")


def _source_line(source: Any) -> str:
    if not isinstance(source, dict):
        return str(source)
    place = f"{source.get('prefix', '?')} ({source.get('format', '?')})"
    match source.get("documents"):
        case [int(first), int(stop)]:
            return f"{place}, documents {first:,} to {stop:,}"
    return place


def _sample_lines(sample: dict[str, Any]) -> list[str]:
    heading = f"  Document {sample['document']:,} ({sample['tokens']:,} tokens)"
    if "problem" in sample:
        return [f"{heading}: {_clean(sample['problem'])}", f"    ids {_shortened(sample['ids'])}"]
    if sample["text"] is None:
        return [heading, f"    ids {_shortened(sample['ids'])}"]
    rows = [row[:SAMPLE_COLUMNS] for row in map(_clean, sample["text"].split("\n"))]
    shown = [heading, *(f"    │ {row}".rstrip() for row in rows[:SAMPLE_ROWS])]
    if sample["tokens"] > len(sample["ids"]) or len(rows) > SAMPLE_ROWS:
        shown.append("    │ ...")
    return shown


def _shortened(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids[:10])) + (" ..." if len(ids) > 10 else "")


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def _clean(text: Any) -> str:
    """Text from a file as one printable line: what could steer a terminal is escaped."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in str(text))


# -- what a mixture will serve ---------------------------------------------------------------
#
# Weights are shares of samples, whatever the sources hold, so a small source with a large share
# repeats. This counts by the rule that serves them, without building any sample index.


def preview_blend(part: SplitData) -> list[SourceShare]:
    """A share for each source of a part; without weights all datasets are one source."""
    pairs = zip(part.sources, part.streams)
    holding = [pair for pair in pairs if pair[1].tokens_per_epoch > 0]
    if not holding:
        return []
    weights = normalised([source.weight for source, _ in holding])
    weights = normalised(weights.tolist())
    counts = np.bincount(choose_sources(weights, part.num_samples), minlength=len(holding))
    return [
        SourceShare(source.name, weight, count, part.spec.seq_len, stream.tokens_per_epoch)
        for (source, stream), weight, count in zip(holding, weights.tolist(), counts.tolist())
    ]


def blend_lines(name: str, part: SplitData) -> Iterator[str]:
    """A small table for people, and a warning for every source that repeats."""
    shares = preview_blend(part)
    if not shares:
        yield f"{name}: no tokens"
        return
    total = sum(share.tokens for share in shares)
    yield f"{name}: {part.num_samples:,} samples of {part.spec.seq_len:,} tokens = {total:,} tokens"
    head = ("weight", "samples", "tokens", "of", "epochs", "source")
    rows = [
        (
            f"{share.weight:.4f}",
            f"{share.samples:,}",
            f"{share.tokens:,}",
            f"{share.tokens_per_epoch:,}",
            f"{share.epochs:.2f}",
            share.name,
        )
        for share in shares
    ]
    for line in table_lines([head, *rows], ">>>>><"):
        yield f"  {line}"
    for source in part.sources:
        if source.name not in {share.name for share in shares}:
            yield f"  warning: {source.name} has no tokens in the {name} part; the others share it"
    for share in shares:
        if share.epochs > 1:
            fits = int(share.tokens_per_epoch // share.seq_len / max(share.weight, 1e-300))
            yield (
                f"  warning: {share.name} is read {share.epochs:.2f} times over; a mixture of at "
                f"most {fits:,} samples, or a smaller weight, would not repeat it"
            )
