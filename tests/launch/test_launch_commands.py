"""`fourfold train` as a launcher: what it refuses, what it hands to torchrun, and real runs."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from helpers.forked import fourfold, fourfold_in_a_terminal
from helpers.tiny_run import DATASET, ONE_LAYER

from fourfold.errors import UserError
from fourfold.launch.launchers import Nodes, torchrun_command

TINY = {
    "Global": {"device": "cpu"},
    "Engine": {
        "max_steps": 3,
        "logging_freq": 1,
        "eval_iters": 1,
        "test_iters": 1,
        "tensorboard": False,
        "mix_precision": {"dtype": "float32"},
        "save_load": {"save_steps": 2},
    },
    "Data": {
        "batch_size": {"global_batch_size": 4, "micro_batch_size": 2},
        "dataset": DATASET,
    },
    "Model": ONE_LAYER,
}

NODES = ["--nnodes", "1", "--node-rank", "0", "--master", "127.0.0.1:1", "--nproc", "2"]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    places = {
        "Engine": TINY["Engine"] | {"save_load": {"output_dir": str(tmp_path / "run")}},
        "Data": TINY["Data"] | {"dataset": TINY["Data"]["dataset"] | {"cache_dir": str(tmp_path)}},
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY | places))
    return path


def train(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return fourfold("train", *words, environment=variables)


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        (["--nproc", "2"], {"RANK": "0", "WORLD_SIZE": "4"}, "leave --nproc out"),
        (["--max-restarts", "1"], {}, "--max-restarts"),
        (["--hang-seconds", "9"], {}, "--hang-seconds"),
        (["--nproc", "2", "--hang-seconds", "0"], {}, "greater than 0"),
        (["--nnodes", "2"], {}, "--master and --nproc missing"),
        (["--master", "node0:29500", "--nproc", "2"], {}, "--nnodes missing"),
        (["--nproc", "2", "--lost-seconds", "9"], {}, "give --nnodes too"),
        ([*NODES, "--nnodes", "3:2"], {}, "the fewest and the most"),
        ([*NODES], {"RANK": "0", "WORLD_SIZE": "4"}, "leave --nnodes out"),
        (["--nproc", "0"], {}, "--nproc"),
        ([], {"WORLD_SIZE": "x", "RANK": "0"}, "WORLD_SIZE=x"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_would_not_work_is_refused(
    words: list[str], variables: dict[str, str], said: str, tiny: Path
) -> None:
    result = train("-c", str(tiny), *words, **variables)
    assert result.returncode == 2
    assert said in result.stderr and "Traceback" not in result.stderr
    assert not (tiny.parent / "run").exists()


def test_torchrun_gets_every_option_and_the_same_command(tmp_path: Path) -> None:
    command = ["train", "-c", "a.yaml", "-o", "Engine.max_steps=3"]
    words = torchrun_command(Nodes(4, 0, "node0:29500"), 8, 2, tmp_path, command)
    assert words == [
        *[sys.executable, "-m", "torch.distributed.run"],
        *["--nnodes", "4", "--node-rank", "0", "--nproc-per-node", "8"],
        *["--master-addr", "node0", "--master-port", "29500", "--max-restarts", "2"],
        *["--log-dir", str(tmp_path / "node_0")],
        *["--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGUSR1,SIGUSR2"],
        *["--redirects", "3", "--tee", "0:3"],
        *["-m", "fourfold", "train", "-c", "a.yaml", "-o", "Engine.max_steps=3"],
    ]
    others = torchrun_command(Nodes(4, 3, "[fe80::1]:29500"), 8, 0, tmp_path, command)
    assert "--tee" not in others, "only the first machine has the run's rank 0"
    assert others[others.index("--master-addr") + 1] == "fe80::1"


@pytest.mark.parametrize(
    "master", ["", "node0", "node0:", ":1", "node0:x", "node0:0", "node0:65536", "::1:29500", "n:٣"]
)
def test_addresses_that_are_none(master: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--master"):
        torchrun_command(Nodes(2, 0, master), 1, 0, tmp_path, [])


def test_a_machine_that_is_not_among_them(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--node-rank 2"):
        torchrun_command(Nodes(2, 2, "node0:1"), 1, 0, tmp_path, [])


def test_processes_train_together(tiny: Path) -> None:
    result = train("-c", str(tiny), "--nproc", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("global step 3,") == 1
    logs = tiny.parent / "run" / "logs" / "attempt_0"
    assert sorted(path.name for path in logs.iterdir()) == ["rank_0.log", "rank_1.log"]
    assert "global step 3," in (logs / "rank_0.log").read_text()


def test_a_user_error_of_all_processes_is_shown_once(tiny: Path) -> None:
    nowhere = f"Data.dataset.input_dir={tiny.parent / 'nowhere'}"
    result = train("-c", str(tiny), "--nproc", "2", "--max-restarts", "2", "-o", nowhere)
    assert result.returncode == 2
    assert result.stderr.count("nowhere") == 1 and "Traceback" not in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("words", ["", "--nproc 2"])
def test_a_reader_that_goes_away_does_not_end_the_run(words: str, tiny: Path) -> None:
    command = f"{sys.executable} -m fourfold train -c {tiny} {words} 2>&1 | head -1"
    result = subprocess.run(
        ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0 and result.stdout.count("\n") == 1
    assert (tiny.parent / "run" / "step_3").exists()
    assert "training process is complete" in (tiny.parent / "run" / "metrics.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("first", [[], ["--nproc", "1"]], ids=["single", "supervised"])
def test_a_second_run_in_the_same_directory_is_refused(first: list[str], tiny: Path) -> None:
    words = [sys.executable, "-m", "fourfold", "train", "-c", str(tiny)]
    settings = ["-o", "Engine.max_steps=100000", "-o", "Engine.eval_freq=0"]
    at_work = subprocess.Popen([*words, *first, *settings], stdout=subprocess.DEVNULL)
    try:
        while not (tiny.parent / "run" / "metrics.jsonl").exists():
            assert at_work.poll() is None
            time.sleep(0.05)
        for second in ([], ["--nproc", "2"]):
            result = train("-c", str(tiny), *second)
            assert result.returncode == 2
            assert f"in use by another run (process {at_work.pid} on" in result.stderr
            assert "Traceback" not in result.stderr and result.stderr.count("\n") == 1
        at_work.kill()
        at_work.wait()
        assert train("-c", str(tiny), *first, "-o", "Engine.max_steps=2").returncode == 0
    finally:
        at_work.kill()
        at_work.wait()


def one_node() -> list[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        master = f"127.0.0.1:{probe.getsockname()[1]}"
    return ["--nnodes", "1", "--node-rank", "0", "--master", master, "--nproc", "2"]


@pytest.mark.slow
def test_one_machine_of_several_trains(tiny: Path) -> None:
    result = train("-c", str(tiny), *one_node(), "-o", "Engine.max_steps=2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "global step 2," in result.stdout and "global step 3," not in result.stdout
    logs = tiny.parent / "run" / "logs" / socket.gethostname() / "attempt_0"
    assert sorted(path.name for path in logs.iterdir()) == ["rank_0.log", "rank_1.log"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--nproc", "2"], 0),
        (["--stopped-exit-code", "85"], 85),
        (["--nproc", "1", "--stopped-exit-code", "85"], 85),
        (["NODES", "--stopped-exit-code", "85"], 85),
        (["NODES"], 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_stop_that_was_saved_ends_with_its_code(words: list[str], code: int, tiny: Path) -> None:
    """Stacks that are asked for leave the run be."""
    console = tiny.parent / "console"
    place = [part for word in words for part in (one_node() if word == "NODES" else [word])]
    words = ["train", "-c", str(tiny), *place, "-o", "Engine.max_steps=100000"]
    with console.open("w") as output:
        command = subprocess.Popen([sys.executable, "-m", "fourfold", *words], stdout=output)
    for number in (signal.SIGQUIT, signal.SIGUSR1):
        told = console.read_text().count("global step")
        while console.read_text().count("global step") < told + 2:
            assert command.poll() is None
            time.sleep(0.05)
        command.send_signal(number)
    assert command.wait(60) == code
    assert "stopped by SIGUSR1" in console.read_text()
    assert (tiny.parent / "run" / "latest").exists()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("columns", [100, 40])
def test_a_terminal_shows_a_bar_with_loss_speed_and_time_left(
    tiny: Path, ranks: int, columns: int
) -> None:
    words = ["train", "-c", tiny, *(["--nproc", ranks] if ranks > 1 else [])]
    ended = fourfold_in_a_terminal(columns, *map(str, words))
    assert ended.returncode == 0, ended.stdout
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", ended.stdout)
    assert "global step" not in plain and "training process is complete" in plain
    bars = [line for line in re.split(r"[\r\n]+", plain) if line.endswith(" left")]
    assert {found[1] for bar in bars if (found := re.search(r"(\d)/3  loss \d", bar))} >= {"3"}
    for bar in bars:
        assert len(bar) <= columns and "\u2501" in bar, bar
        assert re.search(r"loss \d+\.\d{3}  .*\d left$", bar), bar
        assert columns < 100 or "tokens/s" in bar, bar
    assert ended.stdout.rstrip().endswith("\x1b[2K")  # the bar is gone in the end


def test_lines_elsewhere_are_those_of_the_log(tiny: Path) -> None:
    ended = fourfold("train", "-c", tiny, "--nproc", "2")
    assert ended.returncode == 0, ended.stderr
    assert len(re.findall(r"^\[.*global step \d, epoch", ended.stdout, re.M)) == 3
    assert "\x1b" not in ended.stdout + ended.stderr
