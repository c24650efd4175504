"""One part (train, valid or test) of the data as numbered samples of seq_len + 1 tokens.

With several datasets the split is applied to each, and the documents of the part follow each
other in the order of the datasets. Which tokens sample i holds depends on the content, the split,
the part, seq_len, num_samples, the seed and the order, all of which are in `fingerprint`, and on
nothing else.

`num_samples` decides the number of epochs, and with it the whole order: opening the same data for
more samples may reshuffle all of them (as in Megatron). `len` is what those epochs hold, at least
`num_samples`, or 0 if the part has no tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from fourfold.data import cache
from fourfold.data.dataset import TokenDataset, blocks
from fourfold.data.indices import (
    ORDERS,
    Plan,
    build_indices,
    plan_indices,
    sample_index_dtype,
    shuffle_index_dtype,
)
from fourfold.data.split import PARTS, document_ranges
from fourfold.errors import DataError


class Samples:
    """Random access to the samples of one part; `Samples.open` builds or finds the indices."""

    def __init__(
        self,
        sources: Sequence[TokenDataset],
        plan: Plan,
        indices: cache.Arrays,
        fingerprint: str,
        name: str,
    ) -> None:
        self.sources = list(sources)
        self.seq_len = plan.seq_len
        self.epochs = plan.epochs
        self.tokens_per_epoch = plan.tokens_per_epoch
        self.num_documents = plan.documents
        self.fingerprint = fingerprint
        self.name = name
        self._num_samples = plan.num_samples
        self._indices = indices
        self._first_documents = first_documents(sources)

    @classmethod
    def open(
        cls,
        sources: Sequence[TokenDataset],
        split: str | Sequence[float],
        part: str,
        seq_len: int,
        num_samples: int,
        seed: int,
        order: str = "megatron",
        cache_dir: str | Path | None = None,
    ) -> Samples:
        """Open a part, building its indices unless they are in the cache."""
        _check_arguments(sources, part, seq_len, num_samples, seed, order)
        ranges, tokens_per_epoch = part_documents(sources, split, part)
        documents = sum(last - first for first, last in ranges)
        plan = plan_indices(documents, tokens_per_epoch, seq_len, num_samples)
        fingerprint = cache.key_of(
            {
                "what": "sample indices",
                "content": [source.fingerprint for source in sources],
                "documents": ranges,
                "seq_len": seq_len,
                "num_samples": num_samples,
                "seed": seed,
                "order": order,
            }
        )
        sizes = all_sizes(sources)
        indices: cache.Arrays = {}
        if plan.num_samples > 0:
            indices = cache.cached_arrays(
                cache.places(sources[0].path.parent, cache_dir),
                fingerprint,
                _expected(plan, sizes),
                lambda: build_indices(ranges, sizes, plan, seed, order),
            )
        return cls(sources, plan, indices, fingerprint, f"{part} part of {sources[0].path.parent}")

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, i: int) -> np.ndarray:
        """Sample i: seq_len + 1 token ids, int64."""
        return self.read(i, np.empty(self.seq_len + 1, np.int64))

    def read(self, i: int, out: np.ndarray) -> np.ndarray:
        """Copy sample i into `out`, of length seq_len + 1."""
        position = 0
        for span in self._spans(i):
            out[position : position + len(span)] = span
            position += len(span)
        return out

    def count_inputs(self, i: int, token: int) -> int:
        """How many of the first seq_len tokens of sample i equal `token`, without copying it."""
        spans = list(self._spans(i))
        last = int(spans[-1][-1] == token)
        return sum(int(np.count_nonzero(span == token)) for span in spans) - last

    def _spans(self, i: int) -> Iterator[np.ndarray]:
        """Views of the tokens of sample i, one per document it touches."""
        if not 0 <= i < self._num_samples:
            raise IndexError(f"sample {i} of {self._num_samples}")
        document_index = self._indices["document_index"]
        sample_index = self._indices["sample_index"]
        row = int(self._indices["shuffle_index"][i])
        if row >= self._num_samples:
            raise self._damaged(i)
        (first, start), (last, end) = sample_index[row : row + 2].tolist()
        if not 0 <= first <= last < len(document_index):
            raise self._damaged(i)
        remaining = self.seq_len + 1
        for position in range(first, last + 1):
            number = int(document_index[position])
            if not 0 <= number < self._first_documents[-1]:
                raise self._damaged(i)
            source, document = self._locate(number)
            size = int(source.sizes[document])
            begin = start if position == first else 0
            stop = end + 1 if position == last else size
            if not 0 <= begin <= stop <= size or stop - begin > remaining:
                raise self._damaged(i)
            remaining -= stop - begin
            if stop > begin:
                yield source.tokens(document, begin, stop)
        if remaining:
            raise self._damaged(i)

    def _locate(self, number: int) -> tuple[TokenDataset, int]:
        """The dataset of a document numbered over all datasets, and its number there."""
        source = bisect_right(self._first_documents, number) - 1
        return self.sources[source], number - self._first_documents[source]

    def _damaged(self, i: int) -> DataError:
        return DataError(
            f"{self.name}: sample {i} does not follow from the cached index {self.fingerprint}; "
            "the cache is damaged, delete that directory and start again"
        )


def part_documents(
    sources: Sequence[TokenDataset], split: str | Sequence[float], part: str
) -> tuple[list[tuple[int, int]], int]:
    """The part's documents, numbered over all datasets, as ranges; and their tokens."""
    ranges, tokens = [], 0
    for source, base in zip(sources, first_documents(sources)):
        first, last = document_ranges(split, len(source))[PARTS.index(part)]
        ranges.append((base + first, base + last))
        tokens += sum(int(block.sum(dtype=np.int64)) for block in blocks(source.sizes[first:last]))
    return ranges, tokens


def first_documents(sources: Sequence[TokenDataset]) -> list[int]:
    """The number of each dataset's first document over all datasets, and their total."""
    return [0, *np.cumsum([len(source) for source in sources]).tolist()]


def all_sizes(sources: Sequence[TokenDataset]) -> np.ndarray:
    """Document lengths over all datasets; of a single one, the array itself."""
    if len(sources) == 1:
        return sources[0].sizes
    return np.concatenate([source.sizes for source in sources])


def _expected(plan: Plan, sizes: np.ndarray) -> cache.Expected:
    """Shape and dtype of the indices: what a cache entry must hold."""
    return {
        "document_index": ((plan.epochs * plan.documents,), np.dtype(np.int32)),
        "sample_index": ((plan.num_samples + 1, 2), sample_index_dtype(sizes)),
        "shuffle_index": ((plan.num_samples,), shuffle_index_dtype(plan)),
    }


def _check_arguments(
    sources: Sequence[TokenDataset],
    part: str,
    seq_len: int,
    num_samples: int,
    seed: int,
    order: str,
) -> None:
    if not sources:
        raise DataError("no dataset to take samples from")
    if part not in PARTS:
        raise DataError(f"part={part!r} is not one of {', '.join(PARTS)}")
    if order not in ORDERS:
        raise DataError(f"order={order!r} is not one of {', '.join(ORDERS)}")
    if seq_len < 1:
        raise DataError(f"seq_len={seq_len} must be at least 1")
    if num_samples < 0:
        raise DataError(f"num_samples={num_samples} must not be negative")
    if not 0 <= seed < 2**32:
        raise DataError(f"seed={seed} must be between 0 and 2^32 - 1")
