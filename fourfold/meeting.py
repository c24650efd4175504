"""Where the ranks of a run find each other: torch's store, under a name of this start of the run.

A store may outlive the ranks that met in it: torchrun keeps one over restarts. Ranks that are
started again must not find the addresses of their predecessors, and no count that each machine
keeps for itself tells them apart: a machine that was away has counted less. So rank 0 makes up a
token, and gives it to each of the others under a name that only this one has asked under:

    rank k    join/k = a word of its own          rank 0    reads join/k, answers under that word
              waits for the answer                          until every rank has confirmed it

Our own supervisors bring a token of their rendezvous along (FOURFOLD_MEETING). A rank that waits
says for whom, after a few seconds and then every minute.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed import DistNetworkError

from fourfold import heartbeat
from fourfold.errors import RunError, UserError, say

FIRST_WORD_SECONDS = 3.0
NEXT_WORD_SECONDS = 60.0
CONNECT_SECONDS = 5.0
LOOK_SECONDS = 0.05

# Set by our supervisors, and by `join_round` for what is started later: HOST:PORT/TOKEN.
MEETING = "FOURFOLD_MEETING"
STORE_FILE = "FOURFOLD_STORE"

# A store that this process serves lives as long as it does.
_served: list[TCPStore] = []


class Patience:
    """Says what is waited for, after a few seconds and then every minute."""

    def __init__(self, tell: Callable[[str], None] | None = None) -> None:
        self._tell = tell or (lambda line: say(line, sys.stderr))
        self._next = time.monotonic() + FIRST_WORD_SECONDS
        self._last = ""

    def waiting(self, what: str) -> None:
        now = time.monotonic()
        if now >= self._next or (self._last and what != self._last):
            self._next, self._last = now + NEXT_WORD_SECONDS, what
            self._tell(f"fourfold: waiting for {what}")


def open_store(rank: int, size: int, timeout_seconds: float) -> Store:
    """The store in which the ranks of this start meet, and no others."""
    if path := os.environ.get(STORE_FILE):
        return FileStore(path, size)
    if MEETING not in os.environ:
        join_round(rank, size, timeout_seconds)
    address, _, token = os.environ[MEETING].rpartition("/")
    host, _, port = address.rpartition(":")
    store = reach(host, int(port), timeout_seconds, f"the store at {address}")
    store.set_timeout(timedelta(seconds=timeout_seconds))
    return PrefixStore(f"fourfold/{token}", store)


def join_round(rank: int, size: int, timeout_seconds: float) -> None:
    """Agree on a token with the others at the launcher's address, and note it for `open_store`."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise UserError(
                f"WORLD_SIZE={size} is set but {name} is not; start through fourfold train "
                "--nproc, torchrun or srun, which set both"
            )
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        _served.append(serve(host, port))
    where = f"{host}:{port}"
    store = reach(host, port, timeout_seconds, f"rank 0 at {where}")
    meeting = PrefixStore("fourfold/rounds", store)
    wait = _give_token if rank == 0 else _get_token
    os.environ[MEETING] = f"{where}/{wait(meeting, rank, size, timeout_seconds, where)}"


def serve(host: str, port: int) -> TCPStore:
    """A store of this process, for the others to reach."""
    try:
        return TCPStore(host, port, is_master=True, wait_for_workers=False, multi_tenant=True)
    except DistNetworkError as error:
        raise UserError(
            f"port {port} of {host} cannot be listened on ({_first_line(error)}); another run may "
            "use it: choose another port"
        ) from error


def reach(
    host: str,
    port: int,
    timeout_seconds: float,
    what: str,
    patience: Patience | None = None,
    given_up: Callable[[], bool] = lambda: False,
) -> TCPStore:
    """A connection to the store of another process, which may not be there yet."""
    patience, deadline = patience or Patience(), time.monotonic() + timeout_seconds
    while True:
        started = time.monotonic()
        seconds = min(CONNECT_SECONDS, timeout_seconds)
        try:
            # First a plain knock at the door: torch reports each failure with pages of C++ frames.
            socket.create_connection((host, port), timeout=seconds).close()
            limit = timedelta(seconds=seconds)
            return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
        except (OSError, RuntimeError) as error:
            if time.monotonic() > deadline or given_up():
                raise RunError(
                    f"{what} could not be reached within {timeout_seconds:g} s "
                    f"({_first_line(error)}); is it started, and does the network let it through?"
                ) from error
        patience.waiting(what)
        time.sleep(max(0.0, 0.5 - (time.monotonic() - started)))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]


