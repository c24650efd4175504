"""`fourfold serve`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from fourfold.cli.options import (
    ConfigFile,
    Host,
    Overrides,
    Port,
    TokenFile,
    check_server_packages,
    refuse_several_processes,
)


def serve(
    config: ConfigFile,
    override: Overrides = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    token_file: TokenFile = None,
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
    check_server_packages("serve")
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
