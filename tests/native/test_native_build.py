"""Building the kernels: once, safely, and without them where that is not possible."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fourfold import native

SMALL = "int answer(void) { return 42; }\n"

needs_kernels = pytest.mark.skipif(
    native.why_not("sample") is not None, reason="no kernels can be built here"
)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with one small source, a cache of its own, and nothing loaded yet."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "small.c").write_text(SMALL)
    monkeypatch.setattr(native, "SOURCES", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(native.SWITCH, raising=False)
    native._load.cache_clear()
    yield folder
    native._load.cache_clear()


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "fourfold" / "native").iterdir())


@needs_kernels
def test_a_library_is_compiled_once_and_kept(sources: Path, tmp_path: Path) -> None:
    library = native.library("small")
    assert library is not None and library.answer() == 42
    assert native.why_not("small") is None
    [made] = kept(tmp_path)
    assert made.parent.stat().st_mode & 0o777 == 0o700
    written = made.stat().st_mtime_ns
    native._load.cache_clear()
    assert native.library("small") is not None
    assert [file.stat().st_mtime_ns for file in kept(tmp_path)] == [written]


@needs_kernels
def test_another_source_is_another_library(sources: Path, tmp_path: Path) -> None:
    native.library("small")
    (sources / "small.c").write_text(SMALL.replace("42", "43"))
    native._load.cache_clear()
    library = native.library("small")
    assert library is not None and library.answer() == 43
    (sources / "some.h").write_text("\n")
    native._load.cache_clear()
    native.library("small")
    assert len(kept(tmp_path)) == 3


@needs_kernels
@pytest.mark.parametrize("damage", [b"", b"not a library", None])
def test_a_damaged_library_is_built_again(
    sources: Path, tmp_path: Path, damage: bytes | None
) -> None:
    native.library("small")
    [made] = kept(tmp_path)
    content = made.read_bytes()
    made.unlink()  # the loaded one stays as it is
    made.write_bytes(content[: len(content) // 2] if damage is None else damage)
    native._load.cache_clear()
    library = native.library("small")
    assert library is not None and library.answer() == 42
    assert made.read_bytes() == content or len(made.read_bytes()) == len(content)


@needs_kernels
def test_a_directory_that_others_may_write_is_not_used(sources: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "fourfold" / "native"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    library = native.library("small")
    assert library is not None and library.answer() == 42
    assert kept(tmp_path) == []


@needs_kernels
def test_several_may_build_at_once(sources: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from fourfold import native\n"
        f"native.SOURCES = Path({str(sources)!r})\n"
        "print(native.library('small').answer())"
    )
    command = [sys.executable, "-c", code]
    builders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [one.communicate()[0].strip() for one in builders] == ["42"] * 3
    assert len(kept(tmp_path)) == 1


def test_no_compiler_is_a_reason(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    assert native.library("small") is None
    assert "no C compiler" in str(native.why_not("small"))


@needs_kernels
def test_a_source_that_does_not_compile_is_a_reason(sources: Path) -> None:
    (sources / "small.c").write_text("this is not C\n")
    assert native.library("small") is None
    assert re.search("the compiler .* failed: .*error", str(native.why_not("small")))


@needs_kernels
def test_a_symbol_that_nobody_has_is_a_reason(sources: Path) -> None:
    (sources / "small.c").write_text("int missing(void);\nint answer(void) { return missing(); }\n")
    assert native.library("small") is None
    assert "cannot be loaded" in str(native.why_not("small"))


@pytest.mark.parametrize("value", ["0", "off", "False"])
def test_it_can_be_switched_off(sources: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(native.SWITCH, value)
    assert native.library("small") is None
    assert native.why_not("small") == f"FOURFOLD_NATIVE is set to {value}"


@pytest.mark.parametrize("machine", ["aarch64", "ppc64le"])
def test_other_processors_are_a_reason(
    sources: Path, monkeypatch: pytest.MonkeyPatch, machine: str
) -> None:
    monkeypatch.setattr(native.platform, "machine", lambda: machine)
    assert native.library("small") is None
    assert "x86-64" in str(native.why_not("small"))


def test_an_old_processor_is_a_reason(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "cpu_flags", lambda: {"sse2", "fma"})
    assert native.library("small") is None
    assert "the processor has no avx2, f16c" in str(native.why_not("small"))


@needs_kernels
def test_threads_are_torchs_own() -> None:
    """A second OpenMP library would have threads that compete with torch's."""
    code = (
        "import re; from pathlib import Path; from fourfold import native\n"
        "assert native.library('sample') is not None\n"
        "print(len(set(re.findall(r'\\S*gomp\\S*', Path('/proc/self/maps').read_text()))))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(native.__file__).parents[2])}
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert output.stdout.strip() == "1"
