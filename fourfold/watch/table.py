"""The runs in a terminal: a table that is drawn again in place, or plain lines elsewhere.

On a terminal all runs are rows of one table, with a curve of the loss and what came last: a
warning, a spike, the reason of an end. Elsewhere (a file, a pipe) a line is printed for each run
whenever it has something new. Texts of a run are escaped: no control character of theirs reaches
the terminal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TextIO

from fourfold.metrics.lines import escape
from fourfold.terminal import duration, in_bytes, is_terminal, table_lines
from fourfold.watch.reading import RunReader, document_of
from fourfold.watch.run_files import Json

POLL_SECONDS = 1.0
BLOCKS = "▁▂▃▄▅▆▇█"
CURVE_COLUMNS = 16
ENDED = ("finished", "stopped", "crashed")
HEADINGS = (
    *("run", "state", "step", "loss", "eval", "tokens/s"),
    *("mfu", "memory", "wall clock", "goodput", "loss by step"),
)
LEFT = ("run", "state", "loss by step")
# What a narrow terminal does without, first to last.
SPARED = ("memory", "mfu", "wall clock", "loss by step", "goodput", "eval")


def show_table(
    readers: Sequence[RunReader],
    stream: TextIO,
    *,
    price: float | None = None,
    once: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Until all runs have ended, or once."""
    if is_terminal(stream):
        _redraw(readers, stream, price, once, sleep)
    else:
        _print_lines(readers, stream, price, once, sleep)


def _redraw(
    readers: Sequence[RunReader],
    stream: TextIO,
    price: float | None,
    once: bool,
    sleep: Callable[[float], None],
) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(file=stream, force_terminal=True)
    with Live(console=console, auto_refresh=False) as screen:
        while True:
            document = _read(readers, price)
            # Words, not rich's markup, which a run's texts could have.
            lines = screen_lines(document, console.width)
            text = Text("\n".join(lines), no_wrap=True, overflow="ellipsis")
            screen.update(text, refresh=True)
            if once or _all_ended(document):
                return
            sleep(POLL_SECONDS)


def _print_lines(
    readers: Sequence[RunReader],
    stream: TextIO,
    price: float | None,
    once: bool,
    sleep: Callable[[float], None],
) -> None:
    said: dict[int, str] = {}
    while True:
        document = _read(readers, price)
        for place, (run, state) in enumerate(zip(document["runs"], document["states"])):
            line = plain_line(run, state)
            if said.get(place) != line:
                said[place] = line
                print(line, file=stream, flush=True)
        if once or _all_ended(document):
            return
        sleep(POLL_SECONDS)


def _read(readers: Sequence[RunReader], price: float | None) -> Json:
    for reader in readers:
        reader.read()
    return document_of(readers, price)


def _all_ended(document: Json) -> bool:
    return all(state["state"] in ENDED for state in document["states"])


# -- lines --------------------------------------------------------------------------------------


def screen_lines(document: Json, width: int) -> list[str]:
    """The whole screen: the table, then a few lines for what needs words."""
    pairs = [*zip(document["runs"], document["states"])]
    rows = [_cells(run, state) | {HEADINGS[-1]: sparkline(run)} for run, state in pairs]
    columns = [name for name in HEADINGS if any(row[name] != "-" for row in rows)]
    lines = _table(columns, rows)
    for name in SPARED:
        if max(map(len, lines)) > width and name in columns:
            columns.remove(name)
            lines = _table(columns, rows)
    for run, state in pairs:
        told = [state["why"]] if state["why"] else []
        told += [f"spike at step {spike['step']:,}" for spike in run["spikes"][-2:]]
        told += [warning["text"] for warning in run["warnings"][-2:]]
        told += [] if run["cost"] is None else [f"cost {run['cost']['total']:,.2f}"]
        lines += [f"{escape(run['name'])}: {escape(text)}" for text in told]
    return lines


def _table(columns: Sequence[str], rows: Sequence[dict[str, str]]) -> list[str]:
    align = "".join("<" if name in LEFT else ">" for name in columns)
    return table_lines([columns, *([row[name] for name in columns] for row in rows)], align)


def plain_line(run: Json, state: Json) -> str:
    """One run, one line: names and values."""
    cells = _cells(run, state)
    words = [cells.pop("run"), cells.pop("state")]
    words += [f"{name} {value}" for name, value in cells.items() if value != "-"]
    if run["cost"] is not None:
        words.append(f"cost {run['cost']['total']:,.2f}")
    why = f" ({escape(state['why'])})" if state["why"] else ""
    return ", ".join(words) + why


def _cells(run: Json, state: Json) -> dict[str, str]:
    step = "-" if run["step"] is None else f"{run['step']:,}"
    of = "" if run["max_steps"] is None else f"/{run['max_steps']:,}"

    def last(name: str, form: Callable[[Any], str]) -> str:
        value = run["curves"].get(name, {}).get("last")
        return "-" if value is None else form(value)

    values = (
        escape(run["name"]),
        state["state"],
        step + of,
        last("loss", "{:.4f}".format),
        last("eval", "{:.4f}".format),
        last("tokens_per_second", "{:,.0f}".format),
        last("mfu", "{:.1%}".format),
        last("memory", lambda size: in_bytes(int(size))),
        duration(run["wall"]),
        "-" if run["goodput"] is None else f"{run['goodput']:.1%}",
    )
    return dict(zip(HEADINGS, values))


def sparkline(run: Json) -> str:
    """The loss as a row of blocks, the mean of each stretch of steps."""
    losses = run["curves"].get("loss", {}).get("y", [])
    if not losses:
        return ""
    columns = min(CURVE_COLUMNS, len(losses))
    cuts = [len(losses) * place // columns for place in range(columns + 1)]
    means = [sum(losses[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, width = min(means), (max(means) - min(means)) or 1.0
    return "".join(BLOCKS[round((mean - low) / width * (len(BLOCKS) - 1))] for mean in means)
