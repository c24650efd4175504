"""The three indices that turn documents into samples, as Megatron and FleetX build them.

    document index   documents of all epochs in the order they are read
    sample index     row k: where sample k starts, as (position in the document index, token)
    shuffle index    the order in which samples are served

Sample k is the tokens k*L to k*L + L of the documents laid end to end in that order: L+1 tokens,
the last of which is also the first of sample k+1. Documents are repeated for as many epochs as
the samples asked for need. If the last epoch would contribute less than 80 % of its samples, its
documents and samples are shuffled apart from the earlier ones, so that it does not thin them out.

The third order, elastic, is our own. Each epoch is cut and shuffled by itself, from random numbers
of its own, so that what sample k holds does not depend on how many will be asked for. The tokens
after an epoch's last whole sample (fewer than L, others each time) are left out of it.

Letters: D documents of the part, T tokens of the part, L sequence length, E epochs, N samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fourfold import heartbeat
from fourfold.errors import DataError

ORDERS = ("megatron", "fleetx", "elastic")
# Positions of documents are int32, in the originals' files as in ours; and so are their numbers
# unless a part lies beyond.
MAX_POSITIONS = 2**31 - 1
BLOCK = 1 << 16
# Indices of short epochs are kept together: as many as make about this many rows of an entry.
ELASTIC_ROWS = 1 << 16
ELASTIC_EPOCHS = 256


@dataclass(frozen=True)
class Plan:
    """Everything about the indices of a part that follows from its counts alone."""

    documents: int
    tokens_per_epoch: int
    seq_len: int
    epochs: int
    num_samples: int
    first_epochs: int  # shuffled together; the rest, none or the last epoch, apart
    first_samples: int


def plan_indices(documents: int, tokens_per_epoch: int, seq_len: int, num_samples: int) -> Plan:
    """How many epochs `num_samples` take, and whether the last one is shuffled apart."""
    if tokens_per_epoch == 0:
        return Plan(documents, 0, seq_len, 0, 0, 0, 0)
    epochs = max(-(-(num_samples * seq_len + 1) // tokens_per_epoch), 1)
    if documents * epochs > MAX_POSITIONS:
        raise DataError(
            f"{num_samples} samples of {seq_len} tokens would repeat the {documents} documents "
            f"({tokens_per_epoch} tokens) {epochs} times, more than 2^31 documents in all; give "
            "this part more data or ask for fewer samples"
        )
    total = (epochs * tokens_per_epoch - 1) // seq_len
    before_last = ((epochs - 1) * tokens_per_epoch - 1) // seq_len if epochs > 1 else 0
    per_epoch = (tokens_per_epoch - 1) // seq_len
    from_last = num_samples - before_last
    if epochs > 1 and from_last < int(0.80 * per_epoch):
        return Plan(documents, tokens_per_epoch, seq_len, epochs, total, epochs - 1, before_last)
    return Plan(documents, tokens_per_epoch, seq_len, epochs, total, epochs, total)


def build_indices(
    ranges: Sequence[tuple[int, int]], sizes: np.ndarray, plan: Plan, seed: int, order: str
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
    ranges: Sequence[tuple[int, int]], plan: Plan, rng: np.random.RandomState, shuffled: bool
) -> np.ndarray:
    index = _listed(ranges, plan.epochs)  # (E D,)
    if shuffled:
        first = plan.first_epochs * plan.documents
        rng.shuffle(index[:first])
        rng.shuffle(index[first:])
    return index


def build_sample_index(sizes: np.ndarray, document_index: np.ndarray, plan: Plan) -> np.ndarray:
    """Find the document holding token k*L for every k, a block of documents at a time.

    Every row but the first points at a token, so empty documents are never pointed at; the first
    row is the beginning, whatever lies there.
    """
    # Gathering from an array that is not aligned, as in an .idx file, copies it whole each time.
    sizes = np.require(sizes, requirements="A")
    seq_len, rows = plan.seq_len, plan.num_samples + 1
    index = np.zeros((rows, 2), sample_index_dtype(sizes))  # (N+1, 2)
    begin = 0
    for first in range(0, len(document_index), BLOCK):
        lengths = sizes[document_index[first : first + BLOCK]]
        ends = np.cumsum(lengths, dtype=np.int64) + begin
        end = int(ends[-1])
        row, next_row = -(-begin // seq_len), min(-(-end // seq_len), rows)
        starts = np.arange(row, next_row, dtype=np.int64) * seq_len
        # Of the rows before a document's end, those not before its beginning lie in it.
        rows_before_end = (ends + (seq_len - 1)) // seq_len
        within = np.diff(rows_before_end, prepend=row)
        position = np.repeat(np.arange(len(ends)), within)[: len(starts)]
        index[row:next_row, 0] = position + first
        index[row:next_row, 1] = starts - (ends[position] - lengths[position])
        begin = end
        heartbeat.alive()
    index[0] = 0
    return index


def build_shuffle_index(plan: Plan, rng: np.random.RandomState) -> np.ndarray:
    index = np.arange(plan.num_samples, dtype=shuffle_index_dtype(plan))  # (N,)
    rng.shuffle(index[: plan.first_samples])
    rng.shuffle(index[plan.first_samples :])
    return index


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
    one_epoch = Plan(length, plan.tokens_per_epoch, plan.seq_len, plan.passes, samples, 0, 0)
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


def _listed(ranges: Sequence[tuple[int, int]], times: int) -> np.ndarray:
    """The documents of the part in file order, that many times over."""
    dtype = document_index_dtype(ranges)
    index = np.empty(times * sum(last - first for first, last in ranges), dtype)
    position = 0
    for first, last in [*ranges] * times:
        index[position : position + last - first] = np.arange(first, last, dtype=dtype)
        position += last - first
    return index


def document_index_dtype(ranges: Sequence[tuple[int, int]]) -> np.dtype:
    """int32 unless the number of a document needs more."""
    wide = max((last for _, last in ranges), default=0) > MAX_POSITIONS + 1
    return np.dtype(np.int64 if wide else np.int32)


def sample_index_dtype(sizes: np.ndarray) -> np.dtype:
    """int32 unless an offset within a document needs more."""
    wide = sizes.dtype.itemsize > 4 and len(sizes) > 0 and int(sizes.max()) > MAX_POSITIONS
    return np.dtype(np.int64 if wide else np.int32)


def shuffle_index_dtype(plan: Plan) -> np.dtype:
    return np.dtype(np.uint32 if plan.num_samples < 2**32 - 2 else np.int64)
