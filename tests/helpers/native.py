"""Shared libraries for tests, from the C++ files of `tests/gpu`: compiled once, then kept."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import pytest
import torch

SOURCES = Path(__file__).parent.parent / "gpu"
TORCH = Path(torch.__file__).parent


def library(name: str, *libraries: str, optimised: bool = False) -> Path:
    """The shared library of `tests/gpu/<name>.cpp`; skips the test where there is no compiler.

    It is kept among temporary files, under a name that changes with its source, with torch and with
    the compiler, so that all test processes share it, and the next run too.
    """
    compiler = next(filter(None, map(shutil.which, [os.environ.get("CXX", "c++"), "g++"])), None)
    if compiler is None:
        pytest.skip("no C++ compiler here (c++, g++ or CXX), which this test needs")
    source = SOURCES / f"{name}.cpp"
    level = "-O1" if optimised else "-O0"
    parts = [path.read_bytes() for path in (source, *sorted(SOURCES.glob("*.h")))]
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    key = hashlib.sha256(b"\0".join([*parts, version, torch.__version__.encode(), level.encode()]))
    folder = Path(tempfile.gettempdir()) / f"fourfold-tests-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    made = folder / f"{name}-{key.hexdigest()[:16]}.so"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            _compile(compiler, source, made, level, libraries)
    return made


def _compile(
    compiler: str, source: Path, made: Path, level: str, libraries: tuple[str, ...]
) -> None:
    headers = [TORCH / "include", TORCH / "include/torch/csrc/api/include"]
    headers.append(Path(sysconfig.get_path("include")))
    unfinished = made.with_suffix(".unfinished")
    subprocess.run(
        [
            *(compiler, "-std=c++20", level, "-fPIC", "-shared", "-DUSE_C10D_GLOO"),
            *(f"-I{folder}" for folder in headers),
            *(str(source), "-o", str(unfinished)),
            *(f"-L{TORCH / 'lib'}", f"-Wl,-rpath,{TORCH / 'lib'}"),
            *(f"-l{one}" for one in ("c10", "torch_cpu", *libraries)),
        ],
        check=True,
    )
    unfinished.rename(made)
