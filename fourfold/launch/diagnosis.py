"""Diagnosis of a failed or hanging run: which rank is to blame, and why.

When one rank fails, the others fail after it because it no longer answers. Each rank records when
its error reached the top, so the order is known; of errors at the same moment, the cause is one
that reports more than a lost connection.

In a hang every rank writes its Python stacks to its log. A rank whose main thread is inside
torch.distributed is waiting for another one. A rank that is not, or that cannot even answer, is
the one the others wait for.
"""

from __future__ import annotations

import linecache
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from fourfold.heartbeat import Beat
from fourfold.launch import workers
from fourfold.launch.workers import Ending, WorkerGroup, process_state
from fourfold.signals import STACKS_SIGNAL

SAME_MOMENT_SECONDS = 0.25
SHOWN_LINES = 25
LAST_CHARACTERS = 20_000

LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|timed out waiting|socket timeout"
    r"|remote process exited|wait timeout|socket closed|pair closure|collective operation timeout",
    re.IGNORECASE,
)

_SIGNAL_NAMES = {number.value: number.name for number in signal.Signals}


def root_cause(failures: list[Ending]) -> Ending:
    """The failure that the others followed from."""
    first = min(end.moment for end in failures)
    together = [end for end in failures if end.moment - first <= SAME_MOMENT_SECONDS]
    return min(together, key=lambda end: (_blame_order(end), end.moment))


def lost_a_peer(end: Ending) -> bool:
    """Whether its error is only that another rank did not answer."""
    # A pipeline puts an error of its own behind that of the connection, with every shape it holds.
    last_words = end.error_text()[-LAST_CHARACTERS:]
    return end.status > 0 and LOST_PEER.search(last_words) is not None


def _blame_order(end: Ending) -> int:
    if lost_a_peer(end):
        return 2
    # Communication libraries abort a process whose peers are gone.
    return 1 if end.status == -signal.SIGABRT else 0


def explain(cause: Ending, endings: list[Ending], host: str = "") -> list[str]:
    """Lines for the console: which rank, how it ended, its error, where its log is.

    With the `host` where there are several.
    """
    text = cause.error_text().rstrip()
    if cause.is_user_error and text:
        return text.splitlines()
    lines = [f"fourfold: {how_it_ended(cause, host)}"]
    left = sorted(end.rank for end in endings if end.status == 0)
    if lost_a_peer(cause) and left:
        lines.append(f"fourfold: before that, {ranks(left)} had ended with exit code 0")
    if not text and cause.rank > 0:
        # A script that ends by `sys.exit(3)` has said why before; rank 0's output was shown.
        text = cause.log.text(cause.log.start).rstrip()
    if shown := _last_words(text, cause.status):
        lines += [f"    {line}" for line in shown]
    return [*lines, f"fourfold: the log of rank {cause.rank} is {cause.log.path}"]


def how_it_ended(end: Ending, host: str = "") -> str:
    who = f"rank {end.rank} on {host}" if host else f"rank {end.rank}"
    if end.status > 0:
        return f"{who} failed at {end.last} with exit code {end.status}"
    name = _SIGNAL_NAMES.get(-end.status, "a real-time signal")
    hint = ""
    if end.status == -signal.SIGKILL:
        hint = "; unless someone killed it, the machine ran out of memory"
    return f"{who} was killed by signal {-end.status} ({name}) at {end.last}{hint}"


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


# -- hangs: the stacks of all ranks -------------------------------------------------------------

ANSWER_SECONDS = 2.0
SHOWN_FRAMES = 4
SHOWN_RANKS = 8

STACKS_PLACE = "fourfold: the stacks of all threads are in the logs in {directory}"

# By the kernel's letter for what a process does.
CANNOT_ANSWER = {
    "T": "stopped by a signal (SIGSTOP or a debugger)",
    "D": "waits in the kernel, for a disk or a network file system",
    "Z": "has just ended",
}

# Named, not imported: that would bring torch.
OUR_COLLECTIVES = "/fourfold/parallel/shared_memory.py"

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)$')


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({'/'.join(Path(self.file).parts[-2:])}:{self.line})"


