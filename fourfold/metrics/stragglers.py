"""Stragglers: ranks, links and disks that hold a run up, by host, rank and phase.

At the end of a logging window every rank gathers a row of figures it has anyway (`OwnTimes`); one
collective a window carries them, none a step. From them:

    compute   seconds of a step a rank was busy itself, neither waiting for others nor reading. On a
              GPU, where calls only queue work, the time of one product of fixed size, taken between
              two events behind the update. How long the rank waited for a processor says whether
              the processor is slow or shared.
    data      seconds of a step waiting for samples
    disk      seconds of writing its part of a checkpoint
    link      rate, round trips and lost segments of TCP, per pair of machines

A figure is compared with the median of its peers: ranks of the same pipeline stage, whose work is
equal, or links of other machines. Noise must not name anyone, so `outliers` asks for a factor, for
a difference that matters, and for a distance of several spreads; and `Suspicion` gathers over looks
of at least `LOOK_SECONDS`: a figure just over the factor must be there for twelve in a row, one far
over it for five, a rank six times as slow as its peers for three, or two long ones. One look below
the factor, and the count begins anew. Five, because other work on a machine makes one look in
twenty far too long: five in a row happen to one rank in three million.
A round trip of TCP is late far more often, for an acknowledgement may be held back; so a link must
stay slow for twelve looks, or for four long ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean, median
from typing import TypeVar

from fourfold.metrics.machines import RankMachines, links_of

Key = TypeVar("Key", bound=Hashable)

LOOK_SECONDS = 0.5
ENOUGH = 12.0  # evidence, see `Suspicion`
ENOUGH_OF_LINKS = 30.0
ENOUGH_OF_SAVES = 5.0  # of which there are few, each a look of its own
MOST_AT_ONCE = 2.5
OUT_OF_REACH = 6.0  # a ratio that noise does not reach
MOST_OUT_OF_REACH, MOST_IN_LONG_LOOK = 4.0, 6.0
LONG_LOOK_SECONDS = 5.0
LONGEST_LOOK = 3.0  # how many short ones a long look of a link counts for, at most
SPREADS = 4.0
UNEVEN_STAGES = 2.0  # embeddings and head make a stage up to this much busier than others
TO_DEVIATION = 1.4826  # a median of absolute deviations, as the standard deviation of a normal law


@dataclass(frozen=True)
class Bound:
    """How far beyond its peers a figure is an outlier."""

    factor: float
    floor: float  # the smallest difference that matters, in the figure's unit


# A processor is shared with whatever else runs, and two ranks of it differ by a third without any
# fault; GPUs of one kind differ by a few percent.
BUSY = Bound(1.5, 0.002)
GPU = Bound(1.2, 0.0)
READING = Bound(3.0, 0.005)
# Small parts of a checkpoint cost an fsync each, whose time varies several times over.
WRITING = Bound(4.0, 0.5)
# An answer may wait for the receiver's delayed acknowledgement, up to 40 ms by Linux' own timer; a
# link's figure is the best of several connections, which rarely all do.
ROUND_TRIP = Bound(5.0, 0.003)
# Of one link between good machines, which has no better one to show what its ends can do.
LONE_ROUND_TRIP = Bound(5.0, 0.05)
# Bursts overflow queues on good links too. One lost segment makes those after it late, so that a
# link that loses one in a hundred shows several times that.
LOSS = Bound(3.0, 0.02)
# Seconds a byte. Small messages between large ones blur it; a rate below 100 MB/s is worth a word.
SENDING = Bound(4.0, 1e-8)


def outliers(figures: Mapping[Key, float], bound: Bound) -> dict[Key, float]:
    """Those far above the others, and the median of the others for each."""
    found = {}
    for key, value in figures.items():
        others = [figure for other, figure in figures.items() if other != key]
        if not others:
            continue
        middle = median(others)
        is_far = value > bound.factor * middle and value - middle > bound.floor
        if is_far and _spreads_above(value, middle, others) > SPREADS:
            found[key] = middle
    return found


def _spreads_above(value: float, middle: float, others: Sequence[float]) -> float:
    """On a scale of ratios, for times scatter by factors."""
    tiny = 1e-12
    distances = [abs(math.log(max(other, tiny) / max(middle, tiny))) for other in others]
    spread = TO_DEVIATION * median(distances)
    distance = math.log(max(value, tiny) / max(middle, tiny))
    return distance / spread if spread > 0 else math.inf


class Suspicion:
    """Gathers what looks say against each suspect, until it is enough to name it, once."""

    def __init__(self) -> None:
        self.against: dict[Hashable, float] = {}
        self.named: set[Hashable] = set()

    def take(
        self,
        found: Mapping[Key, float],
        figures: Mapping[Key, float],
        factor: float,
        enough: float = ENOUGH,
        weight: float = 1.0,
        most_out_of_reach: float = MOST_AT_ONCE,
    ) -> list[Key]:
        """The suspects of one kind among `found` that this look makes certain.

        A look adds 1 for a ratio of `factor`, 2 for its 1.5th power, and so on to `MOST_AT_ONCE`,
        times its `weight`.
        """
        for key in figures:
            if key not in found:
                self.against.pop(key, None)
        certain = []
        for key, middle in found.items():
            ratio = figures[key] / max(middle, 1e-12)
            gain = 2 * math.log(max(ratio, factor)) / math.log(factor) - 1
            most = MOST_AT_ONCE if ratio < OUT_OF_REACH else most_out_of_reach
            self.against[key] = self.against.get(key, 0.0) + weight * min(gain, most)
            if self.against[key] >= enough and key not in self.named:
                self.named.add(key)
                certain.append(key)
        return certain


# -- what ranks tell each other -------------------------------------------------------------------


@dataclass(frozen=True)
class RankTimes:
    """A window's steps, over all ranks. Busy is the time a rank was not waiting for others."""

    busy_seconds_least: float
    busy_seconds_median: float
    busy_seconds_most: float
    slowest_rank: int
    communication_share: float  # of a step, mean over ranks
    bubble_share: float  # of a step the pipeline left empty, mean over ranks


