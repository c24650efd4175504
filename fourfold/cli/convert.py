"""`fourfold convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Format = Literal["hf", "fourfold", "fleetx", "megatron"]
Dtype = Literal["float32", "bfloat16", "float16"]
Names = Literal["core", "core-local", "classic"]


def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="A checkpoint of any of the formats, or a .tgz.")
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The new directory to write.")],
    to: Annotated[Format, typer.Option(help="The format to write.")],
    num_attention_heads: Annotated[
        int | None,
        typer.Option(min=1, help="For FleetX files, which do not say how many heads there are."),
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Keep this many rows of a padded vocabulary.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="The tokenizer, if there is none beside the source.")
    ] = None,
    force: Annotated[
        bool,
        typer.Option(help="Accept a tokenizer other than the one that made the training data."),
    ] = False,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Type of the weights written.", show_default="that of the source"),
    ] = None,
    megatron_names: Annotated[
        Names | None,
        typer.Option(
            help="Names for Megatron Core with Transformer Engine (core, the default), with "
            "--transformer-impl local (core-local), or for Megatron-DeepSpeed (classic)."
        ),
    ] = None,
    tp: Annotated[
        int | None, typer.Option(min=1, help="Number of Megatron's tensor ranks [1].")
    ] = None,
    pp: Annotated[
        int | None, typer.Option(min=1, help="Number of Megatron's pipeline stages [1].")
    ] = None,
) -> None:
    """Convert a checkpoint between Fourfold, Hugging Face, FleetX and Megatron."""
    import torch

    from fourfold.convert import MegatronLayout
    from fourfold.convert import convert as write

    chosen = {"names": megatron_names, "tp": tp, "pp": pp}
    given = {key: value for key, value in chosen.items() if value is not None}
    done = write(
        source,
        target,
        to,
        num_attention_heads=num_attention_heads,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        force=force,
        dtype=getattr(torch, dtype) if dtype else None,
        megatron=MegatronLayout(**given) if given else None,  # type: ignore[arg-type]
    )
    for note in done.notes:
        print(f"note: {note}")
    sizes = done.model
    print(
        f"{target}: {to} from {done.source}, {sizes['num_layers']} layers of "
        f"{sizes['hidden_size']}, {sizes['num_attention_heads']} heads, vocabulary of "
        f"{sizes['vocab_size']}"
    )
    if done.flags:
        print("Megatron must be given, besides its data, batch and training flags:")
        print("\n".join(f"  {flag}" for flag in done.flags))
    if to == "fourfold" and done.has_tokenizer:
        print(f"Write text: fourfold generate -c {target / 'config.yaml'} --prompt TEXT")
