"""The page on the five documents names what exists, and leaves out nothing that has a name."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import fourfold.compat
from fourfold.cli import command_line
from fourfold.compat.flags import FlagParser, Flags
from fourfold.compat.paddle_launch import read_job
from fourfold.config.compat_keys import USUAL
from fourfold.config.fields import leaves
from fourfold.config.schema import Config
from fourfold.errors import UserError

ROOT = Path(__file__).parent.parent
# Without its blocks of commands and output, whose back-ticks are no marks.
PAGE = re.sub(r"^```.*?^```$", "", (ROOT / "docs" / "documents.md").read_text(), flags=re.M | re.S)
KEYS = {path for path, _ in leaves(Config)}
SECTIONS = {path.rsplit(".", depth)[0] for path in KEYS for depth in (1, 2, 3)}
# A key or section of the tree, wherever it stands between back-ticks.
KEY = re.compile(rf"(?:{'|'.join(Config.model_fields)})(?:\.\w+)+")
JUDGEMENTS = {"same", "better", "differs", ""}


def rows() -> Iterator[list[str]]:
    """The cells of every row of a table with a column `here`, first cell first."""
    inside = False
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not cells:
            inside = False
        elif "here" in cells:
            inside = True
        elif inside and not set("".join(cells)) <= {"-", ":"}:
            yield cells


def marked(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def here() -> list[str]:
    return [word for cells in rows() for word in marked(cells[1])]


# -- what there is ---------------------------------------------------------------------------


def commands(command: Any, name: str = "fourfold") -> Iterator[tuple[str, Any]]:
    yield name, command
    for word, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, f"{name} {word}")


def command_options() -> set[str]:
    return {
        option
        for _, command in commands(typer.main.get_command(command_line()))
        for parameter in command.params
        for option in parameter.opts
    }


def launcher_options(capsys: pytest.CaptureFixture[str]) -> set[str]:
    with pytest.raises(SystemExit):
        read_job(["--help"])
    return set(re.findall(r"--[a-z_]+", capsys.readouterr().out)) - {"--help"}


def flag_readers() -> dict[str, Callable[..., Any]]:
    """`read_flags` of every module that reads another program's command line."""
    readers = {}
    for found in pkgutil.iter_modules(fourfold.compat.__path__):
        module = importlib.import_module(f"fourfold.compat.{found.name}")
        read = getattr(module, "read_flags", None)
        if read is not None and read.__module__ == module.__name__:
            readers[found.name] = read
    return readers


def flags_of(read: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Every flag a program takes or refuses by name."""
    flags: set[str] = set()

    def listen(parser: FlagParser, _: Any, required: Any, refused: Any = None) -> Flags:
        flags.update(parser._option_string_actions, refused or ())
        raise UserError("only the flags were asked for")

    monkeypatch.setattr(FlagParser, "read", listen)
    takes_name = "program" in inspect.signature(read).parameters
    with contextlib.suppress(UserError):
        read(*(["program"] if takes_name else []), [])
    return {flag for flag in flags if flag.startswith("--")} - {"--help"}


# -- what the page says of it ----------------------------------------------------------------


def test_keys_on_the_page_exist() -> None:
    named = {word for word in marked(PAGE) if KEY.fullmatch(word)}
    # Keys of other files: one that is read as another, and those without effect.
    named -= {"Engine.use_recompute", *USUAL}
    assert named and named <= KEYS | SECTIONS


def test_every_key_of_the_shipped_files_is_on_the_page() -> None:
    shipped = set()
    for file in (ROOT / "configs" / "gpt").rglob("*.yaml"):
        if file.name in ("quickstart.yaml", "modern_124M.yaml"):
            continue  # of no document
        shipped |= set(flat(yaml.safe_load(file.read_text())))
    own = {"Global.tokenizer", "Engine.mix_precision.dtype"}  # the quickstart's, in no document
    assert shipped - own <= set(here())


def flat(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_options_in_the_column_here_exist(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = command_options() | launcher_options(capsys)
    for read in flag_readers().values():
        known |= flags_of(read, monkeypatch)
    named = {word.split()[0].partition("=")[0] for word in here() if word.startswith("-")}
    assert named and named <= known


@pytest.mark.parametrize("program", flag_readers())
def test_every_flag_of_another_program_is_on_the_page(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = flags_of(flag_readers()[program], monkeypatch)
    assert flags and flags <= set(here())


def test_every_option_of_the_launcher_is_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    options = launcher_options(capsys)
    assert "--devices" in options and options <= set(marked(PAGE))


def test_commands_on_the_page_exist() -> None:
    known = {name for name, _ in commands(typer.main.get_command(command_line()))}
    named = [word.split() for word in marked(PAGE) if word.startswith("fourfold ")]
    assert named
    for words in named:
        assert f"fourfold {words[1]}" in known
        if words[1] in ("data", "config", "checkpoint"):
            assert " ".join(words[:3]) in known


def test_files_and_modules_on_the_page_exist() -> None:
    # The first column is the documents' own, with paths of their repositories.
    ours = [word for cells in rows() for cell in cells[1:] for word in marked(cell)]
    for word in ours:
        if re.match(r"(tests|examples|configs|benchmarks|fourfold|docs)/", word):
            assert (ROOT / word).exists(), word
        elif re.fullmatch(r"fourfold(\.\w+)+", word):
            module, _, name = word.rpartition(".")
            assert hasattr(importlib.import_module(module), name), word


def test_every_row_says_same_better_or_differs() -> None:
    judged = [cells for cells in rows() if len(cells) == 4]
    assert len(judged) > 100
    assert [cells for cells in judged if cells[2] not in JUDGEMENTS] == []
    assert [cells for cells in rows() if len(cells) not in (2, 4)] == []
