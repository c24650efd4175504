"""`fourfold plan`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fourfold.atomic_files import replace_text
from fourfold.cli.options import Overrides, check_new, check_writable, refuse_all_but
from fourfold.errors import UserError
from fourfold.terminal import table_lines

if TYPE_CHECKING:
    from fourfold.plan.planner import Candidate, Plan
    from fourfold.plan.report import Economics

FIX_NAMES = {
    "mp": "mp", "pp": "pp", "dp": "dp", "sharding": "sharding", "stage": "stage",
    "mbs": "micro_batch", "micro_batch": "micro_batch", "recompute": "recompute",
    "sp": "sequence_parallel", "schedule": "schedule", "v": "virtual",
}  # fmt: skip


# By their names in `plan`: what each of its modes uses.
PLANNED = {"config", "override", "cluster", "fix", "top", "tokens", "price", "explain", "plot"}
PLANNED |= {"emit", "as_json"}
MODES = {
    "self_test": {"self_test", "rows"},
    "dry_run": {"dry_run", "config", "override", "rank", "world"},
    "calibrate": {"calibrate", "config", "override", "cluster", "out", "force"},
}
CLUSTER_FILE = Path("cluster.yaml")
Force = Annotated[bool, typer.Option("--force", help="Overwrite the cluster file if there is one.")]


def plan(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option("-c", "--config", help="The YAML file that describes the run.")
    ] = None,
    override: Overrides = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="16x8xA100-80G (nodes x devices x device), or a cluster.yaml."),
    ] = None,
    fix: Annotated[
        str | None,
        typer.Option(metavar="mp=8,pp=8", help="Consider only layouts with these degrees."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of rows in the table.")] = 10,
    tokens: Annotated[
        str | None, typer.Option(metavar="300B", help="Tokens to train on, for days and cost.")
    ] = None,
    price: Annotated[
        float | None, typer.Option(min=0, help="Price of one device for one hour.")
    ] = None,
    explain: Annotated[
        str | None,
        typer.Option(
            metavar="LAYOUT",
            help="Show the arithmetic of one layout: its row, `file`, or mp=8,pp=16 and the like.",
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw time and memory as bars: a .png or .html file.")
    ] = None,
    emit: Annotated[
        Path | None, typer.Option(help="Write the configuration of the best layout.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    calibrate: Annotated[
        Path | None,
        typer.Option(metavar="RUN_DIR", help="Fit the cluster's numbers to a run's own metrics."),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="With --calibrate: the cluster file to write.")
    ] = CLUSTER_FILE,
    force: Annotated[
        bool, typer.Option("--force", help="With --calibrate: overwrite the cluster file.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Build one rank of the file's layout without memory, and count what it holds.",
        ),
    ] = False,
    rank: Annotated[int, typer.Option(min=0, help="With --dry-run: the rank to build.")] = 0,
    world: Annotated[
        int | None,
        typer.Option(
            min=1, help="With --dry-run: number of ranks.", show_default="what the file needs"
        ),
    ] = None,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Predict published runs and show the errors.")
    ] = False,
    rows: Annotated[
        Path | None, typer.Option(help="With --self-test: another table of published runs.")
    ] = None,
) -> None:
    """Rank the layouts of a model on a cluster: does it fit, how fast is it, what does it cost."""
    mode = _mode_of(context)
    if mode == "self_test":
        _self_test(rows)
        return
    if config is None or (cluster is None and mode != "dry_run"):
        raise UserError(
            "plan needs a configuration and a cluster, for example "
            "-c configs/gpt/quickstart.yaml --cluster 1x8xA100-80G; --dry-run needs the first "
            "alone, --self-test neither"
        )
    if mode == "dry_run":
        _dry_run(config, override or [], rank, world)
        return
    assert cluster is not None
    if mode == "calibrate":
        assert calibrate is not None
        check_new(out, "--out", force)
        _calibrate(config, override or [], cluster, calibrate, out)
        return
    for option, file in (("--emit", emit), ("--plot", plot)):
        if file is not None:
            check_writable(file, option)
    made, economics = _make_plan(config, override or [], cluster, fix, tokens, price)
    if made.best is None:
        _say_impossible(made)
    if emit is not None:
        _emit(config, override or [], made, emit)
    if plot is not None:
        from fourfold.plan.drawing import draw

        draw(made, top, plot)
        print(f"drawn: {plot}", file=sys.stderr)
    if explain is not None:
        from fourfold.plan.report import explain as derivation

        for line in derivation(made, _pick(made, explain), economics):
            print(line)
    elif as_json:
        from fourfold.plan.report import as_json as to_json

        print(json.dumps(to_json(made, top, economics), indent=2))
    else:
        _print_plan(made, top, economics)


def _mode_of(context: typer.Context) -> str | None:
    """The requested mode; an option that it would ignore is refused."""
    given = context.params
    mode = next((name for name in MODES if given[name]), None)
    if mode is not None:
        option = f"--{mode.replace('_', '-')}"
        refuse_all_but(context, MODES[mode], f"with {option}")
        return mode
    refuse_all_but(context, PLANNED, "without --dry-run, --calibrate or --self-test")
    if given["tokens"] is None:
        refuse_all_but(context, PLANNED - {"price"}, "without --tokens")
    if given["explain"] is not None:
        rows = {"top"} if given["plot"] is None else set()
        refuse_all_but(context, PLANNED - {"as_json"} - rows, "with --explain")
    return None


def _make_plan(
    config: Path,
    override: list[str],
    cluster: str,
    fix: str | None,
    tokens: str | None,
    price: float | None,
) -> tuple[Plan, Economics]:
    from fourfold.config import read_config
    from fourfold.config.auto_constraints import as_laid_out
    from fourfold.plan import parse_cluster
    from fourfold.plan import plan as make
    from fourfold.plan.report import Economics

    described = parse_cluster(cluster)
    fixed = _parse_fix(fix, "--fix") if fix is not None else {}
    resolved, problem = as_laid_out(read_config(config, override), described.world)
    made = make(resolved, described, fixed=fixed, own_problem=problem)
    if made.costs is None and fixed:
        raise UserError(
            f"--fix {fix}: no legal layout of {made.cluster.world} ranks has these; the degrees "
            "must divide the ranks, the model and the batch"
        )
    return made, Economics(made, None if tokens is None else _parse_tokens(tokens), price)


def _self_test(rows: Path | None) -> None:
    from fourfold.plan.selftest import self_test_lines

    for line in self_test_lines(rows):
        print(line)


def _dry_run(config: Path, override: list[str], rank: int, world: int | None) -> None:
    from fourfold.config import load_config
    from fourfold.plan.dry_run import dry_run_lines

    resolved = load_config(config, override, world)
    for notice in resolved.notices:
        print(notice, file=sys.stderr)
    for line in dry_run_lines(resolved, rank):
        print(line)


def _parse_fix(text: str, option: str) -> dict[str, object]:
    """`mp=8,pp=8` or `mp8 pp8` as fields of a layout."""
    import re

    fixed: dict[str, object] = {}
    for part in re.split(r"[,\s]+", text.strip()):
        name, equals, value = part.partition("=")
        short = re.fullmatch(r"([a-z]+)(\d+)", part, re.ASCII)
        if not equals and short is not None:
            name, value = short.groups()
        if name not in FIX_NAMES or not value:
            raise UserError(
                f"{option} {text!r}: {part!r} is not NAME=VALUE with a name of "
                f"{', '.join(FIX_NAMES)}"
            )
        fixed[FIX_NAMES[name]] = _fix_value(FIX_NAMES[name], value, f"{option} {text!r}")
    return fixed


def _fix_value(field: str, value: str, said: str) -> object:
    from typing import get_args

    from fourfold.config.schema import PipelineSchedule
    from fourfold.cost.workload import RECOMPUTE_MODES

    if field == "sequence_parallel":
        choices: Any = {"true": True, "1": True, "false": False, "0": False}
        if value.lower() in choices:
            return choices[value.lower()]
        raise UserError(f"{said}: sp is true or false, not {value!r}")
    if field in ("recompute", "schedule"):
        known = RECOMPUTE_MODES if field == "recompute" else get_args(PipelineSchedule)
        if value in known:
            return value
        raise UserError(f"{said}: {field} is one of {', '.join(known)}, not {value!r}")
    if value.isascii() and value.isdecimal() and len(value) <= 7 and int(value) >= 1:
        return int(value)
    raise UserError(f"{said}: {field}={value!r} is not a whole number of at least 1")


def _parse_tokens(text: str) -> float:
    units = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    number, unit = (text[:-1], units[text[-1].upper()]) if text[-1:].upper() in units else (text, 1)
    try:
        tokens = float(number) * unit
    except ValueError:
        tokens = 0.0
    if not 0 < tokens < 1e18:
        raise UserError(f"--tokens {text!r} is not a number of tokens such as 300B or 1.5T")
    return tokens


def _pick(plan: Plan, text: str) -> Candidate:
    """The candidate a user names: a row, `file`, or degrees."""
    from fourfold.plan.planner import candidate_of
    from fourfold.plan.search import concerns, one_spread, search

    if text in ("file", "config"):
        if plan.own is None:
            raise UserError(f"--explain {text}: {plan.own_problem}")
        return plan.own
    if text.isascii() and text.isdecimal():
        if not 1 <= int(text[:6]) <= len(plan.candidates):
            raise UserError(f"--explain {text}: the table has rows 1 to {len(plan.candidates)}")
        return plan.candidates[int(text) - 1]
    fixed = _parse_fix(text, "--explain")
    costs = search(plan.workload, plan.cluster, plan.coefficients, fixed)
    if costs is None:
        raise UserError(
            f"--explain {text}: no legal layout of {plan.cluster.world} ranks has these"
        )
    cluster = plan.cluster
    above = cluster.memory_band(costs.spread.pp).above
    concern = concerns(costs.bytes_, cluster.usable_bytes, above)
    spread = one_spread(costs.spread, int((concern * 1e12 + costs.seconds).argmin()))
    return candidate_of(plan.workload, spread, plan.cluster, plan.coefficients)


def _say_impossible(plan: Plan) -> None:
    from fourfold.plan.suggestions import impossible

    raise UserError("\n".join(impossible(plan)))


def _emit(config: Path, override: list[str], plan: Plan, path: Path) -> None:
    from fourfold.config import read_config

    best = plan.best
    assert best is not None
    # What was planned is the whole layout, its layers shared out evenly.
    chosen = {**best.settings(), "Distributed.auto": False, "Distributed.pp_layers": None}
    resolved = read_config(config, override).with_values(chosen).load(plan.cluster.world)
    head = f"# {best.layout}, {best.details}: planned for {plan.cluster}.\n\n"
    replace_text(path, head + resolved.to_yaml())
    print(f"written: {path}", file=sys.stderr)


def _calibrate(config: Path, override: list[str], cluster: str, run: Path, out: Path) -> None:
    from fourfold.plan import parse_cluster
    from fourfold.plan.calibrate import calibrate, read_run
    from fourfold.plan.cluster import save_cluster

    result = calibrate(config, override, parse_cluster(cluster), read_run(run))
    for line in result.lines:
        print(line)
    save_cluster(result.cluster, out, f"Calibrated with {run}.")
    print(f"written: {out}; use it with `fourfold plan --cluster {out}`")


def _print_plan(plan: Plan, top: int, economics: Economics) -> None:
    from fourfold.plan.report import advice_lines, heading_lines, headings, table

    for line in heading_lines(plan):
        print(line)
    _print_table(headings(economics), table(plan, top, economics))
    for line in advice_lines(plan, top, economics):
        print(line)


def _print_table(heads: list[str], rows: list[list[str]]) -> None:
    """A rich table on a terminal; aligned columns, which grep understands, elsewhere."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        colours = {"fits": "green", "tight": "yellow", "no": "red"}
        shown = Table(*heads)
        for cells in rows:
            shown.add_row(*cells, style="bold" if "file" in cells[0] else colours.get(cells[4]))
        Console().print(shown)
        return
    for line in table_lines([heads, *rows]):
        print(line)
