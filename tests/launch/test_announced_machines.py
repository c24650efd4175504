"""Schedulers that start one process on each machine, and what nobody can join."""

from __future__ import annotations

import socket

import pytest
from helpers.forked import fourfold
from hypothesis import given
from hypothesis import strategies as st

from fourfold.errors import UserError
from fourfold.launch import scheduled
from fourfold.launch.launchers import (
    Launcher,
    join_launcher,
    machines_to_start,
    refuse_inside_launcher,
    started_by,
)
from fourfold.launch.scheduled import MachineStart, first_pod, port_of

# What each of them sets, from its documentation and source; values of the second of two machines.
TRAIN_JOB = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "gpt-node-0-0.gpt",
    "PET_MASTER_PORT": "29500",
    "JOB_COMPLETION_INDEX": "1",
}
PYTORCH_JOB = {
    "MASTER_ADDR": "gpt-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "8",
    "RANK": "1",
    "PET_MASTER_ADDR": "gpt-master-0",
    "PET_MASTER_PORT": "23456",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
}
INDEXED = {"JOB_COMPLETION_INDEX": "1", "PET_NNODES": "2", "PET_MASTER_ADDR": "gpt-0.gpt"}
SKYPILOT = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.7",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "sky-2026-11-18-04-00-00-000000_gpt-1",
}
MPICH = {
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "PMI_FD": "8",
    "MPI_LOCALRANKID": "3",
    "MPI_LOCALNRANKS": "4",
    "MPIR_CVAR_CH3_INTERFACE_HOSTNAME": "node0",
}
SRUN_ONE_EACH = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "node[0-1]",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
SKY_PORT = port_of(SKYPILOT["SKYPILOT_TASK_ID"])
BATCH_SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    ("environment", "name", "master", "nproc"),
    [
        (TRAIN_JOB, "Kubeflow", "gpt-node-0-0.gpt:29500", 4),
        (PYTORCH_JOB, "Kubeflow", "gpt-master-0:23456", 4),
        (INDEXED, "an indexed Job", "gpt-0.gpt:29500", None),
        (INDEXED | {"PET_MASTER_ADDR": "fd00::1"}, "an indexed Job", "[fd00::1]:29500", None),
        (SKYPILOT | {"SKYPILOT_TASK_ID": ""}, "SkyPilot", "10.0.0.4:12000", 8),
        (SKYPILOT | {"SKYPILOT_NUM_GPUS_PER_NODE": "0"}, "SkyPilot", f"10.0.0.4:{SKY_PORT}", None),
    ],
    ids=["TrainJob", "PyTorchJob", "indexed Job", "IPv6", "SkyPilot", "SkyPilot without GPUs"],
)
def test_the_second_of_two_machines(
    environment: dict[str, str], name: str, master: str, nproc: int | None
) -> None:
    assert machines_to_start(environment, None) == MachineStart(name, "2", 1, master, nproc)


@pytest.mark.parametrize("environment", [TRAIN_JOB, PYTORCH_JOB, INDEXED, SKYPILOT, BATCH_SCRIPT])
def test_a_verb_that_starts_nothing_elsewhere_does_not_run_alone(
    environment: dict[str, str],
) -> None:
    with pytest.raises(UserError, match="2 machines"):
        join_launcher(dict(environment))
    with pytest.raises(UserError, match="2 machines"):
        refuse_inside_launcher(dict(environment), "--nproc 4")


@pytest.mark.parametrize("environment", [TRAIN_JOB, PYTORCH_JOB, SKYPILOT, BATCH_SCRIPT])
def test_what_torchrun_started_there_is_torchruns(environment: dict[str, str]) -> None:
    inside = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"}
    found = started_by(environment | inside)
    assert found == Launcher("torchrun", 8)
    assert machines_to_start(environment | inside, None) is None


def test_an_elastic_pytorch_job() -> None:
    """It has no ranks of machines, and names the place of the rendezvous."""
    machines = machines_to_start(
        {
            "PET_RDZV_BACKEND": "c10d",
            "PET_RDZV_ENDPOINT": "gpt-worker-0:23456",
            "PET_RDZV_ID": "gpt",
            "PET_NNODES": "1:3",
            "PET_NPROC_PER_NODE": "2",
        },
        None,
    )
    assert machines == MachineStart("Kubeflow", "1:3", None, "gpt-worker-0:23456", 2)
    assert machines.most == 3


