"""Copies on a neighbour: each rank's part of a copy is also in the memory of the next machine.

Machines are a ring. Every rank sends its files to one rank of the next machine (`CopyExchange`),
in a process group that is for that alone, so that this happens beside the training. After a
failure the parts are looked for on all machines (`Recovery`), each is verified where it is, and the
newest step of which every part is sound somewhere becomes a checkpoint on every machine, with those
files that the ranks there need, whatever the layout they have now.

Everything travels by torch's point-to-point messages. Who cannot take what is sent says so before
it is sent, so that nobody waits for a rank that has a problem.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.checkpoint.bounded import HASH, FileRecord, digest_of
from fourfold.checkpoint.copy_store import (
    CopyOf,
    CopyStore,
    HeldParts,
    in_words,
    listed_files,
    record_name,
    writer_of,
)
from fourfold.checkpoint.index import joined, read_parts
from fourfold.checkpoint.manifest import MAX_INDEX_BYTES, STATE, read_manifest, write_manifest
from fourfold.checkpoint.rendezvous import Beat
from fourfold.checkpoint.tensor_files import parts_by_file
from fourfold.errors import CheckpointError, UserError
from fourfold.mesh import Mesh
from fourfold.shards import Tensors, as_shards

# Of one message: the time limit of a group is for each of them.
MESSAGE_BYTES = 64 << 20
# In hexadecimal digits.
DIGEST_BYTES = 64

Result = TypeVar("Result")


def ring(machines: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Which rank sends its copies to which, given the ranks of each machine."""
    if len(machines) < 2:
        return []
    followers = [*machines[1:], machines[0]]
    return [
        (rank, following[place % len(following)])
        for ranks, following in zip(machines, followers)
        for place, rank in enumerate(ranks)
    ]


# --- files as messages ------------------------------------------------------------------------


def _mapped(path: Path) -> Tensor:
    """The bytes of a file, which is not empty."""
    with path.open("rb") as stream:
        return torch.frombuffer(
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8
        )


