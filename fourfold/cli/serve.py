"""`fourfold serve`."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from fourfold.cli.options import ConfigFile, Overrides, refuse_several_processes
from fourfold.errors import UserError


def serve(
    config: ConfigFile,
    override: Overrides = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but this machine's own needs a token.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")
    ] = 8000,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the token clients must send.",
            show_default="the environment variable FOURFOLD_TOKEN",
        ),
    ] = None,
    slots: Annotated[
        int, typer.Option(min=1, help="Number of sequences generated at once; others wait.")
    ] = 8,
    queue: Annotated[
        int,
        typer.Option(
            min=0, help="Number of sequences that may wait; beyond that, requests are refused."
        ),
    ] = 128,
    timeout: Annotated[
        float, typer.Option(min=1, help="Total seconds a request may take.")
    ] = 300.0,
    access_log: Annotated[
        bool, typer.Option(help="Log each request to standard error, without its texts.")
    ] = True,
) -> None:
    """Serve a trained model over HTTP: OpenAI's API and a page to play with."""
    refuse_several_processes("serve")
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UserError(
            f"serve needs {' and '.join(missing)}, not installed here; "
            "run pip install 'fourfold[serve]'"
        )
    from fourfold.config import load_config
    from fourfold.serve import Limits, read_token
    from fourfold.serve import serve as serve_model

    healthy = serve_model(
        load_config(config, override or []),
        config.stem,
        host=host,
        port=port,
        token=read_token(token_file),
        slots=slots,
        limits=Limits(waiting=queue, request_seconds=timeout),
        logs_requests=access_log,
        on_notice=lambda text: print(text, file=sys.stderr, flush=True),
    )
    raise typer.Exit(0 if healthy else 1)
