"""The model that PaddleNLP's `--model_name_or_path` stands for: a preset, or a checkpoint's own.

A preset begins with new weights. Its feed-forward width is 4 * hidden_size, which is what the
`Model` section takes by itself. Sizes in names are nominal: OpenAI's "117M" has 124 million
parameters with this vocabulary.

A checkpoint may be ours or any that `fourfold convert` reads, PaddleNLP's `model_state.pdparams`
and FleetX's `model.pdparams` among them. Its weights are taken and the run begins at step 0, as in
the original; to resume a run, start it again with its own `--output_dir`.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fourfold.config.findings import did_you_mean, nearest
from fourfold.errors import CheckpointError, UserError

if TYPE_CHECKING:
    from fourfold.model import ModelShape

ModelType = Literal["gpt", "gpt-cn"]
HEADS = "num_attention_heads"
SIZES = ("vocab_size", "hidden_size", "num_layers", HEADS, "max_position_embeddings")


@dataclass(frozen=True)
class ModelPreset:
    """Names are those of the `Model` section."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    max_position_embeddings: int = 1024
    initializer_range: float = 0.02


ENGLISH = {
    "gpt2-small-en": ModelPreset(50304, 1024, 4, 4),
    "gpt2-en": ModelPreset(50304, 768, 12, 12),
    "gpt2-medium-en": ModelPreset(50304, 1024, 24, 16),
    "gpt3-1.3B-en": ModelPreset(50304, 2048, 24, 16),
    "gpt3-13B-en": ModelPreset(50304, 5120, 40, 128),
    "gpt3-89B-en": ModelPreset(51200, 12288, 48, 96),
    "gpt3-175B-en": ModelPreset(51200, 12288, 96, 96),
}
CHINESE = {
    "gpt-cpm-large-cn": ModelPreset(30000, 2560, 32, 32),
    "gpt-cpm-small-cn-distill": ModelPreset(30000, 768, 12, 12),
}
PRESETS = ENGLISH | CHINESE
# The end-of-text id of each model type's tokenizer. GPT-2's is what `Data.dataset` assumes.
END_OF_TEXT: dict[ModelType, int] = {"gpt": 50256, "gpt-cn": 7}


def model_type_of(name: str) -> ModelType:
    """The `--model_type` that goes with a preset."""
    return "gpt-cn" if name in CHINESE else "gpt"


# -- the model a run begins with ----------------------------------------------------------------


@dataclass(frozen=True)
class InitialModel:
    """Keys of the `Model` section, and the checkpoint to take the weights from, if there is one."""

    sizes: dict[str, int | float]
    weights: Path | None = None


def find_model(named: str, sizes: Mapping[str, int]) -> InitialModel:
    """The model `named`, a preset before a directory; `sizes` come from flags of our own.

    They change a preset. A checkpoint has its own sizes; only its number of heads may be given,
    because Paddle's files do not hold it.
    """
    if named in PRESETS:
        return InitialModel({**asdict(PRESETS[named]), **sizes})
    checkpoint = Path(named)
    if not checkpoint.exists():
        raise UserError(
            f"--model_name_or_path {named} is neither a directory nor one of the models known by "
            f"name ({', '.join(PRESETS)}){did_you_mean(nearest(named, PRESETS))}"
        )
    own = _sizes_of(checkpoint, sizes.get(HEADS))
    if other := [f"--{name} {size}" for name, size in sizes.items() if own[name] != size]:
        raise UserError(
            f"{', '.join(other)}: the checkpoint {named} has its own sizes "
            f"({', '.join(f'{name} {own[name]}' for name in SIZES)}); leave the flags out"
        )
    return InitialModel(own, checkpoint)


def _sizes_of(path: Path, heads: int | None) -> dict[str, int | float]:
    from fourfold import checkpoint
    from fourfold.convert import load_foreign, open_weights
    from fourfold.convert.fleetx import HEADS_OPTION
    from fourfold.convert.native import shape_in

    names = [*SIZES, "ffn_hidden_size"]
    try:
        if path.is_dir() and open_weights(path).kind == "fourfold":
            # From its saved configuration: opening it as a foreign model would verify every weight.
            section = checkpoint.read_state(checkpoint.candidates(path)[0])["config"]["Model"]
            _refuse_other_networks(path, shape_in(path, section))
            return {name: section[name] for name in names}
        with load_foreign(path, heads) as foreign:
            _refuse_other_networks(path, foreign.shape)
            return {name: foreign.model[name] for name in names}
    except CheckpointError as error:
        text = str(error).replace(HEADS_OPTION, f"--{HEADS}")
        raise CheckpointError(f"--model_name_or_path {text}") from error


def _refuse_other_networks(path: Path, shape: ModelShape) -> None:
    """PaddleNLP's commands train GPT-2's network, and have no flags for others."""
    from fourfold.convert import options_of

    for name, value in options_of(shape).items():
        raise CheckpointError(
            f"{path}: its network is not GPT-2's (Model.{name}={value}); train it with fourfold "
            "train"
        )


def initial_weights_dir(output_dir: Path) -> Path:
    """Beside the run, not in it: a checkpoint named inside a run would be loaded at every start."""
    return output_dir.with_name(f"{output_dir.name}_initial_weights")


def write_initial_weights(model: InitialModel, output_dir: Path) -> None:
    """Write the weights that the run begins with, unless it has begun. One process does this; the
    others wait for it when they connect."""
    from fourfold import checkpoint
    from fourfold.convert import convert

    if model.weights is None or checkpoint.candidates(output_dir):
        return
    target = initial_weights_dir(output_dir)
    # Left by a run that was started and saved no checkpoint; the source may have changed since.
    if any(
        checkpoint.read_state(step).get("weights_only") for step in checkpoint.candidates(target)
    ):
        shutil.rmtree(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    convert(model.weights, target, "fourfold", num_attention_heads=int(model.sizes[HEADS]))
