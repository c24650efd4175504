"""The pipeline from raw text to token files: tokenize in work shards, then join them.

`prepare_files` cuts its inputs into shards, has workers tokenize them into a work directory
(`<prefix>.parts`), and joins the finished shards in order: the result is the same bytes whatever
the number of workers. A run that was killed leaves its finished shards there, and the same call
resumes with them. Files under their final names are finished, the manifest being the last.

`prepare` does the same, in memory's reach and without workers, for documents from anywhere.

Each process holds a few megabytes of text and ids, or, if that is more, some ten times the longest
document, whose length is limited (`max_document_bytes`).
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Container, Generator, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fourfold.errors import DataError, UserError
from fourfold.tokenizer import Tokenizer
from fourfold.tools.prepare.documents import (
    DAMAGED_FILE,
    BadLine,
    ChunkReader,
    TextRule,
    num_chunks,
    text_stretches,
)
from fourfold.tools.prepare.input_files import WORK_SUFFIX, InputFile, describe_input
from fourfold.tools.prepare.manifest import (
    DocumentCounts,
    InputHashes,
    PreparePlan,
    PrepareSettings,
    damaged_file,
    describe,
    finished_manifest,
    tokenizer_entry,
)
from fourfold.tools.prepare.work_shards import (
    FinishedShard,
    ShardReport,
    StretchFeed,
    TokenizeJob,
    TokenRule,
    TokenWriter,
    WorkShard,
    make_shards,
    read_report,
    token_dtype,
)
from fourfold.tools.prepare.writers import check_output, writable, write_dataset

# Small enough to share out evenly and to lose little when killed, and not too many.
SMALLEST_CHUNK_BYTES = 8 << 20
MOST_CHUNKS = 4096
FILES_PER_SHARD = 256
# One thread hashes the input about as fast as this many processes tokenize it.
WORKERS_PER_HASH = 16
# A compressed file beyond this is always cut, lest a killed run lose too much of it.
MOST_WHOLE_BYTES = 1 << 30
EVEN_SHARES = 1.5
# Of the text of one that is cut; a few chunks of it are in memory at once.
MOST_STRETCH_BYTES = 64 << 20

log = logging.getLogger(__name__)


@dataclass
class PrepareProgress:
    """How far a run is; documents, tokens and text are those of this run, not of resumed shards."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    source_bytes: int = 0
    source_total: int = 0
    resumed_bytes: int = 0
    phase: str = "tokenizing"


def dataset_prefix(output_prefix: str | Path, form: str, json_key: str) -> Path:
    """Where the dataset goes: Megatron appends the key and the level to the prefix it is given."""
    if form == "megatron":
        return Path(f"{output_prefix}_{json_key}_document")
    return Path(output_prefix)


def prepare(
    documents: Iterable[str], prefix: str | Path, tokenizer: Tokenizer, append_eod: bool = True
) -> dict[str, Any]:
    """Write `<prefix>.bin`, `.idx` and `.json` from `documents`; returns the manifest.

    With `append_eod` each document ends with the tokenizer's end-of-text id; each begins as the
    tokenizer's family has it. Documents without
    any token have no sequence, and an entry in the document index, as in Megatron.
    """
    prefix = Path(prefix)
    check_output(prefix, "megatron", overwrite=True)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    begin_ids = tokenizer.begin_ids
    rule = TokenRule(token_dtype(tokenizer.vocab_size).str, append_eod, begin_ids=begin_ids)
    report = ShardReport()
    with tempfile.TemporaryDirectory(prefix=f".{prefix.name}.", dir=prefix.parent) as work:
        stem = Path(work, "part")
        with (
            stem.with_suffix(".bin").open("wb") as ids,
            stem.with_suffix(".len").open("wb") as len_,
        ):
            TokenWriter(ids, len_, tokenizer, rule, report).write(documents)
        if not report.documents:
            raise DataError(f"{prefix}: no document with any text was given; nothing to prepare")
        run = FinishedShard(stem, report, np.dtype(rule.dtype))
        description = describe(tokenizer_entry(tokenizer, None), rule) | {
            "empty_documents": report.empty
        }
        dtype = np.dtype(rule.dtype)
        return write_dataset(prefix, "megatron", dtype, [run], description)


