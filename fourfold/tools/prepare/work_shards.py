"""Work shards of `prepare`: some chunks of text each, tokenized into files of their own.

A finished shard `name` is three files in the work directory:

    name.bin    token ids, as they will be in the result
    name.len    tokens of each document (int32), 0 for an empty one
    name.json   counts, and what could not be read; written last, so it marks the shard finished

Shards depend only on the input and the settings, so any process may make any shard, in any order.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import connection
from pathlib import Path
from typing import IO, Any

import numpy as np

from fourfold.atomic_files import replace_text
from fourfold.data.datasets import BLOCK
from fourfold.errors import DataError, UserError
from fourfold.tokenizer import Tokenizer
from fourfold.tools.prepare.documents import DAMAGED_FILE, BadLine, ChunkReader, TextRule
from fourfold.tools.prepare.input_files import InputFile, TextStretch
from fourfold.tools.prepare.writers import DocumentRun

BATCH_CHARACTERS = 1 << 18
PLACES_KEPT = 20
MOST_TOKENS = 2**31 - 1
STRETCHES_AHEAD = 2

Pipe = connection.Connection


@dataclass(frozen=True)
class TokenRule:
    """How documents become tokens."""

    dtype: str
    append_eod: bool = True
    min_length: int = 0
    strip: bool = False  # blanks around a document, as FleetX does
    keep_empty: bool = True  # an entry for documents without a token, as Megatron does
    begin_ids: tuple[int, ...] = ()  # before every document that has a token


def token_dtype(vocab_size: int, form: str = "megatron") -> np.dtype[Any]:
    """The type the original tools store ids of such a vocabulary in."""
    limit = 65500 if form == "megatron" else 65535
    return np.dtype("<u2") if vocab_size < limit else np.dtype("<i4")


@dataclass(frozen=True)
class WorkShard:
    """Chunks that are read one after the other, as (number of the file, chunk)."""

    chunks: tuple[tuple[int, int], ...]
    chunk_bytes: int | None  # None: the files are read whole
    kind: str = "part"  # in the names of its files, as earlier versions wrote them
    # Of a compressed file, where another process decompresses it.
    text: TextStretch | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of_file(cls, number: int) -> WorkShard:
        """A whole file that could be cut as well; named so that the two are not mixed up."""
        return cls(((number, 0),), None, "file")

    @property
    def name(self) -> str:
        return "{}-{:06d}-{:06d}".format(self.kind, *self.chunks[0])

    def is_in(self, reports: set[str]) -> bool:
        """Whether its report is among the names of finished ones."""
        return f"{self.name}.json" in reports


@dataclass
class ChunkReport:
    """What one chunk contained."""

    file: int
    num_lines: int
    ended: bool
    source_bytes: int  # of the file as it lies on disk, read so far
    bad: dict[str, int] = field(default_factory=dict)  # kind -> how many
    places: list[BadLine] = field(default_factory=list)  # the first of them
    texts: int = 0  # that could be read


@dataclass
class ShardReport:
    """What one shard contained; `documents` have tokens, `empty` and `short` ones are left out."""

    documents: int = 0
    empty: int = 0
    short: int = 0
    tokens: int = 0
    text_bytes: int = 0
    chunks: list[ChunkReport] = field(default_factory=list)

    @property
    def num_bad(self) -> int:
        return sum(sum(chunk.bad.values()) for chunk in self.chunks)


class ShardTokenizer:
    """Makes shards in a work directory; one per process."""

    def __init__(
        self,
        directory: Path,
        files: Sequence[InputFile],
        text_rule: TextRule,
        token_rule: TokenRule,
        tokenizer: Tokenizer,
    ) -> None:
        self._directory = directory
        self._files = files
        self._reader = ChunkReader(text_rule)
        self._rule = token_rule
        self._tokenizer = tokenizer

    def make(self, shard: WorkShard) -> ShardReport:
        try:
            return self._make(shard)
        except OSError as error:
            raise DataError(
                f"{error.filename or self._directory}: {error.strerror or error}; free some "
                "space, or fix what else is wrong, and the same command resumes from here"
            ) from error

    def _make(self, shard: WorkShard) -> ShardReport:
        report = ShardReport()
        ids_file = _unfinished(self._directory, f"{shard.name}.bin")
        lengths_file = _unfinished(self._directory, f"{shard.name}.len")
        with ids_file.open("wb") as ids, lengths_file.open("wb") as lengths:
            tokens = TokenWriter(ids, lengths, self._tokenizer, self._rule, report)
            tokens.write(self._texts(shard, report))
            for stream in (ids, lengths):
                stream.flush()
                os.fsync(stream.fileno())
        ids_file.replace(self._directory / f"{shard.name}.bin")
        lengths_file.replace(self._directory / f"{shard.name}.len")
        write_json(self._directory / f"{shard.name}.json", asdict(report))
        return report

    def close(self) -> None:
        self._reader.close()

    def _texts(self, shard: WorkShard, report: ShardReport) -> Iterator[str]:
        for number, chunk in shard.chunks:
            kinds: Counter[str] = Counter()
            places: list[BadLine] = []
            texts = 0
            documents = self._reader.documents(
                self._files[number], chunk, shard.chunk_bytes, shard.text
            )
            for document in documents:
                if isinstance(document, str):
                    texts += 1
                    yield document
                    continue
                kinds[document.kind] += 1
                if len(places) < PLACES_KEPT or document.kind == DAMAGED_FILE:
                    places.append(document)
            report.chunks.append(
                ChunkReport(
                    number,
                    self._reader.num_lines,
                    self._reader.ended,
                    self._reader.source_bytes,
                    dict(kinds),
                    places,
                    texts,
                )
            )


class TokenWriter:
    """Documents in, ids and lengths out; counts into a report."""

    def __init__(
        self,
        ids: IO[bytes],
        lengths: IO[bytes],
        tokenizer: Tokenizer,
        rule: TokenRule,
        report: ShardReport,
    ) -> None:
        self._ids = ids
        self._lengths = lengths
        self._tokenizer = tokenizer
        self._rule = rule
        self._report = report

    def write(self, texts: Iterable[str]) -> None:
        batch: list[str] = []
        characters = 0
        for text in texts:
            if self._rule.strip:
                text = text.strip()
            if len(text) <= self._rule.min_length and self._rule.min_length > 0:
                self._report.short += 1
                continue
            batch.append(text)
            characters += len(text)
            if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_CHARACTERS // 16:
                self._write_batch(batch)
                batch, characters = [], 0
        if batch:
            self._write_batch(batch)

    def _write_batch(self, texts: list[str]) -> None:
        dtype = np.dtype(self._rule.dtype)
        ids, lengths = self._tokenizer.encode_joined(texts)
        # The dtype follows from the vocabulary, so an id beyond it is a fault of ours.
        assert len(ids) == 0 or int(ids.max()) <= np.iinfo(dtype).max
        filled = lengths > 0
        self._report.empty += int(np.count_nonzero(~filled))
        if self._rule.append_eod:
            ends = np.cumsum(lengths)[filled]
            ids = np.insert(ids, ends, self._tokenizer.eos_id)
            lengths = lengths + filled
        for begin in reversed(self._rule.begin_ids):
            starts = (np.cumsum(lengths) - lengths)[filled]
            ids = np.insert(ids, starts, begin)
            lengths = lengths + filled
        if not self._rule.keep_empty:
            lengths = lengths[filled]
        if len(lengths) and int(lengths.max()) > MOST_TOKENS:
            raise DataError(
                f"a document has {int(lengths.max())} tokens, and lengths are kept in 32 bits, up "
                f"to {MOST_TOKENS}; divide it, or lower --max-document-mb to leave it out"
            )
        self._ids.write(ids.astype(dtype).tobytes())
        self._lengths.write(lengths.astype("<i4").tobytes())
        self._report.documents += int(np.count_nonzero(filled))
        self._report.tokens += len(ids)
        self._report.text_bytes += sum(
            len(text) if text.isascii() else _utf8(text) for text in texts
        )


def _utf8(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


class FinishedShard(DocumentRun):
    """A finished shard as a run of documents to be written; files are opened when read."""

    def __init__(self, stem: Path, report: ShardReport, dtype: np.dtype) -> None:
        self._stem = stem
        self._report = report
        self._dtype = dtype
        self.num_tokens = report.tokens

    def __len__(self) -> int:
        return self._report.documents

    @property
    def num_groups(self) -> int:
        return self._stem.with_suffix(".len").stat().st_size // 4

    @property
    def borders(self) -> np.ndarray | None:  # type: ignore[override]
        """Megatron's document index: an empty document is a border without a sequence."""
        if self.num_groups == len(self):
            return None
        filled = self._all_lengths() > 0
        return np.concatenate(([0], np.cumsum(filled, dtype=np.int64)))

    def lengths(self) -> Iterator[np.ndarray]:
        lengths = self._all_lengths()
        if len(self):
            yield lengths[lengths > 0]

    def tokens(self) -> Iterator[np.ndarray]:
        with self._stem.with_suffix(".bin").open("rb") as file:
            while len(block := np.fromfile(file, self._dtype, BLOCK)):
                yield block

    def _all_lengths(self) -> np.ndarray:
        return np.fromfile(self._stem.with_suffix(".len"), "<i4")


