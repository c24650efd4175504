"""`fourfold layout`: what every rank of a layout holds, without starting any."""

from __future__ import annotations

from typing import Annotated

import typer

from fourfold.cli.options import ConfigFile, Overrides
from fourfold.terminal import in_bytes, table_lines

World = Annotated[
    int | None,
    typer.Option(min=1, help="Number of processes.", show_default="what the file needs"),
]


def layout(config: ConfigFile, override: Overrides = None, world: World = None) -> None:
    """List what every rank of the configured layout holds, without starting any of them."""
    from fourfold.config import load_config
    from fourfold.cost.rank_memory import rank_memory
    from fourfold.cost.workload import options_of
    from fourfold.model import ModelShape, count_parameters
    from fourfold.parallel import layout_of

    resolved = load_config(config, override or [], world)
    for notice in resolved.notices:
        typer.echo(notice, err=True)
    shape, chosen = layout_of(resolved), ModelShape.of(resolved.Model)
    shares = rank_memory(resolved)
    typer.echo(f"layout {shape}: {shape.world_size} process(es)")
    if options := options_of(chosen):
        typer.echo(f"network: {options}")
    header = ("rank", "dp", "pp", "sharding", "mp", "layers", "parameters", "state", "activations")
    rows: list[tuple[str, ...]] = [header]
    for share in shares:
        place = shape.coordinates(share.rank)
        rows.append(
            (
                str(share.rank),
                *(str(place[axis]) for axis in ("dp", "pp", "sharding", "mp")),
                f"{share.layers} from {share.first_layer}",
                f"{share.parameters:,}",
                in_bytes(share.state_bytes),
                in_bytes(share.activation_bytes),
            )
        )
    for line in table_lines(rows, ">"):
        typer.echo(line)
    counted, expected = sum(share.counted for share in shares), count_parameters(chosen)
    assert counted == expected, (counted, expected)
    typer.echo(
        f"{sum(share.parameters for share in shares):,} held in all, of which {counted:,} are the "
        "model's and the rest copies"
    )
