"""`convert`: any checkpoint in, a new directory of another format out."""

from __future__ import annotations

import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from fourfold.convert.detect import load_foreign
from fourfold.convert.fleetx import write_fleetx
from fourfold.convert.foreign import ForeignModel, Kind
from fourfold.convert.huggingface_out import SHARD_BYTES, write_huggingface
from fourfold.convert.megatron_out import MegatronLayout, write_megatron
from fourfold.convert.native import write_native
from fourfold.errors import CheckpointError, UserError
from fourfold.tokenizer import Tokenizer


@dataclass(frozen=True)
class Converted:
    """What was done, for whoever asked."""

    source: Kind
    model: dict[str, int | float]
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
    megatron: MegatronLayout | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Converted:
    """Write the model at `source` to the new directory `target` in the format `to`.

    `target` appears complete or not at all. `vocab_size` cuts off the padding of a vocabulary;
    `tokenizer` names one that is not beside the source; `megatron` is for that format alone.
    """
    target = Path(target)
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
            words = _tokenizer(model, tokenizer)
            flags = []
            if to == "megatron":
                layout = megatron or MegatronLayout()
                flags = write_megatron(model, temporary, target, layout, words)
            else:
                _write(model, temporary, target, to, words, shard_bytes)
            done = Converted(model.kind, model.model, words is not None, model.notes, flags)
        temporary.rename(target)
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return done


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


def _tokenizer(model: ForeignModel, named: Path | str | None) -> Tokenizer | None:
    """The tokenizer asked for, or the source's own if that is one Fourfold can use."""
    place = named if named is not None else model.tokenizer
    if place is None:
        model.notes.append("no tokenizer was found; give one with --tokenizer to write text")
        return None
    try:
        tokenizer = Tokenizer.load(place)
    except UserError as error:
        if named is not None:
            raise
        model.notes.append(f"the tokenizer was not taken over: {error}")
        return None
    if tokenizer.vocab_size > model.model["vocab_size"]:
        raise CheckpointError(
            f"{place} has {tokenizer.vocab_size} tokens, more than the {model.model['vocab_size']} "
            f"of the model at {model.path}; it is another model's tokenizer"
        )
    return tokenizer
