"""A checkpoint in a `.tgz`, unpacked into a private directory: weights and descriptions only."""

from __future__ import annotations

import shutil
import tarfile
import zlib
from pathlib import Path

from fourfold.errors import CheckpointError

SUFFIXES = (".tgz", ".tar.gz", ".tar")

# Weights hardly shrink when packed, so an archive that grows more than this is none of weights.
MAX_GROWTH = 20
ALLOWANCE = 64 << 20
MAX_MEMBERS = 10_000

# Optimizer states, larger than the weights, stay in the archive.
WANTED = (".pdparams", ".safetensors", ".bin", ".pt", ".json", ".txt")


def is_archive(path: Path) -> bool:
    return path.name.endswith(SUFFIXES) and path.is_file()


def unpack(path: Path, directory: Path) -> None:
    """Unpack what a model needs; a name that leaves `directory`, a link or a device is refused."""
    limit = MAX_GROWTH * path.stat().st_size + ALLOWANCE
    free = shutil.disk_usage(directory).free
    total = 0
    try:
        with tarfile.open(path, "r|*") as archive:
            for count, member in enumerate(archive):
                total += member.size
                if total > limit or count >= MAX_MEMBERS:
                    raise CheckpointError(
                        f"{path} unpacks to over {limit} bytes or {MAX_MEMBERS} files, which no "
                        "packed weights do; nothing of it is used"
                    )
                if total > free:
                    raise CheckpointError(
                        f"{path} needs over {free} bytes, which {directory} does not have free"
                    )
                if member.isdir() or member.name.endswith(WANTED):
                    archive.extract(member, directory, filter=_plain)
    except (tarfile.TarError, EOFError, OSError, zlib.error, ValueError) as error:
        raise CheckpointError(f"{path} cannot be unpacked: {error}") from error


def _plain(member: tarfile.TarInfo, directory: str) -> tarfile.TarInfo:
    if not member.isfile() and not member.isdir():
        raise CheckpointError(f"its member {member.name[:100]!r} is a link or a device")
    return tarfile.data_filter(member, directory)
