"""All ranks of a layout against each other: sound ones end, and every planted fault is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers.layout_table import CASES, Case
from helpers.traces import Workshop
from typer.testing import CliRunner

from fourfold.cli import command_line
from fourfold.config import Config, load_config
from fourfold.errors import UserError
from fourfold.plan.operations import RECEIVE, SEND, WAIT, Operation, trace_of
from fourfold.plan.rehearsal import Misfit, Rehearsal, rehearsal_lines, rehearse

QUICK = {"dp2", "pp2 zbv", "sh2 stage3 mp2 sp"}
Trace = list[Operation]


def configured(folder: Path, case: Case) -> Config:
    shop = Workshop(folder)
    overrides = [*shop.settings("run"), *case.overrides()]
    return load_config(shop.yaml, overrides, world_size=case.world)


def layouts() -> list[Any]:
    """One of each layout and network; what else a case sets sends nothing."""
    first: dict[tuple[str, str], Case] = {}
    for case in CASES:
        first.setdefault((case.layout, case.network), case)
    return [
        pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.slow)
        for case in first.values()
    ]


@pytest.mark.parametrize("case", layouts())
def test_every_layout_ends(case: Case, tmp_path: Path) -> None:
    played = rehearse(configured(tmp_path, case), all_ranks=True, workers=1)
    assert not played.findings
    assert played.collectives >= 1
    assert (played.messages > 0) == ("pp" in case.degrees)


# -- planted faults -------------------------------------------------------------------------------

Fault = Callable[[Trace], Trace]


def number(trace: Trace, kind: str, which: int = 0, group: str | None = None) -> int:
    found = [at for at, one in enumerate(trace) if one.kind == kind and group in (None, one.group)]
    return found[which]


def without(trace: Trace, *numbers: int) -> Trace:
    """Waits for what is left out go too."""
    gone = {*numbers} | {at for at, one in enumerate(trace) if one.begun in numbers}
    kept = [at for at in range(len(trace)) if at not in gone]
    place = {at: new for new, at in enumerate(kept)}
    return [replace(trace[at], begun=place.get(trace[at].begun, -1)) for at in kept]


def left_out(kind: str, which: int = 0, group: str | None = None) -> Fault:
    return lambda trace: without(trace, number(trace, kind, which, group))


def changed(kind: str, which: int = 0, group: str | None = None, /, **fields: Any) -> Fault:
    def fault(trace: Trace) -> Trace:
        at = number(trace, kind, which, group)
        return [*trace[:at], replace(trace[at], **fields), *trace[at + 1 :]]

    return fault


def twice(kind: str, which: int = 0, group: str | None = None) -> Fault:
    def fault(trace: Trace) -> Trace:
        return [*trace, trace[number(trace, kind, which, group)]]

    return fault


def first_waited_for(kind: str) -> Fault:
    """A message is waited for before anything else is begun."""

    def fault(trace: Trace) -> Trace:
        at = number(trace, kind, -1)
        begun = trace[at]
        rest = without(trace, at)
        wait = replace(begun, kind=WAIT, begun=0)
        moved = [replace(one, begun=one.begun + 2) if one.kind == WAIT else one for one in rest]
        return [begun, wait, *moved]

    return fault


def exchanged(first: tuple[str, str], second: tuple[str, str]) -> Fault:
    """Two collectives in the wrong order."""

    def fault(trace: Trace) -> Trace:
        one = number(trace, first[0], -1, first[1])
        other = number(trace, second[0], -1, second[1])
        swapped = [*trace]
        swapped[one], swapped[other] = swapped[other], swapped[one]
        return swapped

    return fault


ODD = "float32 [1, 2, 3]"
# Of one rank of dp2 x pp2 x mp2, which is dp 0, pp 0, mp 1 and rank 1.
FAULTS: dict[str, Fault] = {
    "a send left out": left_out(SEND, 2),
    "the last send left out": left_out(SEND, -1),
    "a receive left out": left_out(RECEIVE, 1),
    "the last receive left out": left_out(RECEIVE, -1),
    "a send twice": twice(SEND, -1),
    "a receive twice": twice(RECEIVE, -1),
    "a send of another shape": changed(SEND, 2, tensor=ODD),
    "a receive of another shape": changed(RECEIVE, -1, tensor=ODD),
    "a send in another precision": changed(SEND, -1, tensor="bfloat16 [1, 16, 32]"),
    "a receive first of all": first_waited_for(RECEIVE),
    "a send first of all": first_waited_for(SEND),
    "a receive instead of a send": changed(SEND, 2, kind=RECEIVE),
    "a model-parallel all-reduce left out": left_out("all-reduce", 0, "mp"),
    "the last model-parallel all-reduce left out": left_out("all-reduce", -1, "mp"),
    "one too many": twice("all-reduce", 0, "mp"),
    "another operation": changed("all-reduce", 3, "mp", kind="all-gather"),
    "another size": changed("all-reduce", 3, "mp", tensor=ODD),
    "a gradient not reduced": left_out("all-reduce", 0, "dp"),
    "the norm not agreed on": left_out("all-reduce", 0, "all ranks"),
    "a group mistaken": changed("all-reduce", 0, "dp", group="mp"),
    "the wrong order of groups": exchanged(("all-reduce", "dp"), ("all-reduce", "all ranks")),
    "the tied gradient not reduced": left_out("all-reduce", -1, "pp"),
    "an update left out": lambda trace: [one for one in trace if one.doing != "update"],
    "an evaluation left out": lambda trace: [one for one in trace if one.doing != "evaluation"],
    "the last micro-batch left out": lambda trace: without(
        trace, *(at for at, one in enumerate(trace) if one.doing.endswith("micro-batch 1"))
    ),
}
PLANTED_IN = 1


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Callable[..., Trace]]:
    case = next(case for case in CASES if case.name == "dp2 pp2 mp2")
    config = configured(tmp_path_factory.mktemp("rehearsal"), case)
    return config, cache(lambda rank, number: trace_of(config, rank, number))


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, sound: tuple[Config, Callable[..., Trace]]) -> None:
    config, trace = sound

    def make(_: Config, rank: int, micro_batches: int) -> Trace:
        own = trace(rank, micro_batches)
        return FAULTS[name](own) if rank == PLANTED_IN else own

    played: Rehearsal = rehearse(config, make=make)
    assert played.findings
    assert PLANTED_IN in played.findings[0].ranks and len(played.findings[0].ranks) >= 2
    for rank in played.findings[0].ranks[:2]:
        assert f"rank {rank}" in played.findings[0].text


def test_the_command_says_it_and_ends_with_its_code(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "pp2")
    shop = Workshop(tmp_path)
    words = ["rehearse", "-c", str(shop.yaml)]
    for override in (*shop.settings("run"), *case.overrides()):
        words += ["-o", override]
    ended = CliRunner().invoke(command_line(), [*words, "--json"])
    assert ended.exit_code == 0, ended.output
    told = json.loads(ended.stdout)
    assert told["findings"] == [] and told["messages"] > 0 and told["traced"] == [0, 1]
    refused = CliRunner().invoke(command_line(), [*words, "--micro-batches", "1"])
    assert isinstance(refused.exception, UserError)
    assert "a pipeline of 2 stages needs at least as many" in str(refused.exception)


def test_lines_of_a_sound_layout_and_of_one_that_is_not(
    sound: tuple[Config, Callable[..., Trace]],
) -> None:
    config, trace = sound
    played = rehearse(config, make=lambda _, rank, number: trace(rank, number))
    first, second = rehearsal_lines(played, config)
    assert "8 ranks, of which 8 run programs of their own" in first
    assert "every send its receive, and all ranks end" in second
    played.findings.append(Misfit("rank 1 waits for rank 2", (1, 2)))
    assert [*rehearsal_lines(played, config)][1:] == ["rank 1 waits for rank 2"]
