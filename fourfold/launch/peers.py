"""What the processes of a run over machines know of each other: reports in torch's store.

Twice a second each process that speaks for ranks writes a report: its host, and of its ranks each
the step, the phase, how long ago that changed, and on request the stack. On machines of our own
launch the agents speak, each for all ranks of its machine; where another launcher started the
ranks, each rank speaks for itself. A report carries a number that grows, so that nobody's clock
is compared with anybody else's: who is silent is whose number stands still.

    PeerReport       what one process says
    PeerExchange     the thread that writes ours and reads those of the others
    RoundEnd         why a round ended, written once by whoever finds out first, told by all
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fourfold.heartbeat import Beat, Board
from fourfold.launch.diagnosis import Frame, RankStack

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

PULSE_SECONDS = 0.5
# Of a thousand machines each reads what a thousand say: they speak less often, at this rate in all.
READS_PER_SECOND = 50.0
# Nothing heard for so many pulses is suspicious, where something else is wrong too.
SUSPICIOUS_PULSES = 6
MOST_TEXT = 20_000
MINUTE = 60.0
ENDED = "ended"


@dataclass(frozen=True)
class RankState:
    """Where a rank is; `frames` of its main thread, innermost first, where they were asked for."""

    step: int = 0
    phase: str = ""
    idle_seconds: float = 0.0
    state: str = "?"
    waits: bool = False
    frames: tuple[Frame, ...] = ()

    @classmethod
    def of(cls, stack: RankStack) -> RankState:
        idle = max(0.0, time.monotonic() - stack.last.seconds)
        place = (stack.last.step, stack.last.phase, idle, stack.state)
        return cls(*place, stack.waits_for_others, tuple(stack.frames[:16]))

    def stack_of(self, rank: int, host: str) -> RankStack:
        """As this machine's own, with the time of its last beat by our clock."""
        last = Beat(time.monotonic() - self.idle_seconds, self.step, self.phase)
        return RankStack(rank, last, self.state, list(self.frames), host, self.waits)

    def __str__(self) -> str:
        return str(Beat(0.0, self.step, self.phase))


@dataclass(frozen=True)
class PeerReport:
    """What a process says of itself and of the ranks it speaks for."""

    host: str
    number: int = 0
    round: str = ""  # the token of the round it takes part in; none while it waits for one
    status: str = ""
    ranks: dict[int, RankState] = field(default_factory=dict)
    has_stacks: bool = False

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @property
    def idle_seconds(self) -> float:
        """How long none of its ranks has made progress."""
        return min((rank.idle_seconds for rank in self.ranks.values()), default=0.0)


