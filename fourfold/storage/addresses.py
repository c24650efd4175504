"""Addresses: what is not on this machine, its local face, and calls to it with patience.

An address is `PROTOCOL://...`, whatever fsspec reads: `s3://bucket/run`, `gs://bucket/data`. Each
has a *local face*, a path below the user's cache directory that repeats it:

    s3://bucket/run/step_5   ->   ~/.cache/fourfold/remote/s3/bucket/run/step_5

What is read from an address appears there, and what is written to it is made there first, so most
code knows paths only; `address_of` tells which of them stand for something elsewhere.

Errors that pass (a server that restarts, a connection that is lost) are met with pauses that grow.
Those that do not (credentials, a bucket that does not exist) are said at once.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fourfold.errors import UserError

ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+)://(.*)", re.DOTALL)
# Of these the path begins with a slash.
ROOTED = ("file", "local", "memory")
INSTALL = "pip install 'fourfold[remote]'"
DRIVERS = {"gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "hdfs": "pyarrow"}
# How long to wait before what failed is tried again.
PAUSE_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
# botocore's own patience would come on top of ours, and of s3fs's.
S3_OPTIONS = {"config_kwargs": {"connect_timeout": 10, "retries": {"max_attempts": 1}}}

FORBIDDEN = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "TokenRetrievalError",
    "UnauthorizedSSOTokenError",
    "ProfileNotFound",
    "DefaultCredentialsError",
    "RefreshError",
    "ClientAuthenticationError",
)
MISUSED = ("ParamValidationError", "InvalidRegionError", "UnknownEndpointError")
OURS = (TypeError, AttributeError, NotImplementedError, AssertionError, FileExistsError)

Result = TypeVar("Result")


class StorageError(UserError, OSError):
    """What is wrong with an address, and what to do. An `OSError` for whoever expects a disk's."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.strerror = message


class NotThereError(StorageError):
    """There is nothing at an address."""


# --- addresses and their local faces ----------------------------------------------------------


def is_address(text: str) -> bool:
    return ADDRESS.fullmatch(text) is not None


def local_path(where: str | Path) -> Path:
    """The local face of an address; a path is its own."""
    found = None if isinstance(where, Path) else ADDRESS.fullmatch(where)
    if found is None:
        return Path(where)
    protocol, rest = found[1], found[2].strip("/")
    parts = rest.split("/")
    if not rest or "::" in rest or any(part in ("", ".", "..") for part in parts):
        raise UserError(
            f"{where} is no address that can be used: give PROTOCOL://bucket/path, without '::', "
            "empty parts or '..'"
        )
    return remote_root() / protocol / rest


def address_of(path: Path) -> str | None:
    """The address whose local face this is; None for an ordinary path."""
    root = remote_root()
    try:
        protocol, *parts = path.absolute().relative_to(root).parts
    except ValueError:
        return None
    if not parts:
        return None
    return f"{protocol}://{'/' if protocol in ROOTED else ''}{'/'.join(parts)}"


def name_of(path: Path) -> str:
    """What to call it in a message, or in a word to another machine."""
    return address_of(path) or str(path)


def cache_root() -> Path:
    """Where this machine keeps what it could fetch or make again."""
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(user).resolve() / "fourfold"


def remote_root() -> Path:
    return cache_root() / "remote"


# --- calls ------------------------------------------------------------------------------------


def file_system(address: str) -> tuple[Any, str]:
    """fsspec's file system of an address, and the path in it. Not kept: a forked process needs
    another, and fsspec remembers those of this one."""
    protocol = address.partition("://")[0]
    try:
        import fsspec
        from fsspec.core import url_to_fs

        options = S3_OPTIONS if protocol in ("s3", "s3a") else {}
        system, path = url_to_fs(address, use_listings_cache=False, **options)
    except ImportError as error:
        driver = DRIVERS.get(protocol)
        more = f"; for {protocol}:// also: pip install {driver}" if driver else ""
        raise UserError(
            f"{address} is not on this machine, and what reads it is not installed ({error}): "
            f"{INSTALL}{more}"
        ) from error
    except ValueError as error:
        known = ", ".join(sorted(name for name in fsspec.available_protocols() if len(name) < 6))
        raise UserError(f"{address}: {error}; the protocols known here are {known}") from error
    except Exception as error:
        raise explained_failure(address, error) from error
    return system, str(path)


def patiently(
    address: str, work: Callable[[Any, str], Result], beat: Callable[[], None] | None = None
) -> Result:
    """`work(file system, path)`, again after a pause where it failed for what may pass."""
    for pause in (*PAUSE_SECONDS, None):
        try:
            return work(*file_system(address))
        except UserError:
            raise
        except Exception as error:
            if isinstance(error, OURS):
                raise
            if pause is None or _lasts(error):
                raise explained_failure(address, error) from error
        _wait(pause, beat)
    raise AssertionError("unreachable")


def _wait(seconds: float, beat: Callable[[], None] | None) -> None:
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if beat is not None:
            beat()
        time.sleep(min(left, 0.5))


def _lasts(error: Exception) -> bool:
    """Whether trying again is of no use."""
    lasting = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
    return isinstance(error, lasting) or type(error).__name__ in (*FORBIDDEN, *MISUSED)


def explained_failure(address: str, error: Exception) -> StorageError:
    said = " ".join(str(error).split())[:300] or type(error).__name__
    if isinstance(error, FileNotFoundError):
        if "bucket" in said.lower():
            return NotThereError(
                f"{address}: there is no such bucket ({said}); create it, or correct the address"
            )
        return NotThereError(f"{address}: there is nothing at this address")
    if isinstance(error, PermissionError) or type(error).__name__ in FORBIDDEN:
        return StorageError(
            f"{address}: access is refused ({said}); give this machine credentials that may read "
            "and write there (for s3://: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "AWS_PROFILE, or the role of the machine; for another server AWS_ENDPOINT_URL)"
        )
    if type(error).__name__ in MISUSED:
        return StorageError(f"{address}: {said}; correct the address")
    waited = sum(PAUSE_SECONDS)
    return StorageError(
        f"{address} does not answer as it should ({type(error).__name__}: {said}), also not when "
        f"asked again for {waited:g} s; check the server and the network"
    )