def read_jsonl(path: str | Path, key: str = "text") -> Iterator[str]:
    """The string under `key` of each line; blank lines are skipped."""
    return read_texts([describe_input(Path(path), "json")], TextRule(json_key=key))


def read_texts(
    files: Iterable[InputFile],
    rule: TextRule,
    max_bad_lines: int = 0,
    allow_damaged_files: bool = False,
) -> Iterator[str]:
    """The documents of all files in order; `DataError` at a bad line beyond the limit, and at a
    damaged file."""
    reader = ChunkReader(rule)
    num_bad = 0
    for file in files:
        line = 0
        for chunk in range(num_chunks(file, rule, file.num_bytes + 1) or 1):
            whole_file = file.num_bytes + 1 if file.kind == "parquet" else None
            for document in reader.documents(file, chunk, whole_file):
                if not isinstance(document, BadLine):
                    yield document
                    continue
                bad = document._replace(line=line + document.line)
                if bad.kind == DAMAGED_FILE and not allow_damaged_files:
                    raise DataError(damaged_file(file.path, bad))
                num_bad += 1
                if num_bad > max_bad_lines:
                    place = f"{file.path}:{bad.line}"
                    raise DataError(f"{place}: {bad.reason}; fix or remove the line")
            line += reader.num_lines
    reader.close()


