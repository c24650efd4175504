"""Runs to look at: a page for one or several, live or as a file to send, and a terminal's table.

    goodput.py     where the time went; the seconds add up to the wall clock
    reading.py     run directories -> one document of plain numbers and texts
    run_files.py   what else of a directory is shown: samples, spikes' documents
    page.html      draws a document: charts, times, spikes; one file that loads nothing
    server.py      the page at an address, following the runs; needs `fourfold[serve]`
    table.py       the same for a terminal

Only files are read, and nothing is written into a run's directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fourfold.atomic_files import replace_text
from fourfold.errors import UserError
from fourfold.pages import load_page, with_data
from fourfold.watch.reading import PAGE, RunReader, document_of, open_runs
from fourfold.watch.table import show_table

__all__ = ["RunReader", "document_of", "open_runs", "show_table", "write_report"]


def write_report(readers: Sequence[RunReader], path: Path, price: float | None = None) -> int:
    """Write the page with the runs in it, as they are now; returns its size in bytes."""
    for reader in readers:
        reader.read()
        if not reader.entries:
            raise UserError(
                f"{reader.directory}: nothing is recorded there (no metrics.jsonl, or an empty "
                "one); give the output directory of a run (Engine.save_load.output_dir)"
            )
    text = with_data(load_page(*PAGE), document_of(readers, price))
    replace_text(path, text)
    return len(text.encode())
