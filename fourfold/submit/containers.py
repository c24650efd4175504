"""Job files that start containers: for Kubernetes, for Kubeflow's Trainer, and for SkyPilot.

Each of them starts one container on every machine and tells it which it is; `fourfold train` reads
that (fourfold/launch/launchers.py) and starts the processes of its machine. The working directory
lies on a volume that all containers share, under the same path as here.

What a container's end means to them, and what the command makes of it:

    0      done: it is not started again. So a run that was told to stop, and has saved, ends with
           75, and a container that comes back after the last step with 0 at once
    2      a mistake in the input: Kubernetes gives up at once
    other  a failure: started again, so many times
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from fourfold import __version__
from fourfold.submit.job import STOPPED_CODE, Job

PORT = 29500
CONTAINER, SHM, DATA = "fourfold", "shm", "data"
# The label of a host, with room for an index of five digits behind a dash.
_LABEL = re.compile(r"[a-z](?:[a-z0-9-]{0,55}[a-z0-9])?", re.ASCII)
# What SkyPilot's catalogues call the planner's devices.
_ACCELERATORS = {
    "V100-16G": "V100",
    "V100-32G": "V100-32GB",
    "A100-40G": "A100",
    "A100-80G": "A100-80GB",
    "H100-80G": "H100",
}

COMMAND = """\
cd {directory} || exit
[ "$(cat {latest} 2>/dev/null)" = step_{max_steps} ] && exit 0
exec {command} \\
    --nproc {ranks_per_node} --max-restarts {max_restarts} --stopped-exit-code {stopped}
"""

OPENING = """\
# {nodes} x {ranks_per_node} ranks of `fourfold {verb}`, written by `fourfold submit` {version}.
# {tested}
{remarks}\
#
"""


class _Dumper(yaml.SafeDumper):
    """Writes a script as lines."""


def _written(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _written)


def _file(job: Job, tested: str, usage: list[str], *documents: dict[str, Any]) -> str:
    opening = OPENING.format(
        nodes=job.nodes,
        ranks_per_node=job.ranks_per_node,
        verb=" ".join(job.arguments[:3]),
        version=__version__,
        tested=tested,
        remarks="".join(f"# {line}\n" for line in job.remarks),
    )
    bodies = [
        yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True)
        for document in documents
    ]
    return opening + "".join(f"#   {line}\n" for line in usage) + "#\n" + "---\n".join(bodies)


def _command(job: Job) -> str:
    return COMMAND.format(
        latest=shlex.quote(str(job.output_dir / "latest")),
        max_steps=job.max_steps,
        directory=shlex.quote(str(job.directory)),
        command="fourfold " + job.shell_words(),
        ranks_per_node=job.ranks_per_node,
        max_restarts=job.max_restarts,
        stopped=STOPPED_CODE,
    )


def _missing(job: Job) -> list[str]:
    found = []
    if job.image is None:
        found.append(
            "--image is missing: a container image with fourfold in it (the Dockerfile of the "
            "sources makes one)"
        )
    if job.volume is None:
        found.append(
            f"--volume is missing: the name of the volume that all machines share, which holds "
            f"{job.directory}"
        )
    if not _LABEL.fullmatch(job.name):
        found.append(
            f"--name {job.name!r}: hosts are named after the job, so it is at most 57 small "
            "letters, digits and dashes, and begins with a letter"
        )
    return found


# -- Kubernetes -----------------------------------------------------------------------------------


def _resources(job: Job) -> dict[str, Any]:
    """Whole GPUs are limits; the cores are what the ranks need at least."""
    asked: dict[str, Any] = {"requests": {"cpu": str(job.ranks_per_node)}}
    if job.on_gpus:
        asked["limits"] = {"nvidia.com/gpu": str(job.ranks_per_node)}
    return asked


def _volumes(job: Job) -> list[dict[str, Any]]:
    return [
        # The default of 64 MB is too small for the messages of processes on one machine.
        {"name": SHM, "emptyDir": {"medium": "Memory"}},
        {"name": DATA, "persistentVolumeClaim": {"claimName": job.volume}},
    ]


def _mounts(job: Job) -> list[dict[str, Any]]:
    return [
        {"name": SHM, "mountPath": "/dev/shm"},
        {"name": DATA, "mountPath": str(job.directory)},
    ]


class Kubernetes:
    """An indexed Job with a headless Service, which need no operator."""

    suffix = ".k8s.yaml"
    uses = frozenset({"image", "volume"})

    def problems(self, job: Job) -> list[str]:
        return _missing(job)

    def text(self, job: Job) -> str:
        return _file(
            job,
            "Validated against the schemas of Kubernetes 1.37; its command ran on machines with "
            "the\n# variables of an indexed Job. Never given to a cluster.",
            [
                f"kubectl apply -f {job.name}{self.suffix}    start",
                f"kubectl logs -f job/{job.name}    the log; every rank's is below {job.log_dir}",
                f"kubectl delete -f {job.name}{self.suffix}    save and stop for good",
            ],
            self._service(job),
            self._job(job),
        )

    def command(self, job: Job, file: Path) -> str:
        return f"kubectl apply -f {shlex.quote(str(file))}"

    def _service(self, job: Job) -> dict[str, Any]:
        """Gives the pods the names NAME-INDEX.NAME, also before they are ready."""
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": job.name},
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": {"batch.kubernetes.io/job-name": job.name},
                "ports": [{"name": "rendezvous", "port": PORT}],
            },
        }

    def _job(self, job: Job) -> dict[str, Any]:
        container = {
            "name": CONTAINER,
            "image": job.image,
            "command": ["/bin/sh", "-c", _command(job)],
            "env": [
                {"name": "PET_NNODES", "value": str(job.nodes)},
                {"name": "PET_MASTER_ADDR", "value": f"{job.name}-0.{job.name}"},
                {"name": "PET_MASTER_PORT", "value": str(PORT)},
            ],
            "ports": [{"name": "rendezvous", "containerPort": PORT}],
            "resources": _resources(job),
            "volumeMounts": _mounts(job),
        }
        rules: list[dict[str, Any]] = [
            {"action": "FailJob", "onExitCodes": _exit_codes(2)},
            {"action": "Ignore", "onExitCodes": _exit_codes(STOPPED_CODE)},
            # Drained, preempted: nobody's failure.
            {
                "action": "Ignore",
                "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
            },
        ]
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": job.name},
            "spec": {
                "completionMode": "Indexed",
                "completions": job.nodes,
                "parallelism": job.nodes,
                # One machine's failure ends the run on all.
                "backoffLimit": job.max_restarts * job.nodes,
                "podReplacementPolicy": "Failed",
                "podFailurePolicy": {"rules": rules},
                "template": {
                    "metadata": {"labels": {"app": job.name}},
                    "spec": {
                        "subdomain": job.name,
                        "restartPolicy": "Never",
                        "terminationGracePeriodSeconds": job.notice_seconds,
                        "enableServiceLinks": False,
                        "containers": [container],
                        "volumes": _volumes(job),
                    },
                },
            },
        }


def _exit_codes(*codes: int) -> dict[str, Any]:
    return {"containerName": CONTAINER, "operator": "In", "values": list(codes)}


class Kubeflow:
    """A TrainJob of the runtime that Kubeflow's Trainer brings along."""

    suffix = ".trainjob.yaml"
    uses = frozenset({"image", "volume"})
    RUNTIME, NODE = "torch-distributed", "node"

    def problems(self, job: Job) -> list[str]:
        return _missing(job)

    def text(self, job: Job) -> str:
        return _file(
            job,
            "Validated by the models of Kubeflow Trainer 2.3; its command ran on machines with the "
            "variables\n# that its torch runtime sets. Never given to a cluster.",
            [
                f"kubectl apply -f {job.name}{self.suffix}    start; needs the runtime "
                f"{self.RUNTIME}, which comes with the Trainer",
                f"kubectl get trainjob {job.name} -o yaml    with the progress of the run",
                f"kubectl delete -f {job.name}{self.suffix}    save and stop for good",
            ],
            self._train_job(job),
        )

    def command(self, job: Job, file: Path) -> str:
        return f"kubectl apply -f {shlex.quote(str(file))}"

    def _train_job(self, job: Job) -> dict[str, Any]:
        pod = {
            "terminationGracePeriodSeconds": job.notice_seconds,
            "containers": [{"name": self.NODE, "volumeMounts": _mounts(job)}],
            "volumes": _volumes(job),
        }
        jobs = [{"name": self.NODE, "template": {"spec": {"template": {"spec": pod}}}}]
        return {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": job.name},
            "spec": {
                "runtimeRef": {"name": self.RUNTIME},
                "trainer": {
                    "image": job.image,
                    "command": ["/bin/sh", "-c", _command(job)],
                    "numNodes": job.nodes,
                    "numProcPerNode": job.ranks_per_node,
                    "resourcesPerNode": _resources(job),
                },
                "runtimePatches": [
                    {
                        "manager": "fourfold.submit/manager",
                        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}},
                    }
                ],
            },
        }


