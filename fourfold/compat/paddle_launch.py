"""`python -m fourfold.launch`: a launcher for any script, with Paddle's options.

The options are those of `python -m paddle.distributed.launch`:

    python -m fourfold.launch --log_dir log --devices "0,1,2,3" run_pretrain.py -c configs.yaml

One process for each device runs the script as `python` would, with the variables set by which
`fourfold train` finds the others. What process 2 writes is in `LOG_DIR/workerlog.2`; what process 0
writes is also shown. Over several machines torchrun starts the processes.
"""

from __future__ import annotations

import math
import os
import runpy
import sys
from argparse import REMAINDER, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from fourfold.errors import UserError, report
from fourfold.launch.launchers import (
    Nodes,
    become,
    refuse_inside_launcher,
    torchrun_command,
)
from fourfold.launch.scheduled import num_gpus
from fourfold.launch.supervisor import supervise

PROGRAM = "python -m fourfold.launch"
LOG_NAME = "workerlog.{rank}"
VISIBLE = "CUDA_VISIBLE_DEVICES"

EXAMPLES = """\
examples:
  python -m fourfold.launch --devices "0,1,2,3" run_pretrain.py -c ./configs.yaml
  python -m fourfold.launch --nproc_per_node 4 run_pretrain.py -c ./configs.yaml
  python -m fourfold.launch --nnodes 2 --master node0:29500 --rank 0 --devices "0,1,2,3,4,5,6,7" \\
      run_pretrain.py -c ./configs.yaml      on the other machine the same with --rank 1
"""


@dataclass(frozen=True)
class ScriptJob:
    """What the user asked for; `devices` is None where only a number of processes was given."""

    script: Path
    arguments: list[str]
    devices: list[str] | None
    nproc: int | None
    log_dir: Path
    max_restart: int
    nodes: Nodes | None


def main(words: Sequence[str]) -> int:
    """Run the script that `words` describe; the exit code of the command."""
    try:
        return launch(read_job(words))
    except (UserError, KeyboardInterrupt) as error:
        return report(error)


def launch(job: ScriptJob) -> int:
    """All processes of this machine from start to end; the exit code as of `supervise`."""
    refuse_inside_launcher(os.environ, "fourfold.launch")
    if job.devices is not None:
        # Before anything looks for a GPU: what is visible then stays so.
        os.environ[VISIBLE] = ",".join(_among_the_visible(job.devices))
    nproc = job.nproc or num_gpus() or 1
    if job.nodes is not None:
        _hand_to_torchrun(job, job.nodes, nproc)
    if nproc > 1:
        _preload()
    return supervise(
        lambda: _run_script(job),
        nproc,
        job.log_dir,
        max_restarts=job.max_restart,
        # An arbitrary script sends no heartbeats. Processes that wait for each other in vain end by
        # the timeout of their collective; a script that ignores a stop is killed.
        hang_seconds=math.inf,
        log_name=LOG_NAME,
    )


def _run_script(job: ScriptJob) -> None:
    """As `python SCRIPT ARGUMENTS` would."""
    sys.argv = [str(job.script), *job.arguments]
    sys.path[0] = str(job.script.resolve().parent)
    runpy.run_path(str(job.script), run_name="__main__")


def _preload() -> None:
    """Import what training may need, before processes are forked that would all do it."""
    import fourfold.engine  # noqa: F401
    from fourfold.mesh import Layout
    from fourfold.parallel import preload

    preload(Layout(dp=1, pp=2, sharding=2, mp=2))


def _hand_to_torchrun(job: ScriptJob, nodes: Nodes, nproc: int) -> NoReturn:
    command = torchrun_command(
        nodes, nproc, job.max_restart, job.log_dir, job.arguments, program=[str(job.script)]
    )
    become(command)


