"""Kernels in C, compiled on first use by the machine's own compiler and called through ctypes.

    library("decode")      -> the CDLL of decode.c, or None where it cannot be built
    library("blocks")      -> that of blocks.cpp, which is C++ since torch's allocators are
    why_not("decode")      -> the reason it cannot, in a sentence for the user

What is compiled here is faster than what torch has for it, never different in what it means: every
caller has a way through torch, for machines without a compiler, processors that are not x86 with
AVX2 and F16C, and the environment variable FOURFOLD_NATIVE=0.

A library is kept in `$XDG_CACHE_HOME/fourfold/native` (`~/.cache` by default) under a name that is
a hash of its source, the compiler, the flags and the processor, so a home directory may be shared
by unlike machines. It appears by a rename, so several processes may build it at once, and ends with
a hash of its content, so a damaged one is built again. A directory that others may write is not
used.

OpenMP is torch's own copy. A library with a second one would have threads of its own, which would
compete with torch's for the processors; so ours are linked without one and find torch's symbols,
which are made global first.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
from functools import cache
from pathlib import Path

SWITCH = "FOURFOLD_NATIVE"
SOURCES = Path(__file__).parent
# Sums keep their order and products are only fused where the source says so: otherwise the same
# row could differ in its last bits between a kernel for one row and one for eight.
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-fopenmp", "-ffp-contract=off", "-fno-math-errno")
CXX_FLAGS = ("-O2", "-std=c++20", "-fPIC")
COMPILE_SECONDS = 120
NEEDED_INSTRUCTIONS = {"avx2", "fma", "f16c"}
DIGEST_BYTES = 32


class _Unavailable(Exception):
    """Why there is no library; a sentence without a full stop."""


def library(name: str, march: str | None = None) -> ctypes.CDLL | None:
    """The compiled source `name` of this directory, once a process; None where there is none."""
    return _load(name, march or _march())[0]


def why_not(name: str, march: str | None = None) -> str | None:
    """Why `library` gives None; None where it does not."""
    return _load(name, march or _march())[1]


def _march() -> str:
    """For this processor, or for what torch's own kernels are asked to stay with."""
    return "haswell" if os.environ.get("ATEN_CPU_CAPABILITY", "").lower() == "avx2" else "native"


@cache
def _load(name: str, march: str) -> tuple[ctypes.CDLL | None, str | None]:
    try:
        return _build(name, march), None
    except _Unavailable as reason:
        return None, str(reason)


def _build(name: str, march: str) -> ctypes.CDLL:
    if os.environ.get(SWITCH, "1").lower() in ("0", "false", "off", "no"):
        raise _Unavailable(f"{SWITCH} is set to {os.environ[SWITCH]}")
    if platform.machine() not in ("x86_64", "AMD64") or not Path("/proc/cpuinfo").exists():
        raise _Unavailable(f"they are written for Linux on x86-64, not {platform.platform()}")
    flags = cpu_flags()
    if missing := NEEDED_INSTRUCTIONS - flags:
        raise _Unavailable(f"the processor has no {', '.join(sorted(missing))}")
    source = SOURCES / f"{name}.cpp"
    if source.exists():
        compiler, words, linked = _cxx()
    else:
        source = SOURCES / f"{name}.c"
        compiler, words, linked = _cc(march)
    headers = [header.read_bytes() for header in sorted(SOURCES.glob("*.h"))]
    version = _run([compiler, "--version"])
    asked = " ".join([*words, *linked, *sorted(flags)]).encode()
    key = hashlib.sha256(b"\0".join([source.read_bytes(), *headers, version, asked])).hexdigest()
    directory = _directory()
    path = directory / f"{name}-{key[:24]}.so"
    if (kept := _open(path)) is not None:
        return kept
    _compile(compiler, words, linked, source, path)
    if (made := _open(path)) is None:
        raise _Unavailable(f"{path} cannot be loaded after it was built")
    return made


def _cc(march: str) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """The compiler of C, its flags, and what to link with."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        raise _Unavailable("there is no C compiler (cc, gcc or what CC names)")
    _share_openmp()
    return compiler, (*FLAGS, f"-march={march}"), ("-lm",)


def _cxx() -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """The same of C++, with the headers and the core library of the torch that is installed."""
    import torch

    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    if compiler is None:
        raise _Unavailable("there is no C++ compiler (c++, g++ or what CXX names)")
    home = Path(torch.__file__).parent
    # The version is a flag so that a library made for another torch is not taken for this one's.
    version = f'-DTORCH="{torch.__version__}"'
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    words = (*CXX_FLAGS, version, abi, f"-I{home / 'include'}")
    return compiler, words, (f"-L{home / 'lib'}", "-lc10")


def cpu_flags() -> set[str]:
    """The instruction sets of this processor, by Linux's names."""
    found = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return set(found[1].split()) if found else set()


def _share_openmp() -> None:
    """Make the symbols of the OpenMP library that torch has loaded visible to ours."""
    import torch

    loaded = re.findall(r"\S*/libgomp[^/\s]*\.so\S*", Path("/proc/self/maps").read_text())
    beside = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    if not loaded and not beside:
        raise _Unavailable("this torch does not use GNU OpenMP, whose threads they share")
    ctypes.CDLL(str((loaded or beside)[0]), mode=ctypes.RTLD_GLOBAL)


def _directory() -> Path:
    """A directory that only this user can write; one for this process alone if there is none."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(base) / "fourfold" / "native"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
        is_ours = status.st_uid == os.geteuid()
        others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if is_ours and not others_write and os.access(directory, os.W_OK):
            return directory
    except OSError:
        pass
    return _private_directory()


@cache
def _private_directory() -> Path:
    import atexit

    directory = tempfile.mkdtemp(prefix="fourfold-native-")
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # and not a process forked from it
            shutil.rmtree(directory, ignore_errors=True)

    atexit.register(remove)
    return Path(directory)


def _open(path: Path) -> ctypes.CDLL | None:
    """The library, if it is whole: loading a truncated one would kill the process."""
    try:
        content = path.read_bytes()
        code, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
        if hashlib.sha256(code).digest() != digest:
            return None
        return ctypes.CDLL(str(path))
    except OSError:
        return None


def _compile(
    compiler: str, words: tuple[str, ...], linked: tuple[str, ...], source: Path, path: Path
) -> None:
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".building-") as folder:
            object_file, unfinished = Path(folder) / "a.o", Path(folder) / "a.so"
            _run([compiler, *words, "-c", str(source), "-o", str(object_file)])
            # Linked without -fopenmp, which would name a library of its own.
            _run([compiler, "-shared", str(object_file), "-o", str(unfinished), *linked])
            code = unfinished.read_bytes()
            unfinished.write_bytes(code + hashlib.sha256(code).digest())
            unfinished.replace(path)
    except OSError as error:
        raise _Unavailable(f"{path.parent} cannot be written: {error}") from None


def _run(command: list[str]) -> bytes:
    try:
        done = subprocess.run(command, capture_output=True, timeout=COMPILE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _Unavailable(f"the compiler {command[0]} does not run: {error}") from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
        said = next((line for line in lines if "error" in line), lines[0] if lines else "no word")
        raise _Unavailable(f"the compiler {command[0]} failed: {said.strip()[:200]}")
    return done.stdout
