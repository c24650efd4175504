"""Small token files in every format, written the way the originals write them, and a tokenizer."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
Documents = Sequence[Sequence[int]]


def documents_of(sizes: Sequence[int], first: int = 1) -> list[list[int]]:
    """Documents of these sizes holding the numbers from `first` on, so that order shows."""
    ends = np.cumsum([0, *sizes]) + first
    return [list(range(begin, end)) for begin, end in pairwise(ends)]


def idx_bytes(sizes: Sequence[int], dtype: str = "uint16", modes: bytes = b"") -> bytes:
    pointers = np.cumsum([0, *sizes])[:-1] * np.dtype(dtype).itemsize
    return (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, CODES[dtype], len(sizes), len(sizes) + 1)
        + np.array(sizes, "<i4").tobytes()
        + pointers.astype("<i8").tobytes()
        + np.arange(len(sizes) + 1, dtype="<i8").tobytes()
        + modes
    )


def flat(documents: Documents, dtype: str) -> np.ndarray:
    return np.array([token for document in documents for token in document], dtype)


def write_megatron(
    prefix: Path, documents: Documents, dtype: str = "uint16", modes: bytes = b""
) -> Path:
    sizes = [len(document) for document in documents]
    Path(f"{prefix}.bin").write_bytes(flat(documents, dtype).tobytes())
    Path(f"{prefix}.idx").write_bytes(idx_bytes(sizes, dtype, modes))
    return prefix


def write_fleetx(
    prefix: Path, documents: Documents, dtype: str = "uint16", compressed: bool = False
) -> Path:
    np.save(f"{prefix}_ids.npy", flat(documents, dtype))
    lens = np.array([len(document) for document in documents], np.int32)
    save = np.savez_compressed if compressed else np.savez
    save(f"{prefix}_idx.npz", lens=lens, docs=np.arange(len(documents) + 1))
    return prefix


def write_legacy(
    prefix: Path, documents: Documents, dtype: str = "uint16", compressed: bool = False
) -> Path:
    lens = np.array([len(document) for document in documents]).astype(dtype)
    save = np.savez_compressed if compressed else np.savez
    save(f"{prefix}_ids.npz", ids=flat(documents, dtype), lens=lens)
    return prefix


WRITERS = {"megatron": write_megatron, "fleetx": write_fleetx, "legacy": write_legacy}


class Numbers:
    """A tokenizer whose text is its ids: "1 2 3"."""

    identity = "numbers"
    older_identity = None
    begin_ids = ()

    def __init__(self, vocab_size: int = 100, eos_id: int = 99) -> None:
        self.vocab_size = vocab_size
        self.eos_id = eos_id

    def encode_joined(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        ids = [[int(word) for word in text.split()] for text in texts]
        flat = [number for each in ids for number in each]
        return np.array(flat, np.uint32), np.array([len(each) for each in ids])
