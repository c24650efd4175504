"""`fourfold rehearse`: all ranks of a layout take a step together, on a laptop, and none waits for
ever.

The traces of all distinct ranks are made (`operations`), every other rank's follows from the one
that runs the same program elsewhere, and all of them are played against each other: a collective
happens when every member of its group has come to it, and must then be the same on each; the n-th
send from one rank to another belongs to the n-th receive there, and must carry what is expected; a
wait ends when both ends of its message were begun. Where nothing can move any more, the ranks that
wait for each other are named.

A send is taken to be begun at once and to end no earlier than its receive begins, as gloo and nccl
do it; a collective is taken to keep its rank until all are there, which is stricter than nccl, for
which it only keeps the stream.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

from fourfold.config import Config
from fourfold.errors import UserError
from fourfold.mesh import AXES, Layout
from fourfold.parallel import layout_of
from fourfold.parallel.stages import count_stages
from fourfold.plan.operations import RECEIVE, SEND, STAGE, TIED, WAIT, WORLD, Operation, trace_of

Trace = Sequence[Operation]
TraceOf = Callable[[Config, int, int], Trace]


@dataclass(frozen=True)
class Misfit:
    """Something that would hang or mix up a run: a sentence that names the ranks."""

    text: str
    ranks: tuple[int, ...]


@dataclass
class Rehearsal:
    layout: Layout
    micro_batches: int
    traced: list[int]  # the ranks whose traces were made; the others' follow from them
    findings: list[Misfit] = field(default_factory=list)
    collectives: int = 0
    messages: int = 0


def rehearse(
    config: Config,
    *,
    all_ranks: bool = False,
    micro_batches: int | None = None,
    make: TraceOf = trace_of,
    workers: int | None = None,
) -> Rehearsal:
    """Play a step of the configured layout. With `all_ranks` each rank's own trace is made.

    `micro_batches` is by default the run's own number, but at most one for each pipeline stage and
    two: by then every schedule repeats itself. `make` makes a trace; `workers` of them are made at
    once.
    """
    layout, stages = layout_of(config), count_stages(config)
    if micro_batches is None:
        micro_batches = min(config.Engine.accumulate_steps, max(stages, 2))
    if micro_batches < stages > 1:
        raise UserError(
            f"--micro-batches {micro_batches}: a pipeline of {stages} stages needs at least as many"
        )
    alike = representatives(layout, all_ranks)
    traced = sorted(set(alike.values()))
    traces = _make_all(config, traced, micro_batches, make, workers)
    rehearsal = Rehearsal(layout, micro_batches, traced)
    Play(layout, {rank: traces[one] for rank, one in alike.items()}, rehearsal).run()
    return rehearsal


def representatives(layout: Layout, all_ranks: bool) -> dict[int, int]:
    """Of every rank, the one whose trace stands for its own: the same stage and, on the axes along
    which ranks run one program on equal pieces, the first or the last."""
    found = {}
    for rank in range(layout.world_size):
        place = layout.coordinates(rank)
        if not all_ranks:
            for axis in ("dp", "sharding", "mp"):
                last = layout.degrees[AXES.index(axis)] - 1
                place[axis] = last if place[axis] == last else 0
        found[rank] = rank_at(layout, place)
    return found


def rank_at(layout: Layout, place: dict[str, int]) -> int:
    rank = 0
    for axis, degree in zip(AXES, layout.degrees):
        rank = rank * degree + place[axis]
    return rank


def _make_all(
    config: Config, ranks: list[int], micro_batches: int, make: TraceOf, workers: int | None
) -> dict[int, Trace]:
    workers = min(workers or os.cpu_count() or 1, len(ranks))
    if workers == 1 or make is not trace_of:
        return {rank: make(config, rank, micro_batches) for rank in ranks}
    # Forked, so that torch is imported once; nothing has been computed yet.
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
        made = pool.map(make, [config] * len(ranks), ranks, [micro_batches] * len(ranks))
        return dict(zip(ranks, made))


# -- playing traces against each other ------------------------------------------------------------


class Play:
    """All ranks, each at some place of its trace."""

    def __init__(self, layout: Layout, traces: dict[int, Trace], rehearsal: Rehearsal) -> None:
        self.layout = layout
        self.traces = traces
        self.rehearsal = rehearsal
        self.at = dict.fromkeys(traces, 0)
        # By sender and receiver: the numbers of the entries that begin a message, at either end.
        self.sent: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.received: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._place: dict[tuple[int, int], int] = {}  # of an entry in those lists
        self._members = self._groups()

    def run(self) -> None:
        """To the end of all traces, or until nothing can move or something does not fit."""
        while (pending := self._unended()) and not self.rehearsal.findings:
            moved = {rank for rank in pending if self._advance(rank)}
            moved |= self._meet()
            if not moved:
                self._explain_standstill()
                return
        if not self.rehearsal.findings:
            self._explain_what_is_left()

    def _unended(self) -> list[int]:
        return [rank for rank in self.traces if self._current(rank) is not None]

    def _current(self, rank: int) -> Operation | None:
        trace, at = self.traces[rank], self.at[rank]
        return trace[at] if at < len(trace) else None

    def _advance(self, rank: int) -> bool:
        """Up to the next collective, or to a wait for what is not there yet."""
        moved = False
        while (doing := self._current(rank)) is not None and not doing.is_collective:
            if doing.kind == WAIT:
                if self._counterpart(rank, doing) is None:
                    break
            else:
                self._begin(rank, doing)
            self.at[rank] += 1
            moved = True
        return moved

    def _begin(self, rank: int, doing: Operation) -> None:
        ends = self._ends(rank, doing)
        entries = (self.sent if doing.kind == SEND else self.received)[ends]
        self._place[rank, self.at[rank]] = len(entries)
        entries.append(self.at[rank])
        number = len(entries) - 1
        sent, received = self.sent[ends], self.received[ends]
        if number < len(sent) and number < len(received):
            self.rehearsal.messages += 1
            self._compare(ends[0], sent[number], ends[1], received[number])

    def _ends(self, rank: int, doing: Operation) -> tuple[int, int]:
        """Sender and receiver of a message."""
        other = rank_at(self.layout, self.layout.coordinates(rank) | {"pp": doing.peer})
        is_sent = doing.kind == SEND
        return (rank, other) if is_sent else (other, rank)

    def _counterpart(self, rank: int, waiting: Operation) -> int | None:
        """The entry at the other end of the message waited for, if that was begun."""
        begun = self.traces[rank][waiting.begun]
        ends = self._ends(rank, begun)
        others = (self.received if begun.kind == SEND else self.sent)[ends]
        number = self._place[rank, waiting.begun]
        return others[number] if number < len(others) else None

    def _compare(self, one: int, entry: int, other: int, its_entry: int) -> None:
        mine, theirs = self.traces[one][entry], self.traces[other][its_entry]
        same_kind = mine.kind == theirs.kind or {mine.kind, theirs.kind} == {SEND, RECEIVE}
        if mine.tensor != theirs.tensor or not same_kind:
            self._find(
                f"rank {one} and rank {other} do not fit together: rank {one} has {mine} where "
                f"rank {other} has {theirs}",
                one,
                other,
            )

    def _compare_parts(self, members: Sequence[int]) -> None:
        """In an all-to-all of unequal parts, what one sends is what the other expects. The parts
        depend on the rank, so only ranks with traces of their own can say."""
        own = [rank for rank in members if rank in self.rehearsal.traced]
        parts = {rank: self.traces[rank][self.at[rank]].splits for rank in own}
        for one, mine in parts.items():
            for other, theirs in parts.items():
                if mine is None or theirs is None:
                    continue
                sent, expected = mine[0][members.index(other)], theirs[1][members.index(one)]
                if sent != expected:
                    doing = self.traces[one][self.at[one]]
                    self._find(
                        f"rank {one} and rank {other} do not fit together: in {doing} rank {one} "
                        f"sends {sent:,} elements where rank {other} expects {expected:,}",
                        one,
                        other,
                    )

    def _meet(self) -> set[int]:
        """Let every collective happen to which all members of its group have come."""
        moved: set[int] = set()
        for rank in self.traces:
            doing = self._current(rank)
            if rank in moved or doing is None or not doing.is_collective:
                continue
            members = self._members[doing.group][rank]
            if rank != members[0]:
                continue
            theirs = [self._current(member) for member in members]
            if any(one is None or not one.is_collective for one in theirs):
                continue
            if any(one is not None and one.group != doing.group for one in theirs):
                continue
            for member in members[1:]:
                self._compare(rank, self.at[rank], member, self.at[member])
            self._compare_parts(members)
            self.rehearsal.collectives += 1
            for member in members:
                self.at[member] += 1
            moved.update(members)
        return moved

    def _groups(self) -> dict[str, dict[int, tuple[int, ...]]]:
        """The members of each kind of group, by rank."""
        layout, everyone = self.layout, range(self.layout.world_size)
        kinds: dict[str, list[list[int]]] = {axis: layout.columns(axis) for axis in layout.axes}
        kinds[WORLD] = [[*everyone]]
        kinds[TIED] = [[column[0], column[-1]] for column in layout.columns("pp")]
        kinds[STAGE] = [
            [rank for rank in everyone if layout.coordinates(rank)["pp"] == stage]
            for stage in range(layout.pp)
        ]
        return {
            kind: {rank: tuple(group) for group in groups for rank in group}
            for kind, groups in kinds.items()
        }

    # -- what went wrong ----------------------------------------------------------------------

    def _find(self, text: str, *ranks: int) -> None:
        self.rehearsal.findings.append(Misfit(text, ranks))

    def _waits_for(self, rank: int) -> list[int]:
        """The ranks without which this one cannot go on."""
        doing = self._current(rank)
        if doing is None:
            return []
        if doing.kind == WAIT:
            ends = self._ends(rank, self.traces[rank][doing.begun])
            return [ends[0] if ends[1] == rank else ends[1]]
        waiting_here = {
            member
            for member in self._members[doing.group][rank]
            if (other := self._current(member)) is not None
            and other.is_collective
            and other.group == doing.group
        }
        return [one for one in self._members[doing.group][rank] if one not in waiting_here]

    def _standing(self, rank: int) -> str:
        doing = self._current(rank)
        if doing is None:
            return f"rank {rank} has ended its step"
        if doing.kind == WAIT:
            begun = self.traces[rank][doing.begun]
            other = self._waits_for(rank)[0]
            to = "to" if begun.kind == SEND else "from"
            return f"rank {rank} waits for its {begun.kind} {to} rank {other}: {begun}"
        return f"rank {rank} waits in {doing} over {doing.group}"

    def _explain_standstill(self) -> None:
        """Follow who waits for whom, to a rank that has ended or around a circle."""
        path = self._unended()[:1]
        while (others := self._waits_for(path[-1])) and others[0] not in path:
            path.append(others[0])
        if others:
            path = [*path[path.index(others[0]) :], others[0]]
        else:
            path = path[-2:]
        told = "; ".join(self._standing(one) for one in dict.fromkeys(path))
        circle = ", each for the next" if others else ""
        self._find(f"nothing can move any more{circle}: {told}", *dict.fromkeys(path))

    def _explain_what_is_left(self) -> None:
        """Messages that were begun at one end only."""
        for ends in sorted({*self.sent, *self.received}):
            sent, received = self.sent[ends], self.received[ends]
            both = min(len(sent), len(received))
            here = [(SEND, ends[0], entry) for entry in sent[both:]]
            here += [(RECEIVE, ends[1], entry) for entry in received[both:]]
            for kind, rank, entry in here[:1]:
                other = ends[1] if kind == SEND else ends[0]
                missing = RECEIVE if kind == SEND else SEND
                self._find(
                    f"rank {rank} has a {self.traces[rank][entry]} for which rank {other} has no "
                    f"{missing}",
                    rank,
                    other,
                )


def rehearsal_lines(rehearsal: Rehearsal, config: Config) -> Iterator[str]:
    """What `fourfold rehearse` prints."""
    layout, own = rehearsal.layout, config.Engine.accumulate_steps
    of = "" if rehearsal.micro_batches == own else f" (of the {own:,} of a step)"
    yield (
        f"layout {layout}: {layout.world_size:,} ranks, of which {len(rehearsal.traced):,} run "
        f"programs of their own; {rehearsal.micro_batches} micro-batch(es){of}, an update and an "
        "evaluation"
    )
    if rehearsal.findings:
        yield from (finding.text for finding in rehearsal.findings)
        return
    yield (
        f"{rehearsal.collectives:,} collectives and {rehearsal.messages:,} messages: every "
        "collective has its members in one order, every send its receive, and all ranks end"
    )
