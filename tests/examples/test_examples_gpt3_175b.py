"""Document 004 from its data to its benchmark: each command as printed, made small by variables."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers.raw_text import (
    web_pages,
    wikipedia_articles,
    write_openwebtext,
    write_vocabulary,
    write_wikipedia,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fourfold import checkpoint

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "gpt3_175b"
PREPROCESS = r"""
python tools/preprocess_data.py \
       --input $DATASET_PATH/wikipedia.20220301.en.json \
       --output-prefix $DATASET_PATH/wikipedia_20220301_en \
       --vocab-file gpt2-vocab.json \
       --tokenizer-type GPT2BPETokenizer \
       --merge-file gpt2-merges.txt \
       --append-eod \
       --workers 8
"""
TRAIN = r"""
bash train_gpt3_175b_distributed.sh \
    $CHECKPOINT_PATH \
    $TENSORBOARD_LOGS_PATH  \
    $VOCAB_FILE \
    $MERGE_FILE
"""
TGS = TRAIN.replace("distributed.sh", "distributed_tgs.sh")
# Eight processes in place of 64 GPUs (two copies of two stages of two shares), and a small model.
SMALL = {
    "GPUS_PER_NODE": "8",
    "NUM_NODES": "1",
    "TP": "2",
    "PP": "2",
    "NUM_LAYERS": "2",
    "HIDDEN_SIZE": "32",
    "NUM_HEADS": "2",
    "SEQ_LENGTH": "16",
    "GLOBAL_BATCH": "16",
    "RAMPUP": "4 4 24",
    "TRAIN_SAMPLES": "50",
    "LR_DECAY_SAMPLES": "70",
    "LR_WARMUP_SAMPLES": "8",
    "INITIAL_LOSS_SCALE": "32768",
    "LOG_INTERVAL": "1",
    "EVAL_INTERVAL": "5",
    "EVAL_ITERS": "2",
}


class Reader:
    """Someone with the document in hand: a shell in the example's directory, and their files."""

    def __init__(self, home: Path) -> None:
        self.data = home / "data"
        self.data.mkdir()
        self.place = home / "gpt3_175b"
        subprocess.run(["cp", "-r", EXAMPLE, self.place], check=True)
        vocab, merges = write_vocabulary(self.place)
        self.variables = SMALL | {
            "DATASET_PATH": str(self.data),
            "PATH_TO": str(home),
            "CHECKPOINT_PATH": str(home / "checkpoints"),
            "TENSORBOARD_LOGS_PATH": str(home / "logs"),
            "VOCAB_FILE": str(vocab),
            "MERGE_FILE": str(merges),
        }
        self.home = home

    def types(self, command: str, exit_code: int = 0, **variables: str) -> str:
        paths = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        result = subprocess.run(
            ["bash", "-c", command],
            cwd=self.place,
            env=os.environ | paths | self.variables | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )
        assert result.returncode == exit_code, result.stdout[-6000:]
        return result.stdout


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """With both datasets exported and prepared."""
    reader = Reader(tmp_path_factory.mktemp("reader"))
    write_wikipedia(reader.data / "wikipedia.20220301.en.json", wikipedia_articles())
    write_openwebtext(reader.data / "openwebtext.Skylion007.json", web_pages())
    reader.types(PREPROCESS)
    second = PREPROCESS.replace("wikipedia.20220301.en", "openwebtext.Skylion007")
    reader.types(second.replace("wikipedia_20220301_en", "openwebtext_Skylion007"))
    return reader


def iterations(output: str) -> list[dict[str, str]]:
    """The fields of each line in Megatron's style."""
    lines = re.findall(r"^ iteration +(\d+)/ +(\d+) \| (.*) \|$", output, flags=re.MULTILINE)
    fields = [[part.partition(":") for part in rest.split(" | ")] for _, _, rest in lines]
    return [
        {"iteration": f"{number}/{last}"} | {name: value.strip() for name, _, value in told}
        for (number, last, _), told in zip(lines, fields)
    ]


def test_the_data_is_where_the_training_script_looks(reader: Reader) -> None:
    script = (EXAMPLE / "settings.sh").read_text()
    for name in ("wikipedia_20220301_en", "openwebtext_Skylion007"):
        assert f"/{name}_text_document" in script
        for ending in (".bin", ".idx"):
            assert (reader.data / f"{name}_text_document{ending}").stat().st_size > 0


def test_the_training_script_trains_and_goes_on_when_run_again(reader: Reader) -> None:
    output = reader.types(TRAIN)
    shown = iterations(output)
    assert [line["global batch size"] for line in shown] == ["4", "4", "8", "12", "16"]
    assert [line["consumed samples"] for line in shown] == ["4", "8", "16", "28", "44"]
    assert shown[0]["learning rate"] == "3.000E-05"
    assert shown[-1]["iteration"] == "5/5"
    assert float(shown[-1]["grad norm"]) > 0
    assert "dp2 x pp2 x sharding1 x mp2" in output and "float16 weights" in output
    assert "validation loss at iteration 5 | lm loss value:" in output
    again = reader.types(TRAIN, TRAIN_SAMPLES="66")
    assert [line["iteration"] for line in iterations(again)] == ["6/6"]
    run = Path(reader.variables["CHECKPOINT_PATH"])
    assert [place.name for place in checkpoint.candidates(run)] == ["step_6", "step_5"]
    check_what_the_run_left(reader, run)


