"""The machines of a run: which rank is on which, and what the kernel knows of the links between.

Every TCP connection that gloo, NCCL's sockets or the store keep open is a socket of this process,
and the kernel tells of each (`TCP_INFO`, tcp(7)) its round trip, how many segments went and how
many had to be sent again. Reading that costs microseconds and sends nothing. RDMA has no sockets:
there only the preflight's own messages tell.
"""

from __future__ import annotations

import ipaddress
import json
import os
import platform
import socket
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite
from pathlib import Path
from statistics import median

from fourfold.mesh import Mesh

# Where in `struct tcp_info` of linux/tcp.h: round trip (us), sent again, segments out, segments in,
# data segments out, received out of order (Linux 5.4 and newer); of 64 bits, bytes acknowledged,
# and microseconds busy sending, of these held up by the receiver and by our own buffer.
_INFO_BYTES = 232
_ROUND_TRIP, _SENT_AGAIN, _OUT, _IN, _DATA_OUT, _OUT_OF_ORDER = 68, 100, 136, 140, 156, 224
_ACKNOWLEDGED, _BUSY, _BY_RECEIVER, _BY_BUFFER = 120, 168, 176, 184
# Fewer segments than this say nothing about a link.
FEW_SEGMENTS = 50
# And fewer bytes nothing about its rate: small messages wait for each other.
FEW_BYTES = 1 << 18


@dataclass(frozen=True)
class RankMachines:
    """The machine of every rank, by rank; machines are numbered in the order of their ranks."""

    hosts: tuple[str, ...]  # of each machine; told apart by a number where two have one name
    of_rank: tuple[int, ...]
    kernels: tuple[str, ...]  # of each machine: containers of one machine share its processors
    addresses: tuple[frozenset[str], ...]  # of each machine

    def __len__(self) -> int:
        return len(self.hosts)

    def host_of(self, rank: int) -> str:
        return self.hosts[self.of_rank[rank]]

    def named(self, rank: int) -> str:
        return f"rank {rank} on {self.host_of(rank)}"

    @cached_property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """Of each machine."""
        each: list[list[int]] = [[] for _ in self.hosts]
        for rank, machine in enumerate(self.of_rank):
            each[machine].append(rank)
        return tuple(map(tuple, each))

    @cached_property
    def by_address(self) -> dict[str, int]:
        return {
            address: number for number, several in enumerate(self.addresses) for address in several
        }


def find_machines(mesh: Mesh) -> RankMachines:
    """Where the ranks are; a collective."""
    own = {
        "host": platform.node(),
        "kernel": _read("/proc/sys/kernel/random/boot_id") or platform.node(),
        "network": _network_namespace(),
        "addresses": sorted({link.own for link in connections()}),
    }
    return machines_of([json.loads(text) for text in mesh.gather(json.dumps(own))])


def machines_of(rows: Sequence[dict[str, object]]) -> RankMachines:
    """From what each rank said of itself."""
    numbers: dict[tuple[object, ...], int] = {}
    of_rank, addresses = list[int](), defaultdict[int, set[str]](set)
    for row in rows:
        identity = (row["host"], row["kernel"], row["network"])
        number = numbers.setdefault(identity, len(numbers))
        of_rank.append(number)
        listed = row["addresses"]
        assert isinstance(listed, list)
        addresses[number].update(map(str, listed))
    names = [str(identity[0]) for identity in numbers]
    hosts = [
        name if names.count(name) == 1 else f"{name}#{number}" for number, name in enumerate(names)
    ]
    return RankMachines(
        tuple(hosts),
        tuple(of_rank),
        tuple(str(identity[1]) for identity in numbers),
        tuple(frozenset(addresses[number]) for number in range(len(names))),
    )


def _network_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


# -- connections ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Connection:
    """A TCP connection of this process, to another address than its own; counts since it began."""

    inode: int
    own: str
    peer: str
    round_trip_seconds: float
    segments: int
    data_sent: int  # segments
    lost: int  # segments sent again, and those received out of order
    sent_bytes: int = 0  # that the other has acknowledged
    sending_seconds: float = 0.0  # with something to send, and nothing but the network in the way


