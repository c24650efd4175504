"""Input files of `prepare`: names, directories, globs and standard input, and the lines of a file.

The formats are `.txt`, `.jsonl` and `.json`, each also `.gz` or `.zst`, and `.parquet`. In a
directory everything of these kinds is input except what is hidden and what Fourfold itself left
there: manifests of token files and unfinished work. What is left out is reported.

A `LineReader` reads the lines of a file that may be compressed, from any position, in bounded
memory.
"""

from __future__ import annotations

import glob
import hashlib
import io
import logging
import os
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import zstandard

from fourfold.data.datasets import read_manifest
from fourfold.errors import DataError, UserError

log = logging.getLogger(__name__)

WORK_SUFFIX = ".parts"
KINDS = {".txt": "txt", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
COMPRESSIONS = (".gz", ".zst")
SPOOLED = re.compile(r"stdin-[0-9a-f]{32}\.(jsonl|txt)")
NAMES_SHOWN = 3
INPUT_ENDINGS = ".txt, .jsonl, .json (these also .gz or .zst) and .parquet"

TOO_LONG = "too long"

_BUFFER_BYTES = 1 << 18

# A zstd block expands at most some 32,000 times; this little of one cannot fill the memory.
_COMPRESSED_BYTES = 1 << 12
_ZLIB_OUTPUT_BYTES = 1 << 18
_ANY_GZIP_HEADER = 16 + zlib.MAX_WBITS
# `zstd --long=31`, the most there is, as large dumps use it. A frame takes as much memory as the
# window it was made with.
_MAX_ZSTD_WINDOW_BYTES = 1 << 31


@dataclass(frozen=True)
class InputFile:
    path: Path
    kind: str
    compression: str  # ".gz", ".zst" or ""
    num_bytes: int
    modified: int  # nanoseconds


def find_inputs(paths: Sequence[str | Path], kind: str | None = None) -> list[InputFile]:
    """Files of the named files, directories (recursive, sorted) and globs (sorted), in order.

    A `kind` of `KINDS` is what they hold, whatever their names say.
    """
    found = [file for path in paths for file in _expand(str(path))]
    if not found:
        raise UserError("no input was given; name files, directories or globs")
    return [describe_input(path, kind) for path in found]


def describe_input(path: Path, kind: str | None = None) -> InputFile:
    try:
        status = path.stat()
        with path.open("rb"):
            pass
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    named_kind, compression = _kind_of(path)
    kind = kind or named_kind
    if kind is None:
        raise DataError(f"{path}: not a known kind of text; the endings read are {INPUT_ENDINGS}")
    return InputFile(path, kind, compression, status.st_size, status.st_mtime_ns)


def spool_stdin(stream: IO[bytes], directory: Path, kind: str) -> InputFile:
    """Standard input as a file in `directory`, named by its content: the same again is the same."""
    if kind not in ("jsonl", "txt"):
        raise UserError(f"--stdin-format {kind}: choose jsonl or txt")
    directory.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    unfinished = directory / f".stdin.{os.getpid()}.tmp"
    try:
        with unfinished.open("wb") as file:
            while block := stream.read(1 << 20):
                digest.update(block)
                file.write(block)
        path = directory / f"stdin-{digest.hexdigest()[:32]}.{kind}"
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    os.utime(path, (0, 0))  # its name says when it is another
    return describe_input(path)


def _expand(name: str) -> list[Path]:
    path = Path(name)
    if path.is_dir():
        texts = _texts_below(path)
        if not texts:
            raise DataError(
                f"{path}: the directory holds no text; the endings read are {INPUT_ENDINGS}"
            )
        return texts
    if path.exists() or not glob.has_magic(name):
        return [path]
    matches = [Path(match) for match in sorted(glob.glob(name, recursive=True))]
    files = [match for match in matches if match.is_file()]
    if not files:
        raise DataError(f"{name}: no file matches")
    return files


def _texts_below(directory: Path) -> list[Path]:
    """The text in a directory, in sorted order; what is left out is logged by its reason."""
    texts: list[Path] = []
    left_out: dict[str, list[Path]] = {}
    for parent, folders, names in os.walk(directory):
        links = [folder for folder in map(Path(parent).joinpath, folders) if folder.is_symlink()]
        if links:
            left_out.setdefault("links to directories", []).extend(links)
        why_all = _reason_for_leaving_out_all(Path(parent).relative_to(directory), directory)
        for file in map(Path(parent).joinpath, names):
            if _kind_of(file)[0] is None:
                continue
            why = why_all or _reason_for_leaving_out(file)
            (left_out.setdefault(why, []) if why else texts).append(file)
    for reason, files in sorted(left_out.items()):
        shown = ", ".join(map(str, sorted(files)[:NAMES_SHOWN]))
        more = ", ..." if len(files) > NAMES_SHOWN else ""
        log.warning("%s: left out %d %s: %s%s", directory, len(files), reason, shown, more)
    return sorted(texts)


def _reason_for_leaving_out_all(inside: Path, directory: Path) -> str:
    """Why nothing in the directory `inside` of an input directory is input, or ""."""
    if any(part.startswith(".") for part in inside.parts):
        return "files in hidden directories"
    for folder in [inside, *inside.parents]:
        if folder.suffix == WORK_SUFFIX and (directory / folder / "plan.json").is_file():
            return "files of unfinished work"
    return ""


def _reason_for_leaving_out(file: Path) -> str:
    if file.name.startswith("."):
        return "hidden files"
    if SPOOLED.fullmatch(file.name) and file.parent.suffix == WORK_SUFFIX:
        return "files of unfinished work"
    return "manifests of token files" if _is_manifest(file) else ""


def _is_manifest(file: Path) -> bool:
    """Raw text may end in .json too, and be large: its beginning says most."""
    if file.suffix != ".json":
        return False
    try:
        with file.open("rb") as stream:
            if b'"fourfold"' not in stream.read(4096):
                return False
    except OSError:
        return False  # reading it will say what is wrong
    manifest = read_manifest(file.with_suffix(""))
    return manifest is not None and "sha256" in manifest


def _kind_of(path: Path) -> tuple[str | None, str]:
    name = path.name.lower()
    for compression in ("", *COMPRESSIONS):
        for ending, kind in KINDS.items():
            if name.endswith(ending + compression) and not (compression and kind == "parquet"):
                return kind, compression
    return None, ""


# -- lines -----------------------------------------------------------------------------------


class Line:
    """One line with its line end, or what is wrong with it."""

    __slots__ = ("content", "flaw", "num_bytes", "start")

    def __init__(self, start: int, content: bytes, flaw: str = "", num_bytes: int = 0) -> None:
        self.start = start
        self.content = content
        self.flaw = flaw
        self.num_bytes = num_bytes or len(content)


@dataclass
class TextStretch:
    """Some of the text of a compressed file, for those who do not decompress it themselves."""

    start: int
    content: bytes
    damage: str  # why the text ends after it, if it should not
    source_bytes: int  # read of the file up to here


class LineReader:
    """The lines of one file, forwards; a plain file, and a stretch of text, can also go back.

    Positions count bytes of the text as decompressed. A line longer than the limit, and the place
    where an archive breaks off, come out as a line with a `flaw` instead of content.
    """

    def __init__(
        self, path: Path, compression: str, max_line_bytes: int, stretch: TextStretch | None = None
    ) -> None:
        self.path = path
        self.position = self._origin = stretch.start if stretch is not None else 0
        self.line_start = -1  # of the line last read: every place after it is ahead
        self._again: io.BytesIO | None = None  # whole lines to be read once more
        self._max_line_bytes = max_line_bytes
        self._raw: DecompressedText | TextStretch | None = stretch
        self._file: IO[bytes]
        self.can_go_back = stretch is not None or not compression
        if stretch is not None:
            self._file = io.BytesIO(stretch.content)
        elif compression:
            self._raw = DecompressedText(path, compression)
            self._file = io.BufferedReader(self._raw, _BUFFER_BYTES)
        else:
            self._file = io.BufferedReader(io.FileIO(path), _BUFFER_BYTES)

    def close(self) -> None:
        self._file.close()

    @property
    def source_bytes(self) -> int:
        """How many bytes of the file on disk have been read."""
        return self.position if self._raw is None else self._raw.source_bytes

    def can_reach(self, start: int) -> bool:
        return self.can_go_back or start > self.line_start

    def go_to(self, start: int) -> bool:
        """Stand before the first line that starts at `start` or later; False beyond the end."""
        if start <= self.line_start:
            self._again = None
        while self._again is not None and self.position < start:
            self.read_line()
        if self.line_start < start <= self.position:
            return True
        if start == 0:
            assert self.position == 0 or self.can_go_back
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
        """Read past the next line end; returns the number of bytes.

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
        if self.can_go_back:
            self._file.seek(position - self._origin)
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


class DecompressedText(io.RawIOBase):
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