@dataclass(frozen=True)
class RankStack:
    """The main thread of a silent rank, innermost frame first; no frames if it did not answer."""

    rank: int
    last: Beat
    state: str
    frames: list[Frame]
    host: str = ""  # where there are several
    waits: bool | None = None  # as another machine has found out

    @property
    def waits_for_others(self) -> bool:
        """Inside torch.distributed or a collective of ours, or in an operator called from there,
        or in `Work.wait`."""
        if self.waits is not None:
            return self.waits
        for frame in self.frames:
            if not frame.file.endswith("/torch/_ops.py"):
                # Waits written in Python have a frame of their own; Work.wait is native.
                waits = ".wait(" in linecache.getline(frame.file, frame.line)
                meets = frame.file.endswith(OUR_COLLECTIVES)
                return waits or meets or "/torch/distributed/" in frame.file
        return False

    def __str__(self) -> str:
        if self.frames:
            where = " < ".join(str(frame) for frame in self.frames[:SHOWN_FRAMES])
        else:
            where = CANNOT_ANSWER.get(self.state, "does not answer")
        who = f"rank {self.rank} on {self.host}" if self.host else f"rank {self.rank}"
        return f"{who}, at {self.last}: {where}"


def take_stacks(group: WorkerGroup) -> list[RankStack]:
    """Ask all running ranks for their stacks; those that can answer do so in their logs."""
    asked_at = {rank: group.logs[rank].size() for rank in group.running}
    group.signal(STACKS_SIGNAL)
    frames_of: dict[int, list[Frame]] = {rank: [] for rank in asked_at}
    deadline = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < deadline and any(
        not frames and process_state(group.running[rank]) not in CANNOT_ANSWER
        for rank, frames in frames_of.items()
    ):
        time.sleep(0.02)
        for rank, offset in asked_at.items():
            frames_of[rank] = main_thread(group.logs[rank].text(offset))
    return [
        RankStack(rank, group.board.last_beat(rank), process_state(group.running[rank]), frames)
        for rank, frames in frames_of.items()
    ]


def main_thread(dump: str) -> list[Frame]:
    """The frames, in a faulthandler dump, of the thread that runs the work; innermost first."""
    frames: list[Frame] = []
    for line in dump.splitlines():
        match = _FRAME.match(line)
        if match is None:
            frames = []
            continue
        frames.append(Frame(match["file"], int(match["line"]), match["function"]))
        if frames[-1].file == workers.__file__ and frames[-1].function == workers.run_rank.__name__:
            return [frame for frame in frames[:-1] if frame.file != workers.__file__]
    return []


def suspects(stacks: list[RankStack]) -> list[RankStack]:
    """Which ranks block the others: those that do not answer, else those that are not waiting."""
    mute = [stack for stack in stacks if not stack.frames]
    busy = [stack for stack in stacks if not stack.waits_for_others]
    if mute or 0 < len(busy) < len(stacks):
        return mute or busy
    return [min(stacks, key=lambda stack: (stack.last.step, stack.last.seconds))]


def explain_hang(stacks: list[RankStack], log_dir: Path | None) -> list[str]:
    """Lines for the console: which rank hangs, where each rank is, where the stacks are."""
    blamed = suspects(stacks)
    others = [stack for stack in stacks if stack not in blamed]
    waiting = [stack.rank for stack in stacks if stack.waits_for_others]
    hosts = {stack.host for stack in blamed} - {""}
    named = ranks([stack.rank for stack in blamed])
    named += f" on {', '.join(sorted(hosts))}" if hosts else ""
    if len(waiting) == len(stacks) > 1:
        said = f"all ranks wait for each other; {named} is furthest behind"
    else:
        said = f"{named} {'hangs' if len(blamed) == 1 else 'hang'}"
        if waiting:
            said += f"; {ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'} in a collective"
    shown = [*blamed, *others][:SHOWN_RANKS]
    lines = [f"fourfold: {said}", *(f"    {stack}" for stack in shown)]
    if len(shown) < len(stacks):
        lines.append(f"    and {len(stacks) - len(shown)} more")
    return lines if log_dir is None else [*lines, STACKS_PLACE.format(directory=log_dir)]
