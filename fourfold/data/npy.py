"""Arrays in `.npy` and `.npz` files of unknown origin.

`map_npy` and `NpzFile.array` return one-dimensional integer arrays or raise `DataError` naming the
file and the field. Nothing in a file is trusted: the header is matched against a pattern rather
than evaluated, its counts must add up to the bytes present, every zip member must match its CRC,
and compressed members may only expand up to a limit.
"""

from __future__ import annotations

import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fourfold import heartbeat, storage
from fourfold.errors import DataError

MAGIC = b"\x93NUMPY"
MAX_HEADER_BYTES = 4096
HEADER = re.compile(
    r"""\{ *['"]descr['"] *: *['"](?P<descr>[<>|=]?[a-zA-Z][0-9]{0,2})['"] *,"""
    r""" *['"]fortran_order['"] *: *(?:True|False) *,"""
    r""" *['"]shape['"] *: *\((?P<shape>[0-9 ,L]*)\) *,? *\}[ \n]*"""
)
BLOCK_BYTES = 1 << 24

# Real token files compress two to four times and equal lengths a thousand times, so the ratio is
# only held against members big enough to hurt.
MAX_COMPRESSED_BYTES = 4 << 30
ALWAYS_ALLOWED_BYTES = 64 << 20
MAX_EXPANSION = 200

# A member's own header ends with the lengths of its name and of an extra field, two bytes each.
LOCAL_HEADER_BYTES = 30
LOCAL_NAME_LENGTH = 26


def checksum(content: np.ndarray) -> int:
    """The CRC-32 of many bytes, as zip archives record it."""
    value = 0
    for start in range(0, len(content), BLOCK_BYTES):
        value = zlib.crc32(content[start : start + BLOCK_BYTES].data, value)
        heartbeat.alive()
    return value


