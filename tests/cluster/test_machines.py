"""The machines of the other tests: what they share, what they do not, and that nothing is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.machines import REPOSITORY, Machines, children, wait_until

needs_ethtool = pytest.mark.skipif(
    shutil.which("ethtool") is None, reason="not installed: ethtool; `make test-cluster` does that"
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with Machines(2, tmp_path_factory.mktemp("pair")) as machines:
        yield machines


# Prints a line when it listens and the time from the first byte to the last of what it receives.
LISTEN = """
import socket, time
server = socket.create_server(("", 5000)); print("listening", flush=True)
with server.accept()[0] as peer:
    peer.settimeout(20)
    while byte := peer.recv(65536): peer.sendall(byte)
"""
# Round trips of one byte, in seconds.
ASK = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000), 20) as peer:
    for _ in range(5):
        began = time.monotonic(); peer.sendall(b"x"); assert peer.recv(1) == b"x"
        print(time.monotonic() - began)
"""


def round_trips(machines: Machines) -> list[float]:
    server = machines.start(1, [sys.executable, "-c", LISTEN])
    server.until("listening")
    asked = machines.run(0, [sys.executable, "-c", ASK, "node1"])
    assert asked.returncode == 0, asked.output()
    assert server.wait(20) == 0
    return [float(line) for line in asked.output().split()]


def test_a_machine_has_its_own_name_address_processes_and_memory(pair: Machines) -> None:
    assert pair.check(1, ["hostname"]) == "node1\n"
    assert "10.77.0.11/24" in pair.check(1, ["ip", "-o", "addr"])
    assert pair.check(0, ["ip", "route", "show", "default"]) == ""
    assert pair.check(0, ["sh", "-c", "ls -d /proc/[0-9]*"]).count("/proc/") < 10
    for place in ("/tmp", "/dev/shm", "/run"):
        pair.check(0, ["touch", f"{place}/of-node0"])
        assert pair.run(1, ["test", "-e", f"{place}/of-node0"]).returncode == 1
        assert not Path(place, "of-node0").exists()
    assert (pair.tmp(0) / "of-node0").exists()


def test_they_share_the_directory_and_the_code(pair: Machines) -> None:
    pair.check(0, ["sh", "-c", f"echo here > {pair.directory}/note"])
    assert pair.check(1, ["cat", pair.directory / "note"]) == "here\n"
    code = "import fourfold; print(fourfold.__file__)"
    assert str(REPOSITORY) in pair.check(1, [sys.executable, "-c", code])


def test_a_signal_reaches_the_command(pair: Machines) -> None:
    told = pair.start(
        0, ["sh", "-c", "trap 'exit 7' USR1; echo ready; while :; do sleep .05; done"]
    )
    told.until("ready")
    told.send_signal(signal.SIGUSR1)
    assert told.wait(20) == 7
    killed = pair.start(0, ["sleep", "60"])
    killed.send_signal(signal.SIGKILL)
    assert killed.wait(20) == -signal.SIGKILL


@needs_ethtool
def test_a_slow_link_is_slow_and_a_mended_one_is_not(pair: Machines) -> None:
    assert max(round_trips(pair)) < 0.05
    pair.wire(1, delay=0.05)
    assert min(round_trips(pair)) >= 0.1
    pair.mend(1)
    assert min(round_trips(pair)) < 0.05


@needs_ethtool
def test_one_way_it_hears_but_is_not_heard(pair: Machines) -> None:
    pair.wire(1, loss_from=1.0)
    # Only addressed frames can show it: without an answer to ARP none would be sent.
    lasting = "ip neigh replace 10.77.0.11 lladdr 02:00:00:00:00:11 dev eth0"
    pair.check(0, lasting.split())
    listen = (
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(20);"
        "s.bind(('', 5001)); print('listening', flush=True); print(s.recvfrom(9)[0])"
    )
    say = "import socket, sys; socket.socket(2, 2).sendto(b'hello', (sys.argv[1], 5001))"
    heard = pair.start(1, [sys.executable, "-c", listen])
    heard.until("listening")
    pair.check(0, [sys.executable, "-c", say, "10.77.0.11"])
    assert heard.wait(30) == 0, heard.output()
    deaf = pair.start(0, [sys.executable, "-c", listen.replace("(20)", "(1)")])
    deaf.until("listening")
    pair.run(1, [sys.executable, "-c", say, "10.77.0.10"])
    assert deaf.wait(20) == 1 and "TimeoutError" in deaf.output()
    pair.mend(1)
    pair.check(0, ["ip", "neigh", "flush", "dev", "eth0"])
    assert len(round_trips(pair)) == 5


WAIT = "import socket; socket.create_connection(('node1', 5000)).recv(1); print('closed')"


@pytest.mark.parametrize("cut_first", [False, True])
def test_power_off_and_on(tmp_path: Path, cut_first: bool) -> None:
    with Machines(2, tmp_path) as machines:
        machines.check(1, ["touch", "/tmp/kept", "/run/lost"])
        server = machines.start(1, [sys.executable, "-c", LISTEN])
        server.until("listening")
        client = machines.start(0, [sys.executable, "-c", WAIT])
        wait_until(lambda: "ESTAB" in machines.check(0, ["ss", "-tn"]), 20)
        machines.power_off(1, cut_first=cut_first)
        assert server.wait(20) == -signal.SIGKILL
        if cut_first:
            time.sleep(0.5)
            assert client.returncode is None
        else:
            assert client.wait(20) == 0 and client.output() == "closed\n"
        machines.boot(1)
        machines.check(1, ["test", "-e", "/tmp/kept"])
        assert machines.run(1, ["test", "-e", "/run/lost"]).returncode == 1
        assert len(round_trips(machines)) == 5


LEAVE = """
import sys, time
from pathlib import Path
from cluster.machines import Machines
with Machines(2, Path(sys.argv[1])) as machines:
    machines.start(1, ["setsid", "sleep", "54321"])
    machines.wire(1, delay=0.01)
    print("up", flush=True)
    time.sleep(600)
"""


@needs_ethtool
def test_nothing_is_left_when_the_tests_are_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", LEAVE, tmp_path],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY / "tests")},
    )
    assert parent.stdout and parent.stdout.readline() == b"up\n"
    theirs = [parent.pid]
    for pid in theirs:
        theirs += children(pid)
    assert len(theirs) >= 8
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in theirs), 20, lambda: theirs)
