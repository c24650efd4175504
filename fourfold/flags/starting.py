"""What `--model_name_or_path` means: a model by name with new weights, or a checkpoint's own.

A checkpoint may be ours or any that `fourfold convert` reads, PaddleNLP's `model_state.pdparams`
and FleetX's `model.pdparams` among them. Its weights are taken and the run begins at step 0, as in
the original; to go on with a run, start it again with the `--output_dir` it has.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fourfold.errors import CheckpointError, UserError
from fourfold.flags.presets import find_preset, unknown_preset

HEADS = "num_attention_heads"
SIZES = ("vocab_size", "hidden_size", "num_layers", HEADS, "max_position_embeddings")


@dataclass(frozen=True)
class Start:
    """Keys of the `Model` section, and the checkpoint to take the weights of, if there is one."""

    model: dict[str, int | float]
    weights: Path | None = None


def find_start(named: str, sizes: Mapping[str, int]) -> Start:
    """The model `named`, a preset before a directory; `sizes` are asked for by flags of our own.

    They change a preset. A checkpoint has its sizes, and may only be told its heads again: Paddle's
    files do not say them.
    """
    if preset := find_preset(named):
        return Start({**preset.model(), **sizes})
    place = Path(named)
    if not place.exists():
        raise UserError(f"--model_name_or_path {unknown_preset(named)}")
    model = _sizes_of(place, sizes.get(HEADS))
    if other := [f"--{name} {size}" for name, size in sizes.items() if model[name] != size]:
        raise UserError(
            f"{', '.join(other)}: the checkpoint {named} has its own sizes "
            f"({', '.join(f'{name} {model[name]}' for name in SIZES)}); leave the flags out"
        )
    return Start(model, place)


def _sizes_of(place: Path, heads: int | None) -> dict[str, int | float]:
    from fourfold import checkpoint
    from fourfold.convert import load_foreign, open_weights
    from fourfold.convert.fleetx import HEADS_OPTION

    names = [*SIZES, "ffn_hidden_size"]
    try:
        if place.is_dir() and open_weights(place).kind == "fourfold":
            # What it says of itself: opening it as a foreign model would verify every weight.
            section = checkpoint.read_state(checkpoint.candidates(place)[0])["config"]["Model"]
            return {name: section[name] for name in names}
        with load_foreign(place, heads) as foreign:
            return {name: foreign.model[name] for name in names}
    except CheckpointError as error:
        told = str(error).replace(HEADS_OPTION, f"--{HEADS}")
        raise CheckpointError(f"--model_name_or_path {told}") from error


def weights_place(output_dir: Path) -> Path:
    """Beside the run and not in it: a checkpoint named inside a run is taken at every start."""
    return output_dir.with_name(f"{output_dir.name}_initial_weights")


def take_weights(start: Start, output_dir: Path) -> None:
    """Write the weights where the run begins, unless it has begun. One process does this; those
    that come to meet it wait."""
    from fourfold import checkpoint
    from fourfold.convert import convert

    if start.weights is None or checkpoint.candidates(output_dir):
        return
    target = weights_place(output_dir)
    # Left by a start that came to no checkpoint; its source may have changed since.
    if any(
        checkpoint.read_state(step).get("weights_only") for step in checkpoint.candidates(target)
    ):
        shutil.rmtree(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    convert(start.weights, target, "fourfold", num_attention_heads=int(start.model[HEADS]))
