"""Checkpoints: `output_dir/step_N/`, complete or not there at all.

A checkpoint is a directory of safetensors files, `state.json`, `manifest.json` and the indices of
what is where; nothing in it is ever unpickled. Tensors are keyed by name
("model.layers.0.attn.qkv.weight", "optim.layers.0.attn.qkv.weight.exp_avg"). Each rank writes the
rectangles of them it is given and reads the rectangles it needs, so a checkpoint does not know the
layout that wrote it. `state` is plain JSON: step, samples consumed, loss scale, configuration.

    save(output_dir, step, tensors, state)        commits output_dir/step_N by rename
    begin_save(...)                               the same, written in the background
    resume(where, tensors, on_notice)             fills tensors from the newest good checkpoint
    load(directory, tensors)                      fills tensors from this one, or raises
    Verified(directory)                           tensors of this one, one at a time
    merge(source, target)                         the same checkpoint with every tensor whole

Every size and hash is checked before a byte is used; damage is a `CheckpointError`.
"""

from fourfold.checkpoint.directory import Retention, candidates, named, step_of
from fourfold.checkpoint.disk import (
    check_shared,
    free_bytes,
    room_problem,
    staging_problem,
    write_times,
)
from fourfold.checkpoint.manifest import MismatchError
from fourfold.checkpoint.reading import (
    Verified,
    load,
    merge,
    read_state,
    resume,
    tensor_names,
    verify,
)
from fourfold.checkpoint.rendezvous import RankGroup
from fourfold.checkpoint.writing import PendingSave, begin_save, save
from fourfold.shards import Shard, Tensors

__all__ = [
    "MismatchError",
    "PendingSave",
    "RankGroup",
    "Retention",
    "Shard",
    "Tensors",
    "Verified",
    "begin_save",
    "candidates",
    "check_shared",
    "free_bytes",
    "load",
    "merge",
    "named",
    "read_state",
    "resume",
    "room_problem",
    "save",
    "staging_problem",
    "step_of",
    "tensor_names",
    "verify",
    "write_times",
]
