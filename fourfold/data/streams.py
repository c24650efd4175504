"""Lines of a file that may be compressed, from any place on, in bounded memory.

Positions count bytes of the text as decompressed. A line longer than the limit, and the place
where an archive breaks off, come out as a line with a `flaw` instead of content.
"""

from __future__ import annotations

import io
import zlib
from pathlib import Path
from typing import Any

import zstandard

TOO_LONG = "too long"

_BUFFER_BYTES = 1 << 18

# A zstd block expands at most some 32,000 times; this little of one cannot fill the memory.
_COMPRESSED_BYTES = 1 << 12
_ZLIB_OUTPUT_BYTES = 1 << 18
_ANY_GZIP_HEADER = 16 + zlib.MAX_WBITS
# `zstd --long=31`, the most there is, as large dumps use it. A frame takes as much memory as the
# window it was made with.
_MAX_ZSTD_WINDOW_BYTES = 1 << 31


class Line:
    """One line with its line end, or what is wrong with it."""

    __slots__ = ("content", "flaw", "num_bytes", "start")

    def __init__(self, start: int, content: bytes, flaw: str = "", num_bytes: int = 0) -> None:
        self.start = start
        self.content = content
        self.flaw = flaw
        self.num_bytes = num_bytes or len(content)


class LineStream:
    """The lines of one file, forwards; a plain file can also go back."""

    def __init__(self, path: Path, compression: str, max_line_bytes: int) -> None:
        self.path = path
        self.position = 0
        self.line_start = -1  # of the line last read: every place after it is ahead
        self._again: io.BytesIO | None = None  # whole lines to be read once more
        self._max_line_bytes = max_line_bytes
        self._raw: _Decompressed | None = None
        self._file: io.BufferedReader[Any]
        if compression:
            self._raw = _Decompressed(path, compression)
            self._file = io.BufferedReader(self._raw, _BUFFER_BYTES)
        else:
            self._file = io.BufferedReader(io.FileIO(path), _BUFFER_BYTES)

    def close(self) -> None:
        self._file.close()

    @property
    def source_bytes(self) -> int:
        """How much of the file, as it lies on disk, has been read."""
        return self.position if self._raw is None else self._raw.source_bytes

    def can_reach(self, start: int) -> bool:
        return self._raw is None or start > self.line_start

    def go_to(self, start: int) -> bool:
        """Stand before the first line that starts at `start` or later; False beyond the end."""
        if start <= self.line_start:
            self._again = None
        while self._again is not None and self.position < start:
            self.read_line()
        if self.line_start < start <= self.position:
            return True
        if start == 0:
            assert self.position == 0 or self._raw is None
            self._seek(0)
            return True
        if not self._seek(start - 1):
            return False
        self._skip_line()
        self.line_start = start - 1
        return True

    def read_line(self) -> Line | None:
        line = self._read_again() or self._read_fresh()
        if line is not None:
            self.line_start = line.start
            self.position = line.start + line.num_bytes
        return line

    @property
    def can_go_back(self) -> bool:
        """Whether lines can be read again without having been pushed back."""
        return self._raw is None

    def push_back(self, lines: bytes, line_start: int) -> None:
        """Undo the reading of these last lines, `line_start` being what it was before them."""
        assert self._again is None
        self._again = io.BytesIO(lines)
        self.position, self.line_start = self.position - len(lines), line_start

    def _read_again(self) -> Line | None:
        if self._again is None:
            return None
        line = Line(self.position, self._again.readline())
        if self._again.tell() == len(self._again.getbuffer()):
            self._again = None
        return line

    def _read_fresh(self) -> Line | None:
        start = self.position
        content = self._file.readline(self._max_line_bytes + 1)
        complete = content.endswith(b"\n")
        if len(content) > self._max_line_bytes and not complete:
            return Line(start, b"", TOO_LONG, len(content) + self._skip_line())
        damage = self._raw.damage if self._raw is not None and not complete else ""
        if damage:
            assert self._raw is not None
            self._raw.damage = ""  # said once; from here on the file has ended
            return Line(start, b"", damage, max(1, len(content)))
        return Line(start, content) if content else None

    def _skip_line(self) -> int:
        """Read on to behind the next line end; the number of bytes.

        Where the archive breaks off in this line, that is the line's flaw and not another's.
        """
        skipped = 0
        while content := self._file.readline(_BUFFER_BYTES):
            skipped += len(content)
            if content.endswith(b"\n"):
                break
        else:
            if self._raw is not None:
                self._raw.damage = ""
        self.position += skipped
        return skipped

    def _seek(self, position: int) -> bool:
        assert self._again is None
        if self._raw is None:
            self._file.seek(position)
            self.position = position
            return True
        assert position >= self.position, (position, self.position)
        while self.position < position:
            block = self._file.read(min(_BUFFER_BYTES, position - self.position))
            if not block:
                return False
            self.position += len(block)
        return True


class _Gzip:
    def __init__(self) -> None:
        self._state = zlib.decompressobj(_ANY_GZIP_HEADER)

    def feed(self, block: bytes) -> bytes:
        return self._state.decompress(block, _ZLIB_OUTPUT_BYTES)

    @property
    def finished(self) -> bool:
        return self._state.eof

    @property
    def rest(self) -> bytes:
        return self._state.unused_data

    @property
    def waiting(self) -> bytes:
        return self._state.unconsumed_tail


class _Zstd:
    waiting = b""

    def __init__(self) -> None:
        self._state = zstandard.ZstdDecompressor(
            max_window_size=_MAX_ZSTD_WINDOW_BYTES
        ).decompressobj()

    def feed(self, block: bytes) -> bytes:
        return self._state.decompress(block)

    @property
    def finished(self) -> bool:
        return self._state.eof

    @property
    def rest(self) -> bytes:
        return self._state.unused_data


class _Decompressed(io.RawIOBase):
    """The text of a .gz or .zst file; ends where the archive does, `damage` says if too early."""

    def __init__(self, path: Path, compression: str) -> None:
        self.damage = ""
        self._file = path.open("rb")
        self._new: type[_Gzip] | type[_Zstd] = _Gzip if compression == ".gz" else _Zstd
        self._member: _Gzip | _Zstd | None = None
        self._members = 0
        self._input = b""
        self._output = memoryview(b"")
        self._ended = False

    @property
    def source_bytes(self) -> int:
        return self._file.tell()

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self._output and not self._ended:
            self._decompress_some()
        taken = self._output[: len(buffer)]
        buffer[: len(taken)] = taken
        self._output = self._output[len(taken) :]
        return len(taken)

    def _decompress_some(self) -> None:
        if not self._input:
            self._input = self._file.read(_COMPRESSED_BYTES)
        if not self._input:
            self._ended = True
            if self._member is not None:
                self.damage = "it breaks off"
            return
        if self._member is None:
            if self._members:
                self._input = self._input.lstrip(b"\0")  # padding between members or at the end
                if not self._input:
                    return
            self._member = self._new()
            self._members += 1
        try:
            self._output = memoryview(self._member.feed(self._input))
        except (zlib.error, zstandard.ZstdError) as error:
            self._ended, self.damage = True, str(error)
            return
        self._input = self._member.waiting
        if self._member.finished:
            self._input = self._member.rest
            self._member = None
