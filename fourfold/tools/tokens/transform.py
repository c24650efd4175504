"""Token files from token files: merge several, split one, convert between formats.

Documents, their order and every token are kept exactly. Each result carries a manifest that says
what was done and contains the manifests of its sources. An existing dataset of the same name is
refused unless `overwrite`; a source is never written over.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fourfold import __version__
from fourfold.config.recipe import Rounding
from fourfold.data.datasets import FORMATS, TokenDataset, manifest_section, prefix_of
from fourfold.data.readers import empty_groups, has_modes, open_datasets
from fourfold.data.samples import PARTS, document_ranges
from fourfold.errors import DataError
from fourfold.tools.prepare.writers import (
    MANIFEST_VERSION,
    ByteProgress,
    DocumentRange,
    check_output,
    common_dtype,
    silent,
    write_dataset,
)


def merge(
    sources: Sequence[str | Path],
    output_prefix: str | Path,
    form: str | None = None,
    force: bool = False,
    overwrite: bool = False,
    progress: ByteProgress = silent,
) -> dict[str, Any]:
    """Write the documents of all sources, in the order given, as one dataset; its manifest.

    Without `form` the result has the format of the first source; for Megatron files it is byte for
    byte what Megatron's own merge writes. Sources made with different tokenizers, or of which only
    some say, are refused unless `force`.
    """
    datasets = open_datasets(list(sources))
    notes = _compare_tokenizers(datasets, force)
    runs = [_whole(dataset) for dataset in datasets]
    return _write("merge", runs, output_prefix, form, overwrite, progress, force, notes)


def split(
    source: str | Path,
    parts: str,
    output_prefix: str | Path,
    overwrite: bool = False,
    progress: ByteProgress = silent,
    rounding: Rounding = "megatron_core",
) -> dict[str, dict[str, Any] | None]:
    """Write `<prefix>_train`, `_valid` and `_test`; their manifests, None for an empty part.

    They have the format of the source. The documents are cut where `Data.dataset.split` with the
    same shares and `split_rounding` would cut them.
    """
    dataset = _open_one(source)
    ranges = dict(zip(PARTS, document_ranges(parts, len(dataset), rounding)))
    prefixes = {part: Path(f"{output_prefix}_{part}") for part in PARTS}
    runs = {part: DocumentRange(dataset, *ranges[part]) for part in PARTS}
    # All are looked at before any is written: a refusal must not leave half a split.
    for part, run in runs.items():
        if len(run):
            _check_output(prefixes[part], [dataset], dataset.format, overwrite)
    manifests: dict[str, dict[str, Any] | None] = dict.fromkeys(PARTS)
    for part, run in runs.items():
        if len(run):
            command = f"split {parts} {part}"
            manifests[part] = _write(command, [run], prefixes[part], None, overwrite, progress)
    return manifests


def convert(
    source: str | Path,
    form: str,
    output_prefix: str | Path,
    force: bool = False,
    overwrite: bool = False,
    progress: ByteProgress = silent,
) -> dict[str, Any]:
    """Write a dataset in another format; its manifest.

    The legacy format has no place for documents of several sentences; `force` lets their
    grouping go.
    """
    run = _whole(_open_one(source))
    return _write("convert", [run], output_prefix, form, overwrite, progress, force)


def _open_one(source: str | Path) -> TokenDataset:
    datasets = open_datasets(source)
    if len(datasets) > 1:
        names = ", ".join(prefix_of(dataset.path).name for dataset in datasets[:5])
        raise DataError(f"{source}: holds {len(datasets)} datasets ({names}); name one of them")
    return datasets[0]


def _whole(dataset: TokenDataset) -> DocumentRange:
    return DocumentRange(dataset, 0, len(dataset))


def _write(
    command: str,
    runs: Sequence[DocumentRange],
    output_prefix: str | Path,
    form: str | None,
    overwrite: bool,
    progress: ByteProgress,
    force: bool = False,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    prefix = Path(output_prefix)
    datasets = [run.dataset for run in runs]
    form = form or datasets[0].format
    if form not in FORMATS:
        raise DataError(f"format {form!r} is not one of {', '.join(FORMATS)}")
    _check_output(prefix, datasets, form, overwrite)
    notes = [*notes, *_losses(runs, form, force)]
    dtype = common_dtype([dataset.dtype for dataset in datasets], form)
    description = _describe(command, runs, notes)
    return write_dataset(prefix, form, dtype, runs, description, progress)


def _check_output(
    prefix: Path, sources: Sequence[TokenDataset], form: str, overwrite: bool
) -> None:
    if any(prefix_of(source.path).resolve() == prefix.resolve() for source in sources):
        raise DataError(f"{prefix}: is a source and would be replaced; choose another prefix")
    check_output(prefix, form, overwrite)


def _compare_tokenizers(datasets: Sequence[TokenDataset], force: bool) -> list[str]:
    """Refuse a mixture of vocabularies; what could not be made sure of comes back as notes."""
    identities = [_tokenizer_identity(dataset.manifest) for dataset in datasets]
    if len(set(identities)) == 1:
        if identities[0] == "" and len(datasets) > 1:
            return ["no source says which tokenizer made it; they were not compared"]
        return []
    lines = [
        f"  {prefix_of(dataset.path)}: {identity[:16] or 'unknown'}"
        for dataset, identity in zip(datasets, identities)
    ]
    if force:
        return ["the sources' tokenizers differ or are not all known; merged by force"]
    raise DataError(
        "the same id must mean the same token throughout, but the tokenizers of the sources "
        "differ or are not all known:\n"
        + "\n".join(lines)
        + "\nprepare them with one tokenizer, or give --force if you know they agree"
    )


def _tokenizer_identity(manifest: dict[str, Any] | None) -> str:
    return str(manifest_section(manifest, "tokenizer").get("identity", ""))


def _losses(runs: Sequence[DocumentRange], form: str, force: bool) -> list[str]:
    """What the result cannot hold, as notes; an error where that needs the user's word."""
    notes = []
    if any(has_modes(run.dataset) for run in runs):
        notes.append("the mode bytes of the sequences (mixed text and images) are left out")
    indexed = [run for run in runs if run.borders is not None] if form == "legacy" else []
    empty = sum(empty_groups(run.borders) for run in indexed)
    if empty:
        notes.append(
            f"{empty} documents without a sequence are left out: the format cannot store them"
        )
    if any(len(run) > run.num_groups - empty_groups(run.borders) for run in indexed):
        if not force:
            raise DataError(
                f"{indexed[0].source}: its documents are split into sentences, which the legacy "
                "format cannot group; choose fleetx or megatron, or give --force to keep each "
                "sentence as a document"
            )
        notes.append("sentences became documents: the legacy format does not group them")
    return notes


