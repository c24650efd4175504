"""Directories of `torch.distributed.checkpoint`, read without it: `.metadata` and `*.distcp`.

`.metadata` is a pickle that says, for each tensor, its whole shape, the rectangles it was cut into
and where in which file each of them is, stored as `torch.save` stores a single tensor. The machine
of pickles.py reads both: the classes of torch and Megatron that are named are records of plain
values here: they are not imported and run no code.

Only the tensors that are requested are looked at, since most of a checkpoint is the optimizer's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fourfold.convert.arrays import Inert
from fourfold.convert.imported import LazyTensor
from fourfold.convert.pickles import Constructor, PickleMachine, Record, only
from fourfold.convert.torch_files import MAX_DIMENSIONS, map_file, read_torch_bytes
from fourfold.errors import CheckpointError
from fourfold.shards import Box, tiling_problem

METADATA = ".metadata"
# A piece takes some hundred steps, with the plans of all ranks, which are stored too.
MAX_STEPS = 20_000_000

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Values(Record):
    """An object as the values it was given: arguments, then its state."""

    def __init__(self, *arguments: Any) -> None:
        self.state: Any = arguments

    def set_state(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        return self.state.get(name) if isinstance(self.state, dict) else None


class Dtype(Record):
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


_INERT = Constructor(Inert)
_VALUES = Constructor(Values)
_KNOWN: dict[str, Any] = {
    **{str(dtype): Dtype(dtype) for dtype in _DTYPES},
    **{
        str(dtype): Inert()
        for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
    },
    "torch.Size": Constructor(lambda sizes=(): sizes),
    "torch.device": _INERT,
    "torch.serialization._get_layout": _INERT,
    "pathlib.PosixPath": _INERT,
}
_RECORDS = ("torch.distributed.checkpoint.", "torch.distributed._shard.", "megatron.core.")


def _names(name: str) -> Any:
    return _VALUES if name.startswith(_RECORDS) else only(_KNOWN)(name)


@dataclass(frozen=True)
class StoredCut:
    """One rectangle of a tensor and the bytes of a file that hold it."""

    box: Box
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class DescribedTensor:
    """A tensor by its description alone."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    cuts: list[StoredCut]


