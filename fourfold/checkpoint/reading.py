"""Loading: every file is verified before it is used, with a fallback to the checkpoint before.

Ranks that load together decide together: what one of them cannot read, none uses.
`merge` writes the same checkpoint with every tensor whole, for tools that know nothing of shards.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError

from fourfold import storage
from fourfold.atomic_files import sync_directory
from fourfold.checkpoint.bounded import (
    FileRecord,
    HashName,
    decode_json,
    digest_of,
    encode_json,
    read_bounded,
)
from fourfold.checkpoint.directory import (
    PinnedDirectory,
    candidates,
    commit,
    look_at,
    private_name,
    remove,
)
from fourfold.checkpoint.disk import explained, free_bytes, readable_gb
from fourfold.checkpoint.index import Cut, Part, StoredPiece, joined
from fourfold.checkpoint.manifest import (
    MANIFEST,
    MAX_STATE_BYTES,
    STATE,
    Manifest,
    MismatchError,
    MovedError,
    read_manifest,
    state_record,
    write_manifest,
)
from fourfold.checkpoint.rendezvous import ALONE, RankGroup
from fourfold.checkpoint.tensor_files import (
    Filling,
    dtype_name,
    file_problems,
    header_problems,
    parts_by_file,
    read_shards,
    shard_names,
    write_shard,
)
from fourfold.errors import CheckpointError
from fourfold.shards import Box, Shard, Tensors, as_shards

# How often a reader starts over because the writer replaced or removed what it was reading.
MAX_RESTARTS = 100

NAMES_SHOWN = 3

Found = tuple[Path, dict[str, Any]]
Result = TypeVar("Result")


def load(
    directory: Path | str,
    tensors: Tensors,
    prefix: str = "",
    ranks: RankGroup = ALONE,
    hashes: bool = True,
    read_once: bool = False,
    ignored: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Fill `tensors` in place from a checkpoint and return its state.

    Over all ranks the names must be exactly the checkpoint's, among those that begin with
    `prefix` ("model." to read the weights alone) and with none of `ignored`, and whole shapes and
    dtypes must be its own.
    Nothing is written into any rank's tensors before every file has been verified: each is hashed
    by one of the ranks that read it. With `read_once` what that rank wants of it is copied as it is
    hashed; when this raises, the tensors may then hold anything. What one rank raises, all raise.
    Without `hashes` only sizes and headers are checked, and values that changed on the disk go
    unnoticed.
    """
    directory, wanted = storage.local_path(directory), as_shards(tensors)
    with ExitStack() as closing:
        place = _on_all_ranks(ranks, lambda: closing.enter_context(PinnedDirectory(directory)))

        def turn(work: Callable[[], Result]) -> Result:
            return _on_all_ranks(ranks, lambda: place.steady(work))

        manifest = turn(lambda: read_manifest(directory, prefix))
        checksum = ranks.broadcast(manifest.checksum)
        turn(lambda: _check_same(directory, manifest, checksum))
        held = [
            name
            for name in manifest.tensors
            if name.startswith(prefix) and not name.startswith(ignored)
        ]
        unclaimed = ranks.unclaimed(held, set(wanted))
        turn(lambda: _check_fits(directory, manifest, wanted, prefix, unclaimed))
        needed = sorted(parts_by_file(manifest, wanted))
        sizes = {file: manifest.files[file].bytes for file in manifest.shards_of(prefix)}
        share = ranks.dealt(needed, sizes)
        filling = Filling(directory, manifest, wanted)
        targets = (filling.targets,) if read_once else ()
        told = (hashes, ranks.beat, *targets)
        turn(lambda: _check(file_problems(directory, manifest, share, *told)))
        turn(lambda: _check(header_problems(directory, manifest, needed)))
        state = turn(lambda: _read_state(directory, manifest.files[STATE], manifest.hash))
        turn(lambda: filling.fill_rest(ranks.beat))
    _forget_copies(directory)
    return state


def _forget_copies(directory: Path) -> None:
    """What was copied from an address to be read; small files stay."""
    storage.forget(directory, ".safetensors")


def resume(
    where: Path | str,
    tensors: Tensors,
    on_notice: Callable[[str], None],
    prefix: str = "",
    ranks: RankGroup = ALONE,
    hashes: bool = True,
    ignored: tuple[str, ...] = (),
) -> Found:
    """Load the first good one of `candidates(where)`; return which, and its state.

    Each damaged one is reported to `on_notice` and skipped. A sound checkpoint of another model is
    an error at once: an older one would only hide that the wrong run is being resumed. With several
    ranks, rank 0 lists the candidates and all try the same ones. When this raises, the tensors may
    hold anything.
    """
    reasons: dict[Path, str] = {}

    def attempt() -> Found | None:
        listed = _on_all_ranks(ranks, lambda: _listing(where) if ranks.rank == 0 else [])
        for directory in map(storage.local_path, ranks.broadcast(listed)):
            try:
                state = load(directory, tensors, prefix, ranks, hashes, True, ignored)
                return directory, state
            except (MismatchError, MovedError):
                raise
            except CheckpointError as error:
                if directory not in reasons:
                    named = storage.name_of(directory)
                    on_notice(f"checkpoint {named} is unusable, trying the one before: {error}")
                reasons[directory] = str(error)
        return None

    found = _until_it_stays(attempt)
    if found:
        return found
    if reasons:
        tried = "".join(f"\n  {storage.name_of(path)}: {why}" for path, why in reasons.items())
        raise CheckpointError(f"no usable checkpoint at {_said(where)}; tried{tried}")
    raise CheckpointError(
        f"no checkpoint at {_said(where)}: give a step_N directory, "
        "or an output directory that has one"
    )


