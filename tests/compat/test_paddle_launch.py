"""`python -m fourfold.launch`: a script in several processes, and what is refused."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fourfold.compat.paddle_launch import read_job
from fourfold.errors import UserError

TELL = """\
import json, os, sys
names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES"
print(json.dumps([os.environ.get(name) for name in names] + sys.argv + [__name__, sys.path[0]]))
"""
FAIL = """\
import os, sys
from fourfold.cli import main
if os.environ["RANK"] == "1":
    if sys.argv[1] == "raise":
        raise ValueError("broken on purpose")
    if sys.argv[1] == "exit":
        print("given up on purpose")
        sys.exit(7)
    main(["train", "-c", sys.argv[1]])
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "tell.py").write_text(TELL)
    (tmp_path / "fail.py").write_text(FAIL)
    return tmp_path


def words_of(*words: str) -> list[str]:
    return [sys.executable, "-m", "fourfold.launch", *words]


def launch(place: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words_of(*words),
        cwd=place,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_each_device_gets_a_process_that_runs_the_script(place: Path) -> None:
    result = launch(place, "--log_dir", "d", "--devices", "4, 5", "scripts/tell.py", "-c", "--rank")
    assert result.returncode == 0, result.stderr
    logs = sorted((place / "d").iterdir())
    assert [log.name for log in logs] == ["workerlog.0", "workerlog.1"]
    told = [log.read_text().splitlines()[-1] for log in logs]
    assert result.stdout.splitlines() == told[:1], "the first process is shown, and it alone"
    for rank, line in enumerate(told):
        assert json.loads(line) == [
            *[str(rank), str(rank), "2", "4,5"],
            *["scripts/tell.py", "-c", "--rank"],
            *["__main__", str(place / "scripts")],
        ]


def test_without_devices_one_process_for_each_gpu_or_one(place: Path) -> None:
    result = launch(place, "scripts/tell.py", CUDA_VISIBLE_DEVICES="")
    assert json.loads(result.stdout)[:4] == ["0", "0", "1", ""]
    assert [log.name for log in (place / "log").iterdir()] == ["workerlog.0"]


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("raise", 1, "ValueError: broken on purpose"),
        pytest.param("exit", 1, "given up on purpose", marks=pytest.mark.slow),
        ("missing.yaml", 2, "fourfold: missing.yaml: cannot be read"),
    ],
)
def test_a_script_that_fails(place: Path, ending: str, code: int, said: str) -> None:
    result = launch(place, "--gpus", "0,1", "fail.py", ending)
    assert result.returncode == code
    assert result.stderr.count(said) == 1
    assert ("Traceback" in result.stderr) is (ending == "raise")
    if code == 1:
        assert "rank 1 failed" in result.stderr and "log/workerlog.1" in result.stderr
    else:
        assert result.stderr.count("\n") == 1


@pytest.mark.slow
def test_restarts_add_to_the_same_logs(place: Path) -> None:
    result = launch(place, "--devices", "0,1", "--max_restart", "1", "fail.py", "raise")
    assert result.returncode == 1 and "ranks in 1 s (restart 1 of 1)" in result.stderr
    log = (place / "log" / "workerlog.1").read_text()
    assert log.count("ValueError: broken on purpose") == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "SCRIPT"),
        (["--devices", "0,1"], "SCRIPT"),
        (["nowhere.py"], "nowhere.py: no such script"),
        (["--devices", "", "fail.py"], "--devices ''"),
        (["--devices", "0,x", "fail.py"], "'x' is not a device"),
        (["--devices", "0,-1", "fail.py"], "'-1' is not a device"),
        (["--devices", "0,1,01", "fail.py"], "names 1 twice"),
        (["--device", "0", "fail.py"], "--device"),
        (["--nproc_per_node", "0", "fail.py"], "--nproc_per_node '0'"),
        (["--nproc_per_node", "2", "--devices", "0", "fail.py"], "does not fit the 1 devices"),
        (["--max_restart", "x", "fail.py"], "--max_restart 'x'"),
        (["--nnodes", "2", "fail.py"], "--master and --rank missing"),
        (["--master", "node0:1", "fail.py"], "--nnodes and --rank missing"),
        (["--nnodes", "2", "--master", "n:1", "--rank", "2", "fail.py"], "--rank 2 does not exist"),
        (["--nnodes", "0", "fail.py"], "--nnodes '0'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_sentence(
    place: Path, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    with pytest.raises(UserError) as raised:
        read_job(words)
    assert said in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        (["--unknown", "1", "fail.py"], {}, "--unknown"),
        (["--devices", "1,2", "fail.py"], {"CUDA_VISIBLE_DEVICES": "0,1"}, "hides 2"),
        (["--devices", "0,1", "fail.py"], {"RANK": "0", "WORLD_SIZE": "2"}, "inside each of the 2"),
        (["--nnodes", "2", "--master", "n", "--rank", "0", "--nproc_per_node", "1", "fail.py"], {},
         "--master 'n' is not HOST:PORT"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)  # fmt: skip
def test_the_command_refuses_before_it_starts_anything(
    place: Path, words: list[str], variables: dict[str, str], said: str
) -> None:
    result = launch(place, *words, **variables)
    assert result.returncode == 2
    assert said in result.stderr and "Traceback" not in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (place / "log").exists()


def test_help_names_the_options_and_an_example(place: Path) -> None:
    result = launch(place, "-h")
    assert result.returncode == 0
    for name in ("--devices", "--log_dir", "--nproc_per_node", "--nnodes", "--master", "--rank"):
        assert name in result.stdout
    assert 'python -m fourfold.launch --devices "0,1,2,3" run_pretrain.py' in result.stdout


@pytest.mark.slow
def test_several_machines_go_through_torchrun(place: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        master = f"127.0.0.1:{probe.getsockname()[1]}"
    machines = [
        subprocess.Popen(
            words_of(
                *["--log_dir", "d", "--nnodes", "2", "--master", master, "--rank", str(number)],
                *["--devices", "6,7", "scripts/tell.py", "-c", "x"],
            ),
            cwd=place,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    said = [machine.communicate(timeout=120)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], said
    told = [json.loads(log.read_text()) for log in (place / "d").rglob("stdout.log")]
    assert sorted(line[:2] for line in told) == [["0", "0"], ["1", "1"], ["2", "0"], ["3", "1"]]
    for line in told:
        assert line[2:7] == ["4", "6,7", "scripts/tell.py", "-c", "x"]
