"""Sample indices: the three arrays that turn documents into samples, as in Megatron and FleetX.

    document index   documents of all epochs in the order they are read
    sample index     row k: where sample k starts, as (position in the document index, token)
    shuffle index    the order in which samples are served

Sample k is the tokens k*L to k*L + L of the documents laid end to end in that order: L+1 tokens,
the last of which is also the first of sample k+1. Documents are repeated for as many epochs as the
requested samples need. If the last epoch would contribute less than 80 % of its samples, its
documents and samples are shuffled apart from the earlier ones, so that it does not thin them out.

The third order, elastic, is our own. Each epoch is cut and shuffled by itself, from random numbers
of its own, so that what sample k holds does not depend on how many samples are requested. The
tokens after an epoch's last whole sample (fewer than L, others each time) are left out of it.

Beside each sample index is the number of end-of-text tokens in every sample (`open_counts`), from
which a rank knows how many tokens of the other ranks' samples count for the loss.

Letters: D documents of the part, T tokens of the part, L sequence length, E epochs, N samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fourfold import heartbeat
from fourfold.data import cache
from fourfold.data.datasets import TokenDataset
from fourfold.errors import DataError

ORDERS = ("megatron", "fleetx", "elastic")
# Positions of documents are int32, in the originals' files as in ours; and so are their numbers
# unless a part is beyond it.
MAX_POSITIONS = 2**31 - 1
DOCUMENTS_AT_ONCE = 1 << 16
# Indices of short epochs are kept together: as many as make about this many rows of an entry.
ELASTIC_ROWS = 1 << 16
ELASTIC_EPOCHS = 256
# Of the search for end-of-text tokens.
ROWS_AT_ONCE = 1 << 20
STRIPE_TOKENS = 1 << 30
LOOKED_AT = 1024
# What is known of a dataset whose tokens need not be searched.
LAST_TOKENS, NOWHERE = "the last token of every document", "nowhere"


@dataclass(frozen=True)
class IndexPlan:
    """Everything about the indices of a part that follows from its counts alone."""

    documents: int
    tokens_per_epoch: int
    seq_len: int
    epochs: int
    num_samples: int
    first_epochs: int  # shuffled together; the rest, none or the last epoch, apart
    first_samples: int


def plan_indices(
    documents: int, tokens_per_epoch: int, seq_len: int, num_samples: int
) -> IndexPlan:
    """How many epochs `num_samples` take, and whether the last one is shuffled apart."""
    if tokens_per_epoch == 0:
        return IndexPlan(documents, 0, seq_len, 0, 0, 0, 0)
    epochs = max(-(-(num_samples * seq_len + 1) // tokens_per_epoch), 1)
    if documents * epochs > MAX_POSITIONS:
        raise DataError(
            f"{num_samples} samples of {seq_len} tokens would repeat the {documents} documents "
            f"({tokens_per_epoch} tokens) {epochs} times, more than 2^31 documents in all; give "
            "this part more data or request fewer samples"
        )
    total = (epochs * tokens_per_epoch - 1) // seq_len
    before_last = ((epochs - 1) * tokens_per_epoch - 1) // seq_len if epochs > 1 else 0
    per_epoch = (tokens_per_epoch - 1) // seq_len
    from_last = num_samples - before_last
    if epochs > 1 and from_last < int(0.80 * per_epoch):
        return IndexPlan(
            documents, tokens_per_epoch, seq_len, epochs, total, epochs - 1, before_last
        )
    return IndexPlan(documents, tokens_per_epoch, seq_len, epochs, total, epochs, total)


def build_indices(
    ranges: Sequence[tuple[int, int]], sizes: np.ndarray, plan: IndexPlan, seed: int, order: str
) -> dict[str, np.ndarray]:
    """Document, sample and shuffle index; `ranges` are the part's documents within `sizes`."""
    rng = np.random.RandomState(seed)
    document_index = build_document_index(ranges, plan, rng, shuffled=order == "megatron")
    sample_index = build_sample_index(sizes, document_index, plan)
    return {
        "document_index": document_index,
        "sample_index": sample_index,
        "shuffle_index": build_shuffle_index(plan, rng),
    }


def build_document_index(
    ranges: Sequence[tuple[int, int]], plan: IndexPlan, rng: np.random.RandomState, shuffled: bool
) -> np.ndarray:
    index = _listed(ranges, plan.epochs)  # (E D,)
    if shuffled:
        first = plan.first_epochs * plan.documents
        rng.shuffle(index[:first])
        rng.shuffle(index[first:])
    return index