def _said(where: Path | str) -> str:
    return storage.name_of(where) if isinstance(where, Path) else where


def _listing(where: Path | str) -> list[str]:
    try:
        # Listing a directory is not atomic: between one checkpoint's coming and another's going
        # a single look can miss both.
        return [storage.name_of(path) for path in candidates(where) or candidates(where)]
    except OSError as error:
        raise CheckpointError(f"{_said(where)} cannot be read: {error.strerror}") from error


def _until_it_stays(attempt: Callable[[], Found | None]) -> Found | None:
    """Start over, with a new look at the directory, while the writer moves what is being read."""
    for _ in range(MAX_RESTARTS):
        try:
            return attempt()
        except MovedError:
            continue
    return attempt()


def _on_all_ranks(ranks: RankGroup, work: Callable[[], Result]) -> Result:
    """`work()` on every rank; what it raises on one is raised on all, as the same kind."""
    try:
        result = work()
    except CheckpointError as error:
        if ranks.size == 1:
            raise
        record = [type(error).__name__, f"rank {ranks.rank}: {error}"]
        first = ranks.broadcast_first(json.dumps(record))
    else:
        first = ranks.broadcast_first(None)
        if first is None:
            return result
    assert first is not None
    kind, message = json.loads(first)
    raise KINDS[kind](message)


KINDS = {kind.__name__: kind for kind in (CheckpointError, MismatchError, MovedError)}


def read_state(directory: Path | str) -> dict[str, Any]:
    """The state of a checkpoint, verified, without looking at its tensors."""
    directory = storage.local_path(directory)

    with PinnedDirectory(directory) as place:
        return place.steady(lambda: _read_state(directory, *state_record(directory)))


