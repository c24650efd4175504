"""Fourfold's own checkpoints as one of the formats: weights alone, in and out.

The result is an output directory that a run can start from:

    step_0/         the weights; state.json says `weights_only`, so moments begin at zero
    config.yaml     the model's sections, for `fourfold generate -c` and `fourfold train -c`
    tokenizer.json  if the source had one
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import ValidationError

from fourfold import __version__, checkpoint
from fourfold.config import load_config
from fourfold.config.model_section import ModelSection
from fourfold.convert.imported import (
    ForeignModel,
    LazyTensor,
    assemble,
    count_of,
    find_tokenizer,
    options_of,
)
from fourfold.convert.scratch import disk_tensor
from fourfold.errors import CheckpointError, UserError
from fourfold.model.params import ModelShape
from fourfold.tokenizer import Tokenizer

PREFIX = "model."
CONFIG = "config.yaml"

_OPTIONS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range")


def read_native(where: Path, closing: ExitStack) -> ForeignModel:
    """The weights of the newest checkpoint at `where`, verified as for a resumed run.

    Checking reads every file once; each weight is then read in place until `closing` closes.
    """
    directory = checkpoint.candidates(where)[0]
    opened = closing.enter_context(checkpoint.Verified(directory, PREFIX))
    section = _model_section(directory, opened.state)
    found = {
        name.removeprefix(PREFIX): LazyTensor(
            opened.shape(name), opened.dtype(name), partial(opened.read, name)
        )
        for name in opened.names
    }
    made_with = opened.state.get("tokenizer")
    heads = count_of(directory, "num_attention_heads", section.get("num_attention_heads"))
    return assemble(
        "fourfold",
        directory,
        found,
        heads,
        declared={},
        options=_network(directory, section)
        | {key: float(section[key]) for key in _OPTIONS if key in section},
        tokenizer=_tokenizer_place(directory, opened.state),
        made_with=made_with if isinstance(made_with, str) else None,
    )


def _model_section(directory: Path, state: dict[str, Any]) -> dict[str, Any]:
    config = state.get("config")
    section = config.get("Model") if isinstance(config, dict) else None
    if not isinstance(section, dict):
        raise CheckpointError(f"{directory}: its state.json has no configuration of the model")
    return section


def _network(directory: Path, section: dict[str, Any]) -> dict[str, Any]:
    """What the tensors do not tell of the network."""
    shape = shape_in(directory, section)
    options = options_of(shape)
    if shape.position_embedding != "learned":
        options["max_position_embeddings"] = shape.max_position_embeddings
    return options


def shape_in(directory: Path, section: dict[str, Any]) -> ModelShape:
    """What the `Model` section of a saved configuration describes. Earlier versions had no options,
    and are GPT-2."""
    known = {name: section[name] for name in ModelSection.model_fields if name in section}
    try:
        return ModelShape.of(ModelSection.model_validate(known))
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"]))
        raise CheckpointError(
            f"{directory}: Model.{key} in its state.json is none that Fourfold writes"
        ) from None


def _tokenizer_place(directory: Path, state: dict[str, Any]) -> Path | None:
    """The tokenizer beside the checkpoint, or the one its run named, if that is still there.

    Where there are both, and the checkpoint knows which tokenizer made its data, that one.
    """
    named = (state["config"].get("Global") or {}).get("tokenizer")
    places = [find_tokenizer(directory), find_tokenizer(directory.parent)]
    places += [Path(named)] if isinstance(named, str) else []
    found = [place for place in places if place is not None]
    for place in found if len(found) > 1 else []:
        with suppress(UserError):
            if Tokenizer.load(place).is_known_as(state.get("tokenizer")):
                return place
    return found[0] if found else None


def write_native(
    model: ForeignModel, directory: Path, target: Path, tokenizer: Tokenizer | None
) -> None:
    """Write into `directory`, which will be renamed to `target`."""
    tensors = {}
    for name, tensor in model.tensors():
        shape = tuple(tensor.shape)
        tensors[PREFIX + name] = disk_tensor(directory, shape, torch.float32).copy_(tensor)
    if tokenizer is not None:
        tokenizer.save(directory / "tokenizer.json")
    path = directory / CONFIG
    path.write_text(yaml.safe_dump(_sections(model, target, tokenizer), sort_keys=False))
    state = {
        "version": __version__,
        "step": 0,
        "consumed_samples": 0,
        "optimizer_updates": 0,
        "skipped_updates": 0,
        "loss_scale": None,
        "weights_only": True,
        "tokenizer": tokenizer.identity if tokenizer else None,
        "converted_from": {"format": model.kind, "path": model.path.name, "notes": model.notes},
        "config": load_config(path).to_dict(),
    }
    checkpoint.save(directory, 0, tensors, state)


def _sections(model: ForeignModel, target: Path, tokenizer: Tokenizer | None) -> dict[str, Any]:
    sections: dict[str, Any] = {
        "Global": {"tokenizer": str(target / "tokenizer.json")},
        "Engine": {"save_load": {"ckpt_dir": str(target)}},
        "Data": {"dataset": {"max_seq_len": model.model["max_position_embeddings"]}},
        "Model": dict(model.model),
    }
    if tokenizer is None:
        del sections["Global"]
    return sections