def build_sample_index(
    sizes: np.ndarray, document_index: np.ndarray, plan: IndexPlan
) -> np.ndarray:
    """Find the document holding token k*L for every k, a block of documents at a time.

    Every row but the first points at a token, so empty documents are never pointed at; the first
    row is the beginning, whatever is there.
    """
    seq_len, rows = plan.seq_len, plan.num_samples + 1
    index = np.zeros((rows, 2), sample_index_dtype(sizes))  # (N+1, 2)
    # In an .idx file lengths are not aligned, and numpy would copy them all to take some; bytes it
    # takes from anywhere.
    held = np.ascontiguousarray(sizes).view(f"V{sizes.itemsize}")
    taken = np.empty(min(DOCUMENTS_AT_ONCE, len(document_index)), held.dtype)
    numbers = np.arange(len(taken), dtype=np.int32)
    begin = 0
    for first in range(0, len(document_index), DOCUMENTS_AT_ONCE):
        documents = document_index[first : first + DOCUMENTS_AT_ONCE]
        # All are there; with the default mode numpy would take into a buffer first.
        held.take(documents, out=taken[: len(documents)], mode="clip")
        lengths = taken[: len(documents)].view(sizes.dtype)
        # Tokens are counted from the block's beginning, in 32 bits wherever they fit.
        fit = int(lengths.max()) * len(lengths) + seq_len < 2**32
        number: Any = np.uint32 if fit else np.uint64
        ends: np.ndarray = np.cumsum(lengths, dtype=number)
        row, end = -(-begin // seq_len), begin + int(ends[-1])
        count = min(-(-end // seq_len), rows) - row
        start = row * seq_len - begin  # of the first row, less than seq_len
        # Of the rows before a document's end, those not before its beginning lie in it.
        before_end = (ends + number(seq_len - 1 - start)) // number(seq_len)
        within = np.diff(before_end, prepend=number(0)).view(f"i{ends.itemsize}")
        position = numbers[: len(ends)].repeat(within)[:count]
        starts: np.ndarray = np.arange(start, start + count * seq_len, seq_len, dtype=number)
        ends -= lengths.astype(number)
        starts -= ends[position]
        position += first
        index[row : row + count, 0] = position
        index[row : row + count, 1] = starts
        begin = end
        heartbeat.alive()
    index[0] = 0
    return index


def build_shuffle_index(plan: IndexPlan, rng: np.random.RandomState) -> np.ndarray:
    index = np.arange(plan.num_samples, dtype=shuffle_index_dtype(plan))  # (N,)
    rng.shuffle(index[: plan.first_samples])
    rng.shuffle(index[plan.first_samples :])
    return index


# -- elastic order ---------------------------------------------------------------------------


@dataclass(frozen=True)
class ElasticPlan:
    """How the epochs of a part in elastic order are laid out; no length of a run is in it."""

    documents: int
    tokens_per_epoch: int
    seq_len: int
    passes: int  # through the documents in an epoch: more than 1 only where all make no sample
    samples_per_epoch: int
    epochs_per_entry: int

    @property
    def samples_per_entry(self) -> int:
        return self.samples_per_epoch * self.epochs_per_entry


def plan_elastic(documents: int, tokens_per_epoch: int, seq_len: int) -> ElasticPlan:
    if tokens_per_epoch == 0:
        return ElasticPlan(documents, 0, seq_len, 0, 0, 1)
    passes = -(-(seq_len + 1) // tokens_per_epoch)
    if documents * passes > MAX_POSITIONS:
        raise DataError(
            f"a sample of {seq_len} tokens would repeat the {documents} documents "
            f"({tokens_per_epoch} tokens) {passes} times, more than 2^31 documents in all; give "
            "this part more data"
        )
    samples = (passes * tokens_per_epoch - 1) // seq_len
    together = max(1, min(ELASTIC_EPOCHS, ELASTIC_ROWS // max(documents * passes, samples)))
    return ElasticPlan(documents, tokens_per_epoch, seq_len, passes, samples, together)


def build_elastic_indices(
    ranges: Sequence[tuple[int, int]], sizes: np.ndarray, plan: ElasticPlan, seed: int, entry: int
) -> dict[str, np.ndarray]:
    """The three indices of one entry's epochs, each a function of the seed and its number."""
    length, samples = plan.passes * plan.documents, plan.samples_per_epoch
    rows = samples + 1
    epochs = plan.epochs_per_entry
    document_index = np.empty(epochs * length, document_index_dtype(ranges))
    sample_index = np.empty((epochs * rows, 2), sample_index_dtype(sizes))
    shuffle_index = np.empty(epochs * samples, np.uint32 if epochs * rows < 2**32 else np.int64)
    one_epoch = IndexPlan(length, plan.tokens_per_epoch, plan.seq_len, plan.passes, samples, 0, 0)
    for i in range(epochs):
        rng = np.random.RandomState([seed, entry * epochs + i])
        documents = document_index[i * length : (i + 1) * length]
        documents[:] = _listed(ranges, plan.passes)
        rng.shuffle(documents)
        index = sample_index[i * rows : (i + 1) * rows]
        index[:] = build_sample_index(sizes, documents, one_epoch)
        index[:, 0] += i * length
        order = shuffle_index[i * samples : (i + 1) * samples]
        order[:] = np.arange(i * rows, i * rows + samples)
        rng.shuffle(order)
    return {
        "document_index": document_index,
        "sample_index": sample_index,
        "shuffle_index": shuffle_index,
    }


# -- what all orders share -------------------------------------------------------------------


def _listed(ranges: Sequence[tuple[int, int]], times: int) -> np.ndarray:
    """The documents of the part in file order, that many times over."""
    dtype = document_index_dtype(ranges)
    index = np.empty(times * sum(last - first for first, last in ranges), dtype)
    once = index[: len(index) // times] if times else index
    position = 0
    for first, last in ranges if times else ():
        for start in range(first, last, ROWS_AT_ONCE):  # not all in memory twice
            block = np.arange(start, min(start + ROWS_AT_ONCE, last), dtype=dtype)
            once[position : position + len(block)] = block
            position += len(block)
    for epoch in range(1, times):
        index[epoch * len(once) : (epoch + 1) * len(once)] = once
    return index


def document_index_dtype(ranges: Sequence[tuple[int, int]]) -> np.dtype:
    """int32 unless the number of a document needs more."""
    wide = max((last for _, last in ranges), default=0) > MAX_POSITIONS + 1
    return np.dtype(np.int64 if wide else np.int32)


def sample_index_dtype(sizes: np.ndarray) -> np.dtype:
    """int32 unless an offset within a document needs more."""
    wide = sizes.dtype.itemsize > 4 and len(sizes) > 0 and int(sizes.max()) > MAX_POSITIONS
    return np.dtype(np.int64 if wide else np.int32)


def shuffle_index_dtype(plan: IndexPlan) -> np.dtype:
    return np.dtype(np.uint32 if plan.num_samples < 2**32 - 2 else np.int64)


# -- end-of-text tokens of each sample -------------------------------------------------------
#
# The loss of a global batch is an average over the tokens of all its samples that count, so every
# rank needs the number of end-of-text tokens in the samples of all others. It is counted once, for
# every row of a sample index, and kept beside that index.
#
# Where the tokens lie follows from the lengths of documents for data `fourfold data prepare` wrote:
# each document ends with one and holds no other. Other data is read once from start to end, and
# their positions are kept.


class EndPositions:
    """The end-of-text tokens of documents, which are numbered over all datasets."""

    def __init__(self, datasets: Sequence[TokenDataset], found: Sequence[np.ndarray | str]) -> None:
        """`found` are the positions in each dataset, ascending, or what is known without any."""
        self._datasets = datasets
        self._found = found
        self._first_documents = np.cumsum([0, *map(len, datasets)])
        self.times = [dataset.file_status.changed_ns for dataset in datasets]

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


def find_ends(datasets: Sequence[TokenDataset], token: int) -> EndPositions | None:
    """The positions of `token` in all datasets; None if another rank should have found them."""
    found = [_find(dataset, token) for dataset in datasets]
    known = [each for each in found if each is not None]
    return EndPositions(datasets, known) if len(known) == len(found) else None


def _find(dataset: TokenDataset, token: int) -> np.ndarray | str | None:
    appended = (dataset.manifest or {}).get("append_eod")
    if (
        isinstance(appended, bool)
        and dataset.is_as_written
        and (record := dataset.tokenizer_record) is not None
        and record.eos_id == token
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
            "time": dataset.file_status.changed_ns,
            "token": token,
            "start": start,
            "tokens": STRIPE_TOKENS,
        }
    )
    if cache.is_trusted() and cache.location(dataset.places, key) is None:
        return None

    def build() -> cache.Arrays:
        positions, begin = [np.empty(0, np.int64)], start
        for block in dataset.blocks_from(start, start + STRIPE_TOKENS):
            positions.append(np.flatnonzero(block == token) + begin)
            begin += len(block)
            heartbeat.alive()
        return {"positions": np.concatenate(positions)}

    expected: cache.Expected = {"positions": (cache.ANY_LENGTH, np.dtype(np.int64))}
    return cache.cached_arrays(dataset.places, key, expected, build)["positions"]


def open_counts(
    places: Sequence[Path], index_key: str, indices: cache.Arrays, ends: EndPositions, token: int
) -> np.ndarray:
    """The count of every row of a sample index, kept in the cache beside it."""
    rows = len(indices["sample_index"]) - 1
    inputs = {"what": "end-of-text counts", "index": index_key, "times": ends.times}
    key = cache.key_of({**inputs, "token": token})
    expected: cache.Expected = {"counts": ((rows,), np.dtype(np.uint32))}
    return cache.cached_arrays(places, key, expected, lambda: _count_rows(indices, ends))["counts"]


def _count_rows(indices: cache.Arrays, ends: EndPositions) -> cache.Arrays:
    """A sample's inputs are the tokens from its row of the index up to the next one."""
    documents, index = indices["document_index"], indices["sample_index"]
    positions = np.ascontiguousarray(index[:, 0])
    borders = np.append(np.arange(0, len(documents), ROWS_AT_ONCE), len(documents))
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
