"""`.pdparams`: Paddle's pickled dictionaries of arrays, in without Paddle or pickle, and out.

Three forms of a value occur: an array (with the table `StructuredToParameterName@@` beside it), a
pair of Paddle's own name and an array, and an array cut into slices (`UnpackBigParamInfor@@`),
which protocols below 4 need beyond 4 GB. The first is the form written.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fourfold.convert.arrays import NUMPY, PickledArray
from fourfold.convert.pickles import Constructor, Machine, only
from fourfold.convert.stored import Stored, joined, reshaped
from fourfold.convert.torch_files import map_file
from fourfold.errors import CheckpointError

NAME_TABLE = "StructuredToParameterName@@"
SLICE_TABLE = "UnpackBigParamInfor@@"


# --- reading ----------------------------------------------------------------------------------


def _itself(items: Any) -> tuple[Any, ...]:
    """`tuple((name, array))`."""
    if not isinstance(items, tuple):
        raise TypeError
    return items


def _named(expression: Any, names: Any) -> Any:
    """`eval("data", {"data": array})`, Paddle's way to write a tensor: looked up, not evaluated."""
    if expression != "data" or not isinstance(names, dict) or set(names) != {"data"}:
        raise CheckpointError("it asks to evaluate an expression. Nothing was run")
    return names["data"]


_PADDLE = NUMPY | {
    f"{module}.{name}": Constructor(make)
    for module in ("builtins", "__builtin__")
    for name, make in (("tuple", _itself), ("eval", _named))
}


def read_pdparams(path: Path) -> dict[str, Stored]:
    """Every array of a `.pdparams` file by its name there."""
    content = Machine(map_file(path), path, only(_PADDLE)).load()
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no dictionary of weights")
    try:
        arrays = {
            name: _array(name, value)
            for name, value in content.items()
            if name not in (NAME_TABLE, SLICE_TABLE)
        }
        return _without_slices(arrays, content.get(SLICE_TABLE, {}))
    except CheckpointError as error:
        raise CheckpointError(f"{path} is refused: {error}") from None


def _array(name: Any, value: Any) -> Stored:
    if isinstance(value, tuple) and len(value) == 2:
        value = value[1]
    if not isinstance(name, str) or not isinstance(value, PickledArray):
        raise CheckpointError(f"its entry {str(name)[:100]!r} is no array")
    return value.stored()


def _without_slices(arrays: dict[str, Stored], table: Any) -> dict[str, Stored]:
    try:
        for name, about in table.items():
            parts = [arrays.pop(part) for part in about["slices"]]
            arrays[name] = reshaped(joined(parts, 0), tuple(about["OriginShape"]))
    except (TypeError, KeyError, AttributeError, IndexError):
        raise CheckpointError("its table of cut arrays is damaged") from None
    return arrays


# --- writing ----------------------------------------------------------------------------------

# The opcodes are written here and not by pickle, so that arrays go to the disk one at a time, and
# under the name numpy had for its constructor before version 2, which newer ones know as well.
_PROTOCOL_4 = b"\x80\x04"
_RECONSTRUCT = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
_NUMPY_CODES = {torch.float32: b"f4", torch.float16: b"f2", torch.bfloat16: b"u2"}
_LITTLE_ENDIAN = b"(K\x03\x8c\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"


def write_pdparams(
    path: Path, tensors: Iterable[tuple[str, Tensor]], table: dict[str, str]
) -> None:
    """Write arrays as they come; `table` gives Paddle's own name of each."""
    with path.open("wb") as stream:
        stream.write(_PROTOCOL_4 + b"}")
        for name, tensor in tensors:
            stream.write(_text(name))
            _write_array(stream, tensor)
            stream.write(b"s")
        stream.write(_text(NAME_TABLE) + b"}")
        for name, own in table.items():
            stream.write(_text(name) + _text(own) + b"s")
        stream.write(b"s.")


def _write_array(stream: BinaryIO, tensor: Tensor) -> None:
    bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
    sizes = b"".join(b"J" + struct.pack("<i", size) for size in tensor.shape)
    dtype = b"cnumpy\ndtype\n\x8c\x02" + _NUMPY_CODES[tensor.dtype] + b"\x89\x88\x87R"
    stream.write(_RECONSTRUCT + b"(K\x01(" + sizes + b"t" + dtype + _LITTLE_ENDIAN + b"\x89")
    stream.write(b"\x8e" + struct.pack("<Q", tensor.nbytes))
    stream.write(bits.contiguous().numpy().data.cast("B"))
    stream.write(b"tb")


def _text(text: str) -> bytes:
    encoded = text.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded
