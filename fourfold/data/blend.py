"""Which source each sample of a weighted mixture comes from, by Megatron's greedy rule.

Sample s goes to the source that is furthest behind its share: the largest w_i * max(s, 1) - c_i,
where c_i samples came from source i so far; of equals, the first. The rule is deterministic, and
the index of a longer mixture begins with that of a shorter one.

The rule is sequential, but it forgets: started anywhere near the right counts, it soon falls into
the same sequence. So the samples are cut into stretches that are run side by side from estimated
counts, one numpy operation a step for all of them. A stretch is right if it began with the counts
its predecessor ended with; the others are run again from there. Since the first begins with
zeros, the result equals the plain loop's, sample for sample: every comparison is the loop's own,
in the same float64 arithmetic.

Letters: S samples, n sources, K stretches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fourfold.config.recipe import Rounding
from fourfold.data import cache

SURPLUS = 0.005
MAX_SOURCES = 2**15 - 1
STRETCHES = 4096
SHORTEST_STRETCH = 256
WARM_UP = 64
SIDE_BY_SIDE = 16


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
    for source in range(len(shares)):
        chosen = sources == source
        numbers[chosen] = np.arange(np.count_nonzero(chosen))
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
    """The stretches that did not begin where the one before them ended."""
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
    chosen = np.empty((steps, len(first)), np.int16)
    sample = first.astype(np.float64)
    column = shares[:, None]
    for row in chosen:
        behind = column * np.maximum(sample, 1.0) - counts  # (n, K)
        most = behind[0]
        row[:] = 0
        for source in range(1, len(shares)):
            larger = behind[source] > most
            row[larger] = source
            most = np.maximum(most, behind[source])
        for source, taken in enumerate(counts):
            taken += row == source
        sample += 1
    return np.ascontiguousarray(chosen.T), counts.T.copy()


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