@dataclass(frozen=True)
class OwnTimes:
    """One rank's figures of a window; seconds are means per step."""

    batch_seconds: float
    communication_seconds: float = 0.0
    bubble_seconds: float = 0.0
    reader_seconds: float = 0.0
    queued_seconds: float = 0.0  # ready to run, and waiting for a processor
    product_seconds: float = 0.0  # of one product on the GPU; 0 where there is none
    writing_seconds: float = 0.0  # of the last part of a checkpoint written in the window
    links: tuple[float, ...] = ()  # as of `LinkWatch.look`

    @property
    def busy_seconds(self) -> float:
        return self.batch_seconds - self.communication_seconds - self.bubble_seconds

    def values(self) -> tuple[float, ...]:
        return (*(getattr(self, field.name) for field in fields(self)[:-1]), *self.links)

    @classmethod
    def of(cls, row: Sequence[float]) -> OwnTimes:
        batch, communication, bubble, reader, queued, product, writing, *links = row
        return cls(batch, communication, bubble, reader, queued, product, writing, tuple(links))


def compare_ranks(times: Sequence[OwnTimes]) -> RankTimes:
    """Of every rank, by rank."""
    busy = [t.busy_seconds for t in times]
    whole = [max(t.batch_seconds, 1e-9) for t in times]
    return RankTimes(
        busy_seconds_least=min(busy),
        busy_seconds_median=median(busy),
        busy_seconds_most=max(busy),
        slowest_rank=busy.index(max(busy)),
        communication_share=fmean(t.communication_seconds / w for t, w in zip(times, whole)),
        bubble_share=fmean(t.bubble_seconds / w for t, w in zip(times, whole)),
    )


# -- naming ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Straggler:
    """One that was named; `rank` is None where it is a machine's link."""

    phase: str  # compute, data, disk, link
    host: str
    rank: int | None
    value: float
    median: float  # of its peers
    text: str


Said = Callable[[float], str]


