"""Stopping well: a signal or a file asks, the step is finished, the run saved, the exit clean."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType

STOP_FILE = "STOP"


class StopRequest:
    """Listens for SIGTERM, SIGINT and a file named STOP in the run directory.

    The first signal only asks. A SIGINT after it means the person at the keyboard will not wait,
    and interrupts at once; what was committed before stays good.
    """

    def __init__(self, output_dir: Path) -> None:
        self.file = output_dir / STOP_FILE
        self.received: str | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name

    def reason(self) -> str | None:
        """Why the run should stop now, or None. A STOP file is used up by asking."""
        if self.received:
            return self.received
        if self.file.exists():
            self.file.unlink(missing_ok=True)
            self.received = f"the file {self.file}"
        return self.received
