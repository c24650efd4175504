"""Text for a terminal: aligned tables, counts, sizes in bytes, durations, a progress bar."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import BarColumn, Progress


def is_terminal(stream: TextIO) -> bool:
    """Whether it understands colours and a cursor that moves."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def table_lines(rows: Sequence[Sequence[str]], align: str = "<") -> list[str]:
    """Rows of cells as lines with aligned columns, two spaces apart.

    `align` has a letter for each column, `<` or `>`; the last one goes for all columns to come.
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    sides = align + align[-1] * (len(widths) - len(align))
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths)).rstrip()
        for row in rows
    ]


def in_bytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"


def count_of(number: int, noun: str) -> str:
    """ "1 device", "16 devices"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def duration(seconds: float, *, short: bool = False) -> str:
    """Hours, minutes, seconds, and days when there are any: 1:05:09, 2d 03:00:00.

    The short form has hours only when there are any: 5:09.
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02d}:{minute:02d}:{second:02d}"
    if short and not hours:
        return f"{minute}:{second:02d}"
    return f"{hour}:{minute:02d}:{second:02d}"


class ProgressBar:
    """A bar with a text beside it, on a line below whatever else is printed to a terminal.

    It is there from the first `show` to `close`, drawn by rich. `redraws`: ten times a second, for
    `show` to cost nothing; otherwise by `show` itself. `stays`: its last state is left behind.
    In a narrow terminal the bar is shorter, and the text the first of those given that fits.
    """

    WIDTH, NARROWEST = 30, 6

    def __init__(self, stream: TextIO, *, redraws: bool = True, stays: bool = False) -> None:
        self._stream = stream
        self._redraws = redraws
        self._stays = stays
        self._screen: Progress | None = None
        self._column: BarColumn | None = None

    def show(self, share: float, *texts: str) -> None:
        """How much is done, from 0 to 1, and what to say of it, in words from many to few."""
        screen = self._screen or self._open()
        task = screen.task_ids[0]
        assert self._column is not None
        width = screen.console.width - 2  # a blank on each side of the text's column
        fitting = (one for one in texts if width - len(one) >= self.NARROWEST)
        text = next(fitting, texts[-1])
        self._column.bar_width = max(self.NARROWEST, min(self.WIDTH, width - len(text)))
        screen.update(task, completed=share, description=text, refresh=not self._redraws)

    def print_above(self, line: str) -> None:
        if self._screen is not None:
            self._screen.console.out(line, highlight=False)
        else:
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        if self._screen is not None:
            self._screen.stop()
            self._screen = None

    def _open(self) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._column = BarColumn(bar_width=self.WIDTH)
        self._screen = Progress(
            self._column,
            TextColumn(" {task.description}", markup=False),
            console=Console(file=self._stream, force_terminal=True),
            auto_refresh=self._redraws,
            transient=not self._stays,
        )
        self._screen.add_task("", total=1.0)
        self._screen.start()
        return self._screen
