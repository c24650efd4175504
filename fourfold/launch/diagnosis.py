"""What went wrong, in words: which rank failed first and how, or which one hangs and where.

When one rank fails, the others fail after it because it no longer answers. Each rank notes when
its error reached the top, so the order is known; of errors that came in the same moment, one that
does not just report a lost connection is the cause.
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from fourfold.errors import USER_ERROR_EXIT, UserError
from fourfold.heartbeat import Beat, Failure

SAME_MOMENT_SECONDS = 0.25
SHOWN_LINES = 25
MAX_TEXT_BYTES = 1 << 18

_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|timed out waiting|socket timeout"
    r"|remote process exited|wait timeout|socket closed",
    re.IGNORECASE,
)

_SIGNAL_NAMES = {number.value: number.name for number in signal.Signals}


class Log:
    """What a rank writes in an attempt, kept open from the start.

    Whatever becomes of the file's name, both sides go on with the file, and one that can no longer
    be read is empty: to look after ranks does not depend on their logs.
    """

    def __init__(self, path: Path, attempt: int) -> None:
        """Head this attempt's part of a file that may have earlier ones."""
        self.path = path
        now = datetime.now().isoformat(sep=" ", timespec="seconds")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            os.write(self.descriptor, f"--- attempt {attempt}, {now}\n".encode())
        except OSError as error:
            raise UserError(f"cannot write the log {path}: {error.strerror or error}") from error
        self.start = self.size()

    def size(self) -> int:
        try:
            return os.fstat(self.descriptor).st_size
        except OSError:
            return 0

    def read(self, start: int, stop: int) -> bytes:
        try:
            return os.pread(self.descriptor, max(0, stop - start), start)
        except OSError:
            return b""

    def text(self, start: int) -> str:
        """From byte `start` on; of a very long text, its end."""
        size = self.size()
        return self.read(max(start, size - MAX_TEXT_BYTES), size).decode(errors="replace")

    def close(self) -> None:
        os.close(self.descriptor)


@dataclass(frozen=True)
class Ending:
    """How a rank ended; `status` is its exit code, or minus the signal that killed it.

    `disturbed`: it ended after the supervisor began to end ranks itself.
    """

    rank: int
    status: int
    noticed: float
    disturbed: bool
    failure: Failure | None
    last: Beat
    log: Log

    @property
    def moment(self) -> float:
        return self.failure.seconds if self.failure else self.noticed

    @property
    def is_user_error(self) -> bool:
        return self.status == USER_ERROR_EXIT

    def error_text(self) -> str:
        """What the rank said about its end: its error, or the last it wrote before a signal."""
        return self.log.text(self.failure.log_offset if self.failure else self.log.start)

    @property
    def lost_a_peer(self) -> bool:
        """Whether its only complaint is that others did not answer."""
        last_words = self.error_text()[-2000:]
        return self.status > 0 and _LOST_PEER.search(last_words) is not None


def root_cause(failures: list[Ending]) -> Ending:
    """The failure that the others followed from."""
    first = min(end.moment for end in failures)
    together = [end for end in failures if end.moment - first <= SAME_MOMENT_SECONDS]
    return min(together, key=lambda end: (_innocence(end), end.moment))


def _innocence(end: Ending) -> int:
    if end.lost_a_peer:
        return 2
    # Communication libraries abort a process whose peers are gone.
    return 1 if end.status == -signal.SIGABRT else 0


def explain(cause: Ending, endings: list[Ending]) -> list[str]:
    """Lines for the console: who, how, its own words, where to read more."""
    text = cause.error_text().rstrip()
    if cause.is_user_error and text:
        return text.splitlines()
    lines = [f"fourfold: {how_it_ended(cause)}"]
    left = sorted(end.rank for end in endings if end.status == 0)
    if cause.lost_a_peer and left:
        lines.append(f"fourfold: before that, {ranks(left)} had ended with exit code 0")
    if not text and cause.rank > 0:
        # A script that ends by `sys.exit(3)` has said why before; of rank 0 that was shown.
        text = cause.log.text(cause.log.start).rstrip()
    if shown := _last_words(text, cause.status):
        lines += [f"    {line}" for line in shown]
    return [*lines, f"fourfold: the log of rank {cause.rank} is {cause.log.path}"]


def how_it_ended(end: Ending) -> str:
    if end.status > 0:
        return f"rank {end.rank} failed at {end.last} with exit code {end.status}"
    name = _SIGNAL_NAMES.get(-end.status, "a real-time signal")
    hint = ""
    if end.status == -signal.SIGKILL:
        hint = "; if nobody did that by hand, memory ran out"
    return f"rank {end.rank} was killed by signal {-end.status} ({name}) at {end.last}{hint}"


def _last_words(text: str, status: int) -> list[str]:
    """The end of a traceback, or for a signal the dump that the crash left, if any."""
    if status < 0:
        _, crash, dump = text.rpartition("Fatal Python error")
        dump = dump.partition("\nExtension modules")[0].rstrip()
        return (crash + dump).splitlines()[:SHOWN_LINES] if crash else []
    lines = text.splitlines()
    if len(lines) > SHOWN_LINES:
        lines = ["...", *lines[-SHOWN_LINES:]]
    return lines


def ranks(numbers: list[int]) -> str:
    """ "rank 3", or "ranks 0, 1 and 5"."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
