"""`fourfold config show | check | schema`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from fourfold.cli.options import ConfigFile, Overrides
from fourfold.errors import UserError

app = typer.Typer(help="Inspect a configuration without running it.", no_args_is_help=True)


@app.command()
def show(
    config: ConfigFile,
    override: Overrides = None,
    comments: Annotated[bool, typer.Option(help="Describe each key.")] = True,
) -> None:
    """Print the resolved configuration: every key, defaults and derived values filled in."""
    from fourfold.config import load_config

    resolved = load_config(config, override or [])
    for notice in resolved.notices:
        print(f"# notice: {notice}", file=sys.stderr)
    print(resolved.to_yaml(comments=comments), end="")


@app.command()
def check(config: ConfigFile, override: Overrides = None) -> None:
    """Report every problem of a configuration at once; exit code 2 if there is any."""
    from fourfold.config import load_config

    resolved = load_config(config, override or [])
    for notice in resolved.notices:
        print(f"notice: {notice}")
    print(f"{config}: good")


@app.command()
def schema(
    config: Annotated[
        Path | None,
        typer.Option("-c", "--config", help="Use this file's resolved values as the defaults."),
    ] = None,
    override: Overrides = None,
) -> None:
    """Print the JSON Schema of the configuration, for editors."""
    from fourfold.config import load_config
    from fourfold.config.reference import json_schema

    if config is None and override:
        raise UserError("-o sets keys of a file; name the file with -c")
    resolved = None if config is None else load_config(config, override or [])
    print(json.dumps(json_schema(resolved), indent=2))
