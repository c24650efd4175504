"""Job files of schedulers: what a run needs of a cluster, written down. None of them is spoken to.

`job.py` plans the job, whatever the scheduler; a `Scheduler` writes it down. To add one, write a
class with the attributes below in a file of this package, and name it in `find_scheduler`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from fourfold.submit.job import Job, JobRequest, prepare

__all__ = ["OPTIONS", "SCHEDULERS", "Job", "JobRequest", "Scheduler", "find_scheduler", "prepare"]

# The words for --to.
SCHEDULERS = ("slurm", "k8s", "kubeflow", "skypilot", "torchrun")
# Of `JobRequest`: what not every scheduler has a place for.
OPTIONS = ("time", "partition", "image", "volume", "sbatch")


class Scheduler(Protocol):
    suffix: str  # of its files
    uses: frozenset[str]  # of `OPTIONS`; the others are refused

    def problems(self, job: Job) -> list[str]:
        """What of this job cannot be written down for it, one sentence each."""

    def text(self, job: Job) -> str:
        """The file; it opens with what such files were tested with."""

    def command(self, job: Job, file: Path) -> str:
        """The one command that starts it."""


def find_scheduler(word: str) -> Scheduler:
    from fourfold.submit.containers import Kubeflow, Kubernetes, SkyPilot
    from fourfold.submit.shell_scripts import Slurm, Torchrun

    known: dict[str, Scheduler] = {
        "slurm": Slurm(),
        "k8s": Kubernetes(),
        "kubeflow": Kubeflow(),
        "skypilot": SkyPilot(),
        "torchrun": Torchrun(),
    }
    return known[word]
