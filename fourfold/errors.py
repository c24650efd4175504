"""Errors a user can act on.

A `UserError` ends a command with its message and exit code 2, without a traceback. The message
says what was given, what it breaks and what to do. A `RunError` ends it with exit code 1. Anything
else that escapes is a bug of ours.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

USER_ERROR_EXIT = 2
INTERRUPTED_EXIT = 130


class UserError(Exception):
    """An input, or a file on the user's disk, that we cannot work with."""


class RunError(Exception):
    """A failure of a run that is no mistake in its input: a restart may get past it.

    Its message is complete, so it too comes without a traceback.
    """


@dataclass(frozen=True)
class Setting:
    """A key of the configuration where a message names it, with its value or without."""

    path: str
    value: Any = None

    def __str__(self) -> str:
        return self.path if self.value is None else f"{self.path}={self.value}"


@dataclass(frozen=True)
class Remark:
    """One remark about a configuration, and where the value it is about was written."""

    parts: tuple[str | Setting, ...]
    source: str = ""
    paths: tuple[str, ...] = ()  # of all keys it is about, named in it or not

    def text(self, name: Callable[[Setting], str] = str) -> str:
        """Without the source; `name` says what to call a key and its value."""
        return "".join(name(part) if isinstance(part, Setting) else part for part in self.parts)

    def __str__(self) -> str:
        return f"{self.source}: {self.text()}" if self.source else self.text()


class ConfigError(UserError):
    """All problems of a configuration at once, one line each."""

    def __init__(self, problems: Sequence[Remark | str]) -> None:
        self.problems = [
            Remark((problem,)) if isinstance(problem, str) else problem for problem in problems
        ]
        super().__init__("\n".join(str(problem) for problem in self.problems))


class DataError(UserError):
    """A data file that is missing, damaged or not what its header says."""


class CheckpointError(UserError):
    """A checkpoint that is missing, torn, corrupted or of another model."""


@contextmanager
def heard_or_not(stream: TextIO | None) -> Iterator[None]:
    """Write to the console in this block: a run must not depend on whether anybody reads it.

    Once the reader has gone (`| head`, a terminal that was closed), all that follows goes nowhere.
    What does not fit on a full disk is left out.
    """
    try:
        yield
    except OSError as error:
        if stream is not None and error.errno in (errno.EPIPE, errno.EIO):
            nothing = os.open(os.devnull, os.O_WRONLY)
            # Not a new stream in its place: what it still holds would be tried again at the end.
            os.dup2(nothing, stream.fileno())
            os.close(nothing)


def say(text: str, stream: TextIO | None) -> None:
    """Print a line to the console, if anybody is reading it."""
    with heard_or_not(stream):
        print(text, file=stream, flush=True)


def told(error: BaseException) -> str:
    """An error in short: its message, or for one of ours the line that names it."""
    if isinstance(error, UserError | RunError):
        return f"fourfold: {error}"
    return "".join(traceback.format_exception_only(error)).strip()


def report(error: BaseException) -> int:
    """Print to standard error what ended a process; returns its exit code."""
    if isinstance(error, UserError):
        say(f"fourfold: {error}", sys.stderr)
        return USER_ERROR_EXIT
    if isinstance(error, RunError):
        say(f"fourfold: {error}", sys.stderr)
        return 1
    if isinstance(error, KeyboardInterrupt):
        say("fourfold: interrupted", sys.stderr)
        return INTERRUPTED_EXIT
    with heard_or_not(sys.stderr):
        traceback.print_exception(error, file=sys.stderr)
    return 1