def _describe(command: str, runs: Sequence[DocumentRange], notes: list[str]) -> dict[str, Any]:
    manifests = [run.dataset.manifest or {} for run in runs]
    description: dict[str, Any] = {"version": MANIFEST_VERSION, "fourfold": __version__}
    # What all sources agree on still holds; the rest is in their own manifests below.
    identities = {_tokenizer_identity(manifest) for manifest in manifests}
    if len(identities) == 1 and "" not in identities:
        description["tokenizer"] = manifests[0]["tokenizer"]
    endings = [manifest.get("append_eod") for manifest in manifests]
    if endings[0] is not None and all(ending == endings[0] for ending in endings):
        description["append_eod"] = endings[0]
    beginnings = [manifest.get("begin_ids") for manifest in manifests]
    if beginnings[0] and all(one == beginnings[0] for one in beginnings):
        description["begin_ids"] = beginnings[0]
    description["derived"] = {
        "command": command,
        "notes": notes,
        "sources": [
            {
                "prefix": str(prefix_of(run.dataset.path)),
                "format": run.dataset.format,
                "documents": [run.first, run.stop],
                "tokens": run.num_tokens,
                "fingerprint": run.dataset.fingerprint,
                "manifest": run.dataset.manifest,
            }
            for run in runs
        ],
    }
    return description
