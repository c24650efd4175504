"""Mixtures: samples of several sources served as one sequence, each source by its share (a blend).

Which source a sample comes from is decided by Megatron's greedy rule (`choose_sources`, below);
within a source its samples come in their own order, none skipped. `Mixture.open` opens as many of
each source as its share of the run needs.

In the orders megatron and fleetx a mixture is what the originals make of the same weights: other
weights or another length are another sequence. In elastic order a mixture may change during a run.
`MixtureProgress` records what was served before the current weights took effect; from there each
source continues with the sample after the last one it served.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import add, le
from pathlib import Path
from typing import Any

import numpy as np

from fourfold.config.recipe import Rounding
from fourfold.data import cache
from fourfold.data.datasets import TokenDataset
from fourfold.data.samples import Samples, SampleSpec, SampleStream
from fourfold.errors import DataError

log = logging.getLogger(__name__)

# Of the blend; the comment above `choose_sources` says what stretches are.
SURPLUS = 0.005
MAX_SOURCES = 2**15 - 1
STRETCHES = 4096
SHORTEST_STRETCH = 256
WARM_UP = 64
ROWS_TOGETHER = 16
SAMPLES_AT_ONCE = 1 << 16
SIDE_BY_SIDE = 16


@dataclass(frozen=True)
class DataSource:
    """One source of a mixture: the datasets found at a path, one after the other."""

    name: str
    weight: float
    datasets: Sequence[TokenDataset]


@dataclass(frozen=True)
class MixtureProgress:
    """What had been served when the current weights took effect, counted by stream identity."""

    start: int = 0
    served: dict[str, int] = field(default_factory=dict)


class Mixture:
    """Random access to the samples of a mixture; position i counts from the run's beginning."""

    def __init__(
        self,
        sources: Sequence[DataSource],
        members: Sequence[Samples],
        shares: np.ndarray,
        blend: cache.Arrays,
        progress: MixtureProgress,
        fingerprint: str,
        place: Path | None = None,
    ) -> None:
        self.sources = list(sources)
        self.members = list(members)
        self.shares = shares
        self.fingerprint = fingerprint
        self.progress = progress
        self.seq_len = members[0].seq_len
        self.is_remote = any(member.is_remote for member in members)
        self.name = f"mixture of {', '.join(source.name for source in sources)}"
        self.tokens_per_epoch = sum(member.tokens_per_epoch for member in members)
        self._source_index = blend["source_index"]
        self._sample_index = blend["source_sample_index"]
        self._place = place
        self._before = [progress.served.get(member.identity, 0) for member in members]

    @classmethod
    def open(
        cls,
        sources: Sequence[DataSource],
        spec: SampleSpec,
        num_samples: int,
        progress: MixtureProgress | None = None,
    ) -> Mixture:
        """Open a mixture of `num_samples` samples, counted from the beginning of the run.

        It may be a little longer, as the originals' are.
        """
        progress = progress or MixtureProgress()
        streams = [SampleStream.from_sources(source.datasets, spec) for source in sources]
        sources, streams = _holding_tokens(sources, streams, spec.part)
        _refuse_repeated(sources, streams, spec.order)
        shares = normalised([source.weight for source in sources])
        before = [progress.served.get(stream.identity, 0) for stream in streams]
        asked = max(num_samples - progress.start, 0)
        if spec.order == "elastic":
            opened, size = [0] * len(sources), asked
        else:
            assert progress == MixtureProgress(), "only elastic order can resume"
            opened, counted = blend_sizes(shares, num_samples, spec.blend_rounding)
            size = sum(counted)
        shares = normalised(shares.tolist())
        blend, kept = open_blend(shares, size, spec.cache_places(sources[0].datasets))
        needed = map(add, before, _counts(blend, asked, len(sources)))
        members = [
            Samples.open(source.datasets, spec, least or count, first)
            for source, first, count, least in zip(sources, before, needed, opened)
        ]
        inputs: dict[str, Any] = {
            "what": "mixture",
            "members": [member.fingerprint for member in members],
        }
        if spec.order != "elastic":
            inputs["blend"] = blend_key(shares, size)
        blend = _within(blend, [len(m) - first for m, first in zip(members, before)])
        return cls(sources, members, shares, blend, progress, cache.key_of(inputs), kept)

    def __len__(self) -> int:
        return self.progress.start + len(self._source_index)

    def __getitem__(self, i: int) -> np.ndarray:
        return self.read(i, np.empty(self.seq_len + 1, np.int64))

    def read(self, i: int, out: np.ndarray) -> np.ndarray:
        """Copy sample i into `out`, of length seq_len + 1."""
        source, sample = self.locate(i)
        return self.members[source].read(sample, out)

    def places_of(self, i: int) -> Iterator[tuple[TokenDataset, int, int, int]]:
        source, sample = self.locate(i)
        return self.members[source].places_of(sample)

    def count_inputs(self, i: int, token: int) -> int:
        source, sample = self.locate(i)
        return self.members[source].count_inputs(sample, token)

    def index_ends(self, token: int) -> None:
        for member in self.members:
            member.index_ends(token)

    def has_indexed(self, token: int) -> bool:
        return all(member.has_indexed(token) for member in self.members)

    def count_all(self, samples: np.ndarray, token: int) -> int:
        places = samples - self.progress.start
        sources, numbers = self._source_index[places], self._sample_index[places]
        return sum(
            member.count_all(before + numbers[sources == source], token)
            for source, (member, before) in enumerate(zip(self.members, self._before))
        )

    def locate(self, i: int) -> tuple[int, int]:
        """The source of sample i, and the sample's number in that source's own stream."""
        if not self.progress.start <= i < len(self):
            raise IndexError(f"sample {i} is not in {self.progress.start}..{len(self) - 1}")
        place = i - self.progress.start
        source = int(self._source_index[place])
        return source, self._before[source] + int(self._sample_index[place])

    def served(self, i: int) -> list[int]:
        """How many samples of each source the first i of the run have taken."""
        since = self._source_index[: max(i - self.progress.start, 0)]
        counts = np.bincount(since, minlength=len(self.members)).tolist()
        return [before + count for before, count in zip(self._before, counts)]

    @property
    def places(self) -> list[Path]:
        """The directories its indices are kept in."""
        own = [] if self._place is None else [self._place]
        return [place for member in self.members for place in member.places] + own

    @property
    def epochs(self) -> int:
        """The most epochs any source was opened for."""
        return max(member.epochs for member in self.members)

    def state(self, consumed: int) -> dict[str, Any]:
        """For a checkpoint written after `consumed` samples: weights, and counts per source."""
        rows = zip(self.sources, self.members, self.shares.tolist(), self.served(consumed))
        sources = [
            {"name": s.name, "identity": m.identity, "weight": weight, "consumed": count}
            for s, m, weight, count in rows
        ]
        return {
            "start": self.progress.start,
            "served_before": dict(self.progress.served),
            "sources": sources,
        }

    def progress_after(
        self, state: dict[str, Any], consumed: int
    ) -> tuple[MixtureProgress, list[str]]:
        """The progress to resume a checkpoint's state with, and notices for the user.

        With the checkpoint's weights the sequence continues unchanged; other weights take effect
        here, and every source keeps its count, including those that are left out.
        """
        served = dict(state["served_before"])
        saved = [(entry["identity"], entry["weight"]) for entry in state["sources"]]
        present = [(m.identity, share) for m, share in zip(self.members, self.shares.tolist())]
        if saved == present:
            return MixtureProgress(state["start"], served), []
        served |= {entry["identity"]: entry["consumed"] for entry in state["sources"]}
        goes_on = ", ".join(
            f"{source.name} ({share:.4g} of the samples) from its sample "
            f"{served.get(member.identity, 0)}"
            for source, member, share in zip(self.sources, self.members, self.shares)
        )
        kept = {member.identity for member in self.members}
        gone = [entry["name"] for entry in state["sources"] if entry["identity"] not in kept]
        left = f"; no longer served: {', '.join(gone)}" if gone else ""
        notice = f"the mixture changes after {consumed} samples; it continues with {goes_on}{left}"
        return MixtureProgress(consumed, served), [notice]