def read_report(data: bytes) -> PeerReport | None:
    """None if it is no report: any process on the network can write to a store."""
    try:
        value = json.loads(data[:MOST_TEXT])
        ranks = {int(rank): _rank_state(state) for rank, state in value["ranks"].items()}
        words = {name: str(value[name])[:256] for name in ("host", "round", "status")}
        return PeerReport(
            **words,
            number=int(value["number"]),
            ranks=ranks,
            has_stacks=bool(value["has_stacks"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None


def _rank_state(value: Any) -> RankState:
    frames = tuple(
        Frame(str(frame["file"])[:512], int(frame["line"]), str(frame["function"])[:256])
        for frame in value["frames"][:64]
    )
    place = (int(value["step"]), str(value["phase"])[:64], float(value["idle_seconds"]))
    return RankState(*place, str(value["state"])[:8], bool(value["waits"]), frames)


def states_of(board: Board, ranks: Iterable[int]) -> dict[int, RankState]:
    now = time.monotonic()
    beats = {rank: board.last_beat(rank) for rank in ranks}
    return {
        rank: RankState(beat.step, beat.phase, max(0.0, now - beat.seconds))
        for rank, beat in beats.items()
    }


@dataclass(frozen=True)
class RoundEnd:
    """Why a round ended for all; `used` counts the restarts of whoever says so, and `lost` are the
    machines that the lines call lost."""

    lines: list[str]
    code: int = 1
    used: int = 0
    lost: tuple[int, ...] = ()

    def encode(self) -> str:
        return json.dumps(asdict(self))


def read_end(data: bytes) -> RoundEnd:
    try:
        value = json.loads(data)
        lines = [str(line)[:2000] for line in value["lines"][:200]]
        lost = tuple(int(index) for index in value["lost"][:1000])
        return RoundEnd(lines, int(value["code"]), int(value["used"]), lost)
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return RoundEnd(["fourfold: another machine ended the round, and did not say why"])


@dataclass
class Seen:
    """The last report of a process, and when its number last grew."""

    report: PeerReport
    heard: float


class PeerExchange:
    """Writes this process's report at every pulse, and reads those of the others.

    All of it in a thread of its own, with a connection of its own: a network that is cut makes a
    question wait without end. Whoever looks finds in `answered` when the store last answered, and
    in `broken` why it never will again.
    """

    def __init__(self, store: Store, host: str, waiting: Callable[[], int] | None = None) -> None:
        self.index = store.add("fourfold/speakers", 1)
        self.seen: dict[int, Seen] = {}
        self.answered = time.monotonic()
        self.broken = ""
        self.end: RoundEnd | None = None
        self.marks: dict[str, str] = {}  # of the round: "stacks", "regroup", "leaving"
        self.nodes_waiting = 0
        # A thousand ranks that all read what all others say would be a crowd: they listen when
        # something is wrong.
        self.listens = True
        # Held while it speaks, so that no process is forked in the middle of a sentence.
        self.speaking = threading.Lock()
        # Held while the report or the round changes, so that no change is lost and nothing of one
        # round is taken into the next.
        self._changing = threading.Lock()
        self._store = store
        self._own = PeerReport(host)
        self._begun = self._spoken = 0  # which time it speaks, and has spoken
        self._states: Callable[[], dict[int, RankState]] = dict
        self._waiting = waiting
        self._wake, self._closed = threading.Event(), threading.Event()
        self._spoke = threading.Condition()
        self._entered = 0.0
        self._outbox: list[Callable[[], object]] = []
        self._speak()
        self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)
        self._thread.start()

    @property
    def pulse_seconds(self) -> float:
        heard = [seen for seen in [*self.seen.values()] if self.answered - seen.heard < MINUTE]
        return max(PULSE_SECONDS, len(heard) / READS_PER_SECOND)

    @property
    def suspicious_seconds(self) -> float:
        return SUSPICIOUS_PULSES * self.pulse_seconds

    # -- called by the supervisor -------------------------------------------------------------

    def enter(self, token: str, states: Callable[[], dict[int, RankState]]) -> None:
        """Take part in a round: from now on report these ranks, and look for its end."""
        with self._changing:
            self.end, self.marks, self.nodes_waiting = None, {}, 0
            self._states = states
            self._own = replace(self._own, round=token, status="", has_stacks=False)
        self._entered = now = time.monotonic()
        for seen in [*self.seen.values()]:
            seen.heard = now
        self._wake.set()

    def wait_for_round(self) -> None:
        """Between two rounds."""
        with self._changing:
            self._states, self.end = dict, None
            self._own = replace(self._own, round="", status="", has_stacks=False)

    def say_last(self, key: str, value: str) -> None:
        self._outbox.append(lambda: self._store.set(key, value))

    def show_stacks(self, states: dict[int, RankState]) -> None:
        self._states = lambda: states
        self.has_stacks()
        self.refresh()

    def has_stacks(self) -> None:
        """From now on what is said of ranks contains their stacks."""
        with self._changing:
            self._own = replace(self._own, has_stacks=True)

    def mark(self, name: str, value: str) -> None:
        """Leave a note in this round for all to see."""
        key = self._key(name)
        self._outbox.append(lambda: self._store.set(key, value))
        self.refresh()

    def post_end(self, end: RoundEnd) -> RoundEnd:
        """Say why the round ended; what counts is what was said first, which is returned."""
        key = self._key("end")
        self._outbox.append(lambda: self._store.compare_set(key, "", end.encode()))
        self.refresh()
        return self.end or end

    def refresh(self, seconds: float = 3.0) -> bool:
        """Speak once more, now; whether that was done in time."""
        # One that is under way may have begun before there was something to say.
        wanted = self._begun + 1
        self._wake.set()
        with self._spoke:
            self._spoke.wait_for(lambda: self._spoken >= wanted or bool(self.broken), seconds)
            return self._spoken >= wanted

    def leave(self) -> None:
        """The last report: that this process is through with the round."""
        with self._changing:
            self._own = replace(self._own, status=ENDED)
        self.refresh()

    def close(self, wait_seconds: float = 2.0) -> None:
        self._closed.set()
        self._wake.set()
        # Not without end: it may be waiting for an answer.
        self._thread.join(wait_seconds)

    def are_through(self) -> bool:
        """Whether all others that are heard of have left this round, or wait for none."""
        others = [index for index in [*self.seen] if index != self.index]
        # Also of those that had left a round when they were lost, whom `silent` does not count.
        heard = [i for i in others if self.unheard_seconds(i) <= self.suspicious_seconds]
        reports = [self.seen[index].report for index in heard]
        rounds = (self._own.round, "")
        return all(report.status == ENDED and report.round in rounds for report in reports)

    def have_left(self, members: Iterable[int], token: str) -> bool:
        """Whether these have been in the round and are no longer."""
        reports = [self.seen[index].report for index in members if index in self.seen]
        left = [report.round != token or report.status == ENDED for report in reports]
        # A report may be older than the round itself.
        return time.monotonic() - self._entered > 3 * self.pulse_seconds and all(left)

    def quiet_seconds(self) -> float:
        """How long the store has not answered."""
        return time.monotonic() - self.answered

    def unheard_seconds(self, index: int) -> float:
        """For how long a process has said nothing, as of the store's last answer."""
        return self.answered - self.seen[index].heard if index in self.seen else 0.0

    def silent(self, others: Iterable[int], seconds: float) -> list[int]:
        """Those of `others` not heard of for so long, though the store answers."""
        seconds = max(seconds, 2 * self.pulse_seconds)
        return [
            index
            for index in others
            if index not in self.seen
            or (
                self.answered - self.seen[index].heard > seconds
                and self.seen[index].report.status != ENDED
            )
        ]

    def present(self) -> list[PeerReport]:
        """Of every process that was heard of a moment ago."""
        alive = [
            index for index in [*self.seen] if not self.silent([index], self.suspicious_seconds)
        ]
        reports = [self.seen[index].report for index in sorted(alive)]
        return [report for report in reports if report.status != ENDED]

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.is_set():
            self._wake.clear()
            try:
                with self.speaking:
                    self._speak()
            except Exception as error:  # torch's are of many kinds
                self.broken = f"{type(error).__name__}: {error}".partition("\n")[0].strip()
            with self._spoke:
                if not self.broken:
                    self._spoken = self._begun
                self._spoke.notify_all()
            if self.broken:
                return
            self._wake.wait(self.pulse_seconds)

    def _speak(self) -> None:
        store = self._store
        self._begun += 1
        while self._outbox:
            self._outbox[0]()
            self._outbox.pop(0)
        states = self._states()
        # The supervisor may enter another round in the middle of this.
        own = replace(self._own, number=self._begun, ranks=states)
        store.set(f"fourfold/report/{self.index}", own.encode())
        if self.listens:
            self._listen(store)
        if own.round:
            self._read_notes(store, own.round)
        self.answered = time.monotonic()

    def _read_notes(self, store: Store, token: str) -> None:
        """What was left in a round for all to see. A note that is not there is not asked for: the
        store would wait for it."""
        keys = {name: _note_key(token, name) for name in ("end", "stacks", "regroup", "leaving")}
        notes = {name: store.get(key) for name, key in keys.items() if store.check([key])}
        waiting = 0 if self._waiting is None else self._waiting()
        with self._changing:
            if self._own.round != token:
                return
            if self.end is None and "end" in notes:
                self.end = read_end(notes["end"])
            notes.pop("end", None)
            self.marks |= {
                name: note.decode(errors="replace").strip() for name, note in notes.items()
            }
            self.nodes_waiting = waiting

    def _listen(self, store: Store) -> None:
        everyone = range(1, store.add("fourfold/speakers", 0) + 1)
        now = time.monotonic()
        for index in everyone:
            if index not in self.seen and store.check([f"fourfold/report/{index}"]):
                self.seen[index] = Seen(PeerReport(""), now)
        # Who comes back comes back under another number.
        living = [index for index, seen in self.seen.items() if now - seen.heard < 10 * MINUTE]
        keys = {index: f"fourfold/report/{index}" for index in sorted(living)}
        for index, data in zip(keys, store.multi_get([*keys.values()])):
            report, seen = read_report(data), self.seen[index]
            if report is not None and report.number != seen.report.number:
                self.seen[index] = Seen(report, now)

    def _key(self, name: str) -> str:
        return _note_key(self._own.round, name)


def _note_key(token: str, name: str) -> str:
    return f"fourfold/{token}/{name}"
