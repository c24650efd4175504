"""PaddleNLP's gpt-3 document: its commands, as printed, train for real in eight processes."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "gpt-3"

# As the document prints it, blanks missing before some backslashes included.
DOCUMENT = r"""
python -u  -m paddle.distributed.fleet.launch \
    --gpus "0,1,2,3,4,5,6,7" \
    --log_dir "output/$task_name/log" run_pretrain_static.py \
    --model_type "gpt" \
    --model_name_or_path "gpt2-en" \
    --input_dir "./data" \
    --output_dir "output/$task_name" \
    --max_seq_len 1024 \
    --micro_batch_size 8 \
    --global_batch_size 32 \
    --sharding_degree 4\
    --mp_degree 2 \
    --dp_degree 1 \
    --pp_degree 1 \
    --use_sharding true \
    --use_amp true \
    --use_recompute true \
    --max_lr 0.00015 \
    --min_lr 0.00001 \
    --max_steps 500000 \
    --save_steps 100000 \
    --decay_steps 320000 \
    --weight_decay 0.01\
    --warmup_rate 0.01 \
    --grad_clip 1.0 \
    --logging_freq 1\
    --eval_freq 10000 \
    --device "gpu"
""".strip()
# What makes it a matter of seconds on a processor; a later flag takes the place of an earlier.
SMALL = (
    "--device cpu --hidden_size 32 --num_layers 2 --num_attention_heads 2 --vocab_size 256 "
    "--max_seq_len 32 --max_steps 3 --eval_iters 1 --max_lr 0.01 --decay_steps 8"
)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The example's directory as a user has it after the download."""
    shutil.copytree(EXAMPLES, tmp_path / "gpt-3")
    source = np.random.default_rng(0)
    lens = source.integers(20, 60, 200).astype(np.uint16)
    counting = [(int(source.integers(100)) + np.arange(length)) % 100 for length in lens]
    for script in ("static", "dygraph"):
        data = tmp_path / "gpt-3" / script / "data"
        data.mkdir()
        ids = np.concatenate(counting).astype(np.uint16)
        np.savez(data / "train.data.json_ids.npz", ids=ids, lens=lens)
    return tmp_path / "gpt-3"


def run(command: str, directory: Path, compiled: bool = False) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "task_name": "task"}
    if not compiled:
        # Eight processes that compile take minutes on two processors.
        environment["TORCHDYNAMO_DISABLE"] = "1"
    return subprocess.run(
        ["sh", "-c", command],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )


def losses(directory: Path) -> dict[int, float]:
    """The loss of each step, from the run's own records."""
    lines = (directory / "output" / "task" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {record["step"]: record["loss"] for record in records if record["kind"] == "train"}


def check_training(done: subprocess.CompletedProcess[str], directory: Path, steps: int) -> None:
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = losses(directory)
    assert list(found) == list(range(1, steps + 1))
    assert all(math.isfinite(loss) for loss in found.values())
    assert found[steps] < found[1] - 0.1
    assert (directory / "output" / "task" / f"step_{steps}").is_dir()


def document_command() -> str:
    return DOCUMENT.replace("paddle.distributed.fleet.launch", "fourfold.launch")


def test_the_documents_command_trains_and_resumes(place: Path) -> None:
    static = place / "static"
    check_training(run(f"{document_command()} {SMALL}", static), static, 3)

    text = (static / "output" / "task" / "config.yaml").read_text()
    for flag, value in re.findall(r"--(\w+) \"?([\w./-]+)\"?", DOCUMENT):
        if flag not in ("log_dir", "gpus", "output_dir", "model_type", "use_sharding"):
            assert f"# --{flag}" in text, f"{flag} {value}"
    config = yaml.safe_load(text)
    assert config["Engine"]["graph_mode"] == "static"
    assert config["Engine"]["mix_precision"]["dtype"] == "float16"
    assert config["Distributed"]["sharding"]["sharding_degree"] == 4

    logs = static / "output" / "task" / "log"
    assert sorted(log.name for log in logs.iterdir()) == [f"workerlog.{rank}" for rank in range(8)]

    alone = "GPUS=0 sh run_static.sh"  # the other name, and a layout of one process
    again = run(f"{alone} {SMALL} --mp_degree 1 --use_sharding no --max_steps 4", static)
    check_training(again, static, 4)
    assert "at step 3" in again.stdout


@pytest.mark.slow
def test_the_dynamic_script_trains(place: Path) -> None:
    dygraph = place / "dygraph"
    done = run(f"sh run.sh {SMALL} --enable_addto", dygraph)
    check_training(done, dygraph, 3)
    assert done.stdout.count("without effect: --enable_addto True") == 1
    config = yaml.safe_load((dygraph / "output" / "task" / "config.yaml").read_text())
    assert config["Engine"]["graph_mode"] == "dynamic"
    assert config["Engine"]["mix_precision"]["level"] == "O2"


def test_a_mistake_ends_with_code_2_before_anything_is_written(place: Path) -> None:
    done = run(f"GPUS=0 sh run.sh {SMALL} --global_batch_size 30", place / "static")
    assert done.returncode == 2
    told = done.stdout + done.stderr
    assert "must be the number of processes, which is 1" in told
    assert "--global_batch_size 30 is no multiple" in told
    assert "Traceback" not in told
    assert not (place / "static" / "output" / "task" / "config.yaml").exists()


def test_run_sh_is_the_documents_command() -> None:
    def words(text: str) -> list[str]:
        return shlex.split(text.replace("\\\n", " "))

    script = (EXAMPLES / "static" / "run.sh").read_text().split("exec ")[1]
    script = script.replace("${PYTHON:-python}", "python").replace('"$@"', "")
    script = script.replace("${GPUS:-0,1,2,3,4,5,6,7}", "0,1,2,3,4,5,6,7")
    assert words(script) == words(document_command())


@pytest.mark.slow
def test_the_static_script_compiles_and_trains(place: Path) -> None:
    static = place / "static"
    check_training(run(f"sh run.sh {SMALL}", static, compiled=True), static, 3)
