"""`fourfold target`: whether a run met a target, by its log."""

from __future__ import annotations

import math
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fourfold.errors import DataError, UserError

if TYPE_CHECKING:
    from fourfold.tools.targets import Finding

MET, MISSED, UNKNOWN = 0, 1, 2


class TargetPreset(StrEnum):
    gpt3_175b = "gpt3-175b"


def target(
    run: Annotated[
        Path,
        typer.Argument(help="A run's output_dir, or a log of FleetX, Megatron-DeepSpeed or -LM."),
    ],
    step: Annotated[
        int | None,
        typer.Option(min=1, help="The step to judge.", show_default="the last one logged"),
    ] = None,
    loss: Annotated[float | None, typer.Option(help="Target: a training loss below this.")] = None,
    ppl: Annotated[
        float | None,
        typer.Option(help="Target: a perplexity below this, the evaluated one if there is any."),
    ] = None,
    tgs: Annotated[
        float | None,
        typer.Option(help="Target: at least this median of tokens per device per second."),
    ] = None,
    preset: Annotated[TargetPreset | None, typer.Option(help="A published target.")] = None,
) -> None:
    """Check whether a run met a target: exit code 0 if so, 1 if not, 2 if the log cannot tell."""
    from fourfold.tools.targets import NOTES, PRESETS, RunTarget, check_target, log_file, read_log

    given: dict[str, Any] = {"loss": loss, "ppl": ppl, "tgs": tgs}
    for name, value in given.items():
        if value is not None and not math.isfinite(value):
            raise UserError(f"--{name} {value} is not a target; give a finite number")
    wanted = RunTarget() if preset is None else PRESETS[preset.value]
    given["step"] = step
    wanted = replace(wanted, **{name: it for name, it in given.items() if it is not None})
    if wanted.loss is None and wanted.ppl is None and wanted.tgs is None:
        raise UserError("no target is given; add --loss, --ppl or --tgs, or --preset gpt3-175b")
    file = log_file(run)
    findings = check_target(read_log(file), wanted)
    if not findings:
        raise DataError(
            f"{file} has no training line of FleetX, Megatron-DeepSpeed or Megatron-LM, so nothing "
            "can be said about a target; give the log of a run"
        )
    for finding in findings:
        print(f"{_word(finding):<12} {finding.text}")
    if preset is not None:
        print(f"{preset.value} is {NOTES[preset.value]}")
    raise typer.Exit(_exit_code(findings))


def _word(finding: Finding) -> str:
    return {True: "met", False: "not met", None: "cannot tell"}[finding.met]


def _exit_code(findings: list[Finding]) -> int:
    if any(finding.met is False for finding in findings):
        return MISSED
    return UNKNOWN if any(finding.met is None for finding in findings) else MET
