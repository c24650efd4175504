"""Tokenizer provenance: do data, tokenizer, model and checkpoint agree on what a token id means?

The manifest of data from `fourfold data prepare` records the tokenizer. Ids of another tokenizer
train without any error into a model that writes nonsense, so a difference is refused unless
`Data.dataset.allow_tokenizer_mismatch` is set. Data without a manifest is taken on trust; that its
ids are inside the vocabulary is checked elsewhere, always.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fourfold.config import Config
from fourfold.data.datasets import TokenDataset, manifest_section
from fourfold.errors import DataError, UserError
from fourfold.tokenizer import Tokenizer

GPT2_EOS = 50256
REMEDY = "to train anyway, set Data.dataset.allow_tokenizer_mismatch=True"


def tokenizer_of(datasets: Sequence[TokenDataset]) -> str | None:
    """The identity of the tokenizer that made the data, of the first dataset that says so."""
    return next(
        (record.identity for dataset in datasets if (record := dataset.tokenizer_record)), None
    )


def find_end_of_text(config: Config, datasets: Sequence[TokenDataset]) -> tuple[int | None, str]:
    """The end-of-text id of all the data of a configuration, and where it is from.

    Of several datasets the first whose manifest names one decides.
    """
    if config.Data.dataset.eos_token_id is not None:
        return config.Data.dataset.eos_token_id, "Data.dataset.eos_token_id"
    for dataset in datasets:
        record = dataset.tokenizer_record
        if record is not None and record.eos_id is not None:
            return record.eos_id, f"the manifest of {dataset.path}"
    if config.Model.vocab_size > GPT2_EOS:
        return GPT2_EOS, "GPT-2's; the data has no manifest"
    return None, "unknown, so nothing is masked; set Data.dataset.eos_token_id"


def find_tokenizer(dataset: TokenDataset) -> tuple[Tokenizer | None, str | None]:
    """The tokenizer the data was made with, or None and the reason.

    The path in the manifest is tried as it is and relative to the data's directory, then
    `tokenizer.json` there and one above. Only one with the recorded identity is taken.
    """
    made_with = manifest_section(dataset.manifest, "tokenizer")
    identity = made_with.get("identity")
    if identity is None:
        return None, "no manifest says which tokenizer made the data; give --tokenizer"
    here = dataset.path.parent
    names = [made_with[key] for key in ("path", "name") if isinstance(made_with.get(key), str)]
    candidates: list[Path | tuple[Path, Path]] = [Path(name) for name in names]
    candidates += [here / name for name in (*names, "tokenizer.json", "../tokenizer.json")]
    match made_with.get("files"):
        case [str(vocab), str(merges)]:
            candidates.append((Path(vocab), Path(merges)))
    for candidate in candidates:
        try:
            tokenizer = Tokenizer.load(candidate)
        except (UserError, OSError):
            continue
        if tokenizer.is_known_as(identity):
            return tokenizer, None
    named = f" ({', '.join(names)})" if names else ""
    return None, f"the tokenizer of the data{named} was not found; give --tokenizer"


def check_agreement(
    datasets: Sequence[TokenDataset], vocab_size: int, tokenizer: str | None, allowed: bool
) -> list[str]:
    """Raise DataError for the first disagreement, or return them all where they are allowed.

    `tokenizer` is the path in Global.tokenizer. Training does not need it, so one that cannot be
    read is only mentioned.
    """
    recorded = [(each, record) for each in datasets if (record := each.tokenizer_record)]
    wrong, remarks = [], []
    for dataset, record in recorded:
        if record.vocab_size > vocab_size:
            wrong.append(
                f"{dataset.path}: made with a tokenizer of {record.vocab_size} tokens, more than "
                f"Model.vocab_size={vocab_size}; set Model.vocab_size={record.vocab_size}, or "
                "more, or name data of a smaller vocabulary"
            )
    if recorded:
        first, first_record = recorded[0]
        wrong += [
            f"{dataset.path}: made with another tokenizer ({_short(record.identity)}) than "
            f"{first.path} ({_short(first_record.identity)}), so the same id means two things; "
            "prepare both with one"
            for dataset, record in recorded[1:]
            if not record.names & first_record.names
        ]
    if recorded and tokenizer is not None:
        try:
            named = Tokenizer.load(tokenizer)
        except UserError as error:
            remarks.append(f"whether the data was made with Global.tokenizer is unknown: {error}")
        else:
            wrong += [
                f"{dataset.path}: made with another tokenizer ({_short(record.identity)}) than "
                f"Global.tokenizer={tokenizer} ({_short(named.identity)}); name the one it was "
                "made with, or prepare the data again"
                for dataset, record in recorded
                if not any(map(named.is_known_as, record.names))
            ]
    if wrong and not allowed:
        raise DataError(f"{wrong[0]}; {REMEDY}")
    return remarks + wrong


def check_checkpoint_tokenizer(
    saved: Any, datasets: Sequence[TokenDataset], checkpoint: str, allowed: bool
) -> list[str]:
    """The same for the identity a checkpoint recorded, None where its data had none."""
    present = next((record for each in datasets if (record := each.tokenizer_record)), None)
    if saved is None or present is None or saved in present.names:
        return []
    text = (
        f"{checkpoint} was trained on data made with another tokenizer ({_short(str(saved))}) than "
        f"the data named now ({_short(present.identity)}): the model knows each id as another "
        "text; continue with data of the checkpoint's tokenizer, or start a new run"
    )
    if not allowed:
        raise DataError(f"{text}; {REMEDY}")
    return [text]


def _short(identity: str) -> str:
    return identity[:12]
