"""`fourfold data`: prepare, look at, check and mix token files."""

from __future__ import annotations

import typer

from fourfold.cli import data_files, data_mixture, data_prepare

app = typer.Typer(help="Prepare, inspect, verify and mix token files.", no_args_is_help=True)
app.command("prepare")(data_prepare.prepare)
app.command("train-tokenizer")(data_prepare.train_tokenizer)
app.command("inspect")(data_files.inspect)
app.command("verify")(data_files.verify)
app.command("merge")(data_files.merge)
app.command("split")(data_files.split)
app.command("convert")(data_files.convert)
app.command("index")(data_mixture.index)
app.command("blend")(data_mixture.blend)