def read_report(stem: Path, token_bytes: int) -> ShardReport | None:
    """The report of a shard if it is finished."""
    try:
        content: dict[str, Any] = json.loads(stem.with_suffix(".json").read_bytes())
        num_bytes = stem.with_suffix(".bin").stat().st_size
        num_entries = stem.with_suffix(".len").stat().st_size // 4
    except FileNotFoundError:
        return None
    # After a power cut the report may be there and what was written before it not.
    if num_bytes != content["tokens"] * token_bytes or num_entries < content["documents"]:
        return None
    chunks = [ChunkReport(**chunk) for chunk in content.pop("chunks")]
    for chunk in chunks:
        chunk.places = [BadLine(*place) for place in chunk.places]
    return ShardReport(**content, chunks=chunks)


def write_json(path: Path, content: object) -> None:
    replace_text(path, json.dumps(content, indent=1))


def _unfinished(directory: Path, name: str) -> Path:
    return directory / f".{name}.{os.getpid()}.tmp"


# -- decompressing ahead of the workers ------------------------------------------------------


class StretchFeed:
    """The stretches of a compressed file, made by a thread a little ahead of who takes them."""

    def __init__(self, stretches: Iterator[tuple[int, TextStretch | None]]) -> None:
        self._stretches = stretches
        self._made: queue.Queue[tuple[int, TextStretch] | BaseException | None] = queue.Queue(
            STRETCHES_AHEAD
        )
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._make, name="fourfold-decompress", daemon=True)
        self._thread.start()

    def take(self, chunk: int, idle: Callable[[], None]) -> TextStretch | None:
        """The stretch of a chunk, later than those taken before; None beyond the end."""
        while True:
            try:
                made = self._made.get(timeout=0.5)
            except queue.Empty:
                idle()
                continue
            if isinstance(made, BaseException):
                raise made
            if made is None:
                return None
            assert made[0] <= chunk, f"chunk {chunk} was left out"
            if made[0] == chunk:
                return made[1]

    def close(self) -> None:
        self._given_up.set()
        with suppress(queue.Empty):
            while True:
                self._made.get_nowait()
        self._thread.join()

    def _make(self) -> None:
        try:
            for chunk, stretch in self._stretches:
                if stretch is not None:
                    self._put((chunk, stretch))
                if self._given_up.is_set():
                    return
            self._put(None)
        except Exception as error:
            self._put(error)

    def _put(self, made: tuple[int, TextStretch] | BaseException | None) -> None:
        while not self._given_up.is_set():
            with suppress(queue.Full):
                self._made.put(made, timeout=0.5)
                return


