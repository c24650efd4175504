"""`fourfold generate`."""

from __future__ import annotations

from typing import Annotated

import typer

from fourfold.cli.options import ConfigFile, Overrides


def generate(
    config: ConfigFile,
    override: Overrides = None,
    prompt: Annotated[
        str, typer.Option(help="The text to continue.")
    ] = "Hi, GPT2. Tell me who Jack Ma is.",
) -> None:
    """Continue a text with a trained model, by the `Generation` section of its YAML file."""
    from fourfold.config import load_config
    from fourfold.generate.module import GenerationModule

    module = GenerationModule(load_config(config, override or []))
    for text in module.generate(prompt):
        print(f"Prompt: {prompt}")
        print(f"Generation: {text}")
