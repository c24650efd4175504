"""Processes that make parts.

Each worker has a pipe of its own to the parent and nothing else in common with it. When the
parent dies, even by SIGKILL, its end of the pipes closes and the workers end after the part they
are at. Workers are started fresh (not forked): they import neither torch nor what the parent did.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

from fourfold.data.inputs import InputFile
from fourfold.data.parts import Part, PartMaker, PartReport, TokenRule
from fourfold.data.text import TextRule
from fourfold.errors import DataError, UserError
from fourfold.tokenizer import Tokenizer

Pipe = connection.Connection


@dataclass(frozen=True)
class Job:
    """All a worker needs to know; the tokenizer travels as the place it is loaded from."""

    directory: Path
    files: tuple[InputFile, ...]
    text_rule: TextRule
    token_rule: TokenRule
    tokenizer: str | tuple[str, str]
    tokenizer_identity: str

    def maker(self) -> PartMaker:
        tokenizer = Tokenizer.load(self.tokenizer)
        if tokenizer.identity != self.tokenizer_identity:
            raise DataError(f"{self.tokenizer}: the tokenizer changed while it was in use")
        return PartMaker(self.directory, self.files, self.text_rule, self.token_rule, tokenizer)


def make_parts(
    job: Job, parts: Iterable[Part], workers: int, idle: Callable[[], None]
) -> Iterator[tuple[Part, PartReport]]:
    """Parts as they are finished, in any order. `parts` is asked for the next when a worker is
    free, `idle` is called at least twice a second meanwhile."""
    with _Crew(job, workers) as crew:
        upcoming = iter(parts)
        while True:
            while crew.has_room and (part := next(upcoming, None)) is not None:
                crew.give(part)
            if not crew.busy:
                return
            yield from crew.finished(timeout=0.5)
            idle()


class _Crew:
    def __init__(self, job: Job, workers: int) -> None:
        self._job = job
        self._workers = workers
        self._free: list[Pipe] = []
        self.busy: dict[Pipe, Part] = {}
        self._processes: dict[Pipe, Any] = {}

    def __enter__(self) -> _Crew:
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

    def give(self, part: Part) -> None:
        pipe = self._free.pop() if self._free else self._start()
        self.busy[pipe] = part
        try:
            pipe.send(part)
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

    def finished(self, timeout: float) -> Iterator[tuple[Part, PartReport]]:
        for pipe in connection.wait(list(self.busy), timeout):
            assert isinstance(pipe, connection.Connection)
            try:
                answer = pipe.recv()
            except (EOFError, ConnectionError):
                self._died(pipe)
            part = self.busy.pop(pipe)
            if isinstance(answer, UserError):
                raise answer
            if isinstance(answer, BaseException):
                raise RuntimeError(f"a worker failed at {part.name}") from answer
            self._free.append(pipe)
            yield part, answer

    def _died(self, pipe: Pipe) -> None:
        process = self._processes[pipe]
        process.join()
        raise DataError(
            f"a worker ended unexpectedly (exit code {process.exitcode}), perhaps for lack of "
            "memory; the same command goes on where this one stopped, with fewer --workers if "
            "need be"
        )


def _work(job: Job, pipe: Pipe) -> None:
    # Ctrl-C reaches the whole group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    maker: PartMaker | None = None
    try:
        while True:
            part = pipe.recv()
            try:
                maker = maker or job.maker()
                answer: object = maker.make(part)
            except Exception as error:
                answer = error
            pipe.send(answer)
    except (EOFError, ConnectionError):
        return  # the parent has finished, or is gone
