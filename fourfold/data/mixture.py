"""Samples of several sources served as one sequence, each source by its share.

Which source a sample comes from is decided by `fourfold.data.blend`; within a source its samples
come in their own order, none skipped. `Mixture.open` gives each source as many as its share of
the run needs.

In the orders megatron and fleetx a mixture is what the originals make of the same weights: other
weights or another length are another sequence. In elastic order a mixture may change while a run
is under way. `Progress` says what was served before the present weights began; from there each
source goes on with the sample after the last one it served.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import add, le
from pathlib import Path
from typing import Any

import numpy as np

from fourfold.config.recipe import Rounding
from fourfold.data import cache
from fourfold.data.blend import blend_key, blend_sizes, normalised, open_blend
from fourfold.data.dataset import TokenDataset
from fourfold.data.samples import Samples, Stream
from fourfold.data.split import PARTS, document_ranges
from fourfold.errors import DataError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """One source of a mixture: the datasets found at a path, one after the other."""

    name: str
    weight: float
    datasets: Sequence[TokenDataset]


@dataclass(frozen=True)
class Serving:
    """How samples are to be cut and ordered: what all sources of a part have in common."""

    split: str | Sequence[float]
    part: str
    seq_len: int
    seed: int
    order: str
    rounding: Rounding = "megatron_core"
    cache_dir: str | Path | None = None
    split_rounding: Rounding = "megatron_core"

    def stream(self, datasets: Sequence[TokenDataset]) -> Stream:
        return Stream.of(
            datasets,
            self.split,
            self.part,
            self.seq_len,
            self.seed,
            self.order,
            self.split_rounding,
        )

    def documents(self, dataset: TokenDataset) -> range:
        """The documents of a dataset that belong to the part."""
        ranges = document_ranges(self.split, len(dataset), self.split_rounding)
        return range(*ranges[PARTS.index(self.part)])

    def samples(
        self, datasets: Sequence[TokenDataset], num_samples: int, first_sample: int = 0
    ) -> Samples:
        return Samples.open(
            datasets,
            self.split,
            self.part,
            self.seq_len,
            num_samples,
            self.seed,
            self.order,
            self.cache_dir,
            first_sample,
            self.split_rounding,
        )


@dataclass(frozen=True)
class Progress:
    """What had been served when the present weights began, counted by stream identity."""

    start: int = 0
    served: dict[str, int] = field(default_factory=dict)


class Mixture:
    """Random access to the samples of a mixture; position i counts from the run's beginning."""

    def __init__(
        self,
        sources: Sequence[Source],
        members: Sequence[Samples],
        shares: np.ndarray,
        blend: cache.Arrays,
        progress: Progress,
        fingerprint: str,
        place: Path | None = None,
    ) -> None:
        self.sources = list(sources)
        self.members = list(members)
        self.shares = shares
        self.fingerprint = fingerprint
        self.progress = progress
        self.seq_len = members[0].seq_len
        self.name = f"mixture of {', '.join(source.name for source in sources)}"
        self.tokens_per_epoch = sum(member.tokens_per_epoch for member in members)
        self._source_index = blend["source_index"]
        self._sample_index = blend["source_sample_index"]
        self._place = place
        self._before = [progress.served.get(member.identity, 0) for member in members]

    @classmethod
    def open(
        cls,
        sources: Sequence[Source],
        serving: Serving,
        num_samples: int,
        progress: Progress | None = None,
    ) -> Mixture:
        """Open a mixture of `num_samples` samples, counted from the beginning of the run.

        It may be a little longer, as the originals' are.
        """
        progress = progress or Progress()
        streams = [serving.stream(source.datasets) for source in sources]
        sources, streams = _holding_tokens(sources, streams, serving.part)
        _refuse_repeated(sources, streams, serving.order)
        shares = normalised([source.weight for source in sources])
        before = [progress.served.get(stream.identity, 0) for stream in streams]
        asked = max(num_samples - progress.start, 0)
        if serving.order == "elastic":
            opened, size = [0] * len(sources), asked
        else:
            assert progress == Progress(), "only elastic order can go on from somewhere"
            opened, counted = blend_sizes(shares, num_samples, serving.rounding)
            size = sum(counted)
        shares = normalised(shares.tolist())
        places = cache.places(sources[0].datasets[0].path.parent, serving.cache_dir)
        blend, kept = open_blend(shares, size, places)
        needed = map(add, before, _counts(blend, asked, len(sources)))
        members = [
            serving.samples(source.datasets, least or count, first)
            for source, first, count, least in zip(sources, before, needed, opened)
        ]
        inputs: dict[str, Any] = {
            "what": "mixture",
            "members": [member.fingerprint for member in members],
        }
        if serving.order != "elastic":
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

    def progress_after(self, state: dict[str, Any], consumed: int) -> tuple[Progress, list[str]]:
        """How to go on after a checkpoint's state, and what to say about it.

        With the weights of the checkpoint the sequence goes on as it was; with others they begin
        here, and every source keeps its count, those that are left out too.
        """
        served = dict(state["served_before"])
        saved = [(entry["identity"], entry["weight"]) for entry in state["sources"]]
        present = [(m.identity, share) for m, share in zip(self.members, self.shares.tolist())]
        if saved == present:
            return Progress(state["start"], served), []
        served |= {entry["identity"]: entry["consumed"] for entry in state["sources"]}
        goes_on = ", ".join(
            f"{source.name} ({share:.4g} of the samples) from its sample "
            f"{served.get(member.identity, 0)}"
            for source, member, share in zip(self.sources, self.members, self.shares)
        )
        kept = {member.identity for member in self.members}
        gone = [entry["name"] for entry in state["sources"] if entry["identity"] not in kept]
        left = f"; no longer served: {', '.join(gone)}" if gone else ""
        notice = f"the mixture changes after {consumed} samples; it goes on with {goes_on}{left}"
        return Progress(consumed, served), [notice]


@dataclass(frozen=True)
class Share:
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


def shares_of(mixture: Mixture, num_samples: int) -> list[Share]:
    return [
        Share(source.name, weight, count, mixture.seq_len, member.tokens_per_epoch)
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

    No source is ever asked for more than ceil(N w) of N samples: it is chosen only when it is
    behind its share. But the rounded-up counts of many sources add up to more than N, and of the
    samples after N one source may get most; there the originals stop with an error.
    """
    size = len(blend["source_index"])
    if all(map(le, _counts(blend, size, len(available)), available)):
        return blend
    beyond = blend["source_sample_index"] >= np.array(available)[blend["source_index"]]
    return {name: array[: int(np.argmax(beyond))] for name, array in blend.items()}


def _holding_tokens(
    sources: Sequence[Source], streams: Sequence[Stream], part: str
) -> tuple[list[Source], list[Stream]]:
    """Without the sources whose part has no tokens, which is said; training must have all."""
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


def _refuse_repeated(sources: Sequence[Source], streams: Sequence[Stream], order: str) -> None:
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
