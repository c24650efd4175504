"""`fourfold submit`: job files, planned as the formulas say; the script of SLURM with stand-ins for
SLURM's commands (tests/cluster/test_slurm.py runs it on the real one)."""

from __future__ import annotations

import math
import os
import re
import subprocess
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from helpers.tiny_run import TINY
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fourfold.cli import main
from fourfold.config import load_config
from fourfold.cost.workload import workload_of
from fourfold.errors import UserError
from fourfold.plan.cluster import parse_cluster
from fourfold.submit.job import JobRequest, clock, parse_time, prepare
from fourfold.submit.shell_scripts import Slurm

SIZE = ["--nodes", "2", "--nproc", "2"]


@pytest.fixture(autouse=True)
def run_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    values = deepcopy(TINY)
    values["Engine"]["save_load"]["output_dir"] = "runs/first"
    values["Data"]["batch_size"] = {"global_batch_size": 8, "micro_batch_size": 1}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def submit(*words: str, code: int = 0) -> None:
    with pytest.raises(SystemExit) as end:
        main(["submit", "-c", "run.yaml", *words])
    assert end.value.code == code


def directives(script: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", script, re.MULTILINE))


# -- what is written ------------------------------------------------------------------------------


def test_a_job_of_slurm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    submit("--to", "slurm", *SIZE, "--partition", "long", "--sbatch=--account=lab")
    assert capsys.readouterr().out == "sbatch first.sbatch\n"
    script = (tmp_path / "first.sbatch").read_text()
    found = directives(script)
    assert script.splitlines()[2].startswith("# Tested with SLURM 22.05")
    assert {name: found[name] for name in ("job-name", "nodes", "ntasks-per-node", "account")} == {
        "job-name": "first",
        "nodes": "2",
        "ntasks-per-node": "2",
        "account": "lab",
    }
    assert found["partition"] == "long" and found["chdir"] == str(tmp_path)
    assert found["output"] == f"{tmp_path}/runs/first/logs/slurm-%j.log"
    # sbatch makes no directories, and says nothing.
    assert (tmp_path / "runs" / "first" / "logs").is_dir()
    assert found["requeue"] == "" and found["open-mode"] == "append"
    name, _, notice = found["signal"].partition("@")
    assert name == "TERM" and 120 <= int(notice) <= parse_time(found["time"]) / 2
    assert "gpus-per-node" not in found


def test_saves_and_the_time_limit_follow_from_the_plan(tmp_path: Path) -> None:
    devices = "2x8xA100-80G"
    words = ["--cluster", devices, "-o", "Data.batch_size.global_batch_size=64"]
    words += ["-o", "Engine.max_steps=100000000", "-o", "Global.device=gpu"]
    submit("--to", "slurm", *words)
    script = (tmp_path / "first.sbatch").read_text()
    config = load_config("run.yaml", ["Data.batch_size.global_batch_size=64"], 16)
    state = workload_of(config, on_cpu=False).checkpoint_bytes
    # Young and Daly: the square root of twice a save times the time between failures.
    between_failures = parse_cluster(devices).device_mtbf_hours * 3600 / 16
    interval = math.sqrt(2 * (5 + state / (2 * 2e9)) * between_failures)
    step = float(re.search(r"([\d.e-]+) s a step expected", script)[1])  # type: ignore[index]
    steps = int(re.search(r"save_steps=(\d+)", script)[1])  # type: ignore[index]
    assert steps * step == pytest.approx(min(interval, 86400 / 4), rel=0.1)
    found = directives(script)
    assert found["time"] == "1-00:00:00" and found["gpus-per-node"] == "8"
    assert re.search(r"100000000 steps need \d+-[\d:]+ or less", script)


def test_what_the_user_says_of_saves_and_time_is_kept(tmp_path: Path) -> None:
    submit("--to", "slurm", *SIZE, "--time", "36h", "-o", "Engine.save_load.save_steps=7")
    script = (tmp_path / "first.sbatch").read_text()
    assert re.findall(r"save_steps=(\d+)", script) == ["7"]
    assert directives(script)["time"] == "1-12:00:00"


def test_the_layout_can_be_planned(tmp_path: Path) -> None:
    words = ["--cluster", "2x4xA100-80G", "-o", "Global.device=gpu"]
    submit("--to", "slurm", "--auto", *words)
    script = (tmp_path / "first.sbatch").read_text()
    overrides = re.findall(r"-o (\S+) ", script)
    degrees = load_config("run.yaml", overrides, 8).Distributed
    others = degrees.mp_degree * degrees.pp_degree * degrees.sharding.sharding_degree
    assert others * (degrees.dp_degree or 0) == 8
    assert f"dp{degrees.dp_degree} pp{degrees.pp_degree}" in script


def test_devices_nobody_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is planned: the file's own layout and saves, the scheduler's own limit."""
    submit("--to", "slurm", *SIZE, "-o", "Global.device=gpu")
    script = (tmp_path / "first.sbatch").read_text()
    assert "save_steps" not in script and "time" not in directives(script)
    submit("--to", "slurm", *SIZE, "-o", "Global.device=gpu", "--auto", "--force", code=2)
    assert "describe them with --cluster" in capsys.readouterr().err


def test_all_problems_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--nodes", "0", "--nproc", "3", "--time", "soon", "--name", "a b", "--image", "x"]
    submit("--to", "slurm", *words, "-o", "Model.hidden_sise=1", code=2)
    said = capsys.readouterr().err
    for part in (
        "--nodes 0",
        "--time 'soon'",
        "--name 'a b'",
        "--image has no place",
        "hidden_sise",
    ):
        assert part in said, said
    assert not list(tmp_path.glob("*.sbatch")) and not (tmp_path / "runs").exists()
    submit("--to", "slrum", code=2)
    assert "did you mean slurm?" in capsys.readouterr().err
    submit("--to", "slurm", code=2)
    assert "--nodes and --nproc missing" in capsys.readouterr().err
    submit("--to", "slurm", *SIZE, "--sbatch=--output=x", "--sbatch=a b", code=2)
    assert "is not an option of sbatch" in capsys.readouterr().err
    submit("--to", "slurm", *SIZE, "--sbatch=--output=x", code=2)
    assert "the job file sets --output itself" in capsys.readouterr().err
    submit("--to", "slurm", *SIZE, "--time", "3m", code=2)
    assert "trains for less than half of 180 s" in capsys.readouterr().err
    submit("--to", "slurm", "--nodes", "3", "--nproc", "1", code=2)
    assert "global_batch_size" in capsys.readouterr().err
    submit("--to", "slurm", *SIZE)
    submit("--to", "slurm", *SIZE, code=2)
    assert "first.sbatch exists" in capsys.readouterr().err


@given(st.integers(1, 10**8))
def test_times_are_read_as_they_are_written(seconds: int) -> None:
    assert parse_time(clock(seconds)) == seconds


@given(st.text(alphabet="0123456789:-smhd. ", max_size=14))
def test_anything_else_is_refused_as_a_time(text: str) -> None:
    try:
        assert 0 < parse_time(text) < 10**11
    except UserError as error:
        assert "--time" in str(error)


# -- what the script does -------------------------------------------------------------------------

STAND_INS = {
    "srun": 'printf "%s\\n" "$@" > words\ntest -z "$SAVES" || echo "$SAVES" > "$RUN/latest"\n'
    'echo ran >> calls\nexit "$CODE"\n',
    "squeue": 'echo "$STATE"\n',
    "scontrol": 'echo "$@" >> calls\n',
}


def play(directory: Path, code: int, *, saves: str = "", state: str = "RUNNING") -> tuple[int, str]:
    """Run the script, with the ranks ending so: its exit code, and what it asked SLURM for."""
    programs = directory / "programs"
    programs.mkdir(exist_ok=True)
    for name, text in STAND_INS.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}")
        (programs / name).chmod(0o755)
    (directory / "calls").unlink(missing_ok=True)
    variables = {
        "CODE": str(code),
        "SAVES": saves,
        "STATE": state,
        "RUN": f"{directory}/runs/first",
    }
    variables |= {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "node[0-1]"}
    variables["PATH"] = f"{programs}:{os.environ['PATH']}"
    done = subprocess.run(["bash", "first.sbatch"], env=variables, capture_output=True, text=True)
    assert not done.stderr
    return done.returncode, (directory / "calls").read_text()


AGAIN = "ran\nrequeue 17\n"


def test_the_script_queues_again_what_is_not_finished(tmp_path: Path) -> None:
    submit("--to", "slurm", *SIZE, "--max-restarts", "1")
    assert play(tmp_path, 75, saves="step_10") == (0, AGAIN)
    # Stopped by whoever owns it.
    assert play(tmp_path, 75, saves="step_20", state="COMPLETING") == (75, "ran\n")
    assert play(tmp_path, 2) == (2, "ran\n")
    # A failure that saved something counts for nothing, one that did not does.
    assert play(tmp_path, 1, saves="step_30") == (0, AGAIN)
    assert play(tmp_path, 1) == (0, AGAIN)
    assert play(tmp_path, 137) == (137, "ran\n")
    assert play(tmp_path, 1, saves="step_40") == (0, AGAIN)
    assert play(tmp_path, 143) == (0, AGAIN)
    assert play(tmp_path, 0, saves="step_50") == (0, "ran\n")
    assert not list((tmp_path / "runs" / "first" / "logs").iterdir())


words = st.text(st.characters(exclude_characters="\n\r\0", codec="utf-8"), max_size=30)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(words, words)
def test_any_text_reaches_the_run_as_it_was_given(tmp_path: Path, path: str, text: str) -> None:
    job = prepare(JobRequest(Path("run.yaml"), nodes=2, nproc=2))
    arguments = ("train", "-c", path, "-o", f"A.b={text}")
    script = Slurm().text(replace(job, arguments=arguments))
    (tmp_path / "first.sbatch").write_text(script)
    assert play(tmp_path, 0)[0] == 0
    given = (tmp_path / "words").read_text().split("\n")
    assert given[given.index("train") :][:5] == [*arguments]


def test_a_script_for_each_machine(tmp_path: Path) -> None:
    submit("--to", "torchrun", *SIZE)
    script = (tmp_path / "first.sh").read_text()
    subprocess.run(["bash", "-n", "first.sh"], check=True)
    assert '--nnodes 2 --node-rank "$node_rank" --master "$host:29500"' in script
    missing = subprocess.run(["bash", "first.sh", "0"], capture_output=True, text=True)
    assert missing.returncode and "HOST is missing" in missing.stderr
