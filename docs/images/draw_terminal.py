"""Draw what a command printed as a picture of a terminal.

    fourfold quickstart | tee docs/images/quickstart_log.txt
    python docs/images/draw_terminal.py docs/images/quickstart_log.txt "make quickstart" \\
        docs/images/quickstart.svg

Of a long log the beginning and the end are kept; nothing else is changed.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 112
FIRST, LAST = 14, 50  # lines that are kept
# XML has no place for them, and a log that was cut may have some.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
STAMP = re.compile(r"^\[[^]]+\] \[ +\w+\] - ")


def main(log: Path, command: str, picture: Path) -> None:
    lines = CONTROLS.sub("", log.read_text()).splitlines()
    left_out = len(lines) - FIRST - LAST
    if left_out > 0:
        lines = [*lines[:FIRST], f"... {left_out} lines ...", *lines[-LAST:]]
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text(f"$ {command}", style="bold"))
    for line in lines:
        text = Text(line)
        text.highlight_regex(STAMP, "green")
        text.highlight_regex(r"loss: [\d.]+", "bold")
        console.print(text, no_wrap=True, overflow="ellipsis", crop=True)
    drawn = console.export_svg(title=command, unique_id="terminal")
    # The picture loads nothing from elsewhere: the reader's own fixed-width font will do.
    picture.write_text(re.sub(r"@font-face \{.*?\}\n", "", drawn, flags=re.DOTALL))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
