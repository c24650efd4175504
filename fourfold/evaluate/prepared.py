"""The tokens of one part of `Data.dataset`, each document once and in file order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fourfold.config import Config
from fourfold.data.agreement import find_end_of_text
from fourfold.data.dataset import TokenDataset
from fourfold.data.serving import Part, all_datasets, check_parts, parts_of
from fourfold.errors import DataError

# Tokens of a document read at a time.
PIECE_TOKENS = 1 << 16


def read_part(config: Config) -> tuple[Iterator[np.ndarray], int | None]:
    """Tokens of the part `Eval.part`, at most `Eval.max_tokens`, and the end-of-text id if known.

    They come in pieces, read from the files as they are asked for.

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
    found = sum(
        int(source.sizes[documents.start : documents.stop].sum(dtype=np.int64))
        for source, documents in _documents(part)
    )
    if found < 2:
        raise DataError(
            f"the {name} part of the data holds {found} tokens; give it a share in "
            "Data.dataset.split, or choose another Eval.part"
        )
    end_of_text, _ = find_end_of_text(config, all_datasets(parts))
    return _pieces(part, config.Eval.max_tokens or found), end_of_text


def _documents(part: Part) -> Iterator[tuple[TokenDataset, range]]:
    for source in part.datasets:
        yield source, part.serving.documents(source)


def _pieces(part: Part, left: int) -> Iterator[np.ndarray]:
    for source, documents in _documents(part):
        for document in documents:
            size = int(source.sizes[document])
            for start in range(0, size, PIECE_TOKENS):
                stop = min(start + PIECE_TOKENS, size, start + left)
                yield source.tokens(document, start, stop)
                left -= stop - start
                if left == 0:
                    return
