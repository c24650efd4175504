"""Merging: the same checkpoint with every tensor whole, for tools that know nothing of pieces."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import SafetensorError

from fourfold.checkpoint.bounded import FileRecord, encode_json
from fourfold.checkpoint.directory import commit, private_name, remove, sync_directory
from fourfold.checkpoint.disk import explained, free_bytes, readable_gb
from fourfold.checkpoint.manifest import (
    MAX_STATE_BYTES,
    STATE,
    Manifest,
    read_manifest,
    write_manifest,
)
from fourfold.checkpoint.place import Place
from fourfold.checkpoint.reading import check_files, read_state
from fourfold.checkpoint.records import Part, StoredPiece, joined
from fourfold.checkpoint.tensor_files import read_shards, shard_names, write_shard
from fourfold.errors import CheckpointError
from fourfold.shards import Box, Shard


def merge(source: Path | str, target: Path | str, prefix: str = "") -> Path:
    """Write the tensors of checkpoint `source` whose names begin with `prefix` whole to `target`.

    `target` is a new directory, which appears complete and can be used wherever a checkpoint can.
    Of the tensors, those of one file at a time are in memory.
    """
    source, target = Path(source), Path(target)
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists already; name a new directory to merge into")
    with Place(source) as place:
        manifest = place.steady(lambda: read_manifest(source, prefix))
        if not any(name.startswith(prefix) for name in manifest.tensors):
            raise CheckpointError(f"{source} has no tensors whose names begin with {prefix!r}")
        place.steady(lambda: check_files(source, manifest, prefix))
        temporary = private_name(target.parent, f"step_{manifest.step}", "tmp")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
            place.steady(lambda: _write_whole(source, manifest, prefix, temporary))
            commit(temporary, target)
        except (OSError, SafetensorError) as error:
            reason = explained(error, target.parent)
            raise CheckpointError(f"cannot merge {source} into {target}: {reason}") from error
        finally:
            remove(temporary)
    return target


def _write_whole(source: Path, manifest: Manifest, prefix: str, into: Path) -> None:
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
        files[file] = write_shard(into / file, tensors)
        for name in names:
            shape = cuts[name].shape
            entire = Box((0,) * len(shape), shape)
            stored[name] = StoredPiece(shape, cuts[name].dtype, entire, file)
    state = encode_json(read_state(source), MAX_STATE_BYTES, STATE)
    indices = joined({0: Part.of(files, stored)})
    write_manifest(into, manifest.step, manifest.serial, indices, state)
    sync_directory(into)
