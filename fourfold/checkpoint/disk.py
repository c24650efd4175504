"""The file system of an output directory: its errors, its free space, whether it is shared.

A checkpoint is saved for the day something breaks, and what breaks first is often the disk. What
can be checked before the first save is checked here, and the errors of a save are turned into
messages that say what to do.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from fourfold import storage
from fourfold.checkpoint.rendezvous import RankGroup
from fourfold.errors import CheckpointError

FULL = (errno.ENOSPC, errno.EDQUOT)
# The device, or the server behind it, fails.
FAILED = (
    errno.EIO,
    errno.ENXIO,
    errno.ENODEV,
    errno.ENOTCONN,
    errno.ESTALE,
    errno.EREMOTEIO,
    errno.ETIMEDOUT,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ECONNABORTED,
)
FORBIDDEN = (errno.EACCES, errno.EPERM)


def advice(error: Exception, place: Path) -> str:
    """What to do about an error of the file system that holds `place`, as the end of a sentence."""
    number = error.errno if isinstance(error, OSError) else None
    if number in FULL:
        return f"make room ({_said_free(place)}) or choose another output directory"
    if number == errno.EROFS:
        return (
            "the file system is mounted read-only, which Linux also does after a disk error: check "
            "the kernel log (dmesg), then remount it read-write or choose another output directory"
        )
    if number in FAILED:
        return (
            "the disk or the file server has failed: check the mount and the kernel log (dmesg), "
            "or choose another output directory"
        )
    if number in FORBIDDEN:
        return "allow the user of this process to write there, or choose another output directory"
    if number == errno.EFBIG:
        return "allow larger files (ulimit -f), or choose an output directory on another disk"
    return "check the file system, or choose another output directory"


def explained(error: Exception, place: Path) -> str:
    """An error with what to do about it."""
    if isinstance(error, storage.StorageError):
        return str(error)  # which says so itself
    return f"{error}; {advice(error, place)}"


# --- room -------------------------------------------------------------------------------------


def free_bytes(place: Path) -> int:
    """Free bytes where `place` is or will be; raises `OSError`."""
    place = place.absolute()
    while True:
        try:
            return shutil.disk_usage(place).free
        except FileNotFoundError:
            if place == place.parent:
                raise
            place = place.parent


def _said_free(place: Path) -> str:
    try:
        return f"{place} has {readable_gb(free_bytes(place))} free"
    except OSError:
        return f"{place} does not say how much it has free"


def readable_gb(count: int) -> str:
    return f"{count / 1e9:.3f} GB ({count} bytes)"


class WriteTimes:
    """How long this process took to write its parts of checkpoints, for whoever compares ranks."""

    def __init__(self) -> None:
        self._longest = 0.0

    def add(self, seconds: float) -> None:
        self._longest = max(self._longest, seconds)

    def take(self) -> float:
        """Seconds of the slowest since the last call; 0 where none was written."""
        longest, self._longest = self._longest, 0.0
        return longest


write_times = WriteTimes()


def room_problem(
    output_dir: Path, one: int, free: int, more: int, keep_last: int
) -> tuple[str | None, list[str]]:
    """Why a run that is going to have `more` checkpoints of `one` bytes each cannot save at all,
    and notices if it can."""
    has = f"{output_dir} has {free / 1e9:.3f} GB free"
    if free < one:
        problem = (
            f"a checkpoint of this run takes {one / 1e9:.3f} GB and {has}; make room or set "
            "Engine.save_load.output_dir to a larger disk"
        )
        return problem, []
    if free >= (needed := more * one):
        return None, []
    notice = (
        f"{has} and this run is going to need {needed / 1e9:.3f} GB more: "
        f"{more} checkpoints of {one / 1e9:.3f} GB "
        f"(Engine.save_load.keep_last={keep_last}); saves will fail unless there is "
        "more room or fewer are kept"
    )
    return None, [notice]


def staging_problem(staging: Path, one: int, free: int) -> str | None:
    """The same of a run at an address, which stages one at a time."""
    if free >= one:
        return None
    return (
        f"a checkpoint of this run takes {one / 1e9:.3f} GB, which are staged before they are "
        f"uploaded, and {staging} has {free / 1e9:.3f} GB free; make room or set XDG_CACHE_HOME to "
        "a directory on a larger disk"
    )


# --- one file system for all ranks ------------------------------------------------------------


def check_shared(output_dir: Path, ranks: RankGroup) -> None:
    """Make `output_dir` and refuse one that is not the same directory on every rank; a collective.

    A save needs all ranks' files in one place, and would find out only after they were written.
    """
    token = output_dir / f".shared-{secrets.token_hex(8)}"
    address = storage.address_of(output_dir)
    problem = None
    if ranks.rank == 0:
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            if address is None:
                token.write_text(ranks.session)
            else:
                storage.write(f"{address}/{token.name}", ranks.session.encode())
        except OSError as error:
            problem = (
                f"cannot write to the output directory {storage.name_of(output_dir)}: "
                f"{explained(error, output_dir)}"
            )
    try:
        if told := ranks.broadcast_first(problem):
            raise CheckpointError(told)
        name = ranks.broadcast(token.name)
        if told := ranks.broadcast_first(_not_seen(output_dir / name, ranks)):
            raise CheckpointError(told)
    finally:
        if ranks.rank == 0:
            with suppress(OSError):
                if address is None:
                    token.unlink(missing_ok=True)
                else:
                    storage.remove(f"{address}/{token.name}")


def _not_seen(token: Path, ranks: RankGroup) -> str | None:
    try:
        address = storage.address_of(token)
        # Opened, not looked for: a network file system then asks its server.
        seen = token.read_bytes() if address is None else storage.read(address)
        if seen == ranks.session.encode():
            return None
    except storage.NotThereError:
        pass
    except storage.StorageError as error:
        return f"rank {ranks.rank} on {os.uname().nodename}: {error}"
    except OSError:
        pass
    return (
        f"rank {ranks.rank} on {os.uname().nodename} does not see what rank 0 has written to the "
        f"output directory {storage.name_of(token.parent)}, so no checkpoint could "
        "be put together; set "
        "Engine.save_load.output_dir to a directory on a file system that all machines share"
    )