# -- worker processes ------------------------------------------------------------------------
#
# Each worker has a pipe of its own to the parent and nothing else in common with it. When the
# parent dies, even by SIGKILL, its end of the pipes closes and the workers end after the shard they
# are at. Workers are started fresh (not forked): they import neither torch nor what the parent did.


@dataclass(frozen=True)
class TokenizeJob:
    """All a worker needs to know."""

    directory: Path
    files: tuple[InputFile, ...]
    text_rule: TextRule
    token_rule: TokenRule
    tokenizer: Tokenizer

    def maker(self) -> ShardTokenizer:
        return ShardTokenizer(
            self.directory, self.files, self.text_rule, self.token_rule, self.tokenizer
        )


def make_shards(
    job: TokenizeJob, shards: Iterable[WorkShard], workers: int, idle: Callable[[], None]
) -> Iterator[tuple[WorkShard, ShardReport]]:
    """Shards as they are finished, in any order. `shards` is asked for the next when a worker is
    free, `idle` is called at least twice a second meanwhile."""
    with _WorkerPool(job, workers) as pool:
        upcoming = iter(shards)
        while True:
            while pool.has_room and (shard := next(upcoming, None)) is not None:
                pool.give(shard)
            if not pool.busy:
                return
            yield from pool.finished(timeout=0.5)
            idle()


