"""The command `fourfold`: thin verbs over the package.

Nothing heavy is imported until a verb runs, so `fourfold --help` answers at once. A `UserError`
becomes one clear message and exit code 2; any other exception is ours and keeps its traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from fourfold import heartbeat
from fourfold.cli import (
    bench,
    checkpoints,
    configuration,
    conversion,
    data,
    evaluation,
    generation,
    layout,
    planning,
    quickstart,
    serving,
    target,
    training,
)
from fourfold.errors import UserError, report

app = typer.Typer(
    help="Train GPT models: one YAML file, any layout, the same numbers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train")(training.train)
app.command("bench")(bench.bench)
app.command("target")(target.target)
app.command("generate")(generation.generate)
app.command("evaluate")(evaluation.evaluate)
app.command("serve")(serving.serve)
app.command("convert")(conversion.convert)
app.command("layout")(layout.layout)
app.command("plan")(planning.plan)
app.command("doctor")(planning.doctor)
app.command("quickstart")(quickstart.quickstart)
app.add_typer(data.app, name="data")
app.add_typer(checkpoints.app, name="checkpoint")
app.add_typer(configuration.app, name="config")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; `arguments` in place of those of this process."""
    try:
        app(None if arguments is None else list(arguments))
    except (UserError, KeyboardInterrupt) as error:
        if heartbeat.is_attached():
            raise  # a script's call of this in many ranks, of which one error is shown
        sys.exit(report(error))
    except BrokenPipeError:
        # Whoever read our output has seen enough (`| head`); not an error.
        sys.stderr.close()
        sys.exit(0)
