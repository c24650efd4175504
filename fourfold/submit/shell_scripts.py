"""Job files that are shell scripts: for SLURM's sbatch, and for torchrun on each machine.

What SLURM does when a job ends early, and what our script makes of it:

    the time limit comes near     SLURM sends SIGTERM to the ranks (`--signal`), which save and end
    a job of a higher partition   so it does, with GraceTime to end in; exit code 0 would mean that
    takes the machines            the job is complete, so ours is another, and queued again
    a rank fails                  the script queues it again, unless nothing new was saved several
                                  times in a row, or the input is wrong (exit code 2)
    a machine is lost             SLURM queues it again by itself (`--requeue`)
    scancel, a STOP file          the ranks save and end; the script leaves it at that

A task's exit code must not make srun kill the others (`--kill-on-bad-exit`): they may be saving.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from fourfold import __version__
from fourfold.signals import STOP_FILE
from fourfold.submit.job import STOPPED_CODE, Job, clock

MASTER_PORT = 29500
# Options of sbatch that the script itself needs as they are.
OURS = {
    *("--array", "--chdir", "--error", "--job-name", "--no-requeue", "--nodes", "--ntasks"),
    *("--ntasks-per-node", "--open-mode", "--output", "--partition", "--requeue", "--signal"),
    *("--time", "-D", "-J", "-N", "-a", "-e", "-n", "-o", "-p", "-t"),
}

SBATCH = """\
#!/bin/bash
# {nodes} x {ranks_per_node} ranks of `fourfold {verb}`, written by `fourfold submit` {version}.
# Tested with SLURM 22.05.8 on three machines: time limit, requeue, preemption, TERM, USR1, scancel,
# drain, a lost machine. Not tested on GPUs.
{remarks}\
#
#   sbatch {file}
#   scancel JOB                    saves within the cluster's KillWait, and ends it for good
#   touch {stop_file}
#                                  the same, however long a save takes
#   scancel --signal=TERM JOB      saves, and goes back to the queue
#
{directives}

set -u
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-${{SLURM_CPUS_PER_TASK:-1}}}}"
run={run}
tries="$run/logs/slurm-$SLURM_JOB_ID.tries"
most_tries={max_restarts}  # in a row without a new checkpoint

saved() {{ cat "$run/latest" 2>/dev/null || echo nothing; }}
from=$(saved)

# The ranks are told by SLURM; this script ends when they have.
trap : TERM USR1 USR2 HUP

echo "$(date -u +%FT%TZ) job $SLURM_JOB_ID on $SLURM_JOB_NODELIST," \\
    "restart ${{SLURM_RESTART_COUNT:-0}}, saved: $from"
srun --kill-on-bad-exit=0 --wait={wait} --mpi=none \\
    {command} \
    --stopped-exit-code {stopped_code}
code=$?

if [ $code = 0 ]; then
    rm -f "$tries"
    exit 0
fi
if [ $code = 2 ]; then
    echo "a mistake in the input, shown above: not queued again"
    exit 2
fi
if [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" != RUNNING ]; then
    echo "ended by SLURM or by its user, saved: $(saved)"
    exit $code
fi
count=0
if [ "$(saved)" = "$from" ]; then
    [ -f "$tries" ] && read -r count < "$tries"
    count=$((count + 1))
fi
if [ "$count" -gt "$most_tries" ]; then
    echo "exit code $code, and nothing new saved after $most_tries restarts: not queued again"
    exit $((code ? code : 1))
fi
echo "$count" > "$tries"
echo "exit code $code, saved: $(saved); queued again"
scontrol requeue "$SLURM_JOB_ID"
"""

TORCHRUN = """\
#!/bin/bash
# {nodes} x {ranks_per_node} ranks of `fourfold {verb}`, written by `fourfold submit` {version}.
# Tested with torch 2.13, whose rendezvous joins the machines, on two. Not tested on GPUs.
{remarks}\
#
#   bash {file} NODE_RANK HOST    on each machine: its number, 0 to {last_node}, and machine 0
#
# SIGTERM to it on any machine saves and stops the run on all.
set -u
node_rank="${{1:?NODE_RANK is missing: 0 to {last_node}}}"
host="${{2:?HOST is missing: the machine with NODE_RANK 0}}"
cd {directory} || exit
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-1}}"
exec {command} \\
    --nnodes {nodes} --node-rank "$node_rank" --master "$host:{port}" \\
    --nproc {ranks_per_node} --max-restarts {max_restarts}
"""


class Slurm:
    suffix = ".sbatch"
    uses = frozenset({"time", "partition", "sbatch"})

    def problems(self, job: Job) -> list[str]:
        found = []
        for option in job.sbatch:
            name = option.partition("=")[0].split()[0]
            if name in OURS or name[:2] in OURS:
                found.append(f"--sbatch {option}: the job file sets {name} itself")
        return found

    def text(self, job: Job) -> str:
        # Killed so long after the first rank has ended; all end together, a failure apart.
        wait = max(job.notice_seconds, round(job.timeout_seconds) + 60)
        return SBATCH.format(
            **_shared(job, self.suffix),
            directives="\n".join(f"#SBATCH {option}" for option in _directives(job)),
            wait=wait,
        )

    def command(self, job: Job, file: Path) -> str:
        return f"sbatch {shlex.quote(str(file))}"


def _directives(job: Job) -> list[str]:
    log = str(job.log_dir).replace("%", "%%") + "/slurm-%j.log"
    lines = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.ranks_per_node}",
    ]
    if job.on_gpus:
        lines.append(f"--gpus-per-node={job.ranks_per_node}")
    if job.partition is not None:
        lines.append(f"--partition={job.partition}")
    if job.limit_seconds is not None:
        lines.append(f"--time={clock(job.limit_seconds)}")
    return [
        *lines,
        f"--signal=TERM@{job.notice_seconds}",
        "--requeue",
        "--open-mode=append",
        f"--chdir={_quoted(str(job.directory))}",
        f"--output={_quoted(log)}",
        *job.sbatch,
    ]


def _quoted(word: str) -> str:
    """For sbatch, which knows double quotes and the backslash."""
    if set(word) & set(" \t\"'\\#"):
        return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return word


class Torchrun:
    suffix = ".sh"
    uses: frozenset[str] = frozenset()

    def problems(self, job: Job) -> list[str]:
        return []

    def text(self, job: Job) -> str:
        return TORCHRUN.format(
            **_shared(job, self.suffix),
            last_node=job.nodes - 1,
            directory=shlex.quote(str(job.directory)),
            port=MASTER_PORT,
        )

    def command(self, job: Job, file: Path) -> str:
        nodes = f"0..{job.nodes - 1}" if job.nodes > 1 else "0"
        return f"bash {shlex.quote(str(file))} {nodes} HOST  # on each machine, its own number"


def _shared(job: Job, suffix: str) -> dict[str, object]:
    """What both scripts are filled in with."""
    program = f"{shlex.quote(job.python)} -m fourfold "
    return {
        "nodes": job.nodes,
        "ranks_per_node": job.ranks_per_node,
        "verb": " ".join(job.arguments[:3]),
        "version": __version__,
        "remarks": "".join(f"# {line}\n" for line in job.remarks),
        "file": f"{job.name}{suffix}",
        "run": shlex.quote(str(job.output_dir)),
        "stop_file": shlex.quote(str(job.output_dir / STOP_FILE)),
        "command": program + job.shell_words(),
        "stopped_code": STOPPED_CODE,
        "max_restarts": job.max_restarts,
    }
