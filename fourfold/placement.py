"""Where the ranks of a run are: on which machines, in which order, and how gloo reaches each.

Asked and answered through the store, before the first process group. A model-parallel group that
spans machines sends its activations over the network at every layer; a launcher that deals ranks
out to machines in turn (srun --distribution=cyclic) does that to all of them. Both are said.

Gloo listens at the address that the machine's own name resolves to, and on many machines that is
the loopback (Debian writes 127.0.1.1 into /etc/hosts), where no other machine finds it: it then
fails after its whole time limit, in words that name no machine. Here such a machine takes the
interface that leads to the others, and one neighbour of each tries to reach it.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Store

from fourfold.errors import UserError

INTERFACE = "GLOO_SOCKET_IFNAME"
CONNECT_SECONDS = 10.0
_SIOCGIFADDR = 0x8915  # linux/sockios.h


@dataclass(frozen=True)
class RankPlace:
    """Where a rank is. `address` is the one gloo listens at, None where it finds none; `route` the
    one this machine has on its way to rank 0."""

    host: str
    boot: str
    address: str | None
    route: str | None
    chosen: str | None  # an interface that the user named
    gpu: int  # a number of its own for each GPU, 0 for none


@dataclass(frozen=True)
class Placement:
    """The host of every rank, and what is to be said about it."""

    hosts: list[str]
    notices: list[str]
    warnings: list[str]


def place_ranks(
    store: Store,
    rank: int,
    size: int,
    model_parallel_groups: Sequence[Sequence[int]],
    gpu: int = 0,
) -> Placement:
    """Learn where all ranks are and see that gloo can reach them; every rank must call this."""
    places = _exchange(store, "place", rank, size, asdict(_own_place(gpu)))
    named = [RankPlace(**place) for place in places]
    if problem := same_gpu([place.gpu for place in named]):
        raise UserError(problem)
    machines: dict[tuple[str, str], list[int]] = {}
    for other, place in enumerate(named):
        machines.setdefault((place.host, place.boot), []).append(other)
    hosts = [place.host for place in named]
    if len(machines) == 1:
        return Placement(hosts, [], [])
    if len({host for host, _ in machines}) < len(machines):  # all of them `localhost`, say
        hosts = [f"{place.host} (boot {place.boot[:8]})" for place in named]
    said = _exchange(store, "interface", rank, size, asdict(_choose_interface(named, rank)))
    listening = [Listening(**one) for one in said]
    for one in listening:
        if one.problem is not None:
            raise UserError(one.problem)
    _check_reachable(store, rank, [ranks[0] for ranks in machines.values()], listening)
    firsts = [listening[ranks[0]] for ranks in machines.values()]
    lines = [
        f"{hosts[ranks[0]]} ({_spans(ranks)} at {first.address})"
        for first, ranks in zip(firsts, machines.values())
    ]
    chosen = [first.notice for first in firsts if first.notice is not None]
    return Placement(
        hosts,
        [f"{len(machines)} machines: {', '.join(lines)}"],
        [*chosen, *spread_groups(hosts, model_parallel_groups)],
    )


def spread_groups(hosts: Sequence[str], groups: Sequence[Sequence[int]]) -> list[str]:
    """What is to be said of model-parallel groups whose ranks are on several machines."""
    spread = [group for group in groups if len({hosts[rank] for rank in group}) > 1]
    if not spread:
        return []
    first = spread[0]
    names = list(dict.fromkeys(hosts[rank] for rank in first))
    shown = " and ".join(names) if len(names) <= 4 else f"{', '.join(names[:4])} and others"
    sentence = (
        f"{len(spread)} of {len(groups)} model-parallel groups span machines (ranks "
        f"{', '.join(map(str, first))} are on {shown}), so every layer waits for the network; "
    )
    if changes_machine_and_returns(hosts):
        return [
            sentence + "the launcher dealt out ranks to the machines in turn: have it fill one "
            "machine after the other (srun --distribution=block, mpirun --map-by slot)"
        ]
    most = max(hosts.count(host) for host in set(hosts))
    return [
        sentence + f"choose Distributed.mp_degree so that groups of {len(first)} ranks fit the "
        f"{most} of a machine"
    ]


def changes_machine_and_returns(hosts: Sequence[str]) -> bool:
    """Whether the ranks of some machine do not follow each other."""
    changes = [host for i, host in enumerate(hosts) if i == 0 or hosts[i - 1] != host]
    return len(changes) > len(set(changes))


def same_gpu(gpus: Sequence[int]) -> str | None:
    """Why ranks cannot work together that were given one GPU; `gpus` are their numbers, by rank."""
    first_with: dict[int, int] = {}
    for rank, gpu in enumerate(gpus):
        first = first_with.setdefault(gpu, rank)
        if gpu and first != rank:
            return (
                f"ranks {first} and {rank} have the same GPU, and each needs one of its own; give "
                "every process another one (srun --gpus-per-task=1), or all GPUs to all of them"
            )
    return None


def _exchange(
    store: Store, what: str, rank: int, size: int, own: Mapping[str, object]
) -> list[dict[str, Any]]:
    """What every rank says, by rank."""
    store.set(f"{what}/{rank}", json.dumps(own))
    said = store.multi_get([f"{what}/{other}" for other in range(size)])
    return [json.loads(text) for text in said]


def _spans(ranks: Sequence[int]) -> str:
    """`ranks 0-3`, `ranks 0, 2, 4`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


