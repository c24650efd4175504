"""`fourfold evaluate`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from fourfold.cli.options import ConfigFile, Overrides, check_writable, refuse_several_processes


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

    refuse_several_processes("evaluate")
    resolved = load_config(config, override or [])
    if output is not None:
        check_writable(output, "--output", makes_parents=True)
    result = evaluate(resolved, on_notice=lambda text: print(text, file=sys.stderr))
    content = json.dumps(result.to_dict(), indent=2)
    # First what cannot fail: a disk may fill while the model is measured.
    print(content if as_json else result.table(), flush=True)
    if output is not None:
        output.write_text(content + "\n", encoding="utf-8")