class _WorkerPool:
    def __init__(self, job: TokenizeJob, workers: int) -> None:
        self._job = job
        self._workers = workers
        self._free: list[Pipe] = []
        self.busy: dict[Pipe, WorkShard] = {}
        self._processes: dict[Pipe, Any] = {}

    def __enter__(self) -> _WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, process in self._processes.items():
            pipe.close()
            if pipe in self.busy:
                process.terminate()
        for process in self._processes.values():
            process.join()

    @property
    def has_room(self) -> bool:
        return len(self.busy) < self._workers

    def give(self, shard: WorkShard) -> None:
        if shard.text is not None and not self._processes:
            # A worker takes the text when it has started, and all had better start at once.
            self._free = [self._start() for _ in range(self._workers)]
        pipe = self._free.pop() if self._free else self._start()
        self.busy[pipe] = replace(shard, text=None)
        try:
            pipe.send(shard)
        except ConnectionError:
            self._died(pipe)

    def _start(self) -> Pipe:
        """One worker more; a small input never needs as many as are allowed."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(self._job, theirs), daemon=True)
        process.start()
        theirs.close()
        self._processes[ours] = process
        return ours

    def finished(self, timeout: float) -> Iterator[tuple[WorkShard, ShardReport]]:
        for pipe in connection.wait(list(self.busy), timeout):
            assert isinstance(pipe, connection.Connection)
            try:
                answer = pipe.recv()
            except (EOFError, ConnectionError):
                self._died(pipe)
            shard = self.busy.pop(pipe)
            if isinstance(answer, UserError):
                raise answer
            if isinstance(answer, BaseException):
                raise RuntimeError(f"a worker failed at {shard.name}") from answer
            self._free.append(pipe)
            yield shard, answer

    def _died(self, pipe: Pipe) -> None:
        process = self._processes[pipe]
        process.join()
        raise DataError(
            f"a worker ended unexpectedly (exit code {process.exitcode}), perhaps for lack of "
            "memory; the same command resumes where this one stopped, with fewer --workers if "
            "need be"
        )


def _work(job: TokenizeJob, pipe: Pipe) -> None:
    # Ctrl-C reaches the whole group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    maker: ShardTokenizer | None = None
    try:
        while True:
            shard = pipe.recv()
            try:
                maker = maker or job.maker()
                answer: object = maker.make(shard)
            except Exception as error:
                answer = error
            pipe.send(answer)
    except (EOFError, ConnectionError):
        return  # the parent has finished, or is gone