@dataclass(frozen=True)
class SourceShare:
    """What the first samples of a mixture take from one source."""

    name: str
    weight: float
    samples: int
    seq_len: int
    tokens_per_epoch: int

    @property
    def tokens(self) -> int:
        return self.samples * self.seq_len

    @property
    def epochs(self) -> float:
        return self.tokens / self.tokens_per_epoch


def shares_of(mixture: Mixture, num_samples: int) -> list[SourceShare]:
    return [
        SourceShare(source.name, weight, count, mixture.seq_len, member.tokens_per_epoch)
        for source, member, weight, count in zip(
            mixture.sources,
            mixture.members,
            mixture.shares.tolist(),
            mixture.served(num_samples),
        )
    ]


def _counts(blend: cache.Arrays, size: int, sources: int) -> list[int]:
    """How many of the first `size` samples come from each source."""
    counts: list[int] = np.bincount(blend["source_index"][:size], minlength=sources).tolist()
    return counts


def _within(blend: cache.Arrays, available: Sequence[int]) -> cache.Arrays:
    """The blend up to where a source would run out.

    No source ever serves more than ceil(N w) of N samples: it is chosen only when it is behind its
    share. But the rounded-up counts of many sources add up to more than N, and of the samples after
    N one source may get most; there the originals stop with an error.
    """
    size = len(blend["source_index"])
    if all(map(le, _counts(blend, size, len(available)), available)):
        return blend
    beyond = blend["source_sample_index"] >= np.array(available)[blend["source_index"]]
    return {name: array[: int(np.argmax(beyond))] for name, array in blend.items()}


