"""The rendezvous of a save: several ranks write one checkpoint together, and meet in a directory.

    rank 0 makes the directory, whose name all can work out, and says so before anyone looks for it
    every rank writes its files, then `rankNNNNN.json`: what it wrote, or why it could not
    rank 0 waits for all of these, then moves the directory to a name only it knows
    the others wait until it is gone

Where there is no room for a record, an empty file says so by its name: `rankNNNNN.full-HOST`.

A record appears by rename after the files it lists were synced. From the move on nobody else can
touch what will be committed: a rank that comes too late finds no directory.

Nobody waits in a collective, whose time is limited: the wait lasts as long as something grows in
the directory. What is waited for is opened or listed and not only looked for, because a network
file system answers questions about a single name from its memory for up to a minute.

`RankGroup` is a transport-free description of the ranks. A save begins with a collective, so that
all ranks learn at once what keeps rank 0 from starting; after that it needs no communication, and
so works from a thread. Loading is a sequence of collective steps.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourfold import heartbeat
from fourfold.atomic_files import replace_bytes
from fourfold.checkpoint.bounded import FileRecord, check_size
from fourfold.checkpoint.directory import commit, meeting_name, private_name, remove
from fourfold.checkpoint.index import Index, Part, encode_part, encode_problem, joined, read_parts
from fourfold.checkpoint.manifest import MAX_INDEX_BYTES
from fourfold.errors import CheckpointError
from fourfold.mesh import Mesh

Beat = Callable[[], None]

# How many ranks may ask the file system for news in the same millisecond.
RANKS_PER_MILLISECOND = 1
NO_ROOM = "rank{rank:05d}.full-"
NO_ROOM_NAME = re.compile(r"rank(?P<rank>\d{5,})\.full-(?P<host>.+)")


class SaveRendezvous:
    """One save of one step, as one of its ranks sees it.

    A process by itself meets nobody, in a directory with a name that says which process it is.
    At an address they meet there (`BucketRendezvous`).
    """

    first_pause_seconds = 0.005
    longest_pause_seconds = 0.2
    # Goes into the names of the files.
    label = ""

    def __init__(self, output_dir: Path, step: int, ranks: RankGroup) -> None:
        self.ranks = ranks
        if ranks.size == 1:
            self.directory = private_name(output_dir, f"step_{step}", "tmp")
        else:
            self.directory = meeting_name(output_dir, step, ranks.session)

    def open(self) -> None:
        assert self.ranks.rank == 0
        self.directory.mkdir()

    def join(self) -> None:
        """Wait until the directory that rank 0 has opened is visible here."""
        own = self._record_name(self.ranks.rank)

        # Our record in it is of an earlier save of this step that rank 0 is still busy with.
        def is_open() -> bool:
            listed = self._listed()
            return listed is not None and own not in listed

        if not self._becomes_true(is_open):
            raise CheckpointError(
                f"rank 0 did not begin this save within {self.ranks.timeout_seconds:g} s"
            )

    def report(self, part: Part | None, problem: str = "") -> None:
        """Say that this rank is done."""
        name = self._record_name(self.ranks.rank)
        data = encode_problem(problem) if part is None else encode_part(part)
        check_size(data, MAX_INDEX_BYTES, name)
        self.report_bytes(name, data)

    def report_bytes(self, name: str, data: bytes) -> None:
        path = self.directory / name
        replace_bytes(path, data, aside=path.with_suffix(".tmp"))

    def report_no_room(self) -> None:
        """Say that this rank has failed where there is room for no record: a name alone takes
        none."""
        name = f"{NO_ROOM.format(rank=self.ranks.rank)}{socket.gethostname()}"
        (self.directory / name).touch()

    def deliver(self, part: Part) -> None:
        """Bring what this rank has written to where it is read; here it is there already."""

    def commit(self, target: Path) -> None:
        """Make what is complete and synced a checkpoint."""
        commit(self.directory, target)

    def leave(self) -> None:
        """Wait until rank 0 has taken the directory away, with our part in it or not."""
        path = self.directory / self._record_name(self.ranks.rank)

        def is_gone() -> bool:
            try:
                os.close(os.open(path, os.O_RDONLY))
            except OSError:
                return True
            return False

        if not self._becomes_true(is_gone, self._last_change):
            raise CheckpointError(
                f"rank 0 did not end this save within {self.ranks.timeout_seconds:g} s"
            )

    def close(self, own: Part | None, problem: str = "") -> dict[str, Index]:
        """Wait for the other ranks; returns what they have written, if together it is complete.

        The directory then has a private name and no records in it. That some rank failed is
        raised when all are done, so that the others need not notice.
        """
        missing = self._wait_for_records()
        self._take_away()
        if missing:
            raise CheckpointError(
                f"no part came from rank {', '.join(map(str, sorted(missing)))} within "
                f"{self.ranks.timeout_seconds:g} s"
            )
        problems = self._without_room()
        paths = {
            rank: self.directory / self._record_name(rank)
            for rank in range(1, self.ranks.size)
            if rank not in problems
        }
        parts, told = read_parts(paths)
        problems |= told
        if own is None:
            problems = {0: problem} | problems
        if problems:
            raise CheckpointError("; ".join(f"rank {rank}: {p}" for rank, p in problems.items()))
        assert own is not None
        indices = joined({0: own} | parts)
        self._check_sizes({f: r for part in parts.values() for f, r in part.files.items()})
        for path in paths.values():
            path.unlink()
        return indices

    def abandon(self) -> None:
        """Remove what is there: first the name, so that a late rank finds nothing to write into."""
        with suppress(OSError):
            self._take_away()
        remove(self.directory)

    def _wait_for_records(self) -> set[int]:
        """The ranks that have not reported in time."""
        names = {self._record_name(rank): rank for rank in range(1, self.ranks.size)}

        def all_there() -> bool:
            listed = self._listed() or set()
            if any(NO_ROOM_NAME.match(name) for name in listed):
                listed |= {self._record_name(rank) for rank in self._without_room()}
            for name in names.keys() & listed:
                del names[name]
            return not names

        self._becomes_true(all_there, self._look_around)
        return set(names.values())

    def _without_room(self) -> dict[int, str]:
        """The ranks that could not even write why they failed, with that."""
        found = [match for name in self._listed() or () if (match := NO_ROOM_NAME.match(name))]
        full = os.strerror(errno.ENOSPC)
        return {int(m["rank"]): f"{full}, not even to say so (on {m['host']})" for m in found}

    def _listed(self) -> set[str] | None:
        """What is in the directory; None if there is no such directory to be seen."""
        try:
            return set(os.listdir(self.directory))
        except OSError:
            return None

    def _look_around(self) -> object:
        """Rank 0's look at what the others are writing: different whenever something grew.

        It then marks the directory, which tells the others that rank 0 is alive; and changing a
        directory makes a network file system refresh it from its server.
        """
        seen = []
        with suppress(OSError):
            with os.scandir(self.directory) as entries:
                seen = sorted((entry.name, entry.stat().st_size) for entry in entries)
            os.utime(self.directory)
        return seen

    def _last_change(self) -> object:
        try:
            return os.stat(self.directory).st_mtime_ns
        except OSError:
            return None

    def _take_away(self) -> None:
        private = self.directory.with_name(f"{self.directory.name}-{secrets.token_hex(4)}")
        self.directory.rename(private)
        self.directory = private

    def _check_sizes(self, files: dict[str, FileRecord]) -> None:
        """A network file system may show a file of another machine later than its record."""
        waiting = set(files)

        def all_there() -> bool:
            waiting.difference_update([f for f in waiting if self._size(f) == files[f].bytes])
            return not waiting

        if not self._becomes_true(all_there):
            raise CheckpointError(f"{min(waiting)} is not there as its rank has written it")

    def _size(self, file: str) -> int | None:
        try:
            with (self.directory / file).open("rb") as stream:
                return os.fstat(stream.fileno()).st_size
        except OSError:
            return None

    def _record_name(self, rank: int) -> str:
        return f"rank{rank:05d}.json"

    def _becomes_true(
        self, condition: Callable[[], bool], progress: Callable[[], object] | None = None
    ) -> bool:
        """Wait for `condition`; at most the group's time after the last change of `progress()`."""
        limit = self.ranks.timeout_seconds
        looks_every = min(10.0, limit / 5)
        longest = max(self.longest_pause_seconds, self.ranks.size / RANKS_PER_MILLISECOND / 1000)
        pause = self.first_pause_seconds
        began = looked = time.monotonic()
        seen: object = None
        while not condition():
            now = time.monotonic()
            if progress is not None and now > looked + looks_every:
                looked, before, seen = now, seen, progress()
                began = now if seen != before else began
            if now > began + limit:
                return False
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return True