def prepare_files(
    files: list[InputFile],
    output_prefix: str | Path,
    settings: PrepareSettings,
    progress: Callable[[PrepareProgress], None] = lambda progress: None,
) -> dict[str, Any]:
    """Prepare the documents of `files` (see `find_inputs`) in their order; the manifest."""
    _check_settings(settings)
    prefix = dataset_prefix(output_prefix, settings.format, settings.json_key)
    tokenizer = Tokenizer.load(settings.tokenizer)
    plan = PreparePlan.from_settings(files, settings, tokenizer, _chunk_bytes(files, settings))
    manifest = None if settings.overwrite else finished_manifest(prefix, plan)
    work = Path(f"{prefix}{WORK_SUFFIX}")
    if manifest is not None:
        shutil.rmtree(work, ignore_errors=True)
        return manifest
    check_output(prefix, settings.format, settings.overwrite)
    with ExitStack() as stack:
        with writable(prefix):
            work.mkdir(parents=True, exist_ok=True)
            stack.enter_context(plan.locked(work))
            shards = plan.begin_or_resume(work, settings.overwrite)
        threads = max(1, settings.workers // WORKERS_PER_HASH)
        hashes = stack.enter_context(InputHashes(files, shards, threads))
        run = _PrepareRun(files, settings, plan, shards, tokenizer, progress)
        run.make_shards()
        manifest = run.write(prefix, hashes)
        try:
            shutil.rmtree(work)
        except OSError as error:
            log.warning("%s: no longer needed, but cannot be removed (%s)", work, error.strerror)
    return manifest


class _PrepareRun:
    """One call of `prepare_files`, from the plan on."""

    def __init__(
        self,
        files: list[InputFile],
        settings: PrepareSettings,
        plan: PreparePlan,
        directory: Path,
        tokenizer: Tokenizer,
        progress: Callable[[PrepareProgress], None],
    ) -> None:
        self.files = files
        self.settings = settings
        self.plan = plan
        self.directory = directory
        self.tokenizer = tokenizer
        self.rule = settings.token_rule(tokenizer)
        self.counts = DocumentCounts(files, settings.max_bad_lines, settings.allow_damaged_files)
        self._show = progress
        self._progress = PrepareProgress(source_total=sum(file.num_bytes for file in files))
        self._read_of = [0] * len(files)
        self._order: list[WorkShard] = []
        self._reports: dict[str, ShardReport] = {}
        self._counted = 0
        self._ended: set[int] = set()

    def make_shards(self) -> None:
        job = TokenizeJob(
            self.directory,
            tuple(self.files),
            self.settings.text_rule(),
            self.rule,
            self.tokenizer,
        )
        if self.settings.workers == 1:
            maker = job.maker()
            for shard in self._unfinished_shards():
                self._finish(shard, maker.make(shard), resumed=False)
            maker.close()
        else:
            with closing(self._with_text(self._unfinished_shards())) as shards:
                made = make_shards(job, shards, self.settings.workers, self._tick)
                for shard, report in made:
                    self._finish(shard, report, resumed=False)
        assert self._counted == len(self._order)
        self.counts.check_files()

    def write(self, prefix: Path, hashes: InputHashes) -> dict[str, Any]:
        """Join the shards under the dataset's name."""
        if not self.counts.documents:
            raise DataError(
                f"{prefix}: the input holds no document with any text; nothing to prepare"
                + (f"\n{self.counts.summary()}" if self.counts.num_bad else "")
            )
        self._progress.phase = "hashing the input"
        self._tick()
        inputs = hashes.wait()
        self._progress.phase = "writing"
        self._tick()
        dtype = np.dtype(self.rule.dtype)
        runs = [
            FinishedShard(self.directory / shard.name, self._reports[shard.name], dtype)
            for shard in self._order
            if shard.name in self._reports
        ]
        entry = tokenizer_entry(self.tokenizer, self.settings.tokenizer)
        description = describe(entry, self.rule) | {
            "flags": self.plan.flags,
            "inputs": inputs,
            **self.counts.entries(),
            "plan": self.plan.identity,
        }
        return write_dataset(prefix, self.settings.format, dtype, runs, description)

    def _unfinished_shards(self) -> Iterator[WorkShard]:
        """Shards in order; those an earlier run finished are taken over on the way."""
        rule, whole = self.settings.text_rule(), self._read_whole()
        for shard in plan_shards(self.files, rule, self.plan.chunk_bytes, self._ended, whole):
            self._order.append(shard)
            report = self._finished_report(shard)
            if report is None:
                yield shard
            else:
                self._finish(shard, report, resumed=True)

    def _finished_report(self, shard: WorkShard) -> ShardReport | None:
        return read_report(self.directory / shard.name, np.dtype(self.rule.dtype).itemsize)

    def _with_text(self, shards: Iterable[WorkShard]) -> Generator[WorkShard, None, None]:
        """The shards, those of a compressed file that was cut with their text.

        Such a file can only be decompressed from its beginning, so this process does it once for
        all workers.
        """
        feed, fed = None, -1
        try:
            for shard in shards:
                (number, chunk), *_ = shard.chunks
                if not self.files[number].compression or shard.chunk_bytes is None:
                    yield shard
                    continue
                if feed is None or number != fed:
                    if feed is not None:
                        feed.close()
                    feed, fed = self._feed(number, shard.chunk_bytes), number
                text = feed.take(chunk, self._tick)
                if text is not None:
                    yield replace(shard, text=text)
                else:  # the file ends before it
                    assert self._order.pop() is shard
                    self._ended.add(number)
        except OSError as error:
            raise DataError(f"an input can no longer be read: {error}") from error
        finally:
            if feed is not None:
                feed.close()

    def _feed(self, number: int, chunk_bytes: int) -> StretchFeed:
        def is_wanted(chunk: int) -> bool:
            return self._finished_report(WorkShard(((number, chunk),), chunk_bytes)) is None

        rule = self.settings.text_rule()
        return StretchFeed(text_stretches(self.files[number], rule, chunk_bytes, is_wanted))

    def _read_whole(self) -> set[int]:
        """The compressed files that are shards of their own.

        One that is cut is decompressed by a single process, which may be too slow for many workers.
        Files that are about an even share of the work, or less, are better left whole. The number
        of workers may change when a run is resumed: a file that was begun one way is finished that
        way.
        """
        total = sum(file.num_bytes for file in self.files)
        most = min(total / self.settings.workers * EVEN_SHARES, MOST_WHOLE_BYTES)
        compressed = [number for number, file in enumerate(self.files) if file.compression]
        if self.settings.workers == 1:
            most = 0  # no one to share with, and cut files lose less when a run is killed
        begun = {path.name for path in self.directory.glob("*-000000.json")}
        return {
            number
            for number in compressed
            if WorkShard.of_file(number).is_in(begun)
            or (
                self.files[number].num_bytes <= most
                and not WorkShard(((number, 0),), self.plan.chunk_bytes).is_in(begun)
            )
        }

    def _finish(self, shard: WorkShard, report: ShardReport, resumed: bool) -> None:
        self._reports[shard.name] = report
        self._ended |= {chunk.file for chunk in report.chunks if chunk.ended}
        for chunk in report.chunks:
            done = max(self._read_of[chunk.file], chunk.source_bytes)
            new = done - self._read_of[chunk.file]
            self._read_of[chunk.file] = done
            self._progress.source_bytes += new
            self._progress.resumed_bytes += new if resumed else 0
        if not resumed:
            self._progress.documents += report.documents
            self._progress.tokens += report.tokens
            self._progress.text_bytes += report.text_bytes
        self._tick()
        self._count_in_order()

    def _count_in_order(self) -> None:
        """Count bad lines in the order of the input, so that every run stops at the same one."""
        while self._counted < len(self._order):
            name = self._order[self._counted].name
            if name not in self._reports:
                return
            self._counted += 1
            if not self.counts.add(self._reports[name]):
                del self._reports[name]  # beyond the end of its file

    def _tick(self) -> None:
        self._show(self._progress)


def plan_shards(
    files: list[InputFile],
    rule: TextRule,
    chunk_bytes: int,
    ended: set[int],
    whole: Container[int] = (),
) -> Iterator[WorkShard]:
    """The shards of the input in order; of files whose number is in `whole`, one each.

    A file whose number of chunks nobody knows gets one after the other until it is in `ended`;
    shards requested too early are beyond its end and turn out empty.
    """
    together: list[tuple[int, int]] = []
    num_bytes = 0
    for number, file in enumerate(files):
        count = num_chunks(file, rule, chunk_bytes)
        if count == 1:
            together.append((number, 0))
            num_bytes += file.num_bytes * (8 if file.compression else 1)
        if together and (
            count != 1 or num_bytes >= chunk_bytes or len(together) == FILES_PER_SHARD
        ):
            yield WorkShard(tuple(together), None)
            together, num_bytes = [], 0
        if count is None and number in whole:
            yield WorkShard.of_file(number)
        elif count is None:
            chunk, size = 0, min(chunk_bytes, MOST_STRETCH_BYTES)
            while number not in ended:
                yield WorkShard(((number, chunk),), size)
                chunk += 1
        elif count > 1:
            yield from (WorkShard(((number, chunk),), chunk_bytes) for chunk in range(count))
    if together:
        yield WorkShard(tuple(together), None)


def _chunk_bytes(files: list[InputFile], settings: PrepareSettings) -> int:
    if settings.chunk_bytes is not None:
        return settings.chunk_bytes
    total = sum(file.num_bytes * (4 if file.compression else 1) for file in files)
    return max(SMALLEST_CHUNK_BYTES, -(-total // MOST_CHUNKS))


def _check_settings(settings: PrepareSettings) -> None:
    for name, smallest in (("workers", 1), ("min_length", 0), ("max_document_bytes", 1)):
        if getattr(settings, name) < smallest:
            option = "--" + name.replace("_bytes", "_mb").replace("_", "-")
            raise UserError(f"{option} {getattr(settings, name)}: choose {smallest} or more")
    if settings.format not in ("megatron", "fleetx"):
        raise UserError(f"--format {settings.format}: choose megatron or fleetx")
    settings.text_rule()  # refuses what it does not know
    if os.sep in settings.json_key or not settings.json_key:
        raise UserError(
            f"--json-key {settings.json_key!r}: becomes part of a file name; rename the key"
        )
