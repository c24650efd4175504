"""Options several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path, typer.Option("-c", "--config", help="The YAML file that describes the run.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "-o",
        "--override",
        metavar="A.B.C=VALUE",
        help="Set one key over the file's value; may be given many times.",
    ),
]