def _reserved(path: Path, size: int) -> Tensor:
    """The memory of a new file; all of it is there, or this raises."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        # Without it a full file system would end the process when it writes there.
        os.posix_fallocate(descriptor, 0, size)
        return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
    finally:
        os.close(descriptor)


def _number(value: int = 0) -> Tensor:
    return torch.tensor([value], dtype=torch.int64)


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _checked(message: bytes) -> bytes:
    """A record, which came behind its digest."""
    record = message[DIGEST_BYTES:]
    if digest_of(record, HASH).encode() != message[:DIGEST_BYTES]:
        raise CheckpointError("its record was changed on the way")
    return record


class CopyExchange:
    """This rank's part of sending every rank's copy to the next machine; making it is a
    collective."""

    def __init__(self, sends: Sequence[tuple[int, int]], rank: int, timeout_seconds: float) -> None:
        self.target = next((to for sender, to in sends if sender == rank), None)
        self.sources = [sender for sender, to in sends if to == rank]
        # Of all ranks, as torch numbers groups by how many a rank is in: pairs would disagree.
        self._group = dist.new_group(timeout=timedelta(seconds=timeout_seconds), backend="gloo")

    def run(self, place: Path, rank: int, ranks: int, record: bytes | None) -> None:
        """Send this rank's part, if it has one, and take in those of the sources.

        Raises where one of them cannot be taken here; another rank says the same of itself.
        """
        problems, content = list[str](), list[Tensor]()
        try:
            listed = {} if record is None else self._listed(record, place, rank)
            content = [_mapped(place / file) for file in listed]
        except OSError as error:
            problems.append(in_words(error))
            record = None
        lengths = {source: _number() for source in self.sources}
        own = -1 if record is None else len(record)
        self._swap([_number(own)], {source: [length] for source, length in lengths.items()})
        messages = {
            source: torch.empty(DIGEST_BYTES + int(length), dtype=torch.uint8)
            for source, length in lengths.items()
            if 0 <= int(length) <= MAX_INDEX_BYTES
        }
        told = [] if record is None else [_bytes(digest_of(record, HASH).encode() + record)]
        self._swap(told, {source: [message] for source, message in messages.items()})
        records = {source: message.numpy().tobytes() for source, message in messages.items()}
        incoming = dict[int, list[Tensor]]()
        for source in self.sources:
            if source not in records:
                continue  # it says itself why
            try:
                listed = self._listed(_checked(records[source]), place, source)
                incoming[source] = [_reserved(place / f, one.bytes) for f, one in listed.items()]
            except (OSError, CheckpointError) as error:
                self._discard(place, source)
                problems.append(f"the copy of rank {source}: {in_words(error)}")
        self._send_parts(content, incoming)
        for source in incoming:
            digest = records[source][:DIGEST_BYTES].decode()
            path = place / record_name(source, ranks, digest)
            aside = path.with_suffix(".tmp")
            aside.write_bytes(records[source][DIGEST_BYTES:])
            aside.rename(path)
        if problems:
            raise CheckpointError("; ".join(problems))

    def _send_parts(self, content: Sequence[Tensor], incoming: dict[int, list[Tensor]]) -> None:
        """After every source was told whether its part can be taken."""
        answers = [
            dist.isend(_number(source in incoming), source, self._group) for source in self.sources
        ]
        takes = _number()
        if self.target is not None:
            _done(dist.irecv(takes, self.target, self._group))
        for answer in answers:
            _done(answer)
        self._swap(content if int(takes) else [], incoming)

    def _listed(self, record: bytes, place: Path, rank: int) -> dict[str, FileRecord]:
        files = listed_files(record, place / f"the record of rank {rank}", rank)
        del files[STATE]  # the same as ours
        return files

    def _discard(self, place: Path, source: int) -> None:
        with suppress(OSError):
            for path in [*place.iterdir()]:
                if writer_of(path.name) == source:
                    path.unlink()

    def _swap(self, outgoing: Sequence[Tensor], incoming: dict[int, list[Tensor]]) -> None:
        """All messages at once, in both directions."""
        works = []
        for source, tensors in incoming.items():
            for piece in (piece for tensor in tensors for piece in tensor.split(MESSAGE_BYTES)):
                works.append(dist.irecv(piece, source, self._group))
        if self.target is not None:
            for piece in (piece for tensor in outgoing for piece in tensor.split(MESSAGE_BYTES)):
                works.append(dist.isend(piece, self.target, self._group))
        for work in works:
            _done(work)


def _done(work: dist.Work | None) -> None:
    assert work is not None, "this rank is in the group"
    work.wait()


class Move(NamedTuple):
    """A file that one rank sends and another one writes."""

    sender: int
    taker: int
    source: Path
    target: Path


def transfer(rank: int, moves: Sequence[Move], beat: Beat) -> None:
    """All moves in their order, as far as this rank has to do with them; every rank has the same
    list, so no two wait for each other. Raises, at the end, what kept this rank from one."""
    problem: str | None = None
    for move in moves:
        try:
            if rank == move.sender:
                _give(move)
            elif rank == move.taker:
                _take(move, beat)
        except (OSError, CheckpointError) as error:
            problem = problem or in_words(error)
        beat()
    if problem is not None:
        raise CheckpointError(problem)


def _give(move: Move) -> None:
    try:
        content = _mapped(move.source)
    except (OSError, ValueError):
        dist.send(_number(-1), move.taker)
        raise
    dist.send(_number(len(content)), move.taker)
    takes = _number()
    dist.recv(takes, move.taker)
    if int(takes):
        for piece in content.split(MESSAGE_BYTES):
            dist.send(piece, move.taker)


def _take(move: Move, beat: Beat) -> None:
    size = _number()
    dist.recv(size, move.sender)
    if int(size) < 0:
        raise CheckpointError(f"rank {move.sender} cannot read {move.source}")
    try:
        content = _reserved(move.target, int(size))
    except OSError:
        dist.send(_number(0), move.sender)
        raise
    dist.send(_number(1), move.sender)
    for piece in content.split(MESSAGE_BYTES):
        dist.recv(piece, move.sender)
        beat()


# --- after a failure --------------------------------------------------------------------------


class Recovery:
    """Looks for the newest copy that is complete, and puts it together; all of it collective."""

    def __init__(
        self,
        store: CopyStore,
        mesh: Mesh,
        machines: Sequence[Sequence[int]],
        tell: Callable[[str], None],
        beat: Beat,
    ) -> None:
        self.store, self.mesh, self.machines = store, mesh, machines
        self.tell, self.beat = tell, beat
        self.leaders = [ranks[0] for ranks in machines]
        self.machine = next(m for m, ranks in enumerate(machines) if mesh.rank in ranks)
        self.leads = mesh.rank in self.leaders

    def offers(self) -> dict[CopyOf, dict[int, HeldParts]]:
        """Of every copy, which machines have what of it."""
        held = self.store.held() if self.leads else {}
        own = [[*copy, parts.ranks, [*parts.records.items()]] for copy, parts in held.items()]
        found: dict[CopyOf, dict[int, HeldParts]] = {}
        told = self.mesh.gather(json.dumps(own))
        for machine, leader in enumerate(self.leaders):
            for timeline, step, ranks, records in json.loads(told[leader]):
                parts = HeldParts(ranks, dict(records))
                found.setdefault(CopyOf(timeline, step), {})[machine] = parts
        return found

    def newest(self, offers: dict[CopyOf, dict[int, HeldParts]], tensors: Tensors) -> CopyOf | None:
        """The newest copy that is complete, now a checkpoint at `store.whole` with what this
        machine needs for its `tensors`. What is wrong with one is said, and the next one tried."""
        for copy in sorted(offers, key=lambda copy: -copy.step):
            try:
                self._put_together(copy, offers[copy], tensors)
                return copy
            except UserError as error:
                self.tell(f"the copy of step {copy.step} in memory cannot be used: {error}")
        return None

    def _put_together(self, copy: CopyOf, held: dict[int, HeldParts], tensors: Tensors) -> None:
        sizes = {parts.ranks for parts in held.values()}
        digests: dict[int, set[str]] = {}
        for parts in held.values():
            for rank, digest in parts.records.items():
                digests.setdefault(rank, set()).add(digest)
        if len(sizes) > 1 or any(len(several) > 1 for several in digests.values()):
            raise CheckpointError("machines have different ones")
        (size,) = sizes
        if missing := [rank for rank in range(size) if rank not in digests]:
            raise CheckpointError(f"it is incomplete, nothing is left {_of_ranks(missing)}")
        names = {rank: record_name(rank, size, *digests[rank]) for rank in range(size)}
        holders = self._sound(copy, names, held)
        if lost := [rank for rank in range(size) if not holders[rank]]:
            raise CheckpointError(f"nothing sound is left {_of_ranks(lost)}")
        self._on_all_ranks(self._begin)
        self._join(copy, names, holders)
        self._bring(copy, holders, tensors)

    def _sound(
        self, copy: CopyOf, names: dict[int, str], held: dict[int, HeldParts]
    ) -> dict[int, list[int]]:
        """The machines that have the part of each rank, every byte of it."""
        neighbours = self.machines[self.machine]
        own = sorted(held[self.machine].records) if self.machine in held else []
        share = own[neighbours.index(self.mesh.rank) :: len(neighbours)]
        found = [[r, self.store.problem(copy, names[r], r, self.beat)] for r in share]
        holders: dict[int, list[int]] = {rank: [] for rank in names}
        told = [json.loads(text) for text in self.mesh.gather(json.dumps(found))]
        for machine, ranks in enumerate(self.machines):
            for rank, problem in (pair for speaker in ranks for pair in told[speaker]):
                if problem is None:
                    holders[rank].append(machine)
                else:
                    self.tell(f"a part of the copy of step {copy.step} is left out: {problem}")
        return holders

    def _begin(self) -> None:
        if self.leads:
            self.store.clear_whole()
            self.store.whole.mkdir(mode=0o700)

    def _join(self, copy: CopyOf, names: dict[int, str], holders: dict[int, list[int]]) -> None:
        """Rank 0 makes a manifest of the records of all, which every machine then gets."""
        place, whole = self.store.place(copy), self.store.whole
        own = next(m for m, ranks in enumerate(self.machines) if 0 in ranks)
        there = {rank for rank, machines in holders.items() if own in machines}
        moves = [
            Move(self.leaders[holders[rank][0]], 0, place / name, whole / name)
            for rank, name in names.items()
            if rank not in there
        ]
        if not there:
            moves.append(Move(self.leaders[holders[0][0]], 0, place / STATE, whole / STATE))
        self._transfer(moves)
        paths = {rank: (place if rank in there else whole) / name for rank, name in names.items()}

        def write() -> list[str]:
            if self.mesh.rank:
                return []
            parts, _ = read_parts(paths)
            state = ((place if there else whole) / STATE).read_bytes()
            write_manifest(whole, copy.step, 0, joined(parts), state)
            return sorted(path.name for path in whole.iterdir() if path not in paths.values())

        small = self._on_all_ranks(write)
        told = self.mesh.broadcast_first(json.dumps(small) if self.mesh.rank == 0 else None)
        assert told is not None
        self._transfer(
            [
                Move(0, leader, whole / name, whole / name)
                for leader in self.leaders
                if leader != 0
                for name in json.loads(told)
            ]
        )

    def _bring(self, copy: CopyOf, holders: dict[int, list[int]], tensors: Tensors) -> None:
        """To each machine the files that its ranks need."""
        place, whole = self.store.place(copy), self.store.whole
        needed = self.mesh.on_all_ranks(lambda: self._needed(tensors))
        told = [json.loads(text) for text in self.mesh.gather(json.dumps(needed))]
        moves, links = list[Move](), list[str]()
        sent = dict.fromkeys(range(self.mesh.size), 0)
        for machine, ranks in enumerate(self.machines):
            takers: dict[str, int] = {}
            for rank in ranks:
                for file in told[rank]:
                    takers.setdefault(file, rank)
            for file, taker in sorted(takers.items()):
                writer = writer_of(file)
                assert writer is not None
                if machine in holders[writer]:
                    links += [file] if machine == self.machine else []
                    continue
                able = [rank for holder in holders[writer] for rank in self.machines[holder]]
                sender = min(able, key=lambda rank: sent[rank])
                sent[sender] += 1
                moves.append(Move(sender, taker, place / file, whole / file))
        self._transfer(moves)

        def link() -> None:
            for file in links if self.leads else ():
                os.link(place / file, whole / file)

        self._on_all_ranks(link)

    def _needed(self, tensors: Tensors) -> list[str]:
        manifest, wanted = read_manifest(self.store.whole), as_shards(tensors)
        if other := next((name for name in wanted if name not in manifest.tensors), None):
            raise CheckpointError(f"it is of another model, which has no {other}")
        return sorted(parts_by_file(manifest, wanted))

    def _on_all_ranks(self, work: Callable[[], Result]) -> Result:
        """The same, with what the file system says against it as a `UserError`."""

        def run() -> Result:
            try:
                return work()
            except OSError as error:
                raise CheckpointError(in_words(error)) from error

        return self.mesh.on_all_ranks(run)

    def _transfer(self, moves: Sequence[Move]) -> None:
        self.mesh.on_all_ranks(lambda: transfer(self.mesh.rank, moves, self.beat))


def _of_ranks(ranks: Sequence[int]) -> str:
    return f"of rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}" + (
        " and others" if len(ranks) > 8 else ""
    )
