"""Machines made of Linux namespaces: own network, host name, processes, /tmp, /dev/shm and /run.

    with Machines(3, tmp_path) as machines:
        done = machines.run(0, ["hostname"])              # node0; a finished command
        job = machines.start(1, ["sleep", "60"])          # a running one
        machines.power_off(1)                             # as if the plug was pulled
        assert job.wait(10) == -9

Machine i is `node<i>` with the address 10.77.0.<10 + i>. They see the disk of this machine, so what
lies outside /tmp, and `directory` wherever it lies, is shared as on a cluster; /tmp is a directory
of the machine's own that a reboot keeps, /dev/shm and /run are memory of its own. They are joined
by a switch in a namespace of its own, from which no route leads out: nothing but machines is spoken
to. The first process of a machine ends when this one does, however that ends, and with it every
process of the machine; all mounts and links are the namespaces' and vanish with them.

    machines.power_off(i)                       loses power: nobody is told
    machines.power_off(i, cut_first=False)      all processes killed; the kernel closes connections
    machines.boot(i)                            starts it again, with the same address
    machines.cut(i)                             pulls its network cable
    machines.wire(i, delay=, loss=, rate=)      makes its link slow or lossy, in both directions
    machines.wire(i, loss_from=1.0)             one way: it hears, but is not heard
    machines.mend(i)                            cable in, and a good one
    machines.tmp(i)                             where its /tmp is seen from here

A command's output goes to a file (`command.output()`), never to a pipe that could fill up.
`why_not` says what this machine lacks; the tests of this directory skip with that sentence.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Self

REPOSITORY = Path(__file__).parent.parent.parent
WIRE = Path(__file__).with_name("wire.py")
NEEDED = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "mount": "mount"}
MACHINE = [
    "unshare",
    "--net",
    "--uts",
    "--mount",
    "--ipc",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
]
# Its processes end when this one reads the end of its input, that is, when the tests are no more.
# Bash also reaps what is left without a parent.
INIT = "hostname {name}; ip link set lo up; trap : TERM INT HUP; echo up; while read -r; do :; done"
PATIENCE = 30.0


@cache
def why_not(*programs: str) -> str | None:
    """What this machine lacks for such machines, and for these programs on them, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "machines made of namespaces need Linux and root"
    missing = [package for program, package in NEEDED.items() if shutil.which(program) is None]
    missing += [program for program in programs if shutil.which(program) is None]
    if missing:
        return f"not installed: {', '.join(dict.fromkeys(missing))}; `make test-cluster` does that"
    tried = subprocess.run(
        [*MACHINE, "ip", "link", "set", "lo", "up"],
        capture_output=True,
        text=True,
    )
    if tried.returncode:
        return f"this kernel or container makes no namespaces: {tried.stderr.strip()}"
    return None


