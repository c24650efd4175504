"""`convert`: any checkpoint in, a new directory of another format out."""

from __future__ import annotations

import math
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from fourfold.atomic_files import sync_directory
from fourfold.convert.detect import load_foreign
from fourfold.convert.fleetx import write_fleetx
from fourfold.convert.huggingface import SHARD_BYTES, write_huggingface
from fourfold.convert.imported import ForeignModel, Kind
from fourfold.convert.megatron_out import MegatronLayout, write_megatron
from fourfold.convert.native import write_native
from fourfold.convert.scratch import check_room, sync_tree
from fourfold.errors import CheckpointError, UserError
from fourfold.tokenizer import Tokenizer


@dataclass(frozen=True)
class Converted:
    """What was done, for the caller to report."""

    source: Kind
    model: dict[str, Any]
    has_tokenizer: bool
    notes: list[str]
    flags: list[str]  # what Megatron must be given to load it


def convert(
    source: Path | str,
    target: Path | str,
    to: Kind,
    *,
    num_attention_heads: int | None = None,
    vocab_size: int | None = None,
    tokenizer: Path | str | None = None,
    force: bool = False,
    dtype: torch.dtype | None = None,
    megatron: MegatronLayout | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Converted:
    """Write the model at `source` to the new directory `target` in the format `to`.

    `target` appears complete or not at all. `vocab_size` cuts off the padding of a vocabulary;
    `tokenizer` names one that is not beside the source, and `force` takes one that did not make the
    model's data; `dtype` is the type of the weights written, their own if None; `megatron` is for
    that format alone.
    """
    target = Path(target)
    if to == "fourfold" and dtype not in (None, torch.float32):
        raise UserError(
            f"--dtype {str(dtype).removeprefix('torch.')} is not for --to fourfold, whose "
            "checkpoints are float32; leave it out"
        )
    if megatron is not None and to != "megatron":
        raise UserError(f"--megatron-names, --tp and --pp are for --to megatron, not --to {to}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is not empty; name a new directory")
    whole = target.absolute()
    temporary = whole.with_name(f".{whole.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        temporary.mkdir(parents=True)
        with load_foreign(source, num_attention_heads, temporary) as model:
            if vocab_size is not None:
                model.trim_vocabulary(vocab_size)
            if dtype is not None:
                model.cast(dtype)
            words = _tokenizer(model, tokenizer, force)
            flags = []
            layout = megatron or MegatronLayout()
            check_room(temporary, _bytes_needed(model, to, layout))
            if to == "megatron":
                flags = write_megatron(model, temporary, target, layout, words)
            else:
                _write(model, temporary, target, to, words, shard_bytes)
            done = Converted(model.kind, model.model, words is not None, model.notes, flags)
        sync_tree(temporary)
        temporary.rename(target)
        sync_directory(whole.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {target}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return done


def _bytes_needed(model: ForeignModel, to: Kind, layout: MegatronLayout) -> int:
    """The weights as they are written, and what waits on the disk until a file is whole."""
    weights = sum(source.nbytes for source in model.stored.values())
    if to == "fourfold":
        return 2 * sum(4 * math.prod(source.shape) for source in model.stored.values())
    return weights + (weights // layout.pp if to == "megatron" else 0)


def _write(
    model: ForeignModel,
    directory: Path,
    target: Path,
    to: Kind,
    tokenizer: Tokenizer | None,
    shard_bytes: int,
) -> None:
    if to == "fourfold":
        write_native(model, directory, target, tokenizer)
    elif to == "hf":
        write_huggingface(model, directory, tokenizer, shard_bytes)
    else:
        write_fleetx(model, directory)
        if tokenizer is not None:
            tokenizer.save(directory / "tokenizer.json")


def _tokenizer(model: ForeignModel, named: Path | str | None, force: bool) -> Tokenizer | None:
    """The requested tokenizer, or the source's own if Fourfold can use it."""
    place = named if named is not None else model.tokenizer
    if place is None:
        model.notes.append("no tokenizer was found; give one with --tokenizer to write text")
        return None
    try:
        tokenizer = Tokenizer.load(place)
    except UserError as error:
        if named is not None:
            raise
        model.notes.append(f"the tokenizer was not copied: {error}")
        return None
    if tokenizer.vocab_size > model.model["vocab_size"]:
        raise CheckpointError(
            f"{place} has {tokenizer.vocab_size} tokens, more than the {model.model['vocab_size']} "
            f"of the model at {model.path}; it is another model's tokenizer"
        )
    if not (model.made_with is None or tokenizer.is_known_as(model.made_with)):
        text = (
            f"{place} is another tokenizer ({tokenizer.identity[:12]}) than the one that made the "
            f"training data of {model.path} ({str(model.made_with)[:12]}), so the model knows each "
            "id as another text"
        )
        if not force:
            raise CheckpointError(f"{text}; give the right one with --tokenizer, or --force")
        model.notes.append(text)
    return tokenizer
