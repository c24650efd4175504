"""The command `fourfold`: thin verbs over the package.

A verb's file is imported when the verb is used, and nothing heavy before it runs, so that
`fourfold --help` answers at once. A `UserError` becomes one clear message and exit code 2, and so
does what the system says of a path that the user named; any other exception is ours and keeps its
traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from fourfold import __version__, heartbeat
from fourfold.errors import RunError, UserError, report

# Verb -> its file; that of a group of verbs has an `app` of its own.
VERBS = {
    "train": "train",
    "bench": "bench",
    "watch": "watch",
    "report": "watch",
    "target": "target",
    "generate": "generate",
    "evaluate": "evaluate",
    "serve": "serve",
    "convert": "convert",
    "layout": "layout",
    "plan": "plan",
    "rehearse": "rehearse",
    "doctor": "doctor",
    "submit": "submit",
    "accept": "accept",
    "mup": "mup",
    "quickstart": "quickstart",
    "data": "data",
    "checkpoint": "checkpoint",
    "config": "config",
    "replay": "question",
    "prove": "question",
    "bisect": "bisect",
    "diff": "bisect",
}


def command_line(words: Sequence[str] = ()) -> typer.Typer:
    """The command with all its verbs, or with the one alone that `words` begin with."""
    app = typer.Typer(
        help="Train GPT models: one YAML file, any layout, the same numbers.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_before_any_verb)
    for verb in words[:1] if words and words[0] in VERBS else VERBS:
        module = import_module(f"fourfold.cli.{VERBS[verb]}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=verb)
        else:
            app.command(verb)(getattr(module, verb))
    return app


def _show_version(asked: bool) -> None:
    if not asked:
        return
    from importlib.metadata import PackageNotFoundError, version
    from platform import python_version

    try:
        torch = f"torch {version('torch')}"
    except PackageNotFoundError:
        torch = "no torch"
    print(f"fourfold {__version__} ({torch}, Python {python_version()})")
    raise typer.Exit


def _before_any_verb(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Show the versions of Fourfold, torch and Python, and exit.",
        ),
    ] = False,
) -> None:
    # The description above, not a docstring here, is what --help begins with.
    assert not version


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; `arguments` in place of those of this process."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        try:
            command_line(words)(words)
        finally:
            if sys.stdout is not None:  # as it is when it was closed (`>&-`)
                sys.stdout.flush()
    except (UserError, RunError, KeyboardInterrupt) as error:
        if heartbeat.is_attached():
            raise  # a script's call of this in many ranks, of which one error is shown
        sys.exit(report(error))
    except BrokenPipeError:
        _end_quietly()
    except OSError as error:
        if heartbeat.is_attached() or not _is_about(error, words):
            raise
        said = UserError(f"{error.filename}: {error.strerror}; check the path and its permissions")
        sys.exit(report(said))
    except SystemExit as end:
        # The library turns a reader that went away into an exit of its own.
        if isinstance(end.__context__, BrokenPipeError):
            _end_quietly()
        raise


def _end_quietly() -> None:
    """Whoever read our output has seen enough (`| head`), which is not an error."""
    # What is still buffered would be reported when the interpreter flushes it at its end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(0)


def _is_about(error: OSError, words: Sequence[str]) -> bool:
    """Whether the path in question was named by one of `words`, or is in a directory that was."""
    if not isinstance(error.filename, str) or not error.strerror:
        return False
    values = [part for word in words for part in (word, word.partition("=")[2])]
    asked = os.path.abspath(error.filename)
    named = [os.path.abspath(value) for value in values if value]
    return any(asked == path or asked.startswith(f"{path.rstrip('/')}/") for path in named)
