"""Errors a user can act on.

A `UserError` ends a command with its message and exit code 2, without a traceback. The message
says what was given, what it breaks and what to do. Anything else that escapes is a bug of ours.
"""

from __future__ import annotations


class UserError(Exception):
    """Something the user gave, or a file on their disk, that we cannot work with."""


class ConfigError(UserError):
    """All problems of a configuration at once, one line each."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class DataError(UserError):
    """A data file that is missing, damaged or not what its header says."""


class CheckpointError(UserError):
    """A checkpoint that is missing, torn, corrupted or of another model."""
