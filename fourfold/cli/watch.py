"""`fourfold watch` and `fourfold report`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fourfold.cli.options import (
    Host,
    Port,
    TokenFile,
    check_server_packages,
    refuse_all_but,
    refuse_several_processes,
)
from fourfold.errors import UserError

Runs = Annotated[
    list[Path],
    typer.Argument(metavar="RUN...", help="Output directories of runs, one or several to compare."),
]
Price = Annotated[
    float | None,
    typer.Option(min=0, help="Price of one process's device for an hour, in any currency."),
]


def watch(
    context: typer.Context,
    runs: Runs,
    text: Annotated[
        bool, typer.Option("--text", help="A live table in the terminal in place of a page.")
    ] = False,
    once: Annotated[
        bool, typer.Option("--once", help="With --text: show it once and do not wait.")
    ] = False,
    price: Price = None,
    host: Host = "127.0.0.1",
    port: Port = 8050,
    token_file: TokenFile = None,
) -> None:
    """Follow runs on a page in the browser, or as a table in the terminal."""
    refuse_several_processes("watch")
    from fourfold.watch import open_runs, show_table

    if text:
        refuse_all_but(
            context, {"runs", "text", "once", "price"}, "with --text, which serves no page"
        )
        show_table(open_runs(runs), sys.stdout, price=price, once=once)
        return
    if once:
        raise UserError("--once goes with --text; for a page of the moment use fourfold report")
    check_server_packages("watch", ", or use --text or fourfold report")
    from fourfold.serve import read_token
    from fourfold.watch.server import serve_page

    serve_page(
        open_runs(runs),
        host=host,
        port=port,
        token=read_token(token_file),
        price=price,
        on_notice=lambda line: print(line, file=sys.stderr, flush=True),
    )


def report(
    runs: Runs,
    output: Annotated[
        Path, typer.Option("--output", "-o", dir_okay=False, help="The file to write.")
    ] = Path("report.html"),
    price: Price = None,
) -> None:
    """Write the page of one or several runs as one file of HTML, to keep or to send."""
    refuse_several_processes("report")
    from fourfold.watch import open_runs, write_report

    size = write_report(open_runs(runs), output, price)
    print(f"{output}: {size / 1000:,.0f} kB")