def test_a_pod_by_itself() -> None:
    alone = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "0"}
    assert join_launcher(dict(alone)) is None
    several = alone | {"PET_NPROC_PER_NODE": "4"}
    with pytest.raises(UserError, match="--nproc 4"):
        join_launcher(dict(several))
    refuse_inside_launcher(several, "--nproc 4")
    assert started_by({"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0"}) is None
    assert started_by({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}) is None


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"JOB_COMPLETION_INDEX": "0"}, "nothing says of how many; set PET_NNODES"),
        ({"PET_NODE_RANK": "1"}, "nothing says of how many"),
        ({"PET_NNODES": "2"}, "which of them this is"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "2"}, "does not exist among PET_NNODES=2"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "0"}, "set PET_MASTER_ADDR"),
        ({"PET_NNODES": "two"}, "PET_NNODES='two' is not a whole number"),
        ({"PET_NNODES": "3:1"}, "the fewest and the most"),
        ({"PET_NNODES": "1:3"}, "set PET_MASTER_ADDR"),
        (TRAIN_JOB | {"PET_NPROC_PER_NODE": "0"}, "at least one process"),
        (SKYPILOT | {"SKYPILOT_NODE_IPS": "10.0.0.4"}, "has 1 addresses"),
        (SKYPILOT | {"SKYPILOT_NODE_RANK": "2"}, "SKYPILOT_NODE_RANK=2"),
        (MPICH | {"MPI_LOCALNRANKS": "2"}, "-genv MASTER_ADDR HOST"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "MASTER_ADDR and LOCAL_RANK not set"),
        (BATCH_SCRIPT, "write srun before the command"),
    ],
)
def test_what_cannot_be_joined_is_refused(environment: dict[str, str], said: str) -> None:
    with pytest.raises(UserError) as refused:
        join_launcher(dict(environment))
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "environment", [{"PET_NNODES": "2"}, {"JOB_COMPLETION_INDEX": "0"}, BATCH_SCRIPT]
)
@pytest.mark.parametrize("verb", ["train", "bench"])
def test_the_command_ends_with_a_sentence(verb: str, environment: dict[str, str]) -> None:
    result = fourfold(verb, "-c", "run.yaml", environment=environment)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr and "run.yaml" not in result.stderr


@pytest.mark.parametrize("environment", [TRAIN_JOB, SKYPILOT])
def test_a_verb_of_one_process_is_not_run_on_each_machine(environment: dict[str, str]) -> None:
    result = fourfold("evaluate", "-c", "run.yaml", environment=environment)
    assert result.returncode == 2 and "started 2; start it without" in result.stderr


def test_mpich() -> None:
    environment = dict(MPICH)
    launcher = join_launcher(environment)
    assert launcher is not None and (launcher.name, launcher.world_size) == ("MPICH", 4)
    assert (environment["RANK"], environment["LOCAL_RANK"]) == ("3", "3")
    assert environment["MASTER_ADDR"] == "127.0.0.1"
    assert environment["MASTER_PORT"].isdigit()


def test_srun_with_pmi2_is_slurm_and_mpich_in_slurm_is_mpich() -> None:
    pmi2 = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "4", "PMI_JOBID": "7.0"}
    found = started_by(SRUN_ONE_EACH | pmi2)
    assert isinstance(found, Launcher) and found.name == "SLURM"
    found = started_by(SRUN_ONE_EACH | MPICH | {"MASTER_ADDR": "node0"})
    assert isinstance(found, Launcher) and (found.name, found.world_size) == ("MPICH", 4)