def _holding_tokens(
    sources: Sequence[DataSource], streams: Sequence[SampleStream], part: str
) -> tuple[list[DataSource], list[SampleStream]]:
    """Without the sources whose part has no tokens, which is logged; training must have all."""
    empty = [source.name for source, s in zip(sources, streams) if s.tokens_per_epoch == 0]
    if empty and (part == "train" or len(empty) == len(sources)):
        raise DataError(
            f"{', '.join(empty)}: the {part} part has no tokens, so no share of a mixture can "
            "come from it; change Data.dataset.split or leave the source out"
        )
    if empty:
        log.warning("%s: no tokens in the %s part; the others share it", ", ".join(empty), part)
    kept = [(source, s) for source, s in zip(sources, streams) if s.tokens_per_epoch > 0]
    return [source for source, _ in kept], [stream for _, stream in kept]


def _refuse_repeated(
    sources: Sequence[DataSource], streams: Sequence[SampleStream], order: str
) -> None:
    """In elastic order a source is known by its content, so the same one twice would be one."""
    names: dict[str, str] = {}
    for source, stream in zip(sources, streams):
        if order == "elastic" and stream.identity in names:
            raise DataError(
                f"{names[stream.identity]} and {source.name} hold the same documents, so a mixture "
                "would serve each of their samples twice; name one of them, with both weights "
                "added up"
            )
        names[stream.identity] = source.name


# -- the blend -------------------------------------------------------------------------------
#
# Which source each sample comes from, by Megatron's greedy rule: sample s goes to the source that
# is furthest behind its share, the one with the largest w_i * max(s, 1) - c_i, where c_i samples
# came from source i so far; of equals, the first. The rule is deterministic, and the index of a
# longer mixture begins with that of a shorter one.
#
# The rule is sequential, but it forgets: started anywhere near the right counts, it soon falls into
# the same sequence. So the samples are cut into stretches that are run side by side from estimated
# counts, one numpy operation a step for all of them. A stretch is right if it began with the counts
# its predecessor ended with; the others are run again from there. Since the first begins with
# zeros, the result equals the plain loop's, sample for sample: every comparison is the loop's own,
# in the same float64 arithmetic.
#
# Letters: S samples, n sources, K stretches.


def normalised(weights: Sequence[float]) -> np.ndarray:
    """Shares adding up to 1. Dividing again may change the last bit, as it does in Megatron."""
    array = np.array(weights, np.float64)
    return array / array.sum()


def blend_sizes(
    shares: np.ndarray, num_samples: int, rounding: Rounding
) -> tuple[list[int], list[int]]:
    """Samples to open of each source, and to count on in the mixture; both per source.

    Both systems add half a percent to what they open. Megatron-DeepSpeed also makes the mixture
    that much longer, Megatron Core does not.
    """
    if rounding == "megatron_deepspeed":
        opened = [math.ceil(num_samples * share * (1 + SURPLUS)) for share in shares.tolist()]
        return opened, opened
    counted = [math.ceil(num_samples * share) for share in shares.tolist()]
    return [math.ceil(count * (1 + SURPLUS)) for count in counted], counted


def open_blend(
    shares: np.ndarray, size: int, places: Sequence[Path]
) -> tuple[cache.Arrays, Path | None]:
    """`blend_index` kept in the cache, and where."""
    key = blend_key(shares, size)
    expected: cache.Expected = {
        "source_index": ((size,), np.dtype(np.int16)),
        "source_sample_index": ((size,), np.dtype(np.int64)),
    }
    arrays = cache.cached_arrays(places, key, expected, lambda: blend_index(shares, size))
    return arrays, cache.location(places, key)


def blend_key(shares: np.ndarray, size: int) -> str:
    return cache.key_of({"what": "blend index", "weights": shares.tolist(), "size": size})