def check_what_the_run_left(reader: Reader, run: Path) -> None:
    dataset = yaml.safe_load((run / "config.yaml").read_text())["Data"]["dataset"]
    assert dataset["input_dir"][::2] == ["0.35", "0.65"]
    cache = Path(dataset["cache_dir"])
    assert cache == reader.home / "gptcache" and any(cache.iterdir())
    assert (run / "tokenizer.json").exists()
    assert len(list((run / "logs").glob("workerlog.*"))) == 8
    charts = EventAccumulator(reader.variables["TENSORBOARD_LOGS_PATH"])
    charts.Reload()
    loss, perplexity = (charts.Scalars(f"eval/{name}")[0].value for name in ("loss", "ppl"))
    assert perplexity == pytest.approx(math.exp(loss), rel=1e-5)
    sizes = [event.value for event in charts.Scalars("train/global_batch_size")]
    assert sizes == [4, 4, 8, 12, 16, 16]


@pytest.mark.slow
def test_the_benchmark_measures_ten_iterations_at_the_whole_batch(reader: Reader) -> None:
    shown = iterations(reader.types(TGS))
    assert [line["iteration"] for line in shown] == [f"{i}/10" for i in range(1, 11)]
    assert {line["global batch size"] for line in shown} == {"16"}
    assert all(float(line["tokens per gpu per second (tgs)"]) > 0 for line in shown)
    rates = [line["learning rate"] for line in shown]
    assert rates[4:8] == ["2.270E-05", "1.392E-05", "8.059E-06", "6.000E-06"]
    assert (Path(reader.variables["CHECKPOINT_PATH"]) / "tgs" / "step_10").is_dir()


def test_wrong_use_is_explained(reader: Reader) -> None:
    usage = "usage: bash train_gpt3_175b_distributed.sh CHECKPOINT_PATH TENSORBOARD_LOGS_PATH"
    assert usage in reader.types("bash train_gpt3_175b_distributed.sh", exit_code=2)
    assert "export DATASET_PATH=" in reader.types(TRAIN, exit_code=2, DATASET_PATH="")
    wrong = {"GPUS_PER_NODE": "1", "TP": "3", "CHECKPOINT_PATH": str(reader.home / "no")}
    refused = reader.types(TRAIN, exit_code=2, **wrong)
    assert "--tensor-model-parallel-size 3 does not divide --num-attention-heads 2" in refused


def test_the_readme_has_the_commands() -> None:
    readme = (EXAMPLE / "README.md").read_text()
    for command in (PREPROCESS, TRAIN, TGS):
        assert command in readme
    variables = re.findall(r"^([A-Z_0-9]+)=", _scripts(), flags=re.MULTILINE)
    assert [name for name in variables if f"`{name}`" not in readme and "ARGS" not in name] == [
        "CHECKPOINT_PATH",
        "TENSORBOARD_LOGS_PATH",
        "VOCAB_FILE",
        "MERGE_FILE",
    ]


def _scripts() -> str:
    return "\n".join(file.read_text() for file in sorted(EXAMPLE.glob("*.sh")))


def test_every_machine_is_told_its_number(reader: Reader, tmp_path: Path) -> None:
    (tmp_path / "python").write_text('#!/bin/bash\necho "$@"\n')
    (tmp_path / "python").chmod(0o755)
    nodes = "NUM_NODES=8 NODE_RANK=3 MASTER_ADDR=node0 MASTER_PORT=6001"
    told = reader.types(f"{nodes} PATH={tmp_path}:$PATH {TRAIN.strip()}")
    assert "--nnodes 8 --rank 3 --master node0:6001" in told


def test_without_variables_the_scripts_are_those_of_the_document(
    reader: Reader, tmp_path: Path
) -> None:
    (tmp_path / "python").write_text('#!/bin/bash\necho "$@"\n')
    (tmp_path / "python").chmod(0o755)
    unset = f"unset {' '.join(SMALL)}; PATH={tmp_path}:$PATH"
    for command, expected in (
        (TRAIN, "--train-samples 10846761 --lr-decay-samples 9400526 --lr-warmup-samples 13558"),
        (TRAIN, "--rampup-batch-size 16 16 433870 --load"),
        (TGS, "--train-iters 10 --lr-decay-iters 8 --lr-warmup-fraction .001 --log-interval 1"),
    ):
        told = reader.types(f"{unset} {command.strip()}")
        assert expected in told
        assert "--micro-batch-size 1 --global-batch-size 1536" in told
        assert "--num-layers 96 --hidden-size 12288 --num-attention-heads 96" in told
        assert "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 8" in told
