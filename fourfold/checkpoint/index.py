"""Where the tensors of a checkpoint are: `index-GROUP.json`.

An index names grids instead of pieces. A *cut* is a shape, a dtype, the borders of a grid and the
file of each of its cells; all tensors that are cut and filed alike share one. The layers of a model
are alike, so a model of 1156 tensors on 1024 ranks has some thirty cuts, and not a million pieces:

    {"files": {"model-rank00000-00001-of-00001.safetensors": {"bytes": 9776, "digest": "..."}, ...},
     "cuts": [{"shape": [96, 32], "dtype": "float32", "grid": [[0, 48], [0]], "files": [0, 1]}],
     "tensors": {"model.decoder.layers.0.attn.qkv.weight": 0, ...}}

`grid` has for each dimension where the cells begin; the last dimension runs fastest through
`files`, which counts the entries of the first table. A grid covers its tensor exactly once because
it is one. Pieces that make no grid are listed, with offsets and shape each, under `boxes`.

The second half is how rank 0 makes one index of what each rank reports about its part.
A rank has many pieces of few *kinds*: shape and dtype of the tensor, offsets and shape of the
piece. Its record lists its files and kinds, and refers by a digest to a table, name -> kind and
file, which is the same on all ranks that hold the same tensors. Rank 0 reads each table once. Its
work grows with the ranks plus the tensors, and not with their product.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import Field, RootModel

from fourfold.checkpoint.bounded import (
    DTYPES,
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
from fourfold.errors import CheckpointError
from fourfold.shards import Box, tiling_problem

Grid = tuple[tuple[int, ...], ...]


def group_of(name: str) -> str:
    """The first part of a tensor's name, after which its files and its index are called."""
    return name.partition(".")[0] if re.match(r"[A-Za-z0-9_]{1,100}\.", name) else "tensors"


def index_name(group: str) -> str:
    return f"index-{group}.json"


@dataclass(frozen=True, eq=False)
class Cut:
    """How a tensor is split over files; shared by all tensors that are split alike."""

    shape: tuple[int, ...]
    dtype: str
    files: tuple[str, ...]  # of each cell of the grid, or of each box
    grid: Grid | None = None
    boxes: tuple[Box, ...] = ()

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: str, cells: Sequence[tuple[Box, str]]) -> Cut:
        """The cut into these cells; `ValueError` unless they cover the shape exactly once."""
        ordered = sorted(cells)
        files = tuple(file for _, file in ordered)
        boxes = tuple(box for box, _ in ordered)
        if len(set(files)) < len(files):
            raise ValueError("it is twice in one file")
        grid = _grid_of(shape, boxes)
        if grid is not None:
            return cls(shape, dtype, files, grid)
        if problem := tiling_problem(shape, boxes):
            raise ValueError(problem)
        return cls(shape, dtype, files, None, boxes)

    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def nbytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype().itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"

    def cells(self) -> Iterator[tuple[Box, str]]:
        """Every piece and its file."""
        boxes = self.boxes if self.grid is None else _cells(self.shape, self.grid)
        return zip(boxes, self.files, strict=True)

    def overlapping(self, wanted: Box) -> Iterator[tuple[Box, str]]:
        """The pieces that overlap `wanted`; in a grid no others are looked at."""
        if self.grid is None:
            yield from (cell for cell in self.cells() if cell[0].overlap(wanted) is not None)
            return
        if wanted.volume() == 0:
            return
        ranges = [
            range(bisect_right(starts, begin) - 1, bisect_left(starts, begin + size))
            for starts, begin, size in zip(self.grid, *wanted, strict=True)
        ]
        for place in itertools.product(*ranges):
            number, begins, sizes = 0, [], []
            for at, starts, size in zip(place, self.grid, self.shape, strict=True):
                number = number * len(starts) + at
                begins.append(starts[at])
                sizes.append((*starts[at + 1 : at + 2], size)[0] - starts[at])
            yield Box(tuple(begins), tuple(sizes)), self.files[number]


def _intervals(shape: tuple[int, ...], grid: Grid) -> list[list[tuple[int, int]]]:
    """For each dimension, where its cells begin and how long they are."""
    return [
        [(start, end - start) for start, end in itertools.pairwise((*starts, size))]
        for starts, size in zip(grid, shape, strict=True)
    ]


def _cells(shape: tuple[int, ...], grid: Grid) -> Iterator[Box]:
    for place in itertools.product(*_intervals(shape, grid)):
        yield Box(tuple(start for start, _ in place), tuple(size for _, size in place))


def _grid_of(shape: tuple[int, ...], boxes: Sequence[Box]) -> Grid | None:
    """The grid whose cells these are, in their order; None if there is none."""
    if not all(box.fits_in(shape) for box in boxes):
        return None
    grid = tuple(tuple(sorted({box.offsets[axis] for box in boxes})) for axis in range(len(shape)))
    if len(boxes) != math.prod(map(len, grid)) or _grid_problem(shape, grid):
        return None
    return grid if all(a == b for a, b in zip(boxes, _cells(shape, grid), strict=True)) else None


