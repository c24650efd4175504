"""What each rank tells of its part of a checkpoint, and how rank 0 makes one index of all.

A rank has many pieces of few *kinds*: shape and dtype of the tensor, offsets and shape of the
piece. Its record lists its files and kinds, and refers by a digest to a table, name -> kind and
file, which is the same on all ranks that hold the same tensors. Rank 0 reads each table once. Its
work grows with the ranks plus the tensors, and not with their product.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pydantic import Field, RootModel

from fourfold.checkpoint.bounded import (
    HASH,
    Count,
    Digest,
    DtypeName,
    FileName,
    FileRecord,
    StrictRecord,
    digest_of,
    parse_record,
)
from fourfold.checkpoint.index import Cut, Index, group_of
from fourfold.errors import CheckpointError
from fourfold.shards import Box


class StoredPiece(NamedTuple):
    """A piece that was written: of what, which part, and where to."""

    shape: tuple[int, ...]
    dtype: str
    box: Box
    file: str


class Kind(NamedTuple):
    """What pieces of different tensors can have in common."""

    shape: tuple[int, ...]
    dtype: str
    box: Box

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


# Name -> which of the rank's kinds, which of its files.
Table = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Part:
    """One rank's part of a checkpoint."""

    files: Mapping[str, FileRecord]
    kinds: list[Kind]
    table: Table
    # Equal where tables are equal.
    table_digest: str

    @classmethod
    def of(cls, files: Mapping[str, FileRecord], pieces: Mapping[str, StoredPiece]) -> Part:
        numbers = {file: number for number, file in enumerate(files)}
        kinds: dict[Kind, int] = {}
        table = {
            name: (kinds.setdefault(Kind(*piece[:3]), len(kinds)), numbers[piece.file])
            for name, piece in pieces.items()
        }
        return cls(files, [*kinds], table, digest_of(_table_bytes(table), HASH))


# --- on the disk: a line that tells of the rank, then the table -------------------------------


class _KindRecord(StrictRecord):
    shape: tuple[Count, ...]
    dtype: DtypeName
    offsets: tuple[Count, ...]
    size: tuple[Count, ...]


class RankRecord(StrictRecord):
    """The first line: one rank's part, or its reason for having none."""

    problem: str | None = None
    files: dict[FileName, FileRecord] = Field(default_factory=dict)
    kinds: tuple[_KindRecord, ...] = ()
    table_digest: Digest = digest_of(b"{}", HASH)


class _TableRecord(RootModel[dict[str, tuple[Count, Count]]]):
    pass


def _table_bytes(table: Table) -> bytes:
    return json.dumps(table, separators=(",", ":")).encode()


def encode_problem(problem: str) -> bytes:
    return RankRecord(problem=problem).model_dump_json().encode() + b"\n{}"


def encode_part(part: Part) -> bytes:
    kinds = tuple(
        _KindRecord(shape=kind.shape, dtype=kind.dtype, offsets=kind.box[0], size=kind.box[1])
        for kind in part.kinds
    )
    head = RankRecord(files=dict(part.files), kinds=kinds, table_digest=part.table_digest)
    return head.model_dump_json().encode() + b"\n" + _table_bytes(part.table)


def read_parts(paths: Mapping[int, Path]) -> tuple[dict[int, Part], dict[int, str]]:
    """The parts of the ranks whose records these are, and the problems of those that failed."""
    parts: dict[int, Part] = {}
    problems: dict[int, str] = {}
    tables: dict[str, Table] = {}
    for rank, path in paths.items():
        with path.open("rb") as stream:
            head = parse_record(RankRecord, stream.readline(), path)
            if head.problem is not None:
                problems[rank] = head.problem
                continue
            if head.table_digest not in tables:
                tables[head.table_digest] = _parse_table(stream.read(), head.table_digest, path)
        kinds = [Kind(k.shape, k.dtype, Box(k.offsets, k.size)) for k in head.kinds]
        table = tables[head.table_digest]
        if any(kind >= len(kinds) or file >= len(head.files) for kind, file in set(table.values())):
            raise CheckpointError(f"{path} is damaged: its table is of another record")
        parts[rank] = Part(head.files, kinds, table, head.table_digest)
    return parts, problems


def _parse_table(data: bytes, digest: str, path: Path) -> Table:
    if digest_of(data, HASH) != digest:
        raise CheckpointError(f"{path} is damaged: its table is not what was written")
    return parse_record(_TableRecord, data, path).root


# --- all parts as one -------------------------------------------------------------------------


class _Share(NamedTuple):
    """The ranks with the table of `speaker` have a piece of this kind each, in this file."""

    speaker: int
    kind: int
    file: int


def joined(parts: Mapping[int, Part]) -> dict[str, Index]:
    """Group -> index; raises unless each tensor's pieces agree and cover it exactly once."""
    ranks: dict[str, list[int]] = {}
    for rank, part in parts.items():
        ranks.setdefault(part.table_digest, []).append(rank)
    shares: dict[str, list[_Share]] = {}
    for same in ranks.values():
        for name, (kind, file) in parts[same[0]].table.items():
            shares.setdefault(name, []).append(_Share(same[0], kind, file))
    sharers = {same[0]: same for same in ranks.values()}
    file_names = {rank: [*part.files] for rank, part in parts.items()}

    def pieces(own: Iterable[_Share]) -> Iterator[tuple[int, Kind, str]]:
        for share in own:
            for rank in sharers[share.speaker]:
                yield rank, parts[rank].kinds[share.kind], file_names[rank][share.file]

    files: dict[str, dict[str, FileRecord]] = {}
    tensors: dict[str, dict[str, Cut]] = {}
    cuts: dict[tuple[str, tuple[_Share, ...]], Cut] = {}
    for name, own in shares.items():
        group = group_of(name)
        alike = (group, tuple(own))
        if alike not in cuts:
            cuts[alike] = _cut(name, [*pieces(own)])
            held = files.setdefault(group, {})
            held |= {file: parts[rank].files[file] for rank, _, file in pieces(own)}
        tensors.setdefault(group, {})[name] = cuts[alike]
    return {group: Index(dict(sorted(files[group].items())), tensors[group]) for group in tensors}


def _cut(name: str, pieces: list[tuple[int, Kind, str]]) -> Cut:
    _, first, _ = pieces[0]
    for rank, kind, _ in pieces:
        if kind[:2] != first[:2]:
            raise CheckpointError(f"{name} is {kind} on rank {rank} and {first} on another")
    try:
        return Cut.of(first.shape, first.dtype, [(kind.box, file) for _, kind, file in pieces])
    except ValueError as error:
        raise CheckpointError(f"the ranks' pieces of {name} do not make it up: {error}") from None
