"""Do the data, the tokenizer, the model and a checkpoint agree on what a token id means?

Data that `fourfold data prepare` made says in its manifest which tokenizer made it. Ids of another
tokenizer train without any error into a model that writes nonsense, so a difference is refused
unless `Data.dataset.allow_tokenizer_mismatch` asks for it. Data without a manifest is taken on
trust; that its ids are inside the vocabulary is checked elsewhere, always.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fourfold.config import Config
from fourfold.data.dataset import TokenDataset
from fourfold.errors import DataError, UserError
from fourfold.tokenizer import Tokenizer

GPT2_EOS = 50256
REMEDY = "to train all the same, set Data.dataset.allow_tokenizer_mismatch=True"


def tokenizer_of(datasets: Sequence[TokenDataset]) -> str | None:
    """The identity of the tokenizer that made the data, of the first dataset that says so."""
    return next((told.by for dataset in datasets if (told := dataset.made)), None)


def find_end_of_text(config: Config, datasets: Sequence[TokenDataset]) -> tuple[int | None, str]:
    """The end-of-text id of all the data of a configuration, and where it is from.

    Of several datasets the first whose manifest names one decides.
    """
    if config.Data.dataset.eos_token_id is not None:
        return config.Data.dataset.eos_token_id, "Data.dataset.eos_token_id"
    for dataset in datasets:
        told = dataset.made
        if told is not None and told.eos_id is not None:
            return told.eos_id, f"the manifest of {dataset.path}"
    if config.Model.vocab_size > GPT2_EOS:
        return GPT2_EOS, "GPT-2's; the data has no manifest"
    return None, "unknown, so nothing is masked; set Data.dataset.eos_token_id"


def check_agreement(
    datasets: Sequence[TokenDataset], vocab_size: int, tokenizer: str | None, allowed: bool
) -> list[str]:
    """Raise DataError for the first disagreement, or return them all where they are allowed.

    `tokenizer` is the path in Global.tokenizer. Training does not need it, so one that cannot be
    read is only mentioned.
    """
    told = [(dataset, made_by) for dataset in datasets if (made_by := dataset.made)]
    wrong, remarks = [], []
    for dataset, made_by in told:
        if made_by.vocab_size > vocab_size:
            wrong.append(
                f"{dataset.path}: made with a tokenizer of {made_by.vocab_size} tokens, more than "
                f"Model.vocab_size={vocab_size}; set Model.vocab_size={made_by.vocab_size}, or "
                "more, or name data of a smaller vocabulary"
            )
    if told:
        first, first_made = told[0]
        wrong += [
            f"{dataset.path}: made with another tokenizer ({_short(made_by.by)}) than {first.path} "
            f"({_short(first_made.by)}), so the same id means two things; prepare both with one"
            for dataset, made_by in told[1:]
            if not made_by.names & first_made.names
        ]
    if told and tokenizer is not None:
        try:
            named = Tokenizer.load(tokenizer)
        except UserError as error:
            remarks.append(f"whether the data was made with Global.tokenizer is unknown: {error}")
        else:
            wrong += [
                f"{dataset.path}: made with another tokenizer ({_short(made_by.by)}) than "
                f"Global.tokenizer={tokenizer} ({_short(named.identity)}); name the one it was "
                "made with, or prepare the data again"
                for dataset, made_by in told
                if not any(map(named.is_known_as, made_by.names))
            ]
    if wrong and not allowed:
        raise DataError(f"{wrong[0]}; {REMEDY}")
    return remarks + wrong


def check_checkpoint_tokenizer(
    saved: Any, datasets: Sequence[TokenDataset], checkpoint: str, allowed: bool
) -> list[str]:
    """The same for the identity a checkpoint recorded, None where its data had none."""
    present = next((told for dataset in datasets if (told := dataset.made)), None)
    if saved is None or present is None or saved in present.names:
        return []
    text = (
        f"{checkpoint} was trained on data made with another tokenizer ({_short(str(saved))}) than "
        f"the data named now ({_short(present.by)}): the model knows each id as another text; go "
        "on with data of the checkpoint's tokenizer, or start a new run"
    )
    if not allowed:
        raise DataError(f"{text}; {REMEDY}")
    return [text]


def _short(identity: str) -> str:
    return identity[:12]