def _get_token(store: Store, rank: int, size: int, seconds: float, where: str) -> str:
    word, patience, deadline = secrets.token_hex(8), Patience(), time.monotonic() + seconds
    store.set(f"join/{rank}", word)
    while not store.check([f"answer/{word}"]):
        if time.monotonic() > deadline:
            raise RunError(f"rank {rank} waited {seconds:g} s for rank 0 at {where}, in vain")
        patience.waiting(f"rank 0 at {where}")
        time.sleep(LOOK_SECONDS)
    token = store.get(f"answer/{word}").decode()
    store.set(f"here/{token}/{rank}", "")
    return token


def _give_token(store: Store, rank: int, size: int, seconds: float, where: str) -> str:
    token, patience, deadline = secrets.token_hex(8), Patience(), time.monotonic() + seconds
    missing, answered = set(range(1, size)), set[bytes]()
    while True:
        for other in sorted(missing):
            if store.check([f"join/{other}"]):
                word = store.get(f"join/{other}")
                if word not in answered:  # it may be of a predecessor, and another one follow
                    answered.add(word)
                    store.set(f"answer/{word.decode()}", token)
                if store.check([f"here/{token}/{other}"]):
                    missing.remove(other)
                    store.delete_key(f"join/{other}")
        if not missing:
            return token
        names = ", ".join(map(str, sorted(missing)[:8])) + (" ..." if len(missing) > 8 else "")
        if time.monotonic() > deadline:
            raise RunError(
                f"{len(missing)} of {size} ranks did not come to {where} within {seconds:g} s: "
                f"rank {names}"
            )
        patience.waiting(f"{len(missing)} of {size} ranks at {where}: rank {names}")
        time.sleep(LOOK_SECONDS)


class Meetings:
    """Where ranks wait for each other for as long as any of them makes progress.

    Progress is known from their heartbeats; waiting ranks send none. A rank that is lost, or hangs,
    is noticed after `timeout_seconds` without a heartbeat.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_seconds: float) -> None:
        self._store = PrefixStore("meetings", store)
        self._rank = rank
        self._size = size
        self._timeout_seconds = timeout_seconds
        self._look_seconds = min(10.0, timeout_seconds / 8)
        self._number = 0
        heartbeat.relay(self._tell_of_progress, self._look_seconds)

    def meet(self) -> None:
        """Return when every rank is here."""
        self._number += 1
        self._store.set(self._key(self._rank), "here")
        if self._store.add(self._key("arrived"), 1) == self._size:
            self._store.set(self._key("all"), "here")
        else:
            self._wait()
        # All are here, so all have left the meeting before.
        with suppress(RuntimeError):
            for what in (self._rank, *(("arrived", "all") if self._rank == 0 else ())):
                self._store.delete_key(self._key(what, self._number - 1))

    def _wait(self) -> None:
        heard, heard_at = self._progress(), time.monotonic()
        while True:
            try:
                self._store.wait([self._key("all")], timedelta(seconds=self._look_seconds))
                return
            except RuntimeError:
                # Not yet; or the store is gone, which the next question to it raises.
                before, heard = heard, self._progress()
            if heard != before:
                heard_at = time.monotonic()
            elif time.monotonic() - heard_at > self._timeout_seconds:
                raise RunError(
                    f"rank {self._rank} timed out waiting for rank {self._missing()}: no sign of "
                    f"life for {self._timeout_seconds:g} s"
                )

    def _missing(self) -> str:
        keys = {rank: self._key(rank) for rank in range(self._size)}
        return ", ".join(str(rank) for rank, key in keys.items() if not self._store.check([key]))

    def _progress(self) -> int:
        return self._store.add("progress", 0)

    def _tell_of_progress(self) -> None:
        # A store that is gone took the others along; that is not for a sign of life to tell.
        with suppress(RuntimeError):
            self._store.add("progress", 1)

    def _key(self, what: str | int, number: int | None = None) -> str:
        return f"{self._number if number is None else number}/{what}"
