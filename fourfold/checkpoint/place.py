"""Reading from a directory that a writer may replace or remove at any moment."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from fourfold.checkpoint.manifest import MismatchError, MovedError
from fourfold.errors import CheckpointError

Result = TypeVar("Result")


class Place:
    """A directory that must stay the same one from the first byte read to the last.

    A writer may replace or remove a checkpoint between two files of it being read; what was read
    is then a mixture, whatever the hashes of the single files say.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            self._descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        except (FileNotFoundError, NotADirectoryError):
            raise MovedError(
                f"{directory} is not a checkpoint: there is no such directory"
            ) from None
        except OSError as error:
            raise CheckpointError(f"{directory} cannot be read: {error.strerror}") from error

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *raised: object) -> None:
        os.close(self._descriptor)

    def steady(self, work: Callable[[], Result]) -> Result:
        """`work()`, or `MovedError` if the directory has moved by its end."""
        try:
            result = work()
        except MismatchError:
            raise
        except CheckpointError:
            if not self._moved():
                raise
        else:
            if not self._moved():
                return result
        raise MovedError(f"{self.directory} was replaced or removed while it was read")

    def _moved(self) -> bool:
        try:
            return not os.path.samestat(os.fstat(self._descriptor), os.stat(self.directory))
        except OSError:
            return True
