"""Options several verbs share, and what is checked of options before any work is done."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from fourfold.errors import UserError
from fourfold.storage import local_path

# A path or an address, which becomes the path that stands for it.
ConfigFile = Annotated[
    Path,
    typer.Option(
        "-c",
        "--config",
        metavar="PATH",
        parser=local_path,
        help="The YAML file that describes the run.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "-o",
        "--override",
        metavar="A.B.C=VALUE",
        help="Override one key of the file; may be repeated.",
    ),
]

# Of verbs that serve pages.
Host = Annotated[
    str, typer.Option(help="Address to listen on; any but this machine's own needs a token.")
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        help="File with the token clients must send.",
        show_default="the environment variable FOURFOLD_TOKEN",
    ),
]


def refuse_all_but(context: typer.Context, used: set[str], reason: str) -> None:
    """Refuse the options given on the command line that are not among `used` (by their names in
    Python): they would be ignored, `reason` says why."""
    given = [
        max(parameter.opts, key=len)
        for parameter in context.command.params
        if parameter.name is not None
        and _was_given(context, parameter.name)
        and parameter.name not in used
    ]
    if given:
        *others, last = given
        listed = f"{', '.join(others)} and {last} have" if others else f"{last} has"
        raise UserError(f"{listed} no effect {reason}; leave {'them' if others else 'it'} out")


def _was_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse_several_processes(verb: str) -> None:
    """For a verb that is one process: each of a launcher's would do all of it over again."""
    from fourfold.launch.launchers import Launcher, started_by

    found = started_by(os.environ)
    if found is None:
        return
    several = found.world_size if isinstance(found, Launcher) else found.most
    if several > 1:
        raise UserError(
            f"{verb} is one process, and {found.name} started {several}; start it without a "
            "launcher, or with one process"
        )


def check_server_packages(verb: str, otherwise: str = "") -> None:
    """`otherwise` is what the user can do without them."""
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UserError(
            f"{verb} needs {' and '.join(missing)}, not installed here; run pip install "
            f"'fourfold[serve]'{otherwise}"
        )


def check_writable(path: Path, option: str, *, makes_parents: bool = False) -> None:
    """Refuse a file that could not be written, before the work whose result it is to hold."""
    try:
        if makes_parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        existed = path.exists()
        if not existed or path.is_file() or path.is_dir():
            path.open("ab").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise UserError(
            f"{option} {path} cannot be written ({error.strerror}); name a file in a directory "
            "that exists and that you can write to"
        ) from error


def check_new(path: Path, option: str, force: bool) -> None:
    """The same, and that nothing there is lost unless --force says so."""
    if path.exists() and not force:
        raise UserError(
            f"{option} {path} exists and would be overwritten; name another file, or add --force"
        )
    check_writable(path, option)
