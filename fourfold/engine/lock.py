"""One run at a time in an output directory.

The supervisor of a run, or where there is none its rank 0, holds the file `.lock` there. It is
locked by `flock`, which processes forked later hold too, and which the kernel releases when the
last of them has ended, however it ended: a dead run keeps nobody out.

Machines of one launch may take the directory over from each other: when the network was cut, those
that go on cannot wait for a machine that nobody reaches and that may hold the file for hours. They
put another file in its place, with a higher epoch, and whoever holds the older one finds out before
it commits anything (`Claim.check`) and ends.

On a file system without such locks the file is a lease. Its holder renews it every few seconds; it
expires after `LEASE_SECONDS` without renewal, or at once if its process has ended on this machine.
At an address the lease is an object, made by a conditional put where the store has one;
a holder that finds another's name in it has lost it, and must not save any more.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import IO
from weakref import WeakValueDictionary

from fourfold import storage
from fourfold.errors import RunError, UserError

LOCK_FILE = ".lock"
# What names the launch that a process belongs to, the same on all its machines.
LAUNCH = "FOURFOLD_LAUNCH"
# What a killed run may need to be gone.
WAIT_SECONDS = 5.0
POLL_SECONDS = 0.1
LEASE_SECONDS = 120.0
RENEW_SECONDS = 15.0
# How long another process may take from finding a void lease to writing its own.
SETTLE_SECONDS = 0.5

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


class Claim:
    """The right to write into an output directory, until `release` or the end of the process."""

    def __init__(self, path: Path, file: IO[str] | None, token: str) -> None:
        self.path = path
        self._file = file  # None: a lease
        self._token = token
        self._process = os.getpid()
        self._released = threading.Event()
        self._renewing = False

    @property
    def is_held(self) -> bool:
        return not self._released.is_set()

    def check(self) -> None:
        """Before something is committed: a `RunError` if other machines have taken over."""
        try:
            # Opened, not only looked at: a network file system then asks its server.
            with self.path.open(encoding="utf-8") as now:
                if self._file is not None:
                    same = os.fstat(now.fileno()).st_ino == os.fstat(self._file.fileno()).st_ino
                else:
                    same = _read(self.path).get("token") == self._token
        except FileNotFoundError:
            return  # removed by hand; whoever takes over leaves another one
        if not same:
            raise _taken_over(self.path, _read(self.path))

    def release(self) -> None:
        """Release it; if it was inherited, only for this process."""
        if not self.is_held:
            return
        self._released.set()
        if self._process == os.getpid():
            with suppress(OSError):
                self._remove_own()
        if self._file is not None:
            self._file.close()

    def _remove_own(self) -> None:
        if _read(self.path).get("token") == self._token:
            self.path.unlink()

    def keep(self) -> None:
        """Renew a lease from now on. Not before processes are forked: it takes a thread."""
        if self._file is None and not self._renewing:
            self._renewing = True
            threading.Thread(target=self._renew, name="lease", daemon=True).start()

    def _renew(self) -> None:
        while not self._released.wait(RENEW_SECONDS):
            with suppress(OSError):
                self._touch()

    def _touch(self) -> None:
        os.utime(self.path)


class StoreClaim(Claim):
    """A lease that is an object at an address."""

    def __init__(self, path: Path, address: str, token: str, owner: str) -> None:
        super().__init__(path, None, token)
        self._address = address
        self._owner = owner
        self._lost = False

    def check(self) -> None:
        self._lost = self._lost or self._is_anothers()
        if self._lost:
            raise _taken_over(self.path, _read_object(self._address))

    def _is_anothers(self) -> bool:
        try:
            return _read_object(self._address).get("token") not in (None, self._token)
        except storage.StorageError:
            return False  # then nobody else can have it; a save will say more

    def _remove_own(self) -> None:
        if _read_object(self._address).get("token") == self._token:
            storage.remove(self._address)

    def _touch(self) -> None:
        self._lost = self._lost or self._is_anothers()
        if not self._lost:
            storage.write(self._address, self._owner.encode())


# What this process holds, or inherited from the one that forked it.
_held: WeakValueDictionary[Path, Claim] = WeakValueDictionary()


def claim(output_dir: Path) -> Claim:
    """Make the directory and keep others out of it; a `UserError` if a run is using it."""
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        path = output_dir.resolve() / LOCK_FILE
        held = _held.get(path)
        if held is None or not held.is_held:
            address = storage.address_of(path)
            if address is None:
                held = _held[path] = _lock(path) or _lease(path)
            else:
                held = _held[path] = _lease_object(path, address)
    except storage.StorageError as error:
        raise UserError(
            f"{storage.name_of(output_dir)}: a run cannot write there. {error}"
        ) from error
    except OSError as error:
        raise UserError(
            f"{output_dir}: a run cannot write there ({error.strerror or error}); choose another "
            "Engine.save_load.output_dir"
        ) from error
    return held


def _lock(path: Path) -> Claim | None:
    """By flock; None where the file system has none."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Not if it was removed before we had it: others would lock its successor.
            if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                break
        except FileNotFoundError:
            pass
        except BlockingIOError:
            if _is_of_our_launch(_read(path)):
                file.close()
                return _take_over(path)
            if time.monotonic() > deadline:
                file.close()
                raise _refusal(path) from None
            time.sleep(POLL_SECONDS)
        except OSError as error:
            file.close()
            if error.errno in NO_LOCKS:
                return None
            raise
        file.close()
    token, owner = _introduction(_next_epoch(_read(path)))
    # On a full disk the lock is held all the same. Past the file's own buffer, which would try
    # again when it is closed.
    with suppress(OSError):
        os.ftruncate(file.fileno(), 0)
        os.write(file.fileno(), owner.encode())
    return Claim(path, file, token)


