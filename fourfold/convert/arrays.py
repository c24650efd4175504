"""numpy arrays in pickles, without numpy making them: what they say, checked, as `LazyTensor`.

`NUMPY` lists the names numpy's pickles use, in the spelling of numpy 1 and 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fourfold.convert.imported import LazyTensor
from fourfold.convert.pickles import Constructor, Record
from fourfold.errors import CheckpointError

# Paddle keeps bfloat16 as the unsigned integers of the same bits.
TORCH_DTYPES = {
    "f2": torch.float16,
    "f4": torch.float32,
    "f8": torch.float64,
    "u2": torch.bfloat16,
    "i8": torch.int64,
    "i4": torch.int32,
    "i2": torch.int16,
    "i1": torch.int8,
    "u1": torch.uint8,
    "b1": torch.bool,
}


class PickledDtype(Record):
    def __init__(self, code: Any, *_: Any) -> None:
        self.code, self.order = code, "="

    def set_state(self, state: Any) -> None:
        _, self.order, *_ = state

    def numpy(self) -> np.dtype:
        if self.code not in TORCH_DTYPES or self.order not in ("<", ">", "|", "="):
            raise CheckpointError("an array is of a type that no weights have")
        return np.dtype(f"{self.order}{self.code}")


@dataclass(frozen=True)
class EncodedText:
    """The bytes of an array in protocol 2, written as a text of as many characters."""

    text: Any
    encoding: Any

    def __len__(self) -> int:
        if self.encoding not in ("latin1", "latin-1") or not isinstance(self.text, str):
            raise TypeError
        return len(self.text)


class PickledArray(Record):
    """Empty when constructed; the state brings (version, shape, dtype, Fortran order, bytes)."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def set_state(self, state: Any) -> None:
        self.state = state

    def stored(self) -> LazyTensor:
        try:
            _, shape, pickled, fortran, data = self.state
            if not (
                isinstance(pickled, PickledDtype)
                and isinstance(shape, tuple)
                and all(isinstance(size, int) and size >= 0 for size in shape)
                and isinstance(data, memoryview | str | EncodedText)
            ):
                raise TypeError
            dtype = pickled.numpy()
            fits = len(shape) <= 8 and math.prod(shape) * dtype.itemsize == len(data)
        except (TypeError, ValueError):
            raise CheckpointError("an array in it is damaged") from None
        if not fits:
            raise CheckpointError("an array in it has another size than its shape says")

        def read() -> Tensor:
            # Copied once: a tensor over a file that is only read must not be written to.
            flat = np.frombuffer(_raw(data), dtype).astype(dtype.newbyteorder("="))
            array = np.ascontiguousarray(flat.reshape(shape, order="F" if fortran else "C"))
            tensor = torch.from_numpy(array)
            return tensor.view(torch.bfloat16) if pickled.code == "u2" else tensor

        return LazyTensor(tuple(shape), TORCH_DTYPES[pickled.code], read)


def _raw(data: memoryview | str | EncodedText) -> memoryview | bytes:
    if isinstance(data, memoryview):
        return data
    text = data.text if isinstance(data, EncodedText) else data
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        raise CheckpointError("the bytes of an array are damaged") from None


class Inert(Record):
    """A placeholder whose value is never looked at."""

    def __init__(self, *_: Any) -> None:
        pass


_ARRAY, _SCALAR = Constructor(PickledArray), Constructor(Inert)

NUMPY: dict[str, Any] = {
    "numpy.core.multiarray._reconstruct": _ARRAY,
    "numpy._core.multiarray._reconstruct": _ARRAY,
    "numpy.core.multiarray.scalar": _SCALAR,
    "numpy._core.multiarray.scalar": _SCALAR,
    "numpy.ndarray": Inert(),
    "numpy.dtype": Constructor(PickledDtype),
    "_codecs.encode": Constructor(EncodedText),
}