class DistributedFiles:
    """A directory of `torch.distributed.checkpoint`: the names of its tensors, and these."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.path = directory, directory / METADATA
        self._maps: dict[str, memoryview] = {}
        machine = PickleMachine(map_file(self.path), self.path, _names, max_steps=MAX_STEPS)
        metadata = machine.load()
        if not isinstance(metadata, Values):
            raise self._damaged("it describes no checkpoint")
        tensors, places = metadata.get("state_dict_metadata"), metadata.get("storage_data")
        if not isinstance(tensors, dict) or not isinstance(places, dict):
            raise self._damaged("it describes no tensors")
        self._tensors: dict[str, Values] = {
            name: about
            for name, about in tensors.items()
            if isinstance(name, str) and isinstance(about, Values) and about.get("chunks")
        }
        self._places = {
            (index.get("fqn"), _numbers(index.get("offset"))): place
            for index, place in places.items()
            if isinstance(index, Values) and isinstance(index.get("fqn"), str)
        }

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def tensor(self, name: str) -> LazyTensor:
        about = self._described(name)
        parts = [(cut.box, self._part(name, about, cut)) for cut in about.cuts]
        whole = Box((0,) * len(about.shape), about.shape)
        return LazyTensor(about.shape, about.dtype, _reader(parts, whole, about.dtype))

    def rows(self, name: str) -> list[LazyTensor]:
        """The parts of a tensor along its first axis, each as a tensor with one axis less."""
        about = self._described(name)
        parts = [(cut.box, self._part(name, about, cut)) for cut in about.cuts]
        return [
            LazyTensor(about.shape[1:], about.dtype, _row_reader(parts, row, about))
            for row in range(about.shape[0] if about.shape else 0)
        ]

    def _described(self, name: str) -> DescribedTensor:
        about = self._tensors[name]
        properties, shape = about.get("properties"), _numbers(about.get("size"))
        state = properties.state if isinstance(properties, Values) else None
        dtype = state[0] if isinstance(state, tuple) and state else None
        if shape is None or math.prod(shape) == 0 or not isinstance(dtype, Dtype):
            raise self._damaged(f"{name[:100]} has an invalid shape, or a type no weights have")
        cuts = [self._cut(name, chunk) for chunk in about.get("chunks")]
        if problem := tiling_problem(shape, [cut.box for cut in cuts]):
            raise self._damaged(f"the pieces of {name[:100]} do not fit: {problem}")
        return DescribedTensor(shape, dtype.dtype, cuts)

    def _cut(self, name: str, chunk: Any) -> StoredCut:
        chunk = chunk if isinstance(chunk, Values) else Values()
        offsets, sizes = _numbers(chunk.get("offsets")), _numbers(chunk.get("sizes"))
        if offsets is None or sizes is None or len(offsets) != len(sizes):
            raise self._damaged(f"a piece of {name[:100]} has no location")
        place = self._places.get((name, offsets))
        if not isinstance(place, Values):
            raise self._damaged(f"no file is named for the piece of {name[:100]} at {offsets}")
        if place.get("transform_descriptors"):
            raise self._damaged(f"{name[:100]} is compressed, which is not supported")
        file, where = (
            place.get("relative_path"),
            _numbers((place.get("offset"), place.get("length"))),
        )
        if not isinstance(file, str) or Path(file).name != file or where is None:
            raise self._damaged(f"the piece of {name[:100]} at {offsets} has an invalid location")
        return StoredCut(Box(offsets, sizes), file, *where)

    def _part(self, name: str, about: DescribedTensor, cut: StoredCut) -> LazyTensor:
        file = self.directory / cut.file
        if cut.file not in self._maps:
            self._maps[cut.file] = map_file(file)
        data = self._maps[cut.file]
        if cut.start + cut.length > len(data):
            raise CheckpointError(f"{file} is cut off: {name[:100]} reaches beyond its end")
        found = read_torch_bytes(data[cut.start : cut.start + cut.length], file)
        if (
            not isinstance(found, LazyTensor)
            or found.shape != cut.box.shape
            or found.dtype != about.dtype
        ):
            raise CheckpointError(
                f"{file} is damaged: its piece of {name[:100]} at {cut.box.offsets} is not the one "
                "described"
            )
        return found

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged or of another kind: {why}")


def _numbers(value: Any) -> tuple[int, ...] | None:
    """Sizes or offsets, or None for anything else."""
    if not isinstance(value, tuple) or len(value) > MAX_DIMENSIONS:
        return None
    plain = all(type(number) is int and 0 <= number < 2**48 for number in value)
    return value if plain else None


Parts = list[tuple[Box, LazyTensor]]


def _reader(parts: Parts, wanted: Box, dtype: torch.dtype) -> Callable[[], Tensor]:
    def read() -> Tensor:
        whole = torch.empty(wanted.shape, dtype=dtype)
        for box, stored, common in _overlapping(parts, wanted):
            whole[common.within(wanted)] = stored.read()[common.within(box)]
        return whole

    return read


def _row_reader(parts: Parts, row: int, about: DescribedTensor) -> Callable[[], Tensor]:
    wanted = Box((row, *(0 for _ in about.shape[1:])), (1, *about.shape[1:]))
    read = _reader([(box, s) for box, s, _ in _overlapping(parts, wanted)], wanted, about.dtype)
    return lambda: read().squeeze(0)


def _overlapping(parts: Parts, wanted: Box) -> Iterator[tuple[Box, LazyTensor, Box]]:
    for box, stored in parts:
        if common := box.overlap(wanted):
            yield box, stored, common
