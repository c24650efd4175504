"""A real SLURM on machines made of namespaces: a controller and compute machines, munge on each.

    with Slurm(3, tmp_path) as slurm:
        job = slurm.sbatch("job.sbatch")
        slurm.until(job, "COMPLETED")

Partition `low` gives way to `high` (REQUEUE, with a grace time). Jobs that are queued again start
within seconds, not the usual two minutes: a credential lives as long as `cred_expire`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from cluster.machines import Machines, wait_until

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
GRACE_SECONDS = KILL_WAIT = 30
SLURMD_TIMEOUT = 15

CONFIGURATION = """\
ClusterName=namespaces
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=/run/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={state}/controller
SlurmdSpoolDir=/run/slurm/spool
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
SlurmctldLogFile={state}/slurmctld.log
SlurmdLogFile={state}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
ReturnToService=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SlurmdTimeout={timeout}
KillWait={kill_wait}
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
{nodes}
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime={grace}
PartitionName=high Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""
NODE = "NodeName={} CPUs=2 Boards=1 SocketsPerBoard=1 CoresPerSocket=2 ThreadsPerCore=1"


class Slurm:
    """`count` compute machines; a further one, on which commands are given, is the controller."""

    def __init__(self, count: int, directory: Path) -> None:
        self.machines = Machines(count + 1, directory)
        self.count = count
        self.directory = self.machines.directory
        self._state = self.directory / "slurm"

    def __enter__(self) -> Self:
        self.machines.__enter__()
        try:
            (self._state / "controller").mkdir(parents=True)
            (self._state / "etc").mkdir()
            (self._state / "key").write_bytes(bytes(range(128)))  # nobody else can reach it
            names = self.machines.names
            (self._state / "etc" / "slurm.conf").write_text(
                CONFIGURATION.format(
                    controller=names[self.count],
                    state=self._state,
                    timeout=SLURMD_TIMEOUT,
                    kill_wait=KILL_WAIT,
                    grace=GRACE_SECONDS,
                    nodes="\n".join(NODE.format(name) for name in names[: self.count]),
                )
            )
            self._start(self.count, "slurmctld")
            for machine in range(self.count):
                self._start(machine, "slurmd")
            self.wait_for_idle(self.count)
        except BaseException:
            self.machines.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self.machines.__exit__()

    def _start(self, machine: int, daemon: str) -> None:
        """munge and SLURM of one machine; both go to the background by themselves."""
        munge = "--key-file=/run/munge/key --socket=/run/munge/socket --pid-file=/run/munge/pid"
        munge += " --log-file=/run/munge/log --seed-file=/run/munge/seed"
        lines = [
            "mkdir -p /run/munge /run/slurm/spool /etc/slurm",
            f"mount --bind '{self._state}/etc' /etc/slurm",
            f"install -m 400 '{self._state}/key' /run/munge/key",
            f"munged {munge}",
            daemon,
        ]
        self.machines.check(machine, ["sh", "-ec", "\n".join(lines)])

    # -- machines ---------------------------------------------------------------------------------

    def reboot(self, machine: int) -> None:
        """A machine that was switched off, with its daemons."""
        self.machines.boot(machine)
        self._start(machine, "slurmd")

    def wait_for_idle(self, count: int, seconds: float = 60) -> None:
        def idle() -> int:
            # Of the daemon: before it answers, the command fails.
            words = ["sinfo", "--noheader", "--partition=low", "--states=idle", "--format=%D"]
            shown = self.machines.run(self.count, words)
            return int(shown.output()) if re.fullmatch(r"\d+\n", shown.output()) else 0

        wait_until(lambda: idle() == count, seconds, lambda: self.call("sinfo -N -l"))

    # -- jobs -------------------------------------------------------------------------------------

    def call(self, command: str | Sequence[str | Path]) -> str:
        """The output of a command on the controller."""
        words = command.split() if isinstance(command, str) else command
        return self.machines.check(self.count, words)

    def sbatch(self, *words: str | Path) -> str:
        """The job's number."""
        return self.call(["sbatch", "--parsable", *words]).strip()

    def job(self, number: str) -> dict[str, str]:
        """JobState, Restarts, ExitCode and so on."""
        shown = self.call(f"scontrol show job {number}")
        return dict(re.findall(r"(\w+)=(\S*)", shown))

    def until(self, number: str, *states: str, seconds: float = 120) -> dict[str, str]:
        """Wait until the job is in one of these states; returns what is known of it."""
        found: dict[str, str] = {}

        def reached() -> bool:
            found.update(self.job(number))
            return found["JobState"] in states

        wait_until(reached, seconds, lambda: f"{states} of {found}\n{self._tail()}")
        return found

    def _tail(self) -> str:
        logs = sorted(self.directory.rglob("slurm-*.log"))
        return "\n".join(f"{log}:\n{log.read_text()[-3000:]}" for log in logs)