class Stragglers:
    """Told every window; tells, once for each, who stays slow."""

    def __init__(self, machines: RankMachines, stages: Sequence[int], on_gpu: bool = False) -> None:
        """`stages` is the pipeline stage of every rank."""
        self.machines = machines
        self.stages = stages
        self.on_gpu = on_gpu
        self.evidence = Suspicion()
        self._windows: list[tuple[int, Sequence[OwnTimes]]] = []
        self._named_links: set[Hashable] = set()
        self._look_seconds = 0.0
        self._first: dict[Hashable, float] = {}  # figures that have no peers, as they began

    def look(self, times: Sequence[OwnTimes], steps: int = 1) -> list[Straggler]:
        """Whom to name after this window of `steps`, if anyone."""
        self._windows.append((steps, times))
        seconds = sum(count * rows[0].batch_seconds for count, rows in self._windows)
        if seconds < LOOK_SECONDS:
            return []
        windows, self._windows, self._look_seconds = self._windows, [], seconds
        merged = [
            _merged([(count, rows[rank]) for count, rows in windows]) for rank in range(len(times))
        ]
        return [
            *self._slow_compute(merged),
            *self._slow_data(merged),
            *self._slow_disk(merged),
            *self._slow_links(merged, min(seconds / LOOK_SECONDS, LONGEST_LOOK)),
        ]

    def _slow_compute(self, times: Sequence[OwnTimes]) -> list[Straggler]:
        bound = GPU if self.on_gpu else BUSY
        own = [
            t.product_seconds if self.on_gpu else t.busy_seconds - t.reader_seconds for t in times
        ]
        floor = (
            bound.floor
            if self.on_gpu
            else max(bound.floor, 0.05 * median(t.batch_seconds for t in times))
        )
        named = []
        for rank, middle in self._among_peers("compute", own, Bound(bound.factor, floor)):
            queued = times[rank].queued_seconds
            shared = not self.on_gpu and queued > 0.5 * (own[rank] - middle)
            what = "a product on its GPU takes" if self.on_gpu else "computes for"
            text = (
                f"{self.machines.named(rank)} holds the others up: {what} {_said(own[rank])}"
                f"{'' if self.on_gpu else ' of a step'}, its peers {_said(middle)} (median,"
                f" {own[rank] / max(middle, 1e-9):.1f} times)"
            )
            if shared:
                text += (
                    f"; {_said(queued)} of that it waits for a processor, which something else "
                    "uses or its priority (nice) does not give it"
                )
            named.append(self._straggler("compute", rank, own[rank], middle, text))
        return named

    def _slow_data(self, times: Sequence[OwnTimes]) -> list[Straggler]:
        own = [t.reader_seconds for t in times]
        floor = max(READING.floor, 0.1 * median(t.batch_seconds for t in times))
        return [
            self._straggler(
                "data",
                rank,
                own[rank],
                middle,
                f"{self.machines.named(rank)} holds the others up: waits {_said(own[rank])} of a "
                f"step for its samples, its peers {_said(middle)} (median); look at the disk "
                "or the network file system its data is on",
            )
            for rank, middle in self._among_peers(
                "data", own, Bound(READING.factor, floor), by_stage=False
            )
        ]

    def _slow_disk(self, times: Sequence[OwnTimes]) -> list[Straggler]:
        wrote = {rank: t.writing_seconds for rank, t in enumerate(times) if t.writing_seconds > 0}
        if not wrote:
            return []
        figures = {("disk", rank): seconds for rank, seconds in wrote.items()}
        found = outliers(figures, WRITING)
        return [
            self._straggler(
                "disk",
                rank,
                wrote[rank],
                found["disk", rank],
                f"{self.machines.named(rank)} holds the others up: took {_said(wrote[rank])} to "
                f"write its part of a checkpoint, the others {_said(found['disk', rank])} (median);"
                " look at its disk, or how it mounts the output directory",
            )
            for _, rank in self.evidence.take(found, figures, 2.0, enough=ENOUGH_OF_SAVES)
        ]

    def _slow_links(self, times: Sequence[OwnTimes], weight: float) -> list[Straggler]:
        size = len(self.machines)
        if size < 2 or not times[0].links:
            return []
        trips = links_of([t.links[:size] for t in times], self.machines)
        lost = links_of([t.links[size : 2 * size] for t in times], self.machines)
        slowness = links_of([t.links[2 * size :] for t in times], self.machines)
        return [
            *self._links_of_a_kind("rate", slowness, SENDING, _said_rate, weight),
            *self._links_of_a_kind("round trips", trips, ROUND_TRIP, _said, weight),
            *self._links_of_a_kind("loss", lost, LOSS, lambda share: f"{share:.1%}", weight),
        ]

    def _links_of_a_kind(
        self,
        kind: str,
        links: dict[tuple[int, int], float],
        bound: Bound,
        said: Said,
        weight: float,
    ) -> list[Straggler]:
        """A machine is named if even its best link is slow, a link alone if its ends are good."""
        found: dict[Hashable, float] = {}
        figures: dict[Hashable, float] = {}
        best = best_links(links)
        slow = outliers(best, bound)
        for machine, value in best.items():
            figures["link", kind, machine] = value
        # A collective is a chain: what follows a slow link is held up by it, by less.
        worst = max((best[machine] for machine in slow), default=0.0)
        for machine, middle in slow.items():
            if bound.factor * best[machine] >= worst:
                found["link", kind, machine] = middle
        explained = {link for link in links if set(link) & slow.keys()}
        rest = {link: value for link, value in links.items() if link not in explained}
        lone = LONE_ROUND_TRIP if bound is ROUND_TRIP else bound
        alone = outliers(rest, lone) if len(rest) > 2 else self._since_the_first(kind, rest, lone)
        for link, value in rest.items():
            figures["link", kind, link] = value
        for link, middle in alone.items():
            found["link", kind, link] = middle
        named = []
        for key in self.evidence.take(found, figures, bound.factor, ENOUGH_OF_LINKS, weight):
            assert isinstance(key, tuple)
            who, value, middle = key[2], figures[key], found[key]
            if who in self._named_links:
                continue  # for another kind, which one fault seldom leaves alone
            self._named_links.add(who)
            hosts = self.machines.hosts
            if isinstance(who, tuple):
                host = " and ".join(hosts[end] for end in who)
                name = f"the link between {host} holds the run up"
                against = "the middle one of the others, or at first,"
            else:
                host = hosts[who]
                name = f"the network of {host} holds the run up"
                against = "the middle one of the other machines"
            figure = {"loss": "segments lost or late:", "rate": "sends"}.get(kind, f"{kind} of")
            text = f"{name}: {figure} {said(value)} even on the best link, {against} {said(middle)}"
            named.append(Straggler("link", host, None, value, middle, text))
        return named

    def _since_the_first(
        self, kind: str, links: Mapping[tuple[int, int], float], bound: Bound
    ) -> dict[tuple[int, int], float]:
        """Too few links to compare: each with itself as it was at its best."""
        found = {}
        for link, value in links.items():
            key = (kind, link)
            first = self._first[key] = min(self._first.get(key, value), value)
            if value > bound.factor * max(first, 1e-4) and value - first > 2 * bound.floor:
                found[link] = first
        return found

    def _among_peers(
        self, phase: str, own: Sequence[float], bound: Bound, by_stage: bool = True
    ) -> list[tuple[int, float]]:
        """The ranks to name and the median of the peers of each.

        A stage of one rank has no peers, and may have more work than the others: it must be far
        slower than they are, or than it was itself at its best, relative to them."""
        stages = self.stages if by_stage else [0] * len(own)
        found: dict[tuple[str, int], float] = {}
        for stage in sorted(set(stages)):
            peers = [rank for rank, its in enumerate(stages) if its == stage]
            if len(peers) > 1:
                slow = outliers({rank: own[rank] for rank in peers}, bound)
                found |= {(phase, rank): middle for rank, middle in slow.items()}
                continue
            (rank,) = peers
            others = max(median([*own[:rank], *own[rank + 1 :]] or own), 1e-9)
            share = own[rank] / others
            best = self._first[phase, rank] = min(self._first.get((phase, rank), share), share)
            usual = min(best * bound.factor, UNEVEN_STAGES)
            if share > bound.factor * usual and own[rank] - usual * others > bound.floor:
                found[phase, rank] = others
        figures = {(phase, rank): value for rank, value in enumerate(own)}
        most = MOST_IN_LONG_LOOK if self._look_seconds > LONG_LOOK_SECONDS else MOST_OUT_OF_REACH
        certain = self.evidence.take(found, figures, bound.factor, most_out_of_reach=most)
        return [(rank, found[phase, rank]) for _, rank in certain]

    def _straggler(
        self, phase: str, rank: int, value: float, middle: float, text: str
    ) -> Straggler:
        host = self.machines.host_of(rank)
        return Straggler(phase, host, rank, value, middle, text)


