"""How many end-of-text tokens each sample holds, without reading the samples.

The loss of a global batch is an average over the tokens of all its samples that count, so every
rank needs the number of end-of-text tokens in the samples of all others. It is counted once, for
every row of a sample index, and kept beside that index.

Where the tokens lie follows from the lengths of documents for data `fourfold data prepare` wrote:
each document ends with one and holds no other. Other data is read once from start to end, and
their positions are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fourfold import heartbeat
from fourfold.data import cache
from fourfold.data.dataset import TokenDataset
from fourfold.data.files import passing_blocks

BLOCK = 1 << 20
STRIPE_TOKENS = 1 << 30
LOOKED_AT = 1024
# What is known of a dataset whose tokens need not be looked for.
LAST_TOKENS, NOWHERE = "the last token of every document", "nowhere"


class Ends:
    """The end-of-text tokens of documents, which are numbered over all datasets."""

    def __init__(self, datasets: Sequence[TokenDataset], found: Sequence[np.ndarray | str]) -> None:
        """`found` are the positions in each dataset, ascending, or what is known without any."""
        self._datasets = datasets
        self._found = found
        self._first_documents = np.cumsum([0, *map(len, datasets)])
        self.times = [dataset.path.stat().st_mtime_ns for dataset in datasets]

    def in_documents(self, documents: np.ndarray) -> np.ndarray:
        """How many each of these documents holds."""
        return self._count(documents, None)

    def before(self, documents: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """How many each holds before its token of that number."""
        return self._count(documents, tokens)

    def _count(self, documents: np.ndarray, tokens: np.ndarray | None) -> np.ndarray:
        counts = np.zeros(len(documents), np.int64)
        for number, (dataset, found) in enumerate(zip(self._datasets, self._found)):
            first, last = self._first_documents[number : number + 2]
            inside = np.flatnonzero((documents >= first) & (documents < last))
            if not len(inside):
                continue
            own = documents[inside] - first
            sizes = np.asarray(dataset.sizes[own], np.int64)
            upto = sizes if tokens is None else tokens[inside]
            if isinstance(found, str):
                counts[inside] = (upto == sizes) & (sizes > 0) & (found == LAST_TOKENS)
            else:
                starts = dataset.starts(own)
                counts[inside] = found.searchsorted(starts + upto) - found.searchsorted(starts)
        return counts


def find_ends(datasets: Sequence[TokenDataset], token: int) -> Ends | None:
    """Where `token` lies in all datasets; None where another rank should have found out."""
    found = [_find(dataset, token) for dataset in datasets]
    known = [each for each in found if each is not None]
    return Ends(datasets, known) if len(known) == len(found) else None


def _find(dataset: TokenDataset, token: int) -> np.ndarray | str | None:
    appended = (dataset.manifest or {}).get("append_eod")
    if (
        isinstance(appended, bool)
        and dataset.is_as_written
        and dataset.made is not None
        and dataset.made.eos_id == token
        and _looks_so(dataset, token, appended)
    ):
        return LAST_TOKENS if appended else NOWHERE
    stripes = []
    for start in range(0, dataset.num_tokens, STRIPE_TOKENS):
        stripe = _find_in_stripe(dataset, token, start)
        if stripe is None:
            return None
        stripes.append(stripe)
    return stripes[0] if len(stripes) == 1 else np.concatenate([np.empty(0, np.int64), *stripes])


def _looks_so(dataset: TokenDataset, token: int, appended: bool) -> bool:
    """Whether some documents end as the manifest says all do."""
    step = max(1, len(dataset) // LOOKED_AT)
    ends = (dataset.tokens(d)[-1] for d in range(0, len(dataset), step) if dataset.sizes[d])
    return all((end == token) == appended for end in ends)


def _find_in_stripe(dataset: TokenDataset, token: int, start: int) -> np.ndarray | None:
    """The positions of `token` from `start` on, for as many tokens as are kept together."""
    key = cache.key_of(
        {
            "what": "positions of a token",
            "content": dataset.fingerprint,
            "time": dataset.path.stat().st_mtime_ns,
            "token": token,
            "start": start,
            "tokens": STRIPE_TOKENS,
        }
    )
    if cache.is_trusted() and cache.location(dataset.places, key) is None:
        return None

    def build() -> cache.Arrays:
        positions, begin = [np.empty(0, np.int64)], start
        for block in passing_blocks(dataset.ids[start : start + STRIPE_TOKENS]):
            positions.append(np.flatnonzero(block == token) + begin)
            begin += len(block)
            heartbeat.alive()
        return {"positions": np.concatenate(positions)}

    expected: cache.Expected = {"positions": (cache.ANY_LENGTH, np.dtype(np.int64))}
    return cache.cached_arrays(dataset.places, key, expected, build)["positions"]


def open_counts(
    places: Sequence[Path], index_key: str, indices: cache.Arrays, ends: Ends, token: int
) -> np.ndarray:
    """The count of every row of a sample index, kept in the cache beside it."""
    rows = len(indices["sample_index"]) - 1
    inputs = {"what": "end-of-text counts", "index": index_key, "times": ends.times}
    key = cache.key_of({**inputs, "token": token})
    expected: cache.Expected = {"counts": ((rows,), np.dtype(np.uint32))}
    return cache.cached_arrays(places, key, expected, lambda: _count_rows(indices, ends))["counts"]


def _count_rows(indices: cache.Arrays, ends: Ends) -> cache.Arrays:
    """A sample's inputs are the tokens from its row of the index up to the next one."""
    documents, index = indices["document_index"], indices["sample_index"]
    positions = np.ascontiguousarray(index[:, 0])
    borders = np.append(np.arange(0, len(documents), BLOCK), len(documents))
    rows = positions.searchsorted(borders)
    before = np.zeros(len(index), np.int64)
    total = 0
    for first, last, row, next_row in zip(borders, borders[1:], rows, rows[1:]):
        block = documents[first:last]
        counts = ends.in_documents(block)
        until = np.cumsum(counts) - counts + total
        places = positions[row:next_row] - first
        within = ends.before(block[places], index[row:next_row, 1])
        before[row:next_row] = until[places] + within
        total += int(counts.sum())
        heartbeat.alive()
    return {"counts": np.diff(before).astype(np.uint32)}
