"""Detection of a checkpoint's format: `open_weights` recognises it, `load_foreign` reads it.

A checkpoint in a `.tgz` is unpacked into a private directory, weights and descriptions only.
"""

from __future__ import annotations

import re
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fourfold import checkpoint
from fourfold.convert import fleetx, huggingface, megatron, native
from fourfold.convert.distributed_files import METADATA
from fourfold.convert.imported import ForeignModel, Kind
from fourfold.errors import CheckpointError

MANIFEST = "manifest.json"
MAX_DESCENT = 3

_FLEETX_STEP = re.compile(r"(?:epoch_\d+_)?step_(\d+)|model_(\d+)")


@dataclass
class Source:
    """A checkpoint found: its kind, and the directory that its reader wants."""

    kind: Kind
    directory: Path
    closing: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        """Remove what an archive was unpacked to."""
        self.closing.close()


def open_weights(path: Path | str, workspace: Path | None = None) -> Source:
    """Recognise the checkpoint at `path`: a directory, a file in one, or an archive of one.

    An archive is unpacked below `workspace` (the system's temporary directory if None) and stays
    there until the source is closed.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such file or directory")
    if is_archive(path):
        return _unpacked(path, workspace)
    directory = path if path.is_dir() else path.parent
    if fleetx.RANK.fullmatch(directory.name) or megatron.RANK.fullmatch(directory.name):
        directory = directory.parent  # one rank of a tree stands for the tree
    return _recognise(directory, path)


def load_foreign(
    path: Path | str, num_attention_heads: int | None = None, workspace: Path | None = None
) -> ForeignModel:
    """The model at `path`, whatever wrote it; no weight is read yet. Close it when done.

    `num_attention_heads` is for files that do not say; where they do, it must agree.
    """
    source = open_weights(path, workspace)
    try:
        model = _read(source, num_attention_heads)
        heads = model.model["num_attention_heads"]
        if num_attention_heads not in (None, heads):
            raise CheckpointError(
                f"{path} has {heads} attention heads, but {num_attention_heads} were given; leave "
                "the number out"
            )
    except BaseException:
        source.close()
        raise
    model.closing = source.closing
    return model


def _read(source: Source, heads: int | None) -> ForeignModel:
    if source.kind == "hf":
        return huggingface.read_huggingface(source.directory)
    if source.kind == "fleetx":
        return fleetx.read_fleetx(source.directory, heads)
    if source.kind == "megatron":
        return megatron.read_megatron(source.directory, heads)
    return native.read_native(source.directory, source.closing)


def _unpacked(path: Path, workspace: Path | None) -> Source:
    closing = ExitStack()
    place = Path(closing.enter_context(tempfile.TemporaryDirectory(dir=workspace)))
    try:
        unpack(path, place)
        found = _recognise(place, path)
    except BaseException:
        closing.close()
        raise
    return Source(found.kind, found.directory, closing)


def _recognise(directory: Path, named: Path) -> Source:
    for _ in range(MAX_DESCENT):
        kinds = _kinds(directory, named)
        if len(kinds) > 1:
            raise CheckpointError(
                f"{named} holds files of several kinds of checkpoint ({', '.join(kinds)}); put "
                "each in a directory of its own"
            )
        if kinds:
            return Source(kinds[0], directory)
        inner = _inner(directory)
        if inner is None:
            break
        directory = inner
    raise CheckpointError(
        f"{named} is no checkpoint Fourfold knows: it needs {MANIFEST} (Fourfold), config.json "
        "with safetensors or pytorch_model.bin (Hugging Face), a .pdparams file or "
        "mp_XX_sharding_XX_pp_XX directories (FleetX), or mp_rank_XX directories or .metadata with "
        ".distcp files (Megatron)"
    )


def _kinds(directory: Path, named: Path) -> list[Kind]:
    with _readable(named):
        names = {path.name for path in directory.iterdir()}
    kinds: list[Kind] = []
    own = directory.resolve()
    if any(
        (place / MANIFEST).is_file()
        for place in checkpoint.candidates(directory)
        if own in (place, place.parent)  # and not an earlier step beside it
    ):
        kinds.append("fourfold")
    if names.intersection(huggingface.WEIGHT_FILES):
        kinds.append("hf")
    if any(name.endswith(".pdparams") or fleetx.RANK.fullmatch(name) for name in names):
        kinds.append("fleetx")
    if {megatron.TRACKER, METADATA} & names or any(
        megatron.RANK.fullmatch(name) or megatron.STEP.fullmatch(name) for name in names
    ):
        kinds.append("megatron")
    if any(name.endswith("model_states.pdparams") and "layer_" in name for name in names):
        raise CheckpointError(
            f"{named} holds Paddle's pipeline files of single layers (layer_XX-tensor_XX-...), "
            "which are not read; save it again as model.pdparams"
        )
    return kinds


def _inner(directory: Path) -> Path | None:
    """Where to look next: the newest step of a FleetX run, or the one directory there is."""
    inner = [path for path in directory.iterdir() if path.is_dir()]
    steps = {
        int(match[1] or match[2]): path
        for path in inner
        if (match := _FLEETX_STEP.fullmatch(path.name))
    }
    if steps:
        return steps[max(steps)]
    return inner[0] if len(inner) == 1 else None


@contextmanager
def _readable(named: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{named} cannot be read: {error.strerror}") from error


# -- archives -------------------------------------------------------------------------------------


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
