"""Loading a trained model as a configuration names it: our checkpoints or another tool's.

`Engine.save_load.ckpt_dir` names a Fourfold checkpoint or run, or a checkpoint of Hugging Face,
FleetX or Megatron (see fourfold/convert), which then decides the network and its sizes itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from fourfold import checkpoint, storage
from fourfold.config import Config
from fourfold.convert import ForeignModel, load_foreign, open_weights
from fourfold.data.splits import open_splits
from fourfold.data.tokenizer_check import find_tokenizer
from fourfold.device import select_device
from fourfold.errors import DataError, UserError
from fourfold.model import GPT, ModelShape, network_of
from fourfold.tokenizer import GPT2, Tokenizer

Notice = Callable[[str], None]

NO_TOKENIZER = (
    "Global.tokenizer is not set, so text cannot be turned into tokens; name the tokenizer the "
    "model was trained with, e.g. -o Global.tokenizer=tokenizer.json"
)
GPT2_TOKENS = 50257


@dataclass(frozen=True)
class Trained:
    """A model with its weights, in evaluation mode, and its tokenizer."""

    model: GPT
    named_tokenizer: Tokenizer | None
    path: Path

    @property
    def tokenizer(self) -> Tokenizer:
        if self.named_tokenizer is None:
            raise UserError(NO_TOKENIZER)
        return self.named_tokenizer


def load_trained(
    config: Config, on_notice: Notice, ckpt_dir: str | None = None, needs_text: bool = True
) -> Trained:
    """The model of `ckpt_dir`, of `Engine.save_load.ckpt_dir`, or the newest of the run itself.

    The tokenizer is checked before any weight is read: a wrong one makes nonsense of the best
    model. It may be missing only if no text is read or written.
    """
    save_load = config.Engine.save_load
    named = ckpt_dir or save_load.ckpt_dir or "latest"
    where = checkpoint.named(named, storage.local_path(save_load.output_dir))
    device = select_device(config.Global.device)
    if checkpoint.candidates(where) or not where.exists():
        return _load_own(config, where, device, on_notice, needs_text)
    return _load_foreign(config, where, device, on_notice, needs_text)


def _load_own(
    config: Config, where: Path, device: torch.device, on_notice: Notice, needs_text: bool
) -> Trained:
    tokenizer = tokenizer_of_run(config, on_notice, needs_text)
    shape = ModelShape.of(config.Model)
    model = _empty(shape, device)
    weights = {f"model.{name}": p.data for name, p in model.named_parameters()}
    path, state = checkpoint.resume(
        where, weights, on_notice, "model.", hashes=config.Engine.save_load.verify_hashes
    )
    check_made_with(config, tokenizer, state.get("tokenizer"), path, on_notice)
    return Trained(model, tokenizer, path)


def check_made_with(
    config: Config,
    tokenizer: Tokenizer | None,
    made_with: str | None,
    path: Path,
    on_notice: Notice,
) -> None:
    """Refuse a tokenizer that is not the one of the checkpoint's data, unless that is allowed."""
    if not (tokenizer is None or made_with is None or tokenizer.is_known_as(made_with)):
        named = config.Global.tokenizer
        given = f"Global.tokenizer={named}" if named else "the one found without Global.tokenizer"
        text = (
            f"{path} was trained on data of another tokenizer ({str(made_with)[:12]}) than "
            f"{given} ({tokenizer.identity[:12]}), so the model knows each id as another text; "
            "name in Global.tokenizer the one its data was prepared with"
        )
        if not config.Data.dataset.allow_tokenizer_mismatch:
            raise DataError(f"{text}, or set Data.dataset.allow_tokenizer_mismatch=True")
        on_notice(text)


def _load_foreign(
    config: Config, where: Path, device: torch.device, on_notice: Notice, needs_text: bool
) -> Trained:
    with open_foreign(config, where) as foreign:
        tokenizer = tokenizer_of_foreign(config, foreign, on_notice, needs_text)
        for note in [*foreign.notes, *other_sizes(config, foreign.shape)]:
            on_notice(note)
        model = _empty(foreign.shape, device)
        parameters = dict(model.named_parameters())
        for name, tensor in foreign.tensors():
            parameters[name].data.copy_(tensor)
    return Trained(model, tokenizer, where)


def open_foreign(config: Config, where: Path) -> ForeignModel:
    # Hugging Face's files say how many heads there are; the others' may not.
    says = where.is_dir() and open_weights(where).kind == "hf"
    return load_foreign(where, None if says else config.Model.num_attention_heads)


def _empty(shape: ModelShape, device: torch.device) -> GPT:
    with torch.device("meta"):
        model = network_of(shape)(shape)
    return model.to_empty(device=device).eval().requires_grad_(False)


def model_sizes() -> list[str]:
    """The keys of `Model` that another tool's checkpoint decides."""
    return [field.name for field in ModelShape.network_fields()]


def other_sizes(config: Config, shape: ModelShape) -> list[str]:
    different = ModelShape.of(config.Model).other_settings(shape)
    return [f"the checkpoint decides the model: {', '.join(different)}"] if different else []


# -- what turns text into ids, and ids into text ------------------------------------------------


def tokenizer_of_run(config: Config, on_notice: Notice, needed: bool = True) -> Tokenizer | None:
    """What `Global.tokenizer` names, else what made the run's data, else GPT-2's."""
    named, vocab_size = config.Global.tokenizer, config.Model.vocab_size
    tokenizer = _tokenizer_of_data(config) if needed and named is None else None
    if tokenizer is not None:
        on_notice("Global.tokenizer is not set; taking the one the run's data was made with")
    else:
        tokenizer = _named_or_gpt2(named, vocab_size, on_notice, needed)
    _check_size(tokenizer, vocab_size)
    return tokenizer


def tokenizer_of_foreign(
    config: Config, foreign: ForeignModel, on_notice: Notice, needed: bool = True
) -> Tokenizer | None:
    """What `Global.tokenizer` names, else the one beside the checkpoint, else GPT-2's."""
    named, vocab_size = config.Global.tokenizer or foreign.tokenizer, foreign.shape.vocab_size
    tokenizer = _named_or_gpt2(named, vocab_size, on_notice, needed)
    _check_size(tokenizer, vocab_size)
    return tokenizer


def _named_or_gpt2(
    named: str | Path | None, vocab_size: int, on_notice: Notice, needed: bool
) -> Tokenizer | None:
    if named is not None:
        return Tokenizer.load(Path(named))
    if not needed:
        return None
    # The models of the documents have GPT-2's vocabulary, padded; a smaller one is another's.
    if vocab_size < GPT2_TOKENS:
        raise UserError(NO_TOKENIZER)
    on_notice("Global.tokenizer is not set; taking GPT-2's")
    return Tokenizer.load(GPT2)


def _tokenizer_of_data(config: Config) -> Tokenizer | None:
    """The tokenizer named by the manifests of the training data, if it can be found."""
    try:
        datasets = open_splits(config)["train"].datasets
    except UserError:
        return None  # the data need not be here for a model to write
    found = (find_tokenizer(dataset)[0] for dataset in datasets)
    return next(filter(None, found), None)


def _check_size(tokenizer: Tokenizer | None, vocab_size: int) -> None:
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model knows {vocab_size}; "
            "it is not the one the model was trained with: name that in Global.tokenizer"
        )