# -- SkyPilot -------------------------------------------------------------------------------------


class SkyPilot:
    """A task; as a managed job it is started again elsewhere when its machines are taken away."""

    suffix = ".sky.yaml"
    uses = frozenset({"image", "volume"})

    def problems(self, job: Job) -> list[str]:
        found = _missing(job)
        if job.on_gpus and job.device is None:
            found.append(
                "SkyPilot must know which GPUs to look for; describe them with --cluster, as in "
                "--cluster 2x8xA100-80G"
            )
        return found

    def text(self, job: Job) -> str:
        return _file(
            job,
            "Validated by SkyPilot 0.14.1; its command ran on machines with the variables that it "
            "sets.\n# Never given to a cloud.",
            [
                f"{self.command(job, Path(job.name + self.suffix))}    start; continued elsewhere "
                "when machines are taken away",
                f"sky jobs logs --name {job.name}    the log; every rank's is below {job.log_dir}",
                f"sky jobs cancel --name {job.name}    stop for good, with the last save kept",
            ],
            self._task(job),
        )

    def command(self, job: Job, file: Path) -> str:
        return f"sky jobs launch --name {job.name} {shlex.quote(str(file))}"

    def _task(self, job: Job) -> dict[str, Any]:
        resources: dict[str, Any] = {"image_id": f"docker:{job.image}"}
        if job.on_gpus:
            name = _ACCELERATORS.get(job.device or "", job.device)
            resources["accelerators"] = f"{name}:{job.ranks_per_node}"
        else:
            resources["cpus"] = f"{job.ranks_per_node}+"
        resources["job_recovery"] = {
            "max_restarts_on_errors": job.max_restarts,
            "recover_on_exit_codes": [STOPPED_CODE],
        }
        return {
            "name": job.name,
            "num_nodes": job.nodes,
            "resources": resources,
            "volumes": {str(job.directory): job.volume},
            "run": _command(job),
        }