def test_one_task_on_each_machine_may_start_the_others_of_its_machine() -> None:
    machines = machines_to_start(SRUN_ONE_EACH, 4)
    assert machines is not None and machines.master.startswith("node0:")
    assert (machines.nnodes, machines.node_rank, machines.nproc) == ("2", 1, 4)
    assert machines_to_start(SRUN_ONE_EACH, None) is None, "without --nproc it is a rank itself"
    refuse_inside_launcher(dict(SRUN_ONE_EACH), "--nnodes", on_every_machine=True)
    both_on_one = SRUN_ONE_EACH | {"SLURM_STEP_NUM_NODES": "1"}
    assert machines_to_start(both_on_one, 4) is None
    with pytest.raises(UserError, match="inside each of the 2 that SLURM started"):
        refuse_inside_launcher(both_on_one, "--nnodes", on_every_machine=True)


@pytest.mark.parametrize(
    ("host", "index", "first"),
    [
        ("gpt-3.gpt.default.svc.cluster.local", "3", "gpt-0.gpt.default.svc.cluster.local"),
        ("js-workers-0-1.js", "1", "js-workers-0-0.js"),
        ("gpt-3", "3", None),
        ("node7.example.org", "3", None),
        ("", "0", None),
    ],
)
def test_the_first_pods_name(host: str, index: str, first: str | None) -> None:
    assert first_pod(host, index) == first


def test_an_indexed_job_with_a_headless_service_needs_only_the_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: "gpt-1.gpt.team.svc.cluster.local")
    machines = machines_to_start({"JOB_COMPLETION_INDEX": "1", "PET_NNODES": "2"}, None)
    assert machines is not None
    assert machines.master == "gpt-0.gpt.team.svc.cluster.local:29500"


def test_counting_gpus_is_torchruns_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    pod = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"}
    for gpus, nproc in [(8, 8), (0, 1)]:
        monkeypatch.setattr(scheduled, "num_gpus", lambda gpus=gpus: gpus)
        machines = machines_to_start(pod, None)
        assert machines is not None and machines.nproc == nproc


ALL = [TRAIN_JOB, PYTORCH_JOB, SKYPILOT, MPICH, SRUN_ONE_EACH, BATCH_SCRIPT]
NAMES = sorted({name for one in ALL for name in one} | {"LOCAL_RANK", "SLURM_NNODES"})
VALUES = st.sampled_from(["0", "1", "2", "3", "4", "node0", "", "-1", "2:4", "a b", "٣", "1e9"])
ENVIRONMENTS = st.dictionaries(
    st.sampled_from(NAMES), VALUES | st.text("01:,[]-ab ", max_size=4), max_size=8
)
WHOLE = st.sampled_from(ALL).flatmap(lambda base: ENVIRONMENTS.map(lambda other: base | other))


@pytest.mark.parametrize(
    "pets", [{"PET_NNODES": "1"}, {"PET_NPROC_PER_NODE": "2"}, {"PET_NODE_RANK": "0"}]
)
def test_skypilots_machines_are_not_forgotten_for_torchruns_variables(pets: dict[str, str]) -> None:
    with pytest.raises(UserError, match="SkyPilot started 2 machines, and the PET_ variables"):
        machines_to_start(SKYPILOT | pets, None)


@given(ENVIRONMENTS | WHOLE)
def test_any_environment_is_joined_or_refused_and_nothing_set_is_changed(
    environment: dict[str, str],
) -> None:
    before = dict(environment)
    try:
        launcher = join_launcher(environment)
    except UserError as error:
        assert len(str(error)) < 400
        return
    assert environment | before == environment
    if launcher is None:
        assert environment == before
        alone = ("1", "1:1", "01")
        assert before.get("PET_NNODES", "1") in alone, "alone, and others were announced"
        assert before.get("JOB_COMPLETION_INDEX") is None or before["PET_NNODES"] in alone
        assert before.get("SKYPILOT_NUM_NODES", "1") == "1"
    else:
        assert 0 <= int(environment["RANK"]) < int(environment["WORLD_SIZE"])
        assert launcher.world_size == int(environment["WORLD_SIZE"])


@given(ENVIRONMENTS | WHOLE, st.none() | st.integers(1, 9))
def test_any_machine_has_a_place_among_the_others(
    environment: dict[str, str], nproc: int | None
) -> None:
    try:
        machines = machines_to_start(environment, nproc)
    except UserError:
        return
    if machines is not None:
        assert machines.node_rank is None or 0 <= machines.node_rank < machines.most
        assert machines.nproc is None or machines.nproc > 0
