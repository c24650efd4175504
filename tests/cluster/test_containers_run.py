"""The commands of our container job files, on machines, with the variables their operators set."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cluster.machines import Command, Machines
from helpers.forked import fourfold
from launch.test_launch_commands import TINY

STEPS = 12
# As of Kubeflow Trainer 2.3 (pkg/runtime/framework/plugins/torch), SkyPilot 0.14 (its job driver)
# and Kubernetes's Job controller; the rest is in the files.
OPERATORS = {
    "k8s": {"JOB_COMPLETION_INDEX": "{i}"},
    "kubeflow": {
        "JOB_COMPLETION_INDEX": "{i}",
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": "{i}",
        "PET_MASTER_ADDR": "gpt-node-0-0.gpt",
        "PET_MASTER_PORT": "29500",
    },
    "skypilot": {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "{i}",
        "SKYPILOT_NODE_IPS": "10.77.0.10\n10.77.0.11",
        "SKYPILOT_NUM_GPUS_PER_NODE": "0",
        "SKYPILOT_TASK_ID": "sky-managed-2026-11-18-05-00-00-000000_gpt_1-0",
    },
}


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with Machines(2, tmp_path) as two:
        with (two.directory / "machines" / "hosts").open("a") as names:
            names.write("10.77.0.10 gpt-0.gpt gpt-node-0-0.gpt\n")
        yield two


def write_job(scheduler: str, directory: Path) -> tuple[list[str], dict[str, str]]:
    """The command of its containers, and the variables that the file itself sets."""
    engine = TINY["Engine"] | {
        "max_steps": STEPS,
        "save_load": {"output_dir": str(directory / "run"), "save_steps": 5},
    }
    dataset = TINY["Data"]["dataset"] | {"cache_dir": str(directory)}
    data = TINY["Data"] | {"dataset": dataset}
    (directory / "run.yaml").write_text(yaml.safe_dump(TINY | {"Engine": engine, "Data": data}))
    file = directory / "job.yaml"
    words = ["--nodes", "2", "--nproc", "1", "--name", "gpt", "--image", "fourfold:1"]
    words += ["--volume", "team", "--out", str(file), "--force"]
    words += ["-o", "Engine.save_load.save_steps=5"]
    done = fourfold("submit", "-c", "run.yaml", "--to", scheduler, *words, cwd=directory)
    assert done.returncode == 0, done.stderr
    last = list(yaml.safe_load_all(file.read_text()))[-1]
    if scheduler == "skypilot":
        return ["bash", "-c", last["run"]], {}
    if scheduler == "kubeflow":
        return last["spec"]["trainer"]["command"], {}
    (container,) = last["spec"]["template"]["spec"]["containers"]
    return container["command"], {one["name"]: one["value"] for one in container["env"]}


def start(machines: Machines, scheduler: str) -> list[Command]:
    """The container of each machine."""
    command, in_file = write_job(scheduler, machines.directory)
    programs = machines.directory / "bin"
    programs.mkdir(exist_ok=True)
    (programs / "fourfold").write_text(f'#!/bin/sh\nexec {sys.executable} -m fourfold "$@"\n')
    (programs / "fourfold").chmod(0o755)
    started = []
    for i in range(2):
        given = {name: text.format(i=i) for name, text in OPERATORS[scheduler].items()}
        path = {"PATH": f"{programs}:{os.environ['PATH']}"}
        started.append(machines.start(i, command, path | in_file | given))
    return started


@pytest.mark.parametrize("scheduler", OPERATORS)
def test_containers_train_together(scheduler: str, machines: Machines) -> None:
    pods = start(machines, scheduler)
    codes = [pod.wait(180) for pod in pods]
    said = pods[0].output()
    assert codes == [0, 0], said + pods[1].output()
    assert f"global step {STEPS}," in said
    assert "2 machines: node0 (rank 0 at 10.77.0.10), node1 (rank 1 at 10.77.0.11)" in said


def test_a_container_that_was_told_to_stop_is_started_again(machines: Machines) -> None:
    pods = start(machines, "k8s")
    pods[0].until("global step 3,", 180)
    pods[1].send_signal(signal.SIGTERM)
    assert [pod.wait(120) for pod in pods] == [75, 75], pods[0].output() + pods[1].output()
    assert "the run is saved" in pods[0].output()
    pods = start(machines, "k8s")
    assert [pod.wait(180) for pod in pods] == [0, 0], pods[0].output()
    assert "resumed from" in pods[0].output()
    assert f"global step {STEPS}," in pods[0].output()
    late = start(machines, "k8s")[1]
    assert late.wait(60) == 0, "it has nothing to do, and waits for nobody"
