"""Faults of a run over machines: each happens, is named, and the run goes on.

    chaos = Chaos(run, random.Random(1), library)
    for kind in chaos.chosen(50):
        print(chaos.happen(kind))
    print(chaos.table())

What is said of a fault is looked for in the lines since it began, on the machines it left alone:
who it hit, and how. They must name nobody else. A fault either ends the ranks (then seconds count
from its beginning to the first step of those that follow), or holds the run up and is named while
it goes on (then seconds are the longest between two steps).
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cluster.machines import wait_until
from cluster.training import Training

LOST_SECONDS = 6
AWAY_SECONDS = 14  # longer than that, and than torch's keep-alive
PATIENCE = 150.0
# Whom a line blames, and for what. Agents and ranks say these, on any machine.
BLAMES = {
    "gone": (
        r"(node\d+) \(ranks? [^)]*\) has not been heard of for .* is gone",
        r"the connection to (node\d+):\d+, where the machines meet, .* is gone",
        r"(node\d+):\d+, where the machines meet, does not answer: .* is gone",
    ),
    "killed": (r"rank \d+ on (node\d+) was killed by signal 9 \(SIGKILL\) at step \d+",),
    "failed": (r"rank \d+ on (node\d+) (?:failed|hangs|gave up)",),
    "network": (r"the network of (node\d+) holds the run up",),
    "link": (r"the link between (node\d+) and node\d+ holds the run up",),
    "full": (
        r"No space left on device.* \(on (node\d+)\)",
        r"(node\d+): .*No space left on device",
    ),
}


@dataclass
class Fault:
    """What happened: to which machines, and what is to be said of it (any one of `causes`)."""

    kind: str
    hit: dict[str, set[str]] = field(default_factory=dict)  # host, and causes
    seconds: float = 0.0
    named: bool = False

    def __str__(self) -> str:
        return f"{self.kind} of {' and '.join(self.hit)}: {self.seconds:.1f} s"


def bad_disk(directory: Path) -> Path:
    """The library that makes a disk slow or full for the processes that load it."""
    compiler = shutil.which("cc")
    assert compiler, "not installed: cc"
    library, source = directory / "bad_disk.so", Path(__file__).with_name("bad_disk.c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


class Chaos:
    def __init__(self, run: Training, choose: random.Random) -> None:
        self.run, self.machines, self.choose = run, run.machines, choose
        self.everyone = range(len(run.machines.names))
        self.faults: list[Fault] = []
        self.kinds: list[Callable[[Fault], None]] = [
            *(self.kill_rank, self.kill_agent, self.power_off, self.come_back, self.cut),
            *(self.one_way, self.twice, self.slow_link, self.lossy_link, self.full_disk),
        ]

    def chosen(self, count: int) -> Iterator[Callable[[Fault], None]]:
        """Each kind in turn, each time in another order."""
        order: list[Callable[[Fault], None]] = []
        for _ in range(count):
            order = order or self.choose.sample(self.kinds, len(self.kinds))
            yield order.pop()

    def happen(self, kind: Callable[[Fault], None]) -> Fault:
        """At some step; returns when the run goes on with all machines."""
        run = self.run
        self.settle()
        run.reach(run.step() + self.choose.randrange(3, 12))
        fault = Fault(kind.__name__)
        self.faults.append(fault)
        self.marks, saved, self.began = run.marks(), checkpoints(run), time.time()
        self.before = run.seen_rounds()
        kind(fault)
        self.check_names(fault)
        first = run.first_steps(run.seen_rounds() - self.before)
        newest = max(saved, default=0)
        assert all(step > newest for step in first.values()), f"step_{newest} is lost: {first}"
        fault.named = True
        return fault

    def settle(self) -> None:
        """All machines take part."""
        wait_until(lambda: self.run.world_size() == len(self.everyone), PATIENCE, self.run.said)

    # -- what happens -------------------------------------------------------------------------

    def kill_rank(self, fault: Fault) -> None:
        self._kill_rank(fault)
        self._goes_on(fault)

    def _kill_rank(self, fault: Fault) -> None:
        machine = self._any(fault, "killed")
        os.kill(self.choose.choice(self.run.rank_pids(machine)), signal.SIGKILL)

    def kill_agent(self, fault: Fault) -> None:
        machine = self._any(fault, "gone")
        self.run.commands[machine].send_signal(signal.SIGKILL)
        self.run.commands[machine].wait()
        self.run.start(machine)
        self._goes_on(fault)

    def power_off(self, fault: Fault) -> None:
        """Back within seconds, before the others have done a step without it, or after."""
        self._power_off(fault)
        self._goes_on(fault)

    def _power_off(self, fault: Fault) -> set[str]:
        """Returns the rounds that had trained by then."""
        machine = self._any(fault, "gone")
        self.machines.power_off(machine, cut_first=self.choose.random() < 0.5)
        seen = self.run.seen_rounds()
        time.sleep(2)
        self.machines.boot(machine)
        self.run.start(machine)
        return seen

    def come_back(self, fault: Fault) -> None:
        """A machine is lost, the others train without it, and it comes back into a round of all.
        Not the one where they meet, without which nobody goes on."""
        machine = self._any(fault, "gone", self.everyone[1:])
        self.machines.power_off(machine)
        self._goes_on(fault)
        fewer = len(self.everyone) - 1
        wait_until(lambda: self.run.world_size() == fewer, PATIENCE, self.run.said)
        self.run.reach(self.run.step() + 3)
        self.machines.boot(machine)
        self.run.start(machine)
        self.settle()

    def cut(self, fault: Fault) -> None:
        machine = self._any(fault, "gone")
        self.machines.cut(machine)
        time.sleep(AWAY_SECONDS)
        self.machines.mend(machine)
        self._goes_on(fault)

    def one_way(self, fault: Fault) -> None:
        """It hears, but is not heard; or the other way round."""
        machine = self._any(fault, "gone")
        way = self.choose.choice(["loss_from", "loss_to"])
        fault.kind += f" ({'from' if way == 'loss_from' else 'to'})"
        self.machines.wire(machine, **{way: 1.0})  # type: ignore[arg-type]
        time.sleep(AWAY_SECONDS)
        self.machines.mend(machine)
        self._goes_on(fault)

    def twice(self, fault: Fault) -> None:
        """A second failure while the run recovers from the first."""
        self._kill_rank(fault)
        time.sleep(self.choose.uniform(0.5, 4))
        # The recovery from the first may be over by then.
        seen = self._power_off(fault)
        fault.seconds = self.run.goes_on(seen, self.began)

    def slow_link(self, fault: Fault) -> None:
        how = self.choose.choice([{"delay": 0.02}, {"rate": 2_000_000}])
        self._bad_link(fault, how)

    def lossy_link(self, fault: Fault) -> None:
        self._bad_link(fault, {"loss": self.choose.choice([0.05, 0.1])})

    def _bad_link(self, fault: Fault, how: dict[str, float]) -> None:
        machine = self._any(fault, "network", self._links_not_named())
        fault.kind += f" {how}"
        self.machines.wire(machine, **how)  # type: ignore[arg-type]
        with self._holding_up(fault):
            wait_until(lambda: self._said_of(fault), PATIENCE, lambda: f"{fault}: {self._new()}")
            self.machines.mend(machine)

    def full_disk(self, fault: Fault) -> None:
        """Nothing that the machine writes below the run finds room, until a save has failed."""
        machine = self._any(fault, "full")
        before = max(checkpoints(self.run), default=0)
        self.run.control(machine).write_text(f"0 0 {self.run.run}/")
        with self._holding_up(fault):
            wait_until(lambda: self._said_of(fault), PATIENCE, lambda: f"{fault}: {self._new()}")
            time.sleep(self.choose.uniform(0, 3))
            self.run.control(machine).unlink()
            wait_until(
                lambda: max(checkpoints(self.run), default=0) > before,
                PATIENCE,
                lambda: f"a checkpoint after step_{before}: {self._new()}",
            )

    def _any(self, fault: Fault, cause: str, among: range | list[int] | None = None) -> int:
        machine = self.choose.choice(among or self.everyone)
        fault.hit.setdefault(self.machines.names[machine], set()).add(cause)
        return machine

    def _links_not_named(self) -> list[int]:
        """A link is named once in a round."""
        named = {str(event["host"]) for event in self.run.events("straggler")}
        hosts = self.machines.names
        left = [i for i in self.everyone if not any(hosts[i] in host for host in named)]
        if not left:
            (pid,) = self.run.rank_pids(0)
            before, began = self.run.seen_rounds(), time.time()
            os.kill(pid, signal.SIGKILL)
            self.run.goes_on(before, began)
            self.settle()
            self.run.reach(self.run.step() + 3)
            self.marks, self.began = self.run.marks(), time.time()
            self.before = self.run.seen_rounds()
        return left or [*self.everyone]

    # -- what became of it --------------------------------------------------------------------

    def _goes_on(self, fault: Fault) -> None:
        fault.seconds = self.run.goes_on(self.before, self.began)

    @contextmanager
    def _holding_up(self, fault: Fault) -> Iterator[None]:
        """The ranks are not ended by what happens inside; measures the longest pause."""
        yield
        self.run.reach(self.run.step() + 3)
        started = self.run.seen_rounds() - self.before
        assert not started, f"{fault}: the ranks were started again: {self._new()}"
        fault.seconds = self.run.longest_pause(self.began)

    def _new(self) -> str:
        return self.run.said(self.marks)

    def blamed(self, fault: Fault) -> dict[str, set[str]]:
        """Hosts and causes, in what machines that can know have said since it began. One that was
        lost or cut off sees all others vanish."""
        found: dict[str, set[str]] = {}
        unreliable = {host for host, causes in fault.hit.items() if "gone" in causes}
        for host, text in self.run.said_by(self.marks).items():
            if host in unreliable:
                continue
            for cause, patterns in BLAMES.items():
                for match in re.finditer("|".join(patterns), text):
                    whom = next(group for group in match.groups() if group)
                    found.setdefault(whom, set()).add(cause)
        return found

    def _said_of(self, fault: Fault) -> bool:
        blamed = self.blamed(fault)
        return all(causes <= blamed.get(host, set()) for host, causes in fault.hit.items())

    def check_names(self, fault: Fault) -> None:
        """Everybody who was hit is named with the cause, and nobody else for anything."""
        blamed = self.blamed(fault)
        assert self._said_of(fault), f"{fault.hit}, but blamed {blamed}:\n{self._new()}"
        innocent = blamed.keys() - fault.hit.keys()
        assert not innocent, f"{fault.hit}, but blamed {blamed}:\n{self._new()}"

    def table(self) -> str:
        lines = [f"{'kind':<12} {'count':>5} {'named':>5} {'median s':>8} {'worst s':>7}"]
        by_kind: dict[str, list[Fault]] = {}
        for fault in self.faults:
            by_kind.setdefault(fault.kind.split()[0], []).append(fault)
        for kind, faults in [*sorted(by_kind.items()), ("all", self.faults)]:
            seconds = [fault.seconds for fault in faults]
            named = sum(fault.named for fault in faults)
            middle, worst = statistics.median(seconds), max(seconds)
            lines.append(f"{kind:<12} {len(faults):>5} {named:>5} {middle:>8.1f} {worst:>7.1f}")
        return "\n".join(lines)


def checkpoints(run: Training) -> list[int]:
    names = [path.name for path in run.run.glob("step_*")]
    return [int(name.removeprefix("step_")) for name in names if name[5:].isdigit()]
