"""Samples: one part (train, valid or test) of the data, numbered, each of seq_len + 1 tokens.

A `SampleSpec` says how samples are cut and ordered. With several datasets the split is applied to
each, and the documents of the part follow each other in the order of the datasets. Which tokens
sample i holds depends only on what `fingerprint` covers: the content, the split, the part, seq_len,
the seed and the order.

In the orders megatron and fleetx `num_samples` decides the number of epochs, and with it the whole
order: opening the same data for more samples may reshuffle all of them, as in the originals. In the
order elastic it has no influence: sample i is the same however many are requested. `len` is what
the epochs hold, at least `num_samples`, or 0 if the part has no tokens.

The split gives training, validation and test contiguous ranges of documents in file order:

    document_ranges("949,50,1", 1000) -> [(0, 949), (949, 999), (999, 1000)]

Shares count documents, not tokens. A range may be empty. Data prepared for another system is cut
where that system would cut it, which takes its rule of rounding:

    megatron_core        each border is the sum of the shares before it, rounded
    megatron_deepspeed   each share is rounded on its own, and what the rounding errors add up to
                         is taken off every border but the first; FleetX does the same
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fourfold import storage
from fourfold.config.recipe import Rounding, parse_split
from fourfold.data import cache
from fourfold.data.datasets import TokenDataset
from fourfold.data.index import (
    ORDERS,
    EndPositions,
    build_elastic_indices,
    build_indices,
    document_index_dtype,
    find_ends,
    open_counts,
    plan_elastic,
    plan_indices,
    sample_index_dtype,
    shuffle_index_dtype,
)
from fourfold.errors import DataError

PARTS = ("train", "valid", "test")


# -- the split -------------------------------------------------------------------------------


def document_ranges(
    split: str | Sequence[float], num_documents: int, rounding: Rounding = "megatron_core"
) -> list[tuple[int, int]]:
    """The document range of each part."""
    try:
        shares = parse_split(split)
    except ValueError as error:
        raise DataError(f"split={split!r}: {error}") from None
    if rounding == "megatron_core":
        borders = [round(share * num_documents) for share in accumulate(shares, initial=0.0)]
        return list(pairwise(borders))
    borders = list(accumulate((round(share * num_documents) for share in shares), initial=0))
    excess = borders[-1] - num_documents
    # Where a border would move below 0, which the originals then fail on, it stays at 0.
    return list(pairwise([0, *(max(border - excess, 0) for border in borders[1:])]))


def whole_split(part: str) -> list[float]:
    """The split in which one part has every document."""
    return [1.0 if name == part else 0.0 for name in PARTS]


# -- samples ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class SampleSpec:
    """How the samples of a part are cut, ordered and blended, whatever they are taken from."""

    split: str | Sequence[float]
    part: str
    seq_len: int
    seed: int
    order: str = "megatron"
    blend_rounding: Rounding = "megatron_core"
    cache_dir: str | Path | None = None
    split_rounding: Rounding = "megatron_core"

    def __post_init__(self) -> None:
        if self.part not in PARTS:
            raise DataError(f"part={self.part!r} is not one of {', '.join(PARTS)}")
        if self.order not in ORDERS:
            raise DataError(f"order={self.order!r} is not one of {', '.join(ORDERS)}")
        if self.seq_len < 1:
            raise DataError(f"seq_len={self.seq_len} must be at least 1")
        if not 0 <= self.seed < 2**32:
            raise DataError(f"seed={self.seed} must be between 0 and 2^32 - 1")

    def documents(self, dataset: TokenDataset) -> range:
        """The documents of a dataset that belong to the part."""
        ranges = document_ranges(self.split, len(dataset), self.split_rounding)
        return range(*ranges[PARTS.index(self.part)])

    def cache_places(self, datasets: Sequence[TokenDataset]) -> list[Path]:
        """Where indices of samples from these datasets are kept."""
        return cache.places(datasets[0].path.parent, self.cache_dir)


@dataclass(frozen=True)
class SampleStream:
    """The endless stream of samples of one part in one order: what determines it, its counts."""

    spec: SampleSpec
    inputs: dict[str, Any]
    ranges: list[tuple[int, int]]  # of documents, numbered over all datasets
    tokens_per_epoch: int

    @classmethod
    def from_sources(cls, sources: Sequence[TokenDataset], spec: SampleSpec) -> SampleStream:
        if not sources:
            raise DataError("no dataset to take samples from")
        ranges, tokens_per_epoch = [], 0
        for source, base in zip(sources, first_documents(sources)):
            documents = spec.documents(source)
            ranges.append((base + documents.start, base + documents.stop))
            tokens_per_epoch += source.count_tokens(documents.start, documents.stop)
        inputs = {
            "content": [source.fingerprint for source in sources],
            "documents": ranges,
            "seq_len": spec.seq_len,
            "seed": spec.seed,
            "order": spec.order,
        }
        return cls(spec, inputs, ranges, tokens_per_epoch)

    @property
    def documents(self) -> int:
        return sum(last - first for first, last in self.ranges)

    @property
    def identity(self) -> str:
        return cache.key_of({**self.inputs, "what": "stream of samples"})


class Samples:
    """Random access to the samples of one part; `Samples.open` builds or finds the indices.

    `identity` names the endless stream of samples; `fingerprint` also covers how many of them were
    requested if, as in the originals' orders, that changes them all.
    """

    def __init__(
        self,
        sources: Sequence[TokenDataset],
        stream: SampleStream,
        num_samples: int,
        epochs: int,
        fingerprint: str,
        shards: IndexShards,
    ) -> None:
        self.sources = list(sources)
        self.seq_len = stream.spec.seq_len
        self.epochs = epochs
        self.tokens_per_epoch = stream.tokens_per_epoch
        self.num_documents = stream.documents
        self.identity = stream.identity
        self.fingerprint = fingerprint
        self.name = f"{stream.spec.part} part of {storage.name_of(sources[0].path.parent)}"
        self.is_remote = any(source.is_remote for source in self.sources)
        self._num_samples = num_samples
        self._shards = shards
        self._first_documents = first_documents(sources)
        self._ends: tuple[int, EndPositions] | None = None
        self._counts: dict[int, np.ndarray] = {}

    @classmethod
    def open(
        cls,
        sources: Sequence[TokenDataset],
        spec: SampleSpec,
        num_samples: int,
        first_sample: int = 0,
    ) -> Samples:
        """Open a part, building its indices unless they are in the cache.

        In elastic order only what is needed from `first_sample` on is built ahead.
        """
        if num_samples < 0:
            raise DataError(f"num_samples={num_samples} must not be negative")
        stream = SampleStream.from_sources(sources, spec)
        if spec.order == "elastic":
            return cls._open_elastic(sources, stream, num_samples, first_sample)
        plan = plan_indices(stream.documents, stream.tokens_per_epoch, spec.seq_len, num_samples)
        fingerprint = cache.key_of(
            {**stream.inputs, "what": "sample indices", "num_samples": num_samples}
        )
        sizes = functools.cache(lambda: all_sizes(sources))
        shards = IndexShards(
            spec.cache_places(sources),
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
            lambda _: build_indices(stream.ranges, sizes(), plan, spec.seed, spec.order),
        )
        shards.prepare(0, plan.num_samples)
        return cls(sources, stream, plan.num_samples, plan.epochs, fingerprint, shards)

    @classmethod
    def _open_elastic(
        cls,
        sources: Sequence[TokenDataset],
        stream: SampleStream,
        num_samples: int,
        first_sample: int,
    ) -> Samples:
        spec = stream.spec
        plan = plan_elastic(stream.documents, stream.tokens_per_epoch, spec.seq_len)
        epochs = max(-(-num_samples // plan.samples_per_epoch), 1) if plan.samples_per_epoch else 0
        together = plan.epochs_per_entry
        sizes = functools.cache(lambda: all_sizes(sources))
        rows = plan.samples_per_epoch + 1
        shards = IndexShards(
            spec.cache_places(sources),
            [
                cache.key_of(
                    {**stream.inputs, "what": "elastic indices", "epochs": together, "entry": shard}
                )
                for shard in range(-(-epochs // together))
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
            lambda shard: build_elastic_indices(stream.ranges, sizes(), plan, spec.seed, shard),
        )
        length = epochs * plan.samples_per_epoch
        shards.prepare(first_sample, min(num_samples, length))
        return cls(sources, stream, length, epochs * plan.passes, stream.identity, shards)

    def __len__(self) -> int:
        return self._num_samples

    @property
    def places(self) -> list[Path]:
        """The directories its indices are kept in."""
        return self._shards.locations()

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
        """Count `token` in every sample, or load the counts, so that `count_all` need not read.

        If another rank should have counted and left nothing, nothing is done.
        """
        ends = find_ends(self.sources, token)
        if ends is not None:
            self._ends, self._counts = (token, ends), {}
            for shard in self._shards.opened:
                self._counts[shard] = self._shards.counts(shard, ends, token)

    def has_indexed(self, token: int) -> bool:
        return self._ends is not None and self._ends[0] == token

    def count_all(self, samples: np.ndarray, token: int) -> int:
        """`count_inputs` of several samples, added up."""
        if self._ends is None or self._ends[0] != token:
            return sum(self.count_inputs(int(i), token) for i in samples)
        total = 0
        for shard, indices, places in self._shards.group(samples):
            if shard not in self._counts:
                self._counts[shard] = self._shards.counts(shard, self._ends[1], token)
            counts, rows = self._counts[shard], indices["shuffle_index"][places]
            if len(rows) and int(rows.max()) >= len(counts):
                raise self._damaged(int(samples[0]))
            total += int(counts[rows].sum(dtype=np.int64))
        return total

    def _spans(self, i: int) -> Iterator[np.ndarray]:
        """Views of the tokens of sample i, one per document it touches."""
        for source, document, begin, stop in self.places_of(i):
            yield source.tokens(document, begin, stop)

    def places_of(self, i: int) -> Iterator[tuple[TokenDataset, int, int, int]]:
        """The parts of documents that make up sample i: dataset, document there, and which of its
        tokens, first and after the last."""
        if not 0 <= i < self._num_samples:
            raise IndexError(f"sample {i} of {self._num_samples}")
        indices, place = self._shards.locate(i)
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
                yield source, document, begin, stop
        if remaining:
            raise self._damaged(i)

    def _locate(self, number: int) -> tuple[TokenDataset, int]:
        """The dataset of a document numbered over all datasets, and its number there."""
        source = bisect_right(self._first_documents, number) - 1
        return self.sources[source], number - self._first_documents[source]

    def _damaged(self, i: int) -> DataError:
        return DataError(
            f"{self.name}: sample {i} does not follow from the cached index "
            f"{self._shards.key(i)}; the cache is damaged, delete that directory and start again"
        )


class IndexShards:
    """The cached indices a part's samples are read through, `samples_per_shard` in each shard."""

    def __init__(
        self,
        places: Sequence[Path],
        keys: Sequence[str],
        samples_per_shard: int,
        expected: cache.Expected,
        build: Callable[[int], cache.Arrays],
    ) -> None:
        self._places = places
        self._keys = keys
        self._samples_per_shard = samples_per_shard
        self._expected = expected
        self._build = build
        self._opened: dict[int, cache.Arrays] = {}

    def prepare(self, first_sample: int, last_sample: int) -> None:
        """Open, building where necessary, all that samples first..last-1 need."""
        size = self._samples_per_shard
        for shard in range(first_sample // size, -(-last_sample // size)):
            self._open(shard)

    def locate(self, sample: int) -> tuple[cache.Arrays, int]:
        """The indices of the shard that holds a sample, and the sample's number there."""
        shard, number = divmod(sample, self._samples_per_shard)
        return self._opened.get(shard) or self._open(shard), number

    def group(self, samples: np.ndarray) -> Iterator[tuple[int, cache.Arrays, np.ndarray]]:
        """Some samples, shard by shard: its number, its indices, and their numbers there."""
        shards = samples // self._samples_per_shard
        for shard in np.unique(shards).tolist():
            arrays = self._opened.get(shard) or self._open(shard)
            yield shard, arrays, samples[shards == shard] - shard * self._samples_per_shard

    def counts(self, shard: int, ends: EndPositions, token: int) -> np.ndarray:
        """The end-of-text tokens of every row of a shard's sample index."""
        indices = self._opened.get(shard) or self._open(shard)
        return open_counts(self._places, self._keys[shard], indices, ends, token)

    def key(self, sample: int) -> str:
        return self._keys[sample // self._samples_per_shard]

    @property
    def opened(self) -> list[int]:
        return sorted(self._opened)

    def locations(self) -> list[Path]:
        """Where the shards opened so far are cached; without those that could not be."""
        found = [cache.location(self._places, self._keys[shard]) for shard in self.opened]
        return [place for place in found if place is not None]

    def _open(self, shard: int) -> cache.Arrays:
        arrays = cache.cached_arrays(
            self._places, self._keys[shard], self._expected, lambda: self._build(shard)
        )
        self._opened[shard] = arrays
        return arrays


def first_documents(sources: Sequence[TokenDataset]) -> list[int]:
    """The number of each dataset's first document over all datasets, and their total."""
    return [0, *np.cumsum([len(source) for source in sources]).tolist()]


def all_sizes(sources: Sequence[TokenDataset]) -> np.ndarray:
    """Document lengths over all datasets; of a single one, the array itself."""
    if len(sources) == 1:
        return sources[0].sizes
    return np.concatenate([source.sizes for source in sources])


def _offset_dtype(sources: Sequence[TokenDataset]) -> np.dtype:
    return np.result_type(*(sample_index_dtype(source.sizes) for source in sources))