def _grid_problem(shape: tuple[int, ...], grid: Grid) -> str | None:
    """Why this is no grid over `shape`; None if it is one."""
    if len(grid) != len(shape):
        return f"a grid of {len(grid)} dimensions over {len(shape)}"
    for size, starts in zip(shape, grid, strict=True):
        rising = all(a < b for a, b in itertools.pairwise(starts))
        if not starts or starts[0] != 0 or not rising or starts[-1] >= max(size, 1):
            return f"the borders of its grid do not cut {size} into parts"
    return None


# --- the file ---------------------------------------------------------------------------------


class _CutRecord(StrictRecord):
    shape: tuple[Count, ...]
    dtype: DtypeName
    grid: tuple[tuple[Count, ...], ...] | None = None
    boxes: tuple[tuple[tuple[Count, ...], tuple[Count, ...]], ...] | None = None
    files: tuple[Count, ...] = Field(min_length=1)

    def cut(self, files: list[str]) -> Cut:
        """`ValueError` if it is none."""
        if not all(number < len(files) for number in self.files):
            raise ValueError("a piece is in no listed file")
        named = tuple(files[number] for number in self.files)
        if (self.grid is None) == (self.boxes is None):
            raise ValueError("it must have either a grid or boxes")
        if self.boxes is not None:
            if len(self.boxes) != len(named):
                raise ValueError(f"{len(self.boxes)} pieces in {len(named)} files")
            boxes = (Box(*box) for box in self.boxes)
            return Cut.of(self.shape, self.dtype, [*zip(boxes, named, strict=True)])
        assert self.grid is not None
        if problem := _grid_problem(self.shape, self.grid):
            raise ValueError(problem)
        if math.prod(map(len, self.grid)) != len(named):
            raise ValueError(f"{len(named)} files for another number of cells")
        if len(set(named)) < len(named):
            raise ValueError("it is twice in one file")
        return Cut(self.shape, self.dtype, named, self.grid)


class _IndexRecord(StrictRecord):
    files: dict[FileName, FileRecord]
    cuts: tuple[_CutRecord, ...]
    tensors: dict[str, Count]


@dataclass(frozen=True)
class Index:
    """The tensors of one group and the files they are in."""

    files: Mapping[str, FileRecord]
    tensors: Mapping[str, Cut]

    def content_bytes(self) -> int:
        return sum(record.bytes for record in self.files.values())

    def to_bytes(self) -> bytes:
        """JSON with a line for each file, cut and tensor, so that it can be read and searched."""
        numbers = {file: number for number, file in enumerate(self.files)}
        cuts = {cut: number for number, cut in enumerate(dict.fromkeys(self.tensors.values()))}
        files = [f"{json.dumps(f)}: {record.model_dump_json()}" for f, record in self.files.items()]
        tensors = [f"{json.dumps(name)}: {cuts[cut]}" for name, cut in self.tensors.items()]
        tables = {
            "files": ("{", files, "}"),
            "cuts": ("[", [_cut_line(cut, numbers) for cut in cuts], "]"),
            "tensors": ("{", tensors, "}"),
        }
        entries = (
            f' "{key}": {begin}\n  ' + ",\n  ".join(lines) + f"\n {end}"
            for key, (begin, lines, end) in tables.items()
        )
        return ("{\n" + ",\n".join(entries) + "\n}\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes, group: str, path: Path) -> Index:
        """Raises `CheckpointError` unless all of it is consistent."""
        record = parse_record(_IndexRecord, data, path)
        names = [*record.files]
        if wrong := next((name for name in record.tensors if group_of(name) != group), None):
            raise CheckpointError(f"{path} is damaged: {wrong!r} is not of this group")
        if not all(number < len(record.cuts) for number in record.tensors.values()):
            raise CheckpointError(f"{path} is damaged: a tensor has no cut")
        first = {number: name for name, number in reversed(record.tensors.items())}
        cuts = []
        for number, given in enumerate(record.cuts):
            try:
                cuts.append(given.cut(names))
            except ValueError as error:
                whose = repr(first[number]) if number in first else f"cut {number}"
                raise CheckpointError(f"{path} is damaged: {whose}: {error}") from None
        tensors = {name: cuts[number] for name, number in record.tensors.items()}
        check_room(record.files, tensors, path)
        return cls(record.files, tensors)


def _cut_line(cut: Cut, numbers: Mapping[str, int]) -> str:
    where = {"boxes": cut.boxes} if cut.grid is None else {"grid": cut.grid}
    record = {"shape": cut.shape, "dtype": cut.dtype, **where}
    return json.dumps(record | {"files": [numbers[file] for file in cut.files]})


def check_room(files: Mapping[str, FileRecord], tensors: Mapping[str, Cut], path: Path) -> None:
    """Raise if a file is listed as smaller than its listed contents."""
    alike: dict[Cut, int] = {}
    for cut in tensors.values():
        alike[cut] = alike.get(cut, 0) + 1
    held: dict[str, int] = {}
    for cut, times in alike.items():
        for box, file in cut.cells():
            nbytes = box.volume() * cut.torch_dtype().itemsize
            held[file] = held.get(file, 0) + times * nbytes
    for file, nbytes in held.items():
        if nbytes > files[file].bytes:
            raise CheckpointError(f"{path} is damaged: {file} is too small for its tensors")


# -- from the ranks' records ----------------------------------------------------------------------


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


# --- on the disk: a line about the rank, then the table ---------------------------------------


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
