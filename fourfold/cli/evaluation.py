"""`fourfold evaluate`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from fourfold.cli.options import ConfigFile, Overrides


def evaluate(
    config: ConfigFile,
    override: Overrides = None,
    output: Annotated[
        Path | None, typer.Option(help="Write the results to this file too, as JSON.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
) -> None:
    """Measure a trained model by the `Eval` section of its file: perplexity, cloze or loss."""
    from fourfold.config import load_config
    from fourfold.evaluate import evaluate

    resolved = load_config(config, override or [])
    result = evaluate(resolved, on_notice=lambda text: print(text, file=sys.stderr))
    content = json.dumps(result.to_dict(), indent=2)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(content + "\n", encoding="utf-8")
    print(content if as_json else result.table())
