"""Documents in raw text files, read chunk by chunk.

    .txt              documents between blank lines, or one document per line or file
    .jsonl, .json     one object per line, the text under a key
    .parquet          one document per row, the text in a column

Files are read in *chunks*: byte ranges of the text (decompressed), row groups of a parquet file.
Every document belongs to exactly one chunk and the chunks in order give the documents in order, so
they can be read by different processes. What cannot be read comes out as a `BadLine` in its place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from fourfold.errors import DataError, UserError
from fourfold.tools.prepare.input_files import (
    TOO_LONG,
    DecompressedText,
    InputFile,
    Line,
    LineReader,
    TextStretch,
)

# With the copies a document goes through, this keeps a process below one gigabyte.
MAX_DOCUMENT_BYTES = 64 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_PRINTABLE = range(0x21, 0x7F)
_ROWS_AT_ONCE = 64
_LINES_AT_ONCE = 4096
_BLOCK_BYTES = 1 << 18
_LINE_END, _BLANK_LINE = re.compile(rb"\n"), re.compile(rb"\n[ \t\r]*\n")
SEPARATORS = ("blank-line", "line", "file")
_TOO_LONG = "longer than --max-document-mb allows"

# A file that ends in the middle or cannot be decompressed at all. It is not one bad line: there
# is no telling how much is lost.
DAMAGED_FILE, UNDECODABLE, TOO_LONG_DOCUMENT = "damaged file", "undecodable", "too long"


class BadLine(NamedTuple):
    """Something that is not a document: where (lines or rows from the chunk's first, 1), why."""

    line: int
    kind: str
    reason: str


@dataclass(frozen=True)
class TextRule:
    """How files become documents."""

    json_key: str = "text"
    document_separator: str = "blank-line"
    max_document_bytes: int = MAX_DOCUMENT_BYTES

    def __post_init__(self) -> None:
        if self.document_separator not in SEPARATORS:
            raise UserError(
                f"--document-separator {self.document_separator}: choose one of "
                f"{', '.join(SEPARATORS)}"
            )


def num_chunks(file: InputFile, rule: TextRule, chunk_bytes: int) -> int | None:
    """How many chunks a file has; None if only reading it to the end can show that."""
    if file.kind == "parquet":
        return _parquet_row_groups(file.path)
    if file.kind == "txt" and rule.document_separator == "file":
        return 1
    if file.compression:
        # A small archive is read whole.
        return 1 if file.num_bytes <= chunk_bytes // 8 else None
    return max(1, -(-file.num_bytes // chunk_bytes))


def text_stretches(
    file: InputFile, rule: TextRule, chunk_bytes: int, is_wanted: Callable[[int], bool]
) -> Iterator[tuple[int, TextStretch | None]]:
    """Of a compressed file, decompressed once, what the reader of each chunk needs; None for those
    that nobody wants.

    That is the chunk with the byte before it, which says whether a line begins with the chunk, and
    what follows up to the end of its last line, or of a document that may go on beyond.
    """
    is_open = file.kind == "txt" and rule.document_separator == "blank-line"
    end_of = _BLANK_LINE if is_open else _LINE_END
    beyond = 2 * rule.max_document_bytes + 3  # enough to see that a document is too long
    held, origin = bytearray(), 0
    with DecompressedText(file.path, file.compression) as text:
        for chunk in count():
            start, end = max(chunk * chunk_bytes - 1, 0), (chunk + 1) * chunk_bytes
            ended = not _extend(held, text, end - origin)
            stretch = None
            if is_wanted(chunk):
                last = end - 1 - origin
                size = _needed(held, text, last, end_of, last + beyond)
                with memoryview(held) as view:
                    content = bytes(view[start - origin : size])
                damage = text.damage if size == len(held) else ""
                stretch = TextStretch(start, content, damage, text.source_bytes)
            yield chunk, stretch
            if ended:
                return
            del held[: end - 1 - origin]
            origin = end - 1


def _extend(held: bytearray, text: DecompressedText, size: int) -> bool:
    """Read until at least `size` bytes are held; False if the text has no more."""
    while len(held) < size:
        block = text.read(_BLOCK_BYTES)
        if not block:
            return False
        held += block
    return True


def _needed(
    held: bytearray, text: DecompressedText, last: int, end_of: re.Pattern[bytes], most: int
) -> int:
    """How much of the text, of which more is read, goes up to an end at or after byte `last`."""
    while (found := end_of.search(held, last)) is None and len(held) < most:
        more = max(len(held) - last, _BLOCK_BYTES)  # twice as much each time
        if not _extend(held, text, min(len(held) + more, most)):
            break
    return min(most, len(held) if found is None else found.end())


class ChunkReader:
    """Iterates over the documents of chunks, one chunk at a time.

    After iteration `num_lines` lines or rows started in the chunk, `ended` is whether the end of
    the file was reached, and `source_bytes` how much of it (as compressed) has been read. The open
    stream is kept from one chunk to the next: a compressed file is then decompressed once by each
    process, not once for each chunk.
    """

    def __init__(self, rule: TextRule) -> None:
        self.rule = rule
        self.num_lines = 0
        self.ended = False
        self.source_bytes = 0
        self._stream: LineReader | None = None

    def documents(
        self,
        file: InputFile,
        chunk: int,
        chunk_bytes: int | None,
        stretch: TextStretch | None = None,
    ) -> Iterator[str | BadLine]:
        """The documents of one chunk; of the whole file where `chunk_bytes` is None.

        With its `stretch` (see `text_stretches`) the file itself is not read.
        """
        self.num_lines, self.ended = 0, chunk_bytes is None
        if file.kind == "parquet":
            yield from self._parquet_documents(file.path, chunk)
            return
        start = 0 if chunk_bytes is None else chunk * chunk_bytes
        end = None if chunk_bytes is None else start + chunk_bytes
        stream = self._stream_at(file, start, stretch)
        if stream is None:
            self.ended = True
        elif file.kind == "json":
            yield from self._json_documents(stream, end)
        elif self.rule.document_separator == "file":
            yield from self._whole_file(stream)
        elif self.rule.document_separator == "line":
            yield from self._line_documents(stream, end)
        else:
            yield from self._blank_line_documents(stream, start, end)
        self.source_bytes = file.num_bytes if self.ended or stream is None else stream.source_bytes

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _stream_at(
        self, file: InputFile, start: int, stretch: TextStretch | None
    ) -> LineReader | None:
        """A stream before the first line that starts at or after `start`; None beyond the end."""
        stream, given = self._stream, stretch is not None
        if given or stream is None or stream.path != file.path or not stream.can_reach(start):
            self.close()
            stream = LineReader(file.path, file.compression, self.rule.max_document_bytes, stretch)
            self._stream = None if given else stream
        return stream if stream.go_to(start) else None

    def _lines(self, stream: LineReader, end: int | None) -> Iterator[Line]:
        """The lines that start before `end`, counted."""
        while end is None or stream.position < end:
            line = stream.read_line()
            if line is None:
                self.ended = True
                return
            self.num_lines += 1
            yield line

    def _json_documents(self, stream: LineReader, end: int | None) -> Iterator[str | BadLine]:
        for line in self._lines(stream, end):
            problem = _unreadable(line, self.num_lines)
            if problem is not None:
                yield problem
            elif line.content.strip():
                content = line.content
                if line.start == 0:
                    content = content.removeprefix(BYTE_ORDER_MARK)
                yield _json_text(content, self.rule.json_key, self.num_lines)

    def _whole_file(self, stream: LineReader) -> Iterator[str | BadLine]:
        document = self._new_document()
        for line in self._lines(stream, None):
            document.add(line, self.num_lines)
        if document.started:
            yield document.result()

    def _line_documents(self, stream: LineReader, end: int | None) -> Iterator[str | BadLine]:
        for line in self._lines(stream, end):
            for row in _rows(line):
                if row is not None:
                    document = self._new_document()
                    document.add(row, self.num_lines)
                    result = document.result()
                    yield result if isinstance(result, BadLine) else result.removesuffix("\n")

    def _blank_line_documents(
        self, stream: LineReader, start: int, end: int | None
    ) -> Iterator[str | BadLine]:
        """Documents whose preceding blank line (or the file's beginning) is in the chunk."""
        inside = start == 0
        document = self._new_document()
        for line in self._lines(stream, end):
            for row in _rows(line):
                if row is not None:
                    if inside:
                        document.add(row, self.num_lines)
                    continue
                if document.started:
                    yield document.result()
                    document = self._new_document()
                inside = True
        if inside and not self.ended:
            self._finish_beyond(stream, document)
        if document.started:
            yield document.result()

    def _finish_beyond(self, stream: LineReader, document: _TextDocument) -> None:
        """Read a document that crosses the chunk's end up to its own end, then go back.

        One that is already bad needs no end, and what follows is not part of this chunk.
        """
        beyond = bytearray()
        line_start, number = stream.line_start, self.num_lines
        finished = flawed = False
        while not finished and document.problem is None:
            line = stream.read_line()
            if line is None:
                break
            number += 1
            flawed = flawed or bool(line.flaw)
            if not stream.can_go_back:
                beyond += line.content
            for row in _rows(line):
                if row is None:
                    finished = True
                    break
                document.add(row, number)
        # What is not pushed back, since it would be much, is found again from the file's beginning.
        if beyond and document.problem is None and not flawed:
            stream.push_back(bytes(beyond), line_start)

    def _new_document(self) -> _TextDocument:
        return _TextDocument(self.rule.max_document_bytes)

    def _parquet_documents(self, path: Path, group: int) -> Iterator[str | BadLine]:
        parquet = _pyarrow_parquet()
        key = self.rule.json_key
        try:
            with parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as table:
                if key not in table.schema_arrow.names:
                    columns = ", ".join(map(repr, table.schema_arrow.names[:8])) or "none"
                    raise DataError(
                        f"{path}: no column {key!r} (columns: {columns}); name the column that "
                        "holds the text with --json-key"
                    )
                if table.num_row_groups == 0:  # as Spark writes a partition without rows
                    self.source_bytes = path.stat().st_size
                    return
                batches = table.iter_batches(
                    _ROWS_AT_ONCE, row_groups=[group], columns=[key], use_threads=False
                )
                for batch in batches:
                    for value in batch.column(0):
                        self.num_lines += 1
                        yield self._parquet_text(value)
                self.source_bytes = path.stat().st_size * (group + 1) // table.num_row_groups
        except (OSError, ValueError) as error:  # pyarrow's own errors are both
            self.num_lines += 1
            yield BadLine(self.num_lines, DAMAGED_FILE, f"the parquet file is damaged ({error})")

    def _parquet_text(self, value: Any) -> str | BadLine:
        try:
            text = value.as_py()
            if isinstance(text, bytes):
                text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            return BadLine(self.num_lines, UNDECODABLE, f"not UTF-8 ({error})")
        if isinstance(text, str) and len(text) > self.rule.max_document_bytes:
            return BadLine(self.num_lines, TOO_LONG_DOCUMENT, _TOO_LONG)
        return _checked_string(text, self.rule.json_key, self.num_lines)


class _TextDocument:
    """A document of a .txt file, line by line."""

    def __init__(self, max_bytes: int) -> None:
        self.started = False
        self.problem: BadLine | None = None
        self._max_bytes = max_bytes
        self._text: list[str] = []
        self._lines: list[str] = []  # the last ones; a string each would be many times the text
        self._num_bytes = 0

    def add(self, line: Line, number: int) -> None:
        self.started = True
        if self.problem is not None:
            return
        self.problem = _unreadable(line, number)
        self._num_bytes += len(line.content)
        if self.problem is None and self._num_bytes > self._max_bytes:
            self.problem = BadLine(number, TOO_LONG_DOCUMENT, _TOO_LONG)
        if self.problem is None:
            content = (
                line.content.removeprefix(BYTE_ORDER_MARK) if line.start == 0 else line.content
            )
            try:
                self._lines.append(content.decode("utf-8"))
                if len(self._lines) == _LINES_AT_ONCE:
                    self._join()
            except UnicodeDecodeError as error:
                self.problem = BadLine(number, UNDECODABLE, f"not UTF-8 ({error})")
        if self.problem is not None:
            self._lines.clear()
            self._text.clear()

    def result(self) -> str | BadLine:
        self._join()
        return self.problem or _universal_newlines("".join(self._text))

    def _join(self) -> None:
        self._text.append("".join(self._lines))
        self._lines.clear()


def _universal_newlines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _is_blank(line: Line) -> bool:
    if line.flaw:
        return False
    inked = line.content.lstrip()
    if not inked or inked[0] in _PRINTABLE:
        return not inked
    # What is left may start with a blank beyond ASCII or a control character that is one.
    try:
        return not inked.decode("utf-8").strip()
    except UnicodeDecodeError:
        return False


def _rows(line: Line) -> Iterator[Line | None]:
    """The line, or its rows where lone carriage returns divide it; None for a blank one."""
    if line.flaw or b"\r" not in line.content.removesuffix(b"\n").removesuffix(b"\r"):
        yield None if _is_blank(line) else line
        return
    start = line.start
    for content in re.split(rb"(?<=\r)(?!\n)", line.content):
        row = Line(start, content)
        start += len(content)
        if content:
            yield None if _is_blank(row) else row


def _unreadable(line: Line, number: int) -> BadLine | None:
    if line.flaw == TOO_LONG:
        return BadLine(number, TOO_LONG_DOCUMENT, _TOO_LONG)
    if line.flaw:
        return BadLine(number, DAMAGED_FILE, f"the archive is damaged ({line.flaw})")
    return None


def _json_text(line: bytes, key: str, number: int) -> str | BadLine:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadLine(number, UNDECODABLE, f"not UTF-8 ({error})")
    except (ValueError, RecursionError) as error:
        return BadLine(number, "invalid JSON", f"not a line of JSON ({error})")
    if not isinstance(record, dict):
        kind = type(record).__name__
        return BadLine(
            number, "not an object", f'of type {kind}, not an object like {{"{key}": ...}}'
        )
    if key not in record:
        found = ", ".join(map(repr, list(record)[:8])) or "none"
        return BadLine(number, "missing key", f"no key {key!r} (keys: {found})")
    return _checked_string(record[key], key, number)


def _checked_string(value: Any, key: str, number: int) -> str | BadLine:
    if isinstance(value, str):
        return value
    kind = type(value).__name__
    return BadLine(number, "not a string", f"{key!r} is of type {kind}, not a string")


# -- Parquet --------------------------------------------------------------------------------


def _pyarrow_parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            "reading .parquet files needs the optional package pyarrow, which is not installed; "
            "run pip install 'fourfold[parquet]'"
        ) from error
    return pyarrow.parquet


def _parquet_row_groups(path: Path) -> int:
    try:
        with _pyarrow_parquet().ParquetFile(path) as table:
            return max(1, table.num_row_groups)
    except (OSError, ValueError):
        return 1  # reading it will say what is wrong
