"""Errors a user can act on.

A `UserError` ends a command with its message and exit code 2, without a traceback. The message
says what was given, what it breaks and what to do. A `RunError` ends it with exit code 1. Anything
else that escapes is a bug of ours.
"""

from __future__ import annotations

import sys
import traceback

USER_ERROR_EXIT = 2
INTERRUPTED_EXIT = 130


class UserError(Exception):
    """Something the user gave, or a file on their disk, that we cannot work with."""


class RunError(Exception):
    """What ended a run and is no mistake in its input: a restart may get past it.

    Its message says all there is to say, so it comes without a traceback too.
    """


class ConfigError(UserError):
    """All problems of a configuration at once, one line each."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class DataError(UserError):
    """A data file that is missing, damaged or not what its header says."""


class CheckpointError(UserError):
    """A checkpoint that is missing, torn, corrupted or of another model."""


def report(error: BaseException) -> int:
    """Say on standard error what ended a process; the exit code it should end with."""
    if isinstance(error, UserError):
        print(f"fourfold: {error}", file=sys.stderr)
        return USER_ERROR_EXIT
    if isinstance(error, RunError):
        print(f"fourfold: {error}", file=sys.stderr)
        return 1
    if isinstance(error, KeyboardInterrupt):
        print("fourfold: interrupted", file=sys.stderr)
        return INTERRUPTED_EXIT
    traceback.print_exception(error, file=sys.stderr)
    return 1
