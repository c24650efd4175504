"""A hang: have every rank write down its Python stacks, and tell from them who keeps the others.

A rank whose main thread stands inside torch.distributed waits for somebody. The one that does not,
or that cannot even answer, is the one waited for.
"""

from __future__ import annotations

import linecache
import re
import time
from dataclasses import dataclass
from pathlib import Path

from fourfold.heartbeat import Beat
from fourfold.launch import worker
from fourfold.launch.children import Children
from fourfold.launch.diagnosis import ranks
from fourfold.launch.kernel import process_state
from fourfold.signals import STACKS_SIGNAL

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

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)$')


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({'/'.join(Path(self.file).parts[-2:])}:{self.line})"


@dataclass(frozen=True)
class Standing:
    """Where a silent rank stands: its main thread, innermost frame first, if it answered."""

    rank: int
    last: Beat
    state: str
    frames: list[Frame]

    @property
    def waits_for_others(self) -> bool:
        """Inside torch.distributed, or in an operator called from there, or in `Work.wait`."""
        for frame in self.frames:
            if not frame.file.endswith("/torch/_ops.py"):
                # Python's own waits have frames of their own; Work.wait is not written in Python.
                waits = ".wait(" in linecache.getline(frame.file, frame.line)
                return waits or "/torch/distributed/" in frame.file
        return False

    def __str__(self) -> str:
        if self.frames:
            where = " < ".join(str(frame) for frame in self.frames[:SHOWN_FRAMES])
        else:
            where = CANNOT_ANSWER.get(self.state, "does not answer")
        return f"rank {self.rank}, at {self.last}: {where}"


def take_stacks(children: Children) -> list[Standing]:
    """Ask all running ranks for their stacks; those that can answer do so in their logs."""
    asked_at = {rank: children.logs[rank].size() for rank in children.running}
    children.signal(STACKS_SIGNAL)
    stacks: dict[int, list[Frame]] = {rank: [] for rank in asked_at}
    deadline = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < deadline and any(
        not frames and process_state(children.running[rank]) not in CANNOT_ANSWER
        for rank, frames in stacks.items()
    ):
        time.sleep(0.02)
        for rank, offset in asked_at.items():
            stacks[rank] = main_thread(children.logs[rank].text(offset))
    return [
        Standing(
            rank, children.board.last_beat(rank), process_state(children.running[rank]), frames
        )
        for rank, frames in stacks.items()
    ]


def main_thread(dump: str) -> list[Frame]:
    """Of a faulthandler dump the frames of the thread that runs the work, innermost first."""
    frames: list[Frame] = []
    for line in dump.splitlines():
        match = _FRAME.match(line)
        if match is None:
            frames = []
            continue
        frames.append(Frame(match["file"], int(match["line"]), match["function"]))
        if frames[-1].file == worker.__file__ and frames[-1].function == worker.run_rank.__name__:
            return [frame for frame in frames[:-1] if frame.file != worker.__file__]
    return []


def culprits(standings: list[Standing]) -> list[Standing]:
    """Who keeps the others: those that do not answer, else those that wait for nobody."""
    mute = [standing for standing in standings if not standing.frames]
    busy = [standing for standing in standings if not standing.waits_for_others]
    if mute or 0 < len(busy) < len(standings):
        return mute or busy
    return [min(standings, key=lambda standing: (standing.last.step, standing.last.seconds))]


def explain_hang(standings: list[Standing], log_dir: Path) -> list[str]:
    """Lines for the console: who hangs, where each rank stands, where all stacks are."""
    guilty = culprits(standings)
    others = [standing for standing in standings if standing not in guilty]
    waiting = [standing.rank for standing in standings if standing.waits_for_others]
    named = ranks([standing.rank for standing in guilty])
    if len(waiting) == len(standings) > 1:
        said = f"all ranks wait for each other; {named} stands furthest behind"
    else:
        said = f"{named} {'hangs' if len(guilty) == 1 else 'hang'}"
        if waiting:
            said += f"; {ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'} in a collective"
    shown = [*guilty, *others][:SHOWN_RANKS]
    lines = [f"fourfold: {said}", *(f"    {standing}" for standing in shown)]
    if len(shown) < len(standings):
        lines.append(f"    and {len(standings) - len(shown)} more")
    return [*lines, STACKS_PLACE.format(directory=log_dir)]
