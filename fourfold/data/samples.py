"""One part (train, valid or test) of the data as numbered samples of seq_len + 1 tokens.

With several datasets the split is applied to each, and the documents of the part follow each
other in the order of the datasets. Which tokens sample i holds depends on what `fingerprint`
covers, and on nothing else: the content, the split, the part, seq_len, the seed and the order.

In the orders megatron and fleetx `num_samples` decides the number of epochs, and with it the whole
order: opening the same data for more samples may reshuffle all of them, as in the originals. In
the order elastic it decides nothing: sample i is the same however many are asked for. `len` is
what the epochs hold, at least `num_samples`, or 0 if the part has no tokens.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fourfold.config.recipe import Rounding
from fourfold.data import cache
from fourfold.data.dataset import TokenDataset
from fourfold.data.ends import Ends, find_ends, open_counts
from fourfold.data.indices import (
    ORDERS,
    build_elastic_indices,
    build_indices,
    document_index_dtype,
    plan_elastic,
    plan_indices,
    sample_index_dtype,
    shuffle_index_dtype,
)
from fourfold.data.split import PARTS, document_ranges
from fourfold.errors import DataError


@dataclass(frozen=True)
class Stream:
    """The samples of one part in one order, without end: what decides them, and its counts."""

    inputs: dict[str, Any]
    part: str
    ranges: list[tuple[int, int]]
    tokens_per_epoch: int
    seq_len: int
    seed: int

    @classmethod
    def of(
        cls,
        sources: Sequence[TokenDataset],
        split: str | Sequence[float],
        part: str,
        seq_len: int,
        seed: int,
        order: str,
        split_rounding: Rounding = "megatron_core",
    ) -> Stream:
        _check_arguments(sources, part, seq_len, seed, order)
        ranges, tokens_per_epoch = part_documents(sources, split, part, split_rounding)
        inputs = {
            "content": [source.fingerprint for source in sources],
            "documents": ranges,
            "seq_len": seq_len,
            "seed": seed,
            "order": order,
        }
        return cls(inputs, part, ranges, tokens_per_epoch, seq_len, seed)

    @property
    def documents(self) -> int:
        return sum(last - first for first, last in self.ranges)

    @property
    def identity(self) -> str:
        return cache.key_of({**self.inputs, "what": "stream of samples"})


class Entries:
    """The cached indices a part's samples are read through: `per_entry` samples in each."""

    def __init__(
        self,
        places: Sequence[Path],
        keys: Sequence[str],
        per_entry: int,
        expected: cache.Expected,
        build: Callable[[int], cache.Arrays],
    ) -> None:
        self._places = places
        self._keys = keys
        self._per_entry = per_entry
        self._expected = expected
        self._build = build
        self._opened: dict[int, cache.Arrays] = {}

    def prepare(self, first_sample: int, last_sample: int) -> None:
        """Open, building where necessary, all that samples first..last-1 need."""
        for entry in range(first_sample // self._per_entry, -(-last_sample // self._per_entry)):
            self._open(entry)

    def of(self, sample: int) -> tuple[cache.Arrays, int]:
        """The indices of the entry that holds a sample, and its place there."""
        entry, place = divmod(sample, self._per_entry)
        return self._opened.get(entry) or self._open(entry), place

    def key(self, sample: int) -> str:
        return self._keys[sample // self._per_entry]

    def _open(self, entry: int) -> cache.Arrays:
        arrays = cache.cached_arrays(
            self._places, self._keys[entry], self._expected, lambda: self._build(entry)
        )
        self._opened[entry] = arrays
        return arrays

    def parts(self, samples: np.ndarray) -> Iterator[tuple[int, cache.Arrays, np.ndarray]]:
        """Entry by entry: its number, its indices, and the places there of some samples."""
        entries = samples // self._per_entry
        for entry in np.unique(entries).tolist():
            arrays = self._opened.get(entry) or self._open(entry)
            yield entry, arrays, samples[entries == entry] - entry * self._per_entry

    def counts(self, entry: int, ends: Ends, token: int) -> np.ndarray:
        """The end-of-text tokens of every row of an entry's sample index."""
        indices = self._opened.get(entry) or self._open(entry)
        return open_counts(self._places, self._keys[entry], indices, ends, token)

    @property
    def opened(self) -> list[int]:
        return sorted(self._opened)

    def locations(self) -> list[Path]:
        """Where the entries opened so far are kept; without those that could not be."""
        found = [cache.location(self._places, self._keys[entry]) for entry in self.opened]
        return [place for place in found if place is not None]


class Samples:
    """Random access to the samples of one part; `Samples.open` builds or finds the indices.

    `identity` names the endless stream of samples; `fingerprint` also covers how many of them
    were asked for where, as in the originals' orders, that changes them all.
    """

    def __init__(
        self,
        sources: Sequence[TokenDataset],
        stream: Stream,
        num_samples: int,
        epochs: int,
        fingerprint: str,
        entries: Entries,
    ) -> None:
        self.sources = list(sources)
        self.seq_len = stream.seq_len
        self.epochs = epochs
        self.tokens_per_epoch = stream.tokens_per_epoch
        self.num_documents = stream.documents
        self.identity = stream.identity
        self.fingerprint = fingerprint
        self.name = f"{stream.part} part of {sources[0].path.parent}"
        self._num_samples = num_samples
        self._entries = entries
        self._first_documents = first_documents(sources)
        self._ends: tuple[int, Ends] | None = None
        self._counts: dict[int, np.ndarray] = {}

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
        first_sample: int = 0,
        split_rounding: Rounding = "megatron_core",
    ) -> Samples:
        """Open a part, building its indices unless they are in the cache.

        In elastic order only what is needed from `first_sample` on is built ahead.
        """
        if num_samples < 0:
            raise DataError(f"num_samples={num_samples} must not be negative")
        stream = Stream.of(sources, split, part, seq_len, seed, order, split_rounding)
        places = cache.places(sources[0].path.parent, cache_dir)
        if order == "elastic":
            return cls._open_elastic(sources, stream, num_samples, places, first_sample)
        plan = plan_indices(stream.documents, stream.tokens_per_epoch, seq_len, num_samples)
        fingerprint = cache.key_of(
            {**stream.inputs, "what": "sample indices", "num_samples": num_samples}
        )
        sizes = functools.cache(lambda: all_sizes(sources))
        entries = Entries(
            places,
            [fingerprint],
            max(plan.num_samples, 1),
            {
                "document_index": (
                    (plan.epochs * plan.documents,),
                    document_index_dtype(stream.ranges),
                ),
                "sample_index": ((plan.num_samples + 1, 2), _offset_dtype(sources)),
                "shuffle_index": ((plan.num_samples,), shuffle_index_dtype(plan)),
            },
            lambda _: build_indices(stream.ranges, sizes(), plan, seed, order),
        )
        entries.prepare(0, plan.num_samples)
        return cls(sources, stream, plan.num_samples, plan.epochs, fingerprint, entries)

    @classmethod
    def _open_elastic(
        cls,
        sources: Sequence[TokenDataset],
        stream: Stream,
        num_samples: int,
        places: Sequence[Path],
        first_sample: int,
    ) -> Samples:
        plan = plan_elastic(stream.documents, stream.tokens_per_epoch, stream.seq_len)
        epochs = max(-(-num_samples // plan.samples_per_epoch), 1) if plan.samples_per_epoch else 0
        together = plan.epochs_per_entry
        sizes = functools.cache(lambda: all_sizes(sources))
        rows = plan.samples_per_epoch + 1
        entries = Entries(
            places,
            [
                cache.key_of(
                    {**stream.inputs, "what": "elastic indices", "epochs": together, "entry": entry}
                )
                for entry in range(-(-epochs // together))
            ],
            max(plan.samples_per_entry, 1),
            {
                "document_index": (
                    (together * plan.passes * plan.documents,),
                    document_index_dtype(stream.ranges),
                ),
                "sample_index": ((together * rows, 2), _offset_dtype(sources)),
                "shuffle_index": (
                    (plan.samples_per_entry,),
                    np.dtype(np.uint32 if together * rows < 2**32 else np.int64),
                ),
            },
            lambda entry: build_elastic_indices(stream.ranges, sizes(), plan, stream.seed, entry),
        )
        length = epochs * plan.samples_per_epoch
        entries.prepare(first_sample, min(num_samples, length))
        return cls(sources, stream, length, epochs * plan.passes, stream.identity, entries)

    def __len__(self) -> int:
        return self._num_samples

    @property
    def places(self) -> list[Path]:
        """The directories its indices are kept in."""
        return self._entries.locations()

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

    def index_ends(self, token: int) -> None:
        """Count `token` in every sample, or find it counted, so that `count_all` need not read.

        Where another rank should have counted and left nothing, nothing is done.
        """
        ends = find_ends(self.sources, token)
        if ends is not None:
            self._ends, self._counts = (token, ends), {}
            for entry in self._entries.opened:
                self._counts[entry] = self._entries.counts(entry, ends, token)

    def has_indexed(self, token: int) -> bool:
        return self._ends is not None and self._ends[0] == token

    def count_all(self, samples: np.ndarray, token: int) -> int:
        """`count_inputs` of several samples, added up."""
        if self._ends is None or self._ends[0] != token:
            return sum(self.count_inputs(int(i), token) for i in samples)
        total = 0
        for entry, indices, places in self._entries.parts(samples):
            if entry not in self._counts:
                self._counts[entry] = self._entries.counts(entry, self._ends[1], token)
            counts, rows = self._counts[entry], indices["shuffle_index"][places]
            if len(rows) and int(rows.max()) >= len(counts):
                raise self._damaged(int(samples[0]))
            total += int(counts[rows].sum(dtype=np.int64))
        return total

    def _spans(self, i: int) -> Iterator[np.ndarray]:
        """Views of the tokens of sample i, one per document it touches."""
        if not 0 <= i < self._num_samples:
            raise IndexError(f"sample {i} of {self._num_samples}")
        indices, place = self._entries.of(i)
        document_index, sample_index = indices["document_index"], indices["sample_index"]
        row = int(indices["shuffle_index"][place])
        if row >= len(sample_index) - 1:
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
            f"{self.name}: sample {i} does not follow from the cached index "
            f"{self._entries.key(i)}; the cache is damaged, delete that directory and start again"
        )


def part_documents(
    sources: Sequence[TokenDataset],
    split: str | Sequence[float],
    part: str,
    rounding: Rounding = "megatron_core",
) -> tuple[list[tuple[int, int]], int]:
    """The part's documents, numbered over all datasets, as ranges; and their tokens."""
    ranges, tokens = [], 0
    for source, base in zip(sources, first_documents(sources)):
        first, last = document_ranges(split, len(source), rounding)[PARTS.index(part)]
        ranges.append((base + first, base + last))
        tokens += source.count_tokens(first, last)
    return ranges, tokens


def first_documents(sources: Sequence[TokenDataset]) -> list[int]:
    """The number of each dataset's first document over all datasets, and their total."""
    return [0, *np.cumsum([len(source) for source in sources]).tolist()]


def _offset_dtype(sources: Sequence[TokenDataset]) -> np.dtype:
    return np.result_type(*(sample_index_dtype(source.sizes) for source in sources))


def all_sizes(sources: Sequence[TokenDataset]) -> np.ndarray:
    """Document lengths over all datasets; of a single one, the array itself."""
    if len(sources) == 1:
        return sources[0].sizes
    return np.concatenate([source.sizes for source in sources])


def _check_arguments(
    sources: Sequence[TokenDataset], part: str, seq_len: int, seed: int, order: str
) -> None:
    if not sources:
        raise DataError("no dataset to take samples from")
    if part not in PARTS:
        raise DataError(f"part={part!r} is not one of {', '.join(PARTS)}")
    if order not in ORDERS:
        raise DataError(f"order={order!r} is not one of {', '.join(ORDERS)}")
    if seq_len < 1:
        raise DataError(f"seq_len={seq_len} must be at least 1")
    if not 0 <= seed < 2**32:
        raise DataError(f"seed={seed} must be between 0 and 2^32 - 1")