def map_bytes(path: Path) -> np.ndarray:
    """The bytes of a file as a read-only memory map, an ordinary array when it is empty."""
    try:
        if path.stat().st_size == 0:
            return np.empty(0, np.uint8)
        return np.asarray(np.memmap(path, np.uint8, mode="r"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def map_npy(path: Path) -> np.ndarray:
    """The one-dimensional integer array stored in a `.npy` file, memory-mapped."""
    return decode_npy(map_bytes(path), str(path))


class RemoteArray:
    """A one-dimensional array in a file at an address, of which parts are read."""

    def __init__(self, file: storage.BlockedFile, dtype: np.dtype, start: int, count: int) -> None:
        self.dtype = dtype
        self._file = file
        self._start = start
        self._count = count

    def __len__(self) -> int:
        return self._count

    def read(self, start: int, stop: int) -> np.ndarray:
        size = self.dtype.itemsize
        content = self._file.read(self._start + start * size, self._start + stop * size)
        return np.frombuffer(content, self.dtype)


def open_ids(path: Path, dtype: np.dtype | None = None) -> np.ndarray | RemoteArray:
    """The integers of a file from its first byte on, or without a `dtype` those of a `.npy` file:
    mapped where the file is here, read block by block where it is at an address."""
    if storage.address_of(path) is None:
        return map_npy(path) if dtype is None else map_bytes(path).view(dtype)
    file, start = storage.open_blocks(path), 0
    if dtype is None:
        head = np.frombuffer(file.read(0, min(12 + MAX_HEADER_BYTES, file.size)), np.uint8)
        dtype, start, count = _described(head, file.size, storage.name_of(path))
    else:
        count = file.size // dtype.itemsize
    return RemoteArray(file, dtype, start, count)


def decode_npy(content: np.ndarray, name: str) -> np.ndarray:
    """View the bytes of a `.npy` file, or of a zip member holding one, as its array."""
    dtype, start, _ = _described(content, len(content), name)
    return content[start:].view(dtype)


def _described(content: np.ndarray, num_bytes: int, name: str) -> tuple[np.dtype, int, int]:
    """Type, first byte and length of the array in a file of `num_bytes` that begins so."""
    header, start = _header_text(content, name)
    match = HEADER.fullmatch(header)
    if match is None:
        raise DataError(f"{name}: the .npy header {header[:80]!r} is malformed; write it again")
    dtype = _integer_dtype(match["descr"], name)
    (count,) = _shape(match["shape"], name)
    if start + count * dtype.itemsize != num_bytes:
        raise DataError(
            f"{name}: shape ({count},) of {dtype} needs {start + count * dtype.itemsize} bytes, "
            f"the file has {num_bytes}; it is truncated or damaged, copy or write it again"
        )
    return dtype, start, count


def _header_text(content: np.ndarray, name: str) -> tuple[str, int]:
    lead = content[:12].tobytes()
    if len(lead) < 10 or lead[:6] != MAGIC:
        raise DataError(f"{name}: not a .npy file (it starts with {lead[:6]!r}, not {MAGIC!r})")
    major, minor = lead[6], lead[7]
    if major not in (1, 2, 3) or minor != 0:
        raise DataError(f"{name}: .npy version {major}.{minor} is unknown; save it with numpy.save")
    length_format, start = ("<H", 10) if major == 1 else ("<I", 12)
    if len(lead) < start:
        raise DataError(f"{name}: the .npy header is cut off after {len(lead)} bytes")
    (length,) = struct.unpack_from(length_format, lead, 8)
    if length > MAX_HEADER_BYTES or start + length > len(content):
        raise DataError(
            f"{name}: .npy header length {length} exceeds the file or the limit of "
            f"{MAX_HEADER_BYTES} bytes; the file is damaged or not a token array"
        )
    raw = content[start : start + length].tobytes()
    return raw.decode("latin1"), start + length


def _integer_dtype(descr: str, name: str) -> np.dtype:
    if re.fullmatch(r"[<>|=]?[iu][1248]", descr) is None:
        raise DataError(f"{name}: dtype {descr!r} is not an integer type; token data must be")
    return np.dtype(descr)


def _shape(text: str, name: str) -> tuple[int]:
    match = re.fullmatch(r" *([0-9]{1,18})L? *, *", text)
    if match is None:
        raise DataError(f"{name}: shape ({text}) is not one-dimensional; flatten the array")
    return (int(match[1]),)


class NpzFile:
    """A `.npz` archive: member names on opening, arrays on request."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _zip_errors(str(path)), zipfile.ZipFile(path) as archive:
            members = archive.infolist()
        self._members = {member.filename: member for member in members}
        if len(self._members) != len(members):
            raise DataError(f"{path}: two members share a name; write the archive again")

    def __contains__(self, key: str) -> bool:
        return f"{key}.npy" in self._members

    def array(self, key: str, check: bool = True) -> np.ndarray:
        """The array under `key`: mapped when stored, read into memory when compressed.

        Without `check` the bytes of a stored one are not read through for their CRC.
        """
        member = self._members.get(f"{key}.npy")
        if member is None:
            held = ", ".join(sorted(self._members)[:5]) or "nothing"
            raise DataError(f"{self.path}: array {key!r} is missing (the archive holds {held})")
        name = f"{self.path}[{key}]"
        if member.compress_type == zipfile.ZIP_STORED:
            content = self._map_stored(member, name, check)
        elif member.compress_type == zipfile.ZIP_DEFLATED:
            content = self._read_deflated(member, name)
        else:
            raise DataError(f"{name}: zip compression {member.compress_type} is not supported")
        return decode_npy(content, name)

    def _map_stored(self, member: zipfile.ZipInfo, name: str, check: bool) -> np.ndarray:
        # Opening compares the two headers of the member, which only zipfile does fully.
        with _zip_errors(name), zipfile.ZipFile(self.path) as archive, archive.open(member):
            pass
        archived = map_bytes(self.path)
        lengths = archived[member.header_offset :][LOCAL_NAME_LENGTH:LOCAL_HEADER_BYTES]
        start = member.header_offset + LOCAL_HEADER_BYTES + int(lengths.view("<u2").sum())
        content = archived[start : start + member.file_size]
        if not len(content) == member.file_size == member.compress_size:
            raise DataError(
                f"{name}: {member.file_size} bytes announced, {len(content)} present; "
                "the archive is truncated, copy it again"
            )
        crc = checksum(content) if check else member.CRC
        if crc != member.CRC:
            raise DataError(
                f"{name}: CRC {crc:08x} is not the recorded {member.CRC:08x}; the archive is "
                "damaged, copy it again"
            )
        return content

    def _read_deflated(self, member: zipfile.ZipInfo, name: str) -> np.ndarray:
        size, ratio = member.file_size, member.file_size / max(member.compress_size, 1)
        bomb = size > ALWAYS_ALLOWED_BYTES and ratio > MAX_EXPANSION
        if bomb or size > MAX_COMPRESSED_BYTES:
            raise DataError(
                f"{name}: expands {ratio:.0f} times to {size} bytes, beyond the limits "
                f"({MAX_EXPANSION} times, {MAX_COMPRESSED_BYTES} bytes); save it uncompressed "
                "with numpy.savez"
            )
        content = bytearray()
        with (
            _zip_errors(name),
            zipfile.ZipFile(self.path) as archive,
            archive.open(member) as stream,
        ):
            # In blocks: memory follows the bytes present, not the size announced.
            while block := stream.read(BLOCK_BYTES):
                content += block
        if len(content) != size:
            raise DataError(f"{name}: {size} bytes announced, {len(content)} decompressed")
        return np.frombuffer(content, np.uint8)


@contextmanager
def _zip_errors(name: str) -> Iterator[None]:
    """zipfile meets hostile bytes with a dozen exception types, from struct.error to
    NotImplementedError; to the user they all mean the same."""
    try:
        yield
    except Exception as error:
        raise DataError(f"{name}: not a readable .npz archive ({error}); copy it again") from error
