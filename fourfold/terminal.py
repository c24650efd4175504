"""Text for a terminal: aligned tables and sizes in bytes."""

from __future__ import annotations

from collections.abc import Sequence


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
