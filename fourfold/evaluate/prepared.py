"""The tokens of one part of `Data.dataset`, each document once and in file order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fourfold.config import Config
from fourfold.data.agreement import made
from fourfold.data.dataset import TokenDataset
from fourfold.data.serving import Part, check_parts, parts_of
from fourfold.data.split import PARTS, document_ranges
from fourfold.engine.feeds import GPT2_EOS
from fourfold.errors import DataError
from fourfold.tokenizer import Tokenizer


def read_part(config: Config) -> tuple[np.ndarray, int | None]:
    """Tokens of the part `Eval.part`, at most `Eval.max_tokens`, and the end-of-text id if known.

    A weighted mixture is read as its sources, whole and one after the other: what is measured is
    the data, not the order training would take it in.
    """
    name = config.Eval.part
    parts = parts_of(config)
    part = parts.get(name)
    if part is None:
        raise DataError(
            f"Eval.part={name}, but Data.dataset.{name}_data is null; choose one of "
            f"{', '.join(parts)}"
        )
    check_parts(config, {name: part})
    limit, found, pieces = config.Eval.max_tokens, 0, []
    for document in _documents(part, name):
        pieces.append(np.asarray(document, np.int64))
        found += len(document)
        if limit is not None and found >= limit:
            break
    tokens = np.concatenate([np.empty(0, np.int64), *pieces])[:limit]
    if len(tokens) < 2:
        raise DataError(
            f"the {name} part of the data holds {len(tokens)} tokens; give it a share in "
            "Data.dataset.split, or choose another Eval.part"
        )
    return tokens, _end_of_text(config, part.datasets)


def _documents(part: Part, name: str) -> Iterator[np.ndarray]:
    for source in part.datasets:
        first, last = document_ranges(part.serving.split, len(source))[PARTS.index(name)]
        for document in range(first, last):
            yield source.tokens(document)


def _end_of_text(config: Config, sources: list[TokenDataset]) -> int | None:
    if config.Data.dataset.eos_token_id is not None:
        return config.Data.dataset.eos_token_id
    told = next((told.eos_id for source in sources if (told := made(source))), None)
    if told is None and config.Model.vocab_size > GPT2_EOS:
        return GPT2_EOS  # as training takes it
    return told


def count_bytes(tokens: np.ndarray, tokenizer: Tokenizer) -> int:
    """Bytes of the text the tokens stand for; an end of text stands for none."""
    total = 0
    for document in np.split(tokens, np.flatnonzero(tokens == tokenizer.eos_id)):
        text = tokenizer.decode(document[document != tokenizer.eos_id].tolist())
        total += len(text.encode("utf-8"))
    return total