def blend_index(shares: np.ndarray, size: int) -> cache.Arrays:
    """Source of each sample, and the sample's number within that source."""
    sources = choose_sources(shares, size)  # (S,)
    numbers = np.empty(size, np.int64)
    taken = [0] * len(shares)
    for start in range(0, size, SAMPLES_AT_ONCE):
        block, out = (array[start : start + SAMPLES_AT_ONCE] for array in (sources, numbers))
        for source, before in enumerate(taken):
            chosen = np.flatnonzero(block == source)
            out[chosen] = np.arange(before, before + len(chosen))
            taken[source] += len(chosen)
    return {"source_index": sources, "source_sample_index": numbers}


def choose_sources(shares: np.ndarray, size: int) -> np.ndarray:
    """The source of each sample, (S,) int16."""
    assert 0 < len(shares) <= MAX_SOURCES
    count = max(1, min(STRETCHES, size // SHORTEST_STRETCH))
    length = -(-size // count)
    first = np.arange(count) * length  # (K,)
    begin = _estimated_counts(shares, first)  # (K, n)
    chosen, end = _run(shares, first, begin, length)
    wrong = _wrong(begin, end)
    while len(wrong) > SIDE_BY_SIDE:
        begin[wrong] = end[wrong - 1]
        chosen[wrong], end[wrong] = _run(shares, first[wrong], begin[wrong], length)
        before, wrong = len(wrong), _wrong(begin, end)
        if len(wrong) > before // 2:
            break
    for stretch in range(int(wrong[0]) if len(wrong) else count, count):
        if not np.array_equal(begin[stretch], end[stretch - 1]):
            begin[stretch] = end[stretch - 1]
            chosen[stretch], end[stretch] = _walk(
                shares, int(first[stretch]), begin[stretch], length
            )
    return chosen.reshape(-1)[:size]


def _wrong(begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The stretches that do not begin where the previous one ended."""
    return np.flatnonzero((begin[1:] != end[:-1]).any(axis=1)) + 1


def _estimated_counts(shares: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Counts after `first` samples, (K, n): a little earlier every source has about its share,
    and from there the rule itself leads to where it would be."""
    start = np.maximum(first - WARM_UP, 0)
    quotas = np.multiply.outer(start, shares)
    counts = np.floor(quotas)
    missing = (start - counts.sum(axis=1)).astype(np.int64)
    by_remainder = np.argsort(counts - quotas, axis=1, kind="stable")
    rank = np.argsort(by_remainder, axis=1, kind="stable")
    counts += missing[:, None] // len(shares) + (rank < missing[:, None] % len(shares))
    _, counts = _run(shares, start, counts, WARM_UP)
    counts[first < WARM_UP] = 0
    for stretch in np.flatnonzero(first < WARM_UP):
        zeros = np.zeros(len(shares))
        _, counts[stretch] = _walk(shares, 0, zeros, int(first[stretch]))
    return counts


def _run(
    shares: np.ndarray, first: np.ndarray, begin: np.ndarray, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """`steps` choices from each start: sources (K, steps) and the counts after them (K, n)."""
    counts = begin.T.copy()  # (n, K)
    chosen = np.empty((len(first), steps), np.int16)
    # A column of that is written slowly, so some are gathered as rows.
    rows = np.zeros((ROWS_TOGETHER, len(first)), np.int16)
    sample = first.astype(np.float64)
    column = shares[:, None]
    behind, scale = np.empty_like(counts), np.empty_like(sample)
    is_so = np.zeros(len(first), bool)
    for step in range(steps):
        np.maximum(sample, 1.0, out=scale)
        np.multiply(column, scale, out=behind)
        behind -= counts  # (n, K)
        row, most = rows[step % ROWS_TOGETHER], behind[0]
        for source in range(1, len(shares)):
            np.greater(behind[source], most, out=is_so)
            if source == 1:
                row[:] = is_so
            else:
                np.copyto(row, source, where=is_so)
            if source + 1 < len(shares):
                np.maximum(behind[source], most, out=most)
        for source, taken in enumerate(counts):
            taken += np.equal(row, source, out=is_so)
        sample += 1
        if (step + 1) % ROWS_TOGETHER == 0 or step + 1 == steps:
            begun = step - step % ROWS_TOGETHER
            chosen[:, begun : step + 1] = rows[: step + 1 - begun].T
    return chosen, counts.T.copy()


def _walk(
    shares: np.ndarray, first: int, begin: np.ndarray, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """The rule as it is written, one sample after the other."""
    weights, counts = shares.tolist(), begin.tolist()
    chosen = np.empty(steps, np.int16)
    for step in range(steps):
        sample = max(float(first + step), 1.0)
        behind = [weight * sample - count for weight, count in zip(weights, counts)]
        source = behind.index(max(behind))
        chosen[step] = source
        counts[source] += 1
    return chosen, np.array(counts)
