"""Job files of Kubernetes, Kubeflow and SkyPilot."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.forked import fourfold
from helpers.schedulers import ROOT, in_schedulers, needs_schedulers
from hypothesis import given
from hypothesis import strategies as st

from fourfold.submit import Job, find_scheduler

KINDS = ["k8s", "kubeflow", "skypilot"]
NAMED = {
    "name": "gpt",
    "nodes": 2,
    "ranks_per_node": 8,
    "on_gpus": True,
    "directory": Path("/data/my team"),
    "output_dir": Path("/data/my team/run"),
    "arguments": ("train", "-c", "a b.yaml", "-o", "Engine.max_steps=9"),
    "max_steps": 9,
    "limit_seconds": None,
    "notice_seconds": 150,
    "timeout_seconds": 600.0,
    "max_restarts": 3,
    "image": "registry/fourfold:cuda",
    "volume": "team",
    "device": "A100-80G",
    "remarks": ("Layout dp16.",),
}


def job(**other: Any) -> Job:
    return Job(**NAMED | other)


def documents(kind: str, made: Job) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(find_scheduler(kind).text(made)))


def script_of(kind: str, made: Job) -> str:
    last = documents(kind, made)[-1]
    if kind == "skypilot":
        return last["run"]
    if kind == "kubeflow":
        return last["spec"]["trainer"]["command"][-1]
    return last["spec"]["template"]["spec"]["containers"][0]["command"][-1]


def test_a_job_of_kubernetes() -> None:
    service, made = documents("k8s", job())
    assert service["spec"]["clusterIP"] == "None" and service["metadata"]["name"] == "gpt"
    spec = made["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == "gpt" and pod["terminationGracePeriodSeconds"] == 150
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert {"name": "PET_NNODES", "value": "2"} in container["env"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory"}
    claim = volumes[mounts["/data/my team"]]["persistentVolumeClaim"]
    assert claim == {"claimName": "team"}
    rules = [(rule["action"], *rule)[:3] for rule in spec["podFailurePolicy"]["rules"]]
    assert [action for action, *_ in rules] == ["FailJob", "Ignore", "Ignore"]


def test_skypilots_words_for_gpus() -> None:
    for device, accelerators in [("A100-80G", "A100-80GB:8"), ("H200", "H200:8")]:
        (task,) = documents("skypilot", job(device=device))
        assert task["resources"]["accelerators"] == accelerators
    (task,) = documents("skypilot", job(on_gpus=False))
    assert task["resources"]["cpus"] == "8+" and "accelerators" not in task["resources"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_missing_is_asked_for_at_once(kind: str) -> None:
    made = job(image=None, volume=None, name="My_Run", device=None)
    said = " ".join(find_scheduler(kind).problems(made))
    assert "--image" in said and "--volume" in said and "--name 'My_Run'" in said
    assert ("--cluster" in said) == (kind == "skypilot")
    assert find_scheduler(kind).problems(job()) == []


words = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1, max_size=9)


@pytest.mark.parametrize("kind", KINDS)
@given(st.lists(words.filter(lambda word: not word.startswith("-")), min_size=1, max_size=3))
def test_any_argument_reaches_the_program_as_it_was_given(kind: str, values: list[str]) -> None:
    arguments = ["train", "-c", *values[:1]]
    arguments += [word for value in values[1:] for word in ("-o", value)]
    lines = script_of(kind, job(arguments=tuple(arguments)))
    command = lines[lines.index("exec fourfold ") :].replace("\\\n", " ")
    assert shlex.split(command)[2 : 2 + len(arguments)] == arguments


@pytest.mark.parametrize("kind", KINDS)
def test_the_script_ends_at_once_after_the_last_step(kind: str, tmp_path: Path) -> None:
    made = job(directory=tmp_path, output_dir=tmp_path / "my run")
    made.output_dir.mkdir()
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "fourfold").write_text('#!/bin/sh\necho "$@"; exit 7\n')
    (programs / "fourfold").chmod(0o755)
    for latest, code in [(None, 7), ("step_8", 7), ("step_9", 0)]:
        if latest is not None:
            (made.output_dir / "latest").write_text(latest + "\n")
        done = subprocess.run(
            ["sh", "-c", script_of(kind, made)],
            env={"PATH": f"{programs}:/usr/bin:/bin"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stderr
        if code:
            assert "--nproc 8 --max-restarts 3 --stopped-exit-code 75" in done.stdout


def test_an_option_without_a_place_is_refused(tmp_path: Path) -> None:
    result = fourfold(
        *["submit", "-c", ROOT / "configs/gpt/quickstart.yaml", "--to", "k8s", "--nodes", "2"],
        *["--nproc", "1", "--time", "1h", "--out", tmp_path / "job.yaml"],
    )
    assert result.returncode == 2
    assert "--time has no place in a job of k8s" in result.stderr
    assert "--image is missing" in result.stderr and not (tmp_path / "job.yaml").exists()


# -- their own programs ---------------------------------------------------------------------------

VALIDATE = "import sys; from kubernetes_validate.__main__ import main; sys.exit(main())"
ROUND_TRIP = """
import sys, yaml
from kubeflow_trainer_api import models

def lost(given, kept, path):
    if isinstance(given, dict):
        for key, value in given.items():
            if not isinstance(kept, dict) or key not in kept:
                yield f"{path}.{key}"
            else:
                yield from lost(value, kept[key], f"{path}.{key}")
    elif isinstance(given, list):
        for i, value in enumerate(given):
            yield from lost(value, kept[i], f"{path}[{i}]")
    elif given != kept:
        yield path

given = yaml.safe_load(open(sys.argv[1]))
found = list(lost(given, models.TrainerV1alpha1TrainJob.from_dict(given).to_dict(), ""))
sys.exit(f"lost: {found}" if found else 0)
"""
TASK = "import sys, sky; print(sky.Task.from_yaml(sys.argv[1]).num_nodes)"


@needs_schedulers
@pytest.mark.parametrize("on_gpus", [True, False])
def test_kubernetes_own_schemas(on_gpus: bool, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    text = find_scheduler("k8s").text(job(on_gpus=on_gpus))
    for written, code in [(text, 0), (text.replace("backoffLimit", "backofLimit"), 1)]:
        file.write_text(written)
        done = in_schedulers(["-c", VALIDATE, "-k", "1.37", "--strict", file], tmp_path)
        assert (done.returncode != 0) == bool(code), done.stdout + done.stderr


@needs_schedulers
@pytest.mark.parametrize("on_gpus", [True, False])
def test_kubeflows_own_models(on_gpus: bool, tmp_path: Path) -> None:
    """They drop what they do not know, so what comes back is compared."""
    file = tmp_path / "job.yaml"
    text = find_scheduler("kubeflow").text(job(on_gpus=on_gpus))
    for written, code in [(text, 0), (text.replace("numNodes", "numNode"), 1)]:
        file.write_text(written)
        done = in_schedulers(["-c", ROUND_TRIP, file], tmp_path)
        assert done.returncode == code, done.stdout + done.stderr


@needs_schedulers
@pytest.mark.parametrize("on_gpus", [True, False])
def test_skypilots_own_reader(on_gpus: bool, tmp_path: Path) -> None:
    file = tmp_path / "task.yaml"
    text = find_scheduler("skypilot").text(job(on_gpus=on_gpus))
    for written, good in [(text, True), (text.replace("num_nodes", "num_node"), False)]:
        file.write_text(written)
        done = in_schedulers(["-c", TASK, file], tmp_path)
        assert (done.returncode == 0 and done.stdout.split()[-1] == "2") == good, done.stderr
