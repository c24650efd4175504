"""`fourfold bench`: a real measurement of a tiny model, and nothing of it left behind."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.forked import fourfold
from helpers.tiny_run import DATASET, ONE_LAYER

TINY: dict[str, Any] = {
    "Global": {"device": "cpu", "peak_tflops": 0.5},
    "Engine": {
        "train_samples": 1000,
        "logging_freq": 50,
        "eval_freq": 1,
        "mix_precision": {"dtype": "float32"},
        "save_load": {"save_steps": 1},
    },
    "Data": {
        "batch_size": {"global_batch_size": 8, "micro_batch_size": 2, "rampup": [4, 4, 400]},
        "dataset": DATASET,
    },
    "Model": ONE_LAYER,
}


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """The file of a run whose directory exists, with a checkpoint that must not be read."""
    (tmp_path / "temporary").mkdir()
    places = {
        "Engine": TINY["Engine"]
        | {"save_load": {"output_dir": str(tmp_path / "run"), "ckpt_dir": "./no_such_checkpoint"}},
        "Data": TINY["Data"]
        | {"dataset": TINY["Data"]["dataset"] | {"cache_dir": str(tmp_path / "cache")}},
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY | places))
    return path


def bench(file: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {"TMPDIR": str(file.parent / "temporary")}
    return fourfold("bench", "-c", file, *words, cwd=file.parent, environment=environment)


def left_behind(file: Path) -> set[str]:
    """What is new beside the file, and of ours among temporary files."""
    found = {path.name for path in file.parent.iterdir()} - {"tiny.yaml", "cache", "temporary"}
    return found | {path.name for path in (file.parent / "temporary").glob("fourfold*")}


def test_ten_iterations_at_the_whole_batch(tiny: Path) -> None:
    result = bench(tiny)
    assert result.returncode == 0, result.stderr
    lines = re.findall(r"^ iteration .*\|$", result.stdout, flags=re.MULTILINE)
    assert len(lines) == 10
    assert all("global batch size:     8 |" in line for line in lines)
    assert "/      10 | consumed samples:           80 |" in lines[-1]
    assert "validation loss" not in result.stdout
    summary = result.stdout.partition("median of ")[2]
    assert summary.startswith("8 iterations after 2 left out; 8 samples x 16 tokens on 1 device(s)")
    for subject in ("seconds an iteration", "samples/s", "(TGS)", "full attention, 4 passes"):
        assert subject in summary
    assert "causal attention" in summary
    assert re.search(r"MFU, by model FLOPs +[\d.]+% of 0.5 TFLOP/s per device, as conf", summary)
    assert "not measured: evaluations, checkpoints" in summary
    assert left_behind(tiny) == set()


def test_on_two_ranks_as_json(tiny: Path) -> None:
    words = "--nproc 2 --iterations 5 --warmup 1 --json -o Global.peak_tflops=null"
    result = bench(tiny, *words.split(), "-o", "Model.use_recompute=False")
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert (told["iterations"], told["left_out"], told["world_size"]) == (4, 1, 2)
    shown = re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", result.stderr)
    assert len(shown) == 5
    counted = sorted(float(text) / 1000 for text in shown[1:])
    median = (counted[1] + counted[2]) / 2
    assert told["median_seconds"] == pytest.approx(median, abs=1e-4)
    assert told["min_seconds"] == pytest.approx(counted[0], abs=1e-4)
    tokens = 8 * 16 / told["median_seconds"] / 2
    assert told["tokens_per_device_per_second"] == pytest.approx(tokens)
    assert set(told["tflops_per_device"]) == set(told["conventions"])
    assert "3 passes" in told["conventions"]["megatron_deepspeed"]
    assert told["mfu"] is None and "unknown device cpu" in told["peak_source"]
    assert left_behind(tiny) == set()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--iterations", "2"], "--warmup 2 leaves none of --iterations 2"),
        (["--nproc", "2", "-o", "Distributed.mp_degree=4"], "4"),
        (["-o", "Data.dataset.input_dir=./nothing"], "nothing"),
    ],
)
def test_bad_input_gets_a_clear_answer(tiny: Path, words: list[str], said: str) -> None:
    result = bench(tiny, *words)
    assert result.returncode == 2
    assert said in result.stderr and "Traceback" not in result.stderr
    assert left_behind(tiny) == set()