# -- the ranks that save and load together --------------------------------------------------------


def _own_word(text: str | None) -> str | None:
    return text


def _own_words(text: str) -> list[str]:
    return [text]


def silent() -> None:
    """A beat that nobody listens to."""


@dataclass(frozen=True)
class RankGroup:
    """One rank's view of the ranks of a job. The default is a process by itself."""

    rank: int = 0
    size: int = 1
    # Unique per start of the job and the same on all its ranks.
    session: str = ""
    # A collective: the text of the first rank that gave one, unchanged, or None if none did.
    broadcast_first: Callable[[str | None], str | None] = _own_word
    # How long to wait for another rank, of which nothing is to be seen, to do its part of a save.
    timeout_seconds: float = 600.0
    # A collective: what every rank said, by rank.
    gather: Callable[[str], list[str]] = _own_words
    # Called every few megabytes by a rank that is working, not by one that waits.
    beat: Callable[[], None] = silent
    # Called by rank 0 before it commits; raises if it may not any more.
    may_commit: Callable[[], None] = silent

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size
        assert self.size == 1 or self.session, "many ranks need a session to meet in"

    @classmethod
    def of(cls, mesh: Mesh, timeout_seconds: float) -> RankGroup:
        """The ranks of a mesh; a collective."""
        session = mesh.broadcast_first(secrets.token_hex(8)) or ""
        talk = (mesh.broadcast_first, timeout_seconds, mesh.gather)
        return cls(mesh.rank, mesh.size, session, *talk, beat=heartbeat.alive)

    def broadcast(self, value: Any) -> Any:
        """Rank 0's `value` (plain JSON) on every rank; a collective."""
        told = self.broadcast_first(json.dumps(value) if self.rank == 0 else None)
        assert told is not None
        return json.loads(told)

    def unclaimed(self, names: list[str], mine: set[str]) -> list[str]:
        """Those of `names`, the same list on all ranks, that no rank has; a collective.

        Each round takes off the names of one rank. Ranks that hold the same names are done in
        one, so there are about as many rounds as pipeline stages.
        """
        left = names
        while True:
            told = self.broadcast_first(
                json.dumps(claim) if (claim := [n for n in left if n in mine]) else None
            )
            if told is None:
                return left
            taken = set(json.loads(told))
            left = [name for name in left if name not in taken]

    def dealt(self, wanted: list[str], sizes: dict[str, int]) -> list[str]:
        """This rank's share of all files wanted by any rank: those it wants itself, if it can.

        Each file falls to one rank that wants it, so that what is read to be checked is then
        read again from memory; of several the one with the least to do takes it. A collective.
        """
        order = {file: number for number, file in enumerate(sizes)}
        mine = sum(1 << order[file] for file in wanted)
        everyone = [int(word, 16) for word in self.gather(f"{mine:x}")]
        assert len(everyone) == self.size, "ranks that load together must be able to gather"
        takers: dict[str, list[int]] = {}
        files = list(sizes)
        for rank, wants in enumerate(everyone):
            while wants:
                lowest = wants & -wants
                wants ^= lowest
                takers.setdefault(files[lowest.bit_length() - 1], []).append(rank)
        load = [0] * len(everyone)
        share = []
        for file in sorted(takers):
            taker = min(takers[file], key=load.__getitem__)
            load[taker] += sizes[file]
            if taker == self.rank:
                share.append(file)
        return share


ALONE = RankGroup()