def tensor_names(directory: Path | str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name -> shape and dtype of every tensor in a checkpoint, from its manifest."""
    tensors = read_manifest(Path(directory)).tensors
    return {name: (cut.shape, cut.torch_dtype()) for name, cut in tensors.items()}


class Verified:
    """The tensors of a checkpoint whose names begin with `prefix`, for reading one at a time.

    Opening it reads and hashes every file once; `read` then copies single tensors out of the
    mapped files. Until it is closed, a checkpoint that is replaced or removed is an error.
    """

    def __init__(self, directory: Path | str, prefix: str = "") -> None:
        self.directory = storage.local_path(directory)
        self._place = PinnedDirectory(self.directory)
        try:
            self._manifest = self._place.steady(lambda: read_manifest(self.directory, prefix))
            self._place.steady(lambda: check_files(self.directory, self._manifest, prefix))
            record = self._manifest.files[STATE], self._manifest.hash
            self.state = self._place.steady(lambda: _read_state(self.directory, *record))
        except BaseException:
            self.close()
            raise
        self.names = [name for name in self._manifest.tensors if name.startswith(prefix)]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._manifest.tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._manifest.tensors[name].torch_dtype()

    def read(self, name: str) -> torch.Tensor:
        tensor = torch.empty(self.shape(name), dtype=self.dtype(name))
        wanted = as_shards({name: tensor})
        self._place.steady(lambda: read_shards(self.directory, self._manifest, wanted))
        return tensor

    def close(self) -> None:
        self._place.__exit__()
        _forget_copies(self.directory)

    def __enter__(self) -> Verified:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def verify(directory: Path | str) -> list[str]:
    """Everything wrong with a checkpoint, down to the last byte; empty if it is good."""
    directory = storage.local_path(directory)
    try:
        look_at(directory)
        manifest = read_manifest(directory)
        problems = file_problems(directory, manifest, manifest.files)
        problems = problems or header_problems(directory, manifest, manifest.shards())
        if not problems:
            _read_state(directory, manifest.files[STATE], manifest.hash)
        expected = {MANIFEST, *manifest.files}
        names = {path.name for path in directory.iterdir()}
        if storage.address_of(directory) is not None:
            names = {*storage.noted(directory)}
        extra = sorted(directory / name for name in names - expected)
    except (CheckpointError, storage.StorageError) as error:
        return [str(error)]
    finally:
        _forget_copies(directory)
    return problems + [f"{path} is not part of the checkpoint" for path in extra]


def check_files(directory: Path, manifest: Manifest, prefix: str) -> None:
    """Raise unless all files with tensors of this prefix are to the byte what they should be."""
    shards = manifest.shards_of(prefix)
    _check(file_problems(directory, manifest, shards))
    _check(header_problems(directory, manifest, shards))


def _check(problems: list[str]) -> None:
    if problems:
        raise CheckpointError("; ".join(problems))


def _check_same(directory: Path, manifest: Manifest, checksum: str) -> None:
    if manifest.checksum != checksum:
        raise MovedError(f"{directory} is another one on rank 0")


def _read_state(directory: Path, record: FileRecord, algorithm: HashName) -> dict[str, Any]:
    path = directory / STATE
    data = read_bounded(path, MAX_STATE_BYTES)
    if len(data) != record.bytes:
        raise CheckpointError(f"{path} has {len(data)} bytes and should have {record.bytes}")
    if digest_of(data, algorithm) != record.digest:
        raise CheckpointError(f"{path} is corrupted: its {algorithm} digest is not the manifest's")
    state = decode_json(data, path)
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is damaged: it holds no JSON object")
    return state


def _check_fits(
    directory: Path,
    manifest: Manifest,
    wanted: Mapping[str, Shard],
    prefix: str,
    unclaimed: list[str],
) -> None:
    held = {name: rec for name, rec in manifest.tensors.items() if name.startswith(prefix)}
    missing = [name for name in wanted if name not in held]
    different = [
        f"{name} (there {held[name]}, here {dtype_name(shard.local.dtype)} {list(shard.shape)})"
        for name, shard in wanted.items()
        if name in held and not _fits(held[name], shard)
    ]
    complaints = [
        f"{len(names)} {what}: {', '.join(names[:NAMES_SHOWN])}"
        + (", ..." if len(names) > NAMES_SHOWN else "")
        for names, what in (
            (missing, "not in it"),
            (unclaimed, "only in it"),
            (different, "of another shape or dtype"),
        )
        if names
    ]
    if complaints:
        raise MismatchError(
            f"checkpoint {directory} is of another model; tensors "
            f"{'; '.join(complaints)}. Use the configuration it was saved with "
            f"(see its {STATE}), or another checkpoint"
        )


def _fits(cut: Cut, shard: Shard) -> bool:
    assert shard.box.fits_in(shard.shape)
    return cut.shape == shard.shape and cut.torch_dtype() == shard.local.dtype


# -- merging --------------------------------------------------------------------------------------


def merge(
    source: Path | str, target: Path | str, prefix: str = "", becomes: str | None = None
) -> Path:
    """Write the tensors of checkpoint `source` whose names begin with `prefix` whole to `target`.

    `target` is a new directory, which appears complete and can be used wherever a checkpoint can.
    With `becomes` the prefix of every name is replaced by it, and the result is one of weights
    alone. Of the tensors, those of one file at a time are in memory.
    """
    source, target = storage.local_path(source), Path(target)
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists already; name a new directory to merge into")
    with PinnedDirectory(source) as place:
        manifest = place.steady(lambda: read_manifest(source, prefix))
        if not any(name.startswith(prefix) for name in manifest.tensors):
            raise CheckpointError(f"{source} has no tensors whose names begin with {prefix!r}")
        place.steady(lambda: check_files(source, manifest, prefix))
        temporary = private_name(target.parent, f"step_{manifest.step}", "tmp")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
            place.steady(lambda: _write_whole(source, manifest, prefix, temporary, becomes))
            commit(temporary, target)
        except (OSError, SafetensorError) as error:
            reason = explained(error, target.parent)
            raise CheckpointError(f"cannot merge {source} into {target}: {reason}") from error
        finally:
            remove(temporary)
            _forget_copies(source)
    return target


def _write_whole(
    source: Path, manifest: Manifest, prefix: str, into: Path, becomes: str | None
) -> None:
    def renamed(name: str) -> str:
        return name if becomes is None else becomes + name.removeprefix(prefix)

    cuts = {name: cut for name, cut in manifest.tensors.items() if name.startswith(prefix)}
    sizes = {name: cut.nbytes() for name, cut in cuts.items()}
    needed, free = sum(sizes.values()), free_bytes(into)
    if needed > free:
        raise CheckpointError(
            f"{into.parent} has {readable_gb(free)} free and {readable_gb(needed)} are needed; "
            "make room or merge into another directory"
        )
    files: dict[str, FileRecord] = {}
    stored: dict[str, StoredPiece] = {}
    for file, names in shard_names(sizes).items():
        tensors = {
            name: torch.empty(cuts[name].shape, dtype=cuts[name].torch_dtype()) for name in names
        }
        read_shards(
            source, manifest, {name: Shard.whole(tensor) for name, tensor in tensors.items()}
        )
        files[file] = write_shard(
            into / file, {renamed(name): tensor for name, tensor in tensors.items()}
        )
        for name in names:
            shape = cuts[name].shape
            entire = Box((0,) * len(shape), shape)
            stored[renamed(name)] = StoredPiece(shape, cuts[name].dtype, entire, file)
    kept = read_state(source) | ({} if becomes is None else {"weights_only": True})
    state = encode_json(kept, MAX_STATE_BYTES, STATE)
    indices = joined({0: Part.of(files, stored)})
    write_manifest(into, manifest.step, manifest.serial, indices, state)
    sync_directory(into)