def connections() -> Iterator[Connection]:
    """All that are open; none where the system does not tell."""
    if not sys.platform.startswith("linux"):
        return
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                with socket.socket(fileno=os.dup(int(name))) as held:
                    if (found := _connection(held, int(target[8:-1]))) is not None:
                        yield found
        except OSError:
            continue  # closed meanwhile, or of a kind that has no peer


def _connection(held: socket.socket, inode: int) -> Connection | None:
    if held.type != socket.SOCK_STREAM or held.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    own, peer = _address(held.getsockname()[0]), _address(held.getpeername()[0])
    if own == peer:
        return None
    info = held.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    return parse_info(info, inode, own, peer)


def parse_info(info: bytes, inode: int = 0, own: str = "", peer: str = "") -> Connection:
    """From `struct tcp_info`; an older kernel gives fewer bytes, and the rest counts as zero."""
    told = info.ljust(_INFO_BYTES, b"\0")

    def number(place: int) -> int:
        (value,) = struct.unpack_from("=I", told, place)
        return int(value)

    def large(place: int) -> int:
        (value,) = struct.unpack_from("=Q", told, place)
        return int(value)

    sending = large(_BUSY) - large(_BY_RECEIVER) - large(_BY_BUFFER)
    return Connection(
        inode,
        own,
        peer,
        number(_ROUND_TRIP) / 1e6,
        number(_OUT) + number(_IN),
        number(_DATA_OUT),
        number(_SENT_AGAIN) + number(_OUT_OF_ORDER),
        large(_ACKNOWLEDGED),
        max(sending, 0) / 1e6,
    )


def _address(text: str) -> str:
    """An IPv4 address that travels as IPv6 is the same machine's."""
    try:
        plain = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return text
    mapped = getattr(plain, "ipv4_mapped", None)
    return str(mapped or plain)


class LinkWatch:
    """What this rank's connections to each other machine did since the last look."""

    def __init__(self, machines: RankMachines) -> None:
        self.machines = machines
        self._before: dict[int, Connection] = {}
        self.look()

    def look(self) -> list[float]:
        """Round trip in seconds to every machine, then the share of segments lost (sent again, or
        received out of order), then seconds to send a byte; nan where too little was sent."""
        size = len(self.machines)
        trips = [inf] * size
        segments, lost = [0] * size, [0] * size
        sent, sending = [0] * size, [0.0] * size
        now = {each.inode: each for each in connections()}
        for inode, each in now.items():
            machine = self.machines.by_address.get(each.peer)
            if machine is None:
                continue
            before = self._before.get(inode)
            moved = each.segments - (before.segments if before else 0)
            if each.data_sent > (before.data_sent if before else 0):
                trips[machine] = min(trips[machine], each.round_trip_seconds)
            segments[machine] += moved
            lost[machine] += each.lost - (before.lost if before else 0)
            sent[machine] += each.sent_bytes - (before.sent_bytes if before else 0)
            sending[machine] += each.sending_seconds - (before.sending_seconds if before else 0.0)
        self._before = now
        return [
            *(trip if isfinite(trip) else float("nan") for trip in trips),
            *(
                again / count if count >= FEW_SEGMENTS else float("nan")
                for again, count in zip(lost, segments)
            ),
            *(
                seconds / count if count >= FEW_BYTES else float("nan")
                for seconds, count in zip(sending, sent)
            ),
        ]


def links_of(
    rows: Sequence[Sequence[float]], machines: RankMachines
) -> dict[tuple[int, int], float]:
    """One figure for each link that was used, from each rank's figures for every machine: of the
    ranks at its two ends the largest is typical of a link, so the middle of each end's counts."""
    views: dict[tuple[int, int], dict[int, list[float]]] = {}
    for rank, row in enumerate(rows):
        here = machines.of_rank[rank]
        for there, value in enumerate(row):
            if there != here and isfinite(value):
                link = (min(here, there), max(here, there))
                views.setdefault(link, defaultdict(list))[here].append(value)
    return {link: max(median(values) for values in ends.values()) for link, ends in views.items()}