def best_links(links: Mapping[tuple[int, int], float]) -> dict[int, float]:
    """Of each machine that has a link; a link is as slow as the slower of its two ends, so the
    best one is what the machine itself can do."""
    best: dict[int, float] = {}
    for link, value in links.items():
        for machine in link:
            best[machine] = min(best.get(machine, math.inf), value)
    return best


def _merged(windows: Sequence[tuple[int, OwnTimes]]) -> OwnTimes:
    """Several windows, with the steps of each, as one."""
    steps = sum(count for count, _ in windows)

    def mean(name: str) -> float:
        return math.fsum(count * getattr(t, name) for count, t in windows) / steps

    times = [t for _, t in windows]
    return OwnTimes(
        mean("batch_seconds"),
        mean("communication_seconds"),
        mean("bubble_seconds"),
        mean("reader_seconds"),
        mean("queued_seconds"),
        min(t.product_seconds for t in times),
        max(t.writing_seconds for t in times),
        tuple(_least(figures) for figures in zip(*(t.links for t in times))),
    )


def _least(figures: Sequence[float]) -> float:
    return min((each for each in figures if math.isfinite(each)), default=math.nan)


def _said(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 0.1 else f"{1e3 * seconds:.1f} ms"


def _said_rate(slowness: float) -> str:
    return f"{1e-6 / max(slowness, 1e-12):.1f} MB/s"
