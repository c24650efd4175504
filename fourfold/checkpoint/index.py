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
"""

from __future__ import annotations

import itertools
import json
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import Field

from fourfold.checkpoint.bounded import (
    DTYPES,
    Count,
    DtypeName,
    FileName,
    FileRecord,
    StrictRecord,
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
    """How a tensor lies in files; shared by all tensors that lie alike, and compared as such."""

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
        """The pieces that have something of `wanted`; of a grid no others are looked at."""
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
    """Raise if a file is listed as smaller than what is said to be in it."""
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