def _take_over(path: Path) -> Claim:
    """From a process of the same launch, which may not be reachable: by a file in its place."""
    token, owner = _introduction(_next_epoch(_read(path)))
    aside = path.with_name(f"{LOCK_FILE}.{token}")
    file = aside.open("a+", encoding="utf-8")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.write(file.fileno(), owner.encode())
    aside.replace(path)
    return Claim(path, file, token)


def _taken_over(path: Path, owner: dict[str, object]) -> RunError:
    return RunError(
        f"{storage.name_of(path.parent)} was taken over by process {owner.get('pid')} on "
        f"{owner.get('host')} (epoch {owner.get('epoch')}, since {owner.get('started')}) "
        f"while {socket.gethostname()} was cut off; this process ends and writes nothing"
    )


def _is_of_our_launch(owner: dict[str, object]) -> bool:
    launch = os.environ.get(LAUNCH)
    return launch is not None and owner.get("launch") == launch


def _next_epoch(owner: dict[str, object]) -> int:
    epoch = owner.get("epoch")
    return 1 + (epoch if isinstance(epoch, int) else 0)


def _lease(path: Path) -> Claim:
    deadline = time.monotonic() + WAIT_SECONDS
    token, owner = _introduction(_next_epoch(_read(path)))
    temporary = path.with_name(f"{LOCK_FILE}.{token}")
    try:
        while True:
            temporary.write_text(owner, encoding="utf-8")
            if _is_of_our_launch(_read(path)) or _is_void(path, temporary.stat().st_mtime):
                break
            if time.monotonic() > deadline:
                raise _refusal(path)
            time.sleep(POLL_SECONDS)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    # Of two that found it void, the last to write has it.
    time.sleep(SETTLE_SECONDS)
    if _read(path).get("token") != token:
        raise _refusal(path)
    return Claim(path, None, token)


def _lease_object(path: Path, address: str) -> Claim:
    deadline = time.monotonic() + WAIT_SECONDS
    before = _read_object(address)
    token, owner = _introduction(_next_epoch(before))
    while not storage.create(address, owner.encode()):
        if _is_of_our_launch(before) or _is_void_object(address, token):
            storage.write(address, owner.encode())
            # Of two that found it void, the last to write has it.
            time.sleep(2 * SETTLE_SECONDS)
            break
        if time.monotonic() > deadline:
            break
        time.sleep(SETTLE_SECONDS)
    if _read_object(address).get("token") != token:
        raise _refusal(path)
    return StoreClaim(path, address, token, owner)


def _is_void_object(address: str, token: str) -> bool:
    owner = _read_object(address)
    if owner.get("token") == token:
        return True  # ours, by a put whose answer was lost
    place, _, name = address.rpartition("/")
    probe = f"{name}.{token}"
    storage.write(f"{place}/{probe}", b"")
    seen = storage.children(place)
    storage.remove(f"{place}/{probe}")
    if name not in seen or probe not in seen:
        return False  # it changes; look again
    return _has_ended(owner, (seen[probe].changed_ns - seen[name].changed_ns) / 1e9)


def _is_void(path: Path, now: float) -> bool:
    """`now` is the file system's time, whose clock may not be ours."""
    try:
        renewed = path.stat().st_mtime
    except FileNotFoundError:
        return True
    return _has_ended(_read(path), now - renewed)


def _has_ended(owner: dict[str, object], silent_seconds: float) -> bool:
    pid = owner.get("pid")
    if owner.get("host") == socket.gethostname() and isinstance(pid, int):
        try:
            os.kill(pid, 0)
        except (ProcessLookupError, OverflowError):
            return True
        except PermissionError:
            pass
    return not owner or silent_seconds > LEASE_SECONDS


def _introduction(epoch: int) -> tuple[str, str]:
    """A token of our own, and what the file says about us."""
    token = secrets.token_hex(8)
    owner = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": datetime.now().isoformat(sep=" ", timespec="seconds"),
        "token": token,
        "launch": os.environ.get(LAUNCH),
        "epoch": epoch,
    }
    return token, json.dumps(owner)


def _read(path: Path) -> dict[str, object]:
    """What the holder says about itself; empty if it cannot be read."""
    try:
        return _parsed(path.read_bytes())
    except OSError:
        return {}


def _read_object(address: str) -> dict[str, object]:
    try:
        return _parsed(storage.read(address))
    except storage.NotThereError:
        return {}


def _parsed(content: bytes) -> dict[str, object]:
    try:
        owner = json.loads(content[:4096])
    except (ValueError, RecursionError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _said_owner(owner: dict[str, object]) -> str:
    if not owner:
        return "another process"
    return f"process {owner.get('pid')} on {owner.get('host')}, since {owner.get('started')}"


def _refusal(path: Path) -> UserError:
    address = storage.address_of(path)
    who = _said_owner(_read(path) if address is None else _read_object(address))
    return UserError(
        f"{storage.name_of(path.parent)} is in use by another run ({who}), and "
        "two would overwrite each other's "
        "checkpoints; wait for it, stop it, or choose another Engine.save_load.output_dir"
    )
