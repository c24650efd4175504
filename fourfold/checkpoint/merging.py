"""Merging: the same checkpoint with every tensor whole, for tools that know nothing of pieces."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError

from fourfold.checkpoint.directory import commit, private_name, remove
from fourfold.checkpoint.manifest import (
    MAX_STATE_BYTES,
    STATE,
    Manifest,
    encode_json,
    read_manifest,
)
from fourfold.checkpoint.pieces import whole
from fourfold.checkpoint.place import Place
from fourfold.checkpoint.reading import check_files, read_state
from fourfold.checkpoint.shards import Tables, read_shards, record_of, shard_names, write_shard
from fourfold.checkpoint.writing import write_manifest
from fourfold.errors import CheckpointError


def merge(source: Path | str, target: Path | str, prefix: str = "") -> Path:
    """Write the tensors of checkpoint `source` whose names begin with `prefix` whole to `target`.

    `target` is a new directory, which appears complete and can be used wherever a checkpoint can.
    Of the tensors, those of one file at a time are in memory.
    """
    source, target = Path(source), Path(target)
    if target.exists():
        raise CheckpointError(f"{target} exists already; name a new directory to merge into")
    with Place(source) as place:
        manifest = place.steady(lambda: read_manifest(source))
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
            raise CheckpointError(f"cannot merge {source} into {target}: {error}") from error
        finally:
            remove(temporary)
    return target


def _write_whole(source: Path, manifest: Manifest, prefix: str, into: Path) -> None:
    tables: Tables = ({}, {})
    files, records = tables
    sizes = {
        name: record.nbytes()
        for name, record in manifest.tensors.items()
        if name.startswith(prefix)
    }
    if sum(sizes.values()) > shutil.disk_usage(into).free:
        raise CheckpointError(f"{into.parent} has no room for {sum(sizes.values())} bytes")
    for file, names in shard_names(sizes).items():
        tensors = {}
        for name in names:
            record = manifest.tensors[name]
            tensors[name] = torch.empty(record.shape, dtype=record.torch_dtype())
        pieces = {name: whole(tensor) for name, tensor in tensors.items()}
        read_shards(source, manifest, pieces)
        files[file] = write_shard(into / file, tensors)
        records |= {name: record_of(piece, file) for name, piece in pieces.items()}
    state = encode_json(read_state(source), MAX_STATE_BYTES, STATE)
    write_manifest(into, manifest.step, manifest.serial, tables, state)