class Command:
    """A command that runs on a machine."""

    def __init__(self, process: subprocess.Popen[bytes], file: Path, machine: str) -> None:
        self._process, self._file, self.machine = process, file, machine

    @property
    def returncode(self) -> int | None:
        """As of subprocess: negative for a signal, None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float = 120) -> int:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.send_signal(signal.SIGKILL)
            raise AssertionError(
                f"{self._process.args} on {self.machine} has not ended within {seconds} s:\n"
                f"{self.output()[-4000:]}"
            ) from None

    def output(self) -> str:
        """Standard output and error so far."""
        return self._file.read_text(errors="replace")

    def send_signal(self, number: int) -> None:
        """To the command, not to nsenter, which only waits for it."""
        for child in children(self._process.pid):
            os.kill(child, number)

    @property
    def pid(self) -> int:
        """Its process id, as seen from outside."""
        return next(iter(children(self._process.pid)))

    def until(self, text: str, seconds: float = 120) -> None:
        """Wait until its output contains `text`."""
        wait_until(
            lambda: text in self.output() or self.returncode is not None,
            seconds,
            lambda: f"{text!r} in the output on {self.machine}:\n{self.output()[-4000:]}",
        )
        assert text in self.output(), f"{self.machine} ended:\n{self.output()[-4000:]}"


class Machines:
    """`count` machines in one network; `directory` is theirs together."""

    def __init__(self, count: int, directory: Path) -> None:
        if reason := why_not():
            raise RuntimeError(reason)
        self.names = [f"node{i}" for i in range(count)]
        self.addresses = [f"10.77.0.{10 + i}" for i in range(count)]
        self.directory = directory.resolve()
        self._state = self.directory / "machines"
        self._inits: dict[str, subprocess.Popen[str]] = {}
        self._wires: dict[int, subprocess.Popen[bytes]] = {}
        self._commands: list[Command] = []

    def __enter__(self) -> Self:
        try:
            self._state.mkdir(parents=True)
            self._write_names()
            self._start_init("switch")
            self._in_switch("ip link add br0 type bridge")
            self._in_switch("ip link set br0 up")
            for i in range(len(self.names)):
                self.boot(i)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        for process in [*self._wires.values(), *self._inits.values()]:
            process.kill()
        for process in [*self._wires.values(), *self._inits.values()]:
            process.wait(PATIENCE)
            if process.stdin:
                process.stdin.close()
        for command in self._commands:
            command._process.wait(PATIENCE)

    # -- commands ---------------------------------------------------------------------------------

    def start(
        self,
        machine: int,
        command: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Command:
        """Start `command` there; `env` is added to this process's environment."""
        file = self._state / f"{self.names[machine]}.{len(self._commands)}.out"
        inside = [
            "nsenter",
            "-t",
            str(self._pid(self.names[machine])),
            "-n",
            "-u",
            "-m",
            "-i",
            "-p",
        ]
        variables = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        with file.open("wb") as output:
            process = subprocess.Popen(
                [*inside, f"--wd={cwd or self.directory}", "--", *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=variables | (env or {}),
                start_new_session=True,  # ^C is for pytest, which then ends them all
            )
        self._commands.append(Command(process, file, self.names[machine]))
        # So that a signal sent from now on finds it.
        wait_until(lambda: process.poll() is not None or children(process.pid), PATIENCE)
        return self._commands[-1]

    def run(
        self,
        machine: int,
        command: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        seconds: float = 120,
    ) -> Command:
        """Run `command` there to its end, whatever its exit code."""
        started = self.start(machine, command, env, cwd)
        started.wait(seconds)
        return started

    def check(self, machine: int, command: Sequence[str | Path], seconds: float = 120) -> str:
        """The output of a command that must succeed."""
        done = self.run(machine, command, seconds=seconds)
        assert done.returncode == 0, f"{command} on {done.machine}:\n{done.output()}"
        return done.output()

    # -- power and network ------------------------------------------------------------------------

    def boot(self, machine: int) -> None:
        name = self.names[machine]
        assert name not in self._inits, f"{name} is up"
        self._start_init(name)
        pid = self._pid(name)
        # The same hardware address each time: neighbours remember it for a minute.
        self._in_switch(
            f"ip link add p{machine} type veth peer name eth0 "
            f"address 02:00:00:00:00:{16 + machine:02x} netns {pid}"
        )
        self._in_switch(f"ip link set p{machine} master br0 up")
        _quietly(f"nsenter -t {pid} -n ip addr add {self.addresses[machine]}/24 dev eth0")
        _quietly(f"nsenter -t {pid} -n ip link set eth0 up")
        self._mount(machine, pid)
        if self._wires:
            self._plain_frames(machine)

    def power_off(self, machine: int, *, cut_first: bool = True) -> None:
        """With the link cut first nobody hears of it; else the kernel closes the connections."""
        if cut_first:
            self.cut(machine)
        process = self._inits.pop(self.names[machine])
        process.kill()
        process.wait(PATIENCE)
        assert process.stdin
        process.stdin.close()
        if not cut_first:
            time.sleep(0.1)  # the last frames are on their way
        self._cut_wire(machine)
        # Connections nobody has closed would keep the namespace, and with it the link, for minutes.
        self._try_in_switch(f"ip link del p{machine}")
        assert self._try_in_switch(f"ip link show p{machine}") != 0

    def is_up(self, machine: int) -> bool:
        return self.names[machine] in self._inits

    def cut(self, machine: int) -> None:
        self._in_switch(f"ip link set p{machine} down")

    def mend(self, machine: int) -> None:
        self._cut_wire(machine)
        self._in_switch(f"ip link set p{machine} master br0 up")

    def wire(
        self,
        machine: int,
        *,
        delay: float = 0,
        loss: float = 0,
        rate: float = 0,
        loss_from: float | None = None,
        loss_to: float | None = None,
    ) -> None:
        """Between the machine and the switch: seconds one way, share lost, bytes per second.

        `loss_from` and `loss_to` lose frames from or to the machine only.
        """
        self.mend(machine)
        for other in range(len(self.names)):
            if self.is_up(other):
                self._plain_frames(other)
        near, far = f"w{machine}", f"v{machine}"
        self._in_switch(f"ip link set p{machine} nomaster")
        self._in_switch(f"ip link add {near} type veth peer name {far}")
        self._in_switch(f"ip link set {far} master br0 up")
        self._in_switch(f"ip link set {near} up")
        losses = [loss if one is None else one for one in (loss_from, loss_to)]
        words = [f"p{machine}", near, *map(str, [delay, *losses, rate])]
        self._wires[machine] = subprocess.Popen(
            ["nsenter", "-t", str(self._pid("switch")), "-n", "--", sys.executable, WIRE, *words],
            stdin=subprocess.PIPE,  # its end is the wire's
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._wires[machine].stdout.read(1) == b"+", "the wire does not carry"  # type: ignore[union-attr]

    def tmp(self, machine: int) -> Path:
        return self._state / self.names[machine] / "tmp"

    # -- how it is made ---------------------------------------------------------------------------

    def _write_names(self) -> None:
        lines = ["127.0.0.1 localhost"]
        for address, name in zip(self.addresses, self.names, strict=True):
            # torch also asks for the names of addresses in IPv6's spelling.
            lines += [f"{address} {name}", f"::ffff:{address} {name}"]
        (self._state / "hosts").write_text("\n".join(lines) + "\n")
        (self._state / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
        (self._state / "resolv.conf").write_text("")

    def _start_init(self, name: str) -> None:
        self._inits[name] = subprocess.Popen(
            [*MACHINE, "bash", "-c", INIT.format(name=name)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        output = self._inits[name].stdout
        assert output and output.readline() == "up\n", f"{name} does not start"
        output.close()

    def _pid(self, name: str) -> int:
        """Of the machine's first process."""
        assert name in self._inits, f"{name} is off"
        return next(iter(children(self._inits[name].pid)))

    def _mount(self, machine: int, pid: int) -> None:
        own = self.tmp(machine)
        own.mkdir(parents=True, exist_ok=True)
        own.chmod(0o1777)
        lines = []
        # What all share stays visible where it is, also if that is below /tmp.
        for path in dict.fromkeys([self.directory, REPOSITORY, Path(sys.prefix).resolve()]):
            if path.is_relative_to("/tmp"):
                seen = own / path.relative_to("/tmp")
                seen.mkdir(parents=True, exist_ok=True)
                lines.append(f"mount --bind '{path}' '{seen}'")
        lines.append(f"mount --rbind '{own}' /tmp")
        for file in ("hosts", "nsswitch.conf", "resolv.conf"):
            lines.append(f"mount --bind '{self._state / file}' /etc/{file}")
        lines += ["mount -t tmpfs -o mode=1777 tmpfs /dev/shm", "mount -t tmpfs tmpfs /run"]
        _quietly(["nsenter", "-t", str(pid), "-m", "sh", "-ec", "\n".join(lines)])

    def _plain_frames(self, machine: int) -> None:
        """Whole checksums and no frames larger than a wire carries."""
        inside = f"nsenter -t {self._pid(self.names[machine])} -n"
        _quietly(f"{inside} ethtool -K eth0 tx off tso off gso off gro off")

    def _cut_wire(self, machine: int) -> None:
        if wire := self._wires.pop(machine, None):
            wire.kill()
            wire.wait(PATIENCE)
            for pipe in (wire.stdin, wire.stdout):
                if pipe:
                    pipe.close()
            self._try_in_switch(f"ip link del w{machine}")

    def _in_switch(self, command: str) -> None:
        _quietly(f"nsenter -t {self._pid('switch')} -n {command}")

    def _try_in_switch(self, command: str) -> int:
        words = f"nsenter -t {self._pid('switch')} -n {command}".split()
        return subprocess.run(words, capture_output=True).returncode


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def wait_until(condition, seconds: float, what=lambda: "it") -> None:  # type: ignore[no-untyped-def]
    """Wait until `condition()` holds; `what()` says what was waited for."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what()}"
        time.sleep(0.02)


def _quietly(command: str | list[str]) -> None:
    words = command.split() if isinstance(command, str) else command
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stdout.strip()}")
