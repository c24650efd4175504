"""`fourfold data <verb>` as a user runs it, in this process, and what it left."""

from __future__ import annotations

from pathlib import Path

import typer
from typer.testing import CliRunner, Result

from fourfold.cli import data
from fourfold.data import TokenDataset, open_datasets
from fourfold.errors import UserError


def run(verb: str, *words: str | Path) -> Result:
    app = typer.Typer()
    app.command()(getattr(data, verb))
    return CliRunner().invoke(app, [str(word) for word in words])


def error_of(verb: str, *words: str | Path) -> str:
    """The message of a run that must fail with one for the user."""
    result = run(verb, *words)
    assert isinstance(result.exception, UserError), result.output
    return str(result.exception)


def read(path: str | Path) -> TokenDataset:
    (dataset,) = open_datasets(path)
    return dataset


def contents(path: str | Path) -> list[list[int]]:
    dataset = read(path)
    return [dataset.tokens(document).tolist() for document in range(len(dataset))]
