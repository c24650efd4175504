"""Launchers' variables become the ones torch reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.errors import UserError
from fourfold.launch.launchers import first_host, join_launcher, port_of

SRUN = {
    "SLURM_JOB_ID": "200505",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "gnode[10,20-22]",
    "SLURM_NODELIST": "gnode[09-22]",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}


def test_nobody_launched_us() -> None:
    environment = {"PATH": "/bin"}
    assert join_launcher(environment) is None
    assert environment == {"PATH": "/bin"}


def test_srun() -> None:
    environment = dict(SRUN)
    launcher = join_launcher(environment)
    assert launcher is not None and (launcher.name, launcher.world_size) == ("SLURM", 8)
    assert environment["RANK"] == "5" and environment["LOCAL_RANK"] == "1"
    assert environment["WORLD_SIZE"] == "8", "the step's tasks, not the job's"
    assert environment["MASTER_ADDR"] == "gnode10"
    assert 12000 <= int(environment["MASTER_PORT"]) < 32000


def test_ranks_of_a_step_agree_on_a_port_and_steps_differ() -> None:
    ports = set()
    for step, rank in [("0", "0"), ("0", "7"), ("1", "0")]:
        environment = SRUN | {"SLURM_PROCID": rank, "SLURM_STEP_ID": step}
        join_launcher(environment)
        ports.add((step, environment["MASTER_PORT"]))
    assert len(ports) == 2 and len({port for _, port in ports}) == 2


def test_a_batch_script_is_no_launcher() -> None:
    """It has the job's variables, also SLURM_PROCID=0, but no step."""
    environment = {name: value for name, value in SRUN.items() if "STEP" not in name}
    assert join_launcher(environment) is None


def test_what_the_user_set_stays() -> None:
    environment = SRUN | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4444"}
    environment["SLURM_STEP_NODELIST"] = "]"
    join_launcher(environment)
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("10.0.0.1", "4444")


def test_torchrun_needs_nothing() -> None:
    environment = SRUN | {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    before = dict(environment)
    launcher = join_launcher(environment)
    assert launcher is not None and (launcher.name, launcher.world_size) == ("torchrun", 2)
    assert environment == before


def test_mpirun_on_one_machine() -> None:
    environment = dict(MPIRUN)
    launcher = join_launcher(environment)
    assert launcher is not None and (launcher.name, launcher.world_size) == ("Open MPI", 4)
    assert environment["RANK"] == environment["LOCAL_RANK"] == "3"
    assert environment["WORLD_SIZE"] == "4" and environment["MASTER_ADDR"] == "127.0.0.1"


def test_mpirun_on_several_machines_needs_an_address() -> None:
    environment = MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(UserError, match="-x MASTER_ADDR"):
        join_launcher(dict(environment))
    environment["MASTER_ADDR"] = "node0"
    assert join_launcher(environment) is not None


@pytest.mark.parametrize(
    "given",
    [
        {"RANK": "0"},
        {"WORLD_SIZE": "2"},
        {"WORLD_SIZE": "two", "RANK": "0"},
        {"WORLD_SIZE": "2", "RANK": "2"},
        {"WORLD_SIZE": "0", "RANK": "0"},
        {"WORLD_SIZE": "2", "RANK": "-1"},
        SRUN | {"SLURM_PROCID": ""},
        SRUN | {"SLURM_STEP_NODELIST": "a[", "SLURM_NODELIST": ""},
    ],
)
def test_variables_that_make_no_sense(given: dict[str, str]) -> None:
    with pytest.raises(UserError):
        join_launcher(dict(given))


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("a,b", "a"),
        ("n[007-010,020]", "n007"),
        ("rack[2-3]node[01,05],login", "rack2node01"),
        ("gpu-a[3]-ib.cluster", "gpu-a3-ib.cluster"),
        ("[1-4]", "1"),
    ],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    "nodes",
    ["", ",a", "n[", "n[]", "n]", "n[a-b]", "n[1", "n[1-]", "n[1,,2]", "a b", "n[1]]", "n[-1]"],
)
def test_node_lists_that_cannot_be_read(nodes: str) -> None:
    with pytest.raises(UserError, match="set MASTER_ADDR"):
        first_host(nodes)


names = st.text("abcxyz-.09", min_size=1, max_size=5)
numbers = st.text("0123456789", min_size=1, max_size=4)
spans = st.tuples(numbers, st.none() | numbers)
brackets = st.lists(spans, min_size=1, max_size=3)


@given(st.lists(st.tuples(names, brackets | st.none()), min_size=1, max_size=4), st.lists(names))
def test_any_well_formed_list(
    pieces: list[tuple[str, list[tuple[str, str | None]] | None]], more: list[str]
) -> None:
    """Built together with its answer from names and bracketed spans."""
    text, expected = "", ""
    for name, inside in pieces:
        text += name
        expected += name
        if inside is not None:
            written = [first if last is None else f"{first}-{last}" for first, last in inside]
            text += f"[{','.join(written)}]"
            expected += inside[0][0]
    assert first_host(",".join([text, *more])) == expected


@given(st.text("ab1-,[] ", max_size=12) | st.text(max_size=8))
def test_any_text_gives_a_host_or_a_clear_error(text: str) -> None:
    try:
        host = first_host(text)
    except UserError:
        return
    assert host and not set(host) & set("[], \n\t")


@given(st.text())
def test_ports_stay_in_range(job: str) -> None:
    assert 12000 <= int(port_of(job)) < 32000