def _among_the_visible(devices: list[str]) -> list[str]:
    """The devices, all of which CUDA_VISIBLE_DEVICES must show if a scheduler set it."""
    shown = os.environ.get(VISIBLE)
    hidden = set(devices) - {name.strip() for name in shown.split(",")} if shown else set()
    if hidden:
        raise UserError(
            f"--devices {','.join(devices)}: {VISIBLE}={shown} hides {','.join(sorted(hidden))}; "
            f"name devices it shows, or unset {VISIBLE}"
        )
    return devices


# -- reading the command line ------------------------------------------------------------------


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; {PROGRAM} -h explains the options")


def read_job(words: Sequence[str]) -> ScriptJob:
    """The job a command line describes; a `UserError` where it describes none."""
    options = _parser().parse_args(list(words))
    script = Path(options.script)
    if not script.is_file():
        raise UserError(f"{script}: no such script; options of the launcher go before its name")
    devices = None if options.devices is None else _device_list(options.devices)
    nproc = _at_least(1, "--nproc_per_node", options.nproc_per_node)
    if devices is not None and nproc not in (None, len(devices)):
        raise UserError(
            f"--nproc_per_node {nproc} does not fit the {len(devices)} devices of "
            f"--devices {options.devices}; each process has one: leave one of the options out"
        )
    return ScriptJob(
        script=script,
        arguments=options.arguments,
        devices=devices,
        nproc=nproc if devices is None else len(devices),
        log_dir=Path(options.log_dir),
        max_restart=_at_least(0, "--max_restart", options.max_restart) or 0,
        nodes=_nodes(options.nnodes, options.master, options.rank),
    )


def _parser() -> ArgumentParser:
    parser = _Parser(
        prog=PROGRAM,
        description="Run a Python script in one process per device, with the options of\n"
        "python -m paddle.distributed.launch.",
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--devices", "--gpus", "--selected_gpus", metavar="0,1,...", help="a process for each")
    add("--nproc_per_node", metavar="N", help="number of processes (one per GPU, or 1)")
    add("--log_dir", metavar="DIR", default="log", help="for workerlog.0, workerlog.1, ... (log)")
    add("--max_restart", metavar="N", help="number of restarts after failures (0)")
    add("--nnodes", metavar="N", help="number of machines; needs --master and --rank")
    add("--master", metavar="HOST:PORT", help="where machine 0 can be reached")
    add("--rank", metavar="R", help="which machine this is, from 0")
    add("script", metavar="SCRIPT", help="the Python file that each process runs")
    rest = add("arguments", metavar="...", nargs=REMAINDER, help="its arguments, as they are")
    rest.required = False
    return parser


def _device_list(text: str) -> list[str]:
    devices = [name.strip() for name in text.split(",")]
    if bad := [name for name in devices if not (name.isascii() and name.isdigit())]:
        raise UserError(
            f"--devices {text!r}: {bad[0]!r} is not a device number; give numbers, as in "
            "--devices 0,1"
        )
    devices = [str(int(name)) for name in devices]
    if twice := [name for name in dict.fromkeys(devices) if devices.count(name) > 1]:
        raise UserError(f"--devices {text!r} names {twice[0]} twice; each process has its own")
    return devices


def _nodes(nnodes: str | None, master: str | None, rank: str | None) -> Nodes | None:
    several = {"--nnodes": nnodes, "--master": master, "--rank": rank}
    count = _at_least(1, "--nnodes", nnodes)
    if all(value is None for value in several.values()) or (count == 1 and rank in (None, "0")):
        return None
    if missing := [name for name, value in several.items() if value is None]:
        raise UserError(
            f"several machines need --nnodes, --master and --rank; {' and '.join(missing)} missing"
        )
    node_rank = _at_least(0, "--rank", rank)
    assert count is not None and node_rank is not None and master is not None
    if node_rank >= count:
        raise UserError(
            f"--rank {node_rank} does not exist among --nnodes {count}; number the machines from 0 "
            f"to {count - 1}"
        )
    return Nodes(count, node_rank, master)


def _at_least(least: int, name: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise UserError(f"{name} {text!r} is not a whole number of at least {least}")
    return int(text)
