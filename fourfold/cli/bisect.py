"""`fourfold bisect` and `fourfold diff`: where two layouts of a step, or two runs, differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fourfold.cli.options import Overrides, refuse_several_processes

DIFFERENT = 1
OfSide = Annotated[
    list[str] | None,
    typer.Option(metavar="A.B.C=VALUE", help="Override a key on this side; may be repeated."),
]
Python = Annotated[
    Path | None,
    typer.Option(
        help="Python of another environment, with its torch and Fourfold, for this side.",
        show_default="this one",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1, help="Threads of each process of this side.", show_default="as in training"
    ),
]


def bisect(
    config: Annotated[
        list[Path],
        typer.Option("-c", "--config", help="The YAML file of A, then that of B if it is another."),
    ],
    override: Overrides = None,
    a_override: OfSide = None,
    b_override: OfSide = None,
    step: Annotated[
        int | None,
        typer.Option(min=1, help="Which step.", show_default="the first from where it begins"),
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option("--from", metavar="CKPT", help="A checkpoint of a run to begin with."),
    ] = None,
    a_python: Python = None,
    b_python: Python = None,
    a_threads: Threads = None,
    b_threads: Threads = None,
    keep: Annotated[
        Path | None,
        typer.Option(help="Keep what was computed in this directory, tensor by tensor."),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="Compute one side only, and write it to this directory."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Compute a step in two layouts and name the first tensor that differs by more than rounding.

    Layouts, precisions, graph modes, numbers of threads or environments: A and B are whatever two
    files or overrides say, a float64 reference tells which of them is wrong. Exit code 0 if they
    are equal, 1 if they differ.
    """
    from fourfold.errors import UserError
    from fourfold.generate.loading import open_foreign
    from fourfold.question.bisect import verdict_lines
    from fourfold.question.sides import Bisection, Side

    refuse_several_processes("fourfold bisect")
    most = 2 if record is None else 1
    if len(config) > most:
        raise UserError(f"-c was given {len(config)} times; give it at most {count_word(most)}")
    shared = override or []
    sides = [
        Side(config[0], (*shared, *(a_override or [])), a_python, a_threads),
        Side(config[-1], (*shared, *(b_override or [])), b_python, b_threads),
    ]
    asked = Bisection(sides, step, start, open_foreign)
    if record is not None:
        facts = asked.record(sides[0], record)
        print(json.dumps(facts, indent=2))
        return
    told = asked.run(keep).to_dict()
    print(json.dumps(told, indent=2) if as_json else "\n".join(verdict_lines(told)))
    if not told["equal"]:
        raise typer.Exit(DIFFERENT)


def diff(
    run: Annotated[Path, typer.Argument(metavar="RUN1", help="The output directory of a run.")],
    other: Annotated[Path, typer.Argument(metavar="RUN2", help="That of another.")],
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Find the reason by computing the first steps again."),
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the losses of both to this PNG file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Show what differs between two runs and the step at which their numbers part.

    Exit code 1 if they part.
    """
    from functools import partial

    from fourfold.cli.options import check_writable
    from fourfold.generate.loading import open_foreign
    from fourfold.question.explain import Explanation
    from fourfold.question.history import RunHistory
    from fourfold.question.run_diff import compare_runs, curves, diff_lines, plot_both

    refuse_several_processes("fourfold diff")
    if plot is not None:
        check_writable(plot, "--plot")
    one, two = RunHistory(run), RunHistory(other)
    found = compare_runs(one, two)
    if plot is not None:
        plot_both(one, two, found, plot)
    if explain and found.parts_at is not None:
        found.explained = Explanation(
            one, two, found, lambda config: partial(open_foreign, config)
        ).run()
    told = found.to_dict()
    if as_json:
        print(json.dumps(told, indent=2))
    else:
        print("\n".join([*diff_lines(told), *curves(one, two)]))
    if found.parts_at is not None:
        raise typer.Exit(DIFFERENT)


def count_word(most: int) -> str:
    return "once with --record" if most == 1 else "twice"