# -- gloo's interface ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Listening:
    """Where gloo of a rank will listen; `notice` where that was chosen here, `problem` where there
    is no such address."""

    host: str
    address: str
    notice: str | None = None
    problem: str | None = None


def _own_place(gpu: int) -> RankPlace:
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    chosen = os.environ.get(INTERFACE)
    address = _first_bindable(socket.gethostname())
    if chosen:
        address = _address_of(chosen.split(",")[0])
    route = _address_towards(os.environ.get("MASTER_ADDR", ""))
    return RankPlace(socket.gethostname(), boot, address, route, chosen, gpu)


def _choose_interface(places: Sequence[RankPlace], rank: int) -> Listening:
    """See that gloo listens where others can reach it, if need be by naming the interface."""
    own = places[rank]
    if own.chosen is not None:
        if own.address is None:
            problem = (
                f"{INTERFACE}={own.chosen} on {own.host}: there is no such interface with an "
                f"address; {_interfaces()}"
            )
            return Listening(own.host, "", problem=problem)
        return Listening(own.host, own.address)
    if own.address is not None and not _is_loopback(own.address):
        return Listening(own.host, own.address)
    # Whoever reached rank 0 from elsewhere has an address that others can answer to.
    towards = next(
        (other.route for other in places if other.route and not _is_loopback(other.route)), None
    )
    address = _address_towards(towards or "")
    interface = None if address is None else _interface_with(address)
    if address is None or interface is None or _is_loopback(address):
        problem = (
            f"{own.host} has no address that other machines could reach: its own name resolves to "
            f"{own.address or 'nothing'}; set {INTERFACE} there to the interface of their network "
            f"({_interfaces()})"
        )
        return Listening(own.host, "", problem=problem)
    os.environ[INTERFACE] = interface
    return Listening(
        own.host,
        address,
        f"{own.host}: its own name resolves to {own.address or 'nothing'}, where no other machine "
        f"finds it; gloo uses {interface} ({address}). Set {INTERFACE} to choose another",
    )


def _check_reachable(
    store: Store, rank: int, leaders: Sequence[int], listening: Sequence[Listening]
) -> None:
    """The first rank of each machine, its leader, connects to the next machine; a failure ends all
    ranks."""
    results = [f"reached/{leader}" for leader in leaders]
    with ExitStack() as open_until_all_have_tried:
        if rank in leaders:
            server = open_until_all_have_tried.enter_context(_listen(listening[rank]))
            store.set(f"port/{rank}", str(server.getsockname()[1]))
            following = leaders[(leaders.index(rank) + 1) % len(leaders)]
            port = int(store.get(f"port/{following}"))
            store.set(f"reached/{rank}", _try(listening[rank], listening[following], port))
        problems = store.multi_get(results)
    if found := [text.decode() for text in problems if text]:
        raise UserError(found[0])


def _listen(own: Listening) -> socket.socket:
    server = socket.socket(socket.AF_INET6 if ":" in own.address else socket.AF_INET)
    # Where it cannot be bound to, it has no port, and who tries to reach it says so.
    with suppress(OSError):
        server.bind((own.address, 0))
        server.listen()
    return server


def _try(own: Listening, other: Listening, port: int) -> str:
    """Why `other` cannot be reached from here; empty if it can."""
    try:
        socket.create_connection((other.address, port), CONNECT_SECONDS).close()
    except OSError as error:
        return (
            f"{own.host} cannot reach {other.host} at {other.address} ({error.strerror or error}), "
            f"where gloo listens there; set {INTERFACE} on {other.host} to the interface of the "
            "network that both are in, or open that network's ports"
        )
    return ""


def _first_bindable(host: str) -> str | None:
    """The address gloo takes for a name: the first that a socket can be bound to."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in found:
        with suppress(OSError), socket.socket(family, kind, protocol) as tried:
            tried.bind(address)
            return str(address[0])
    return None


def _address_towards(host: str) -> str | None:
    """The address of this machine on its way to `host`. Nothing is sent: the socket is UDP's."""
    if not host:
        return None
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as way:
                way.connect(address)
                return str(way.getsockname()[0])
    return None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _addresses() -> dict[str, str]:
    """The first address of each interface: IPv4, or else IPv6."""
    found: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, _, _, name = line.split()
            found.setdefault(name, str(ipaddress.IPv6Address(int(digits, 16))))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _address_of(interface: str) -> str | None:
    return _addresses().get(interface)


def _interface_with(address: str) -> str | None:
    return next((name for name, own in _addresses().items() if own == address), None)


def _interfaces() -> str:
    shown = [f"{name} {address}" for name, address in _addresses().items() if name != "lo"]
    return f"it has {', '.join(shown) or 'none'}"
