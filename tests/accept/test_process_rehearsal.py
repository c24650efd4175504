"""`fourfold rehearse --processes`: a narrow network on all ranks, against one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.layout_table import NETWORKS
from typer.testing import CliRunner

from fourfold.accept import process_rehearsal
from fourfold.accept.process_rehearsal import (
    Apart,
    check_room,
    narrowed,
    process_rehearsal_lines,
    rehearse_processes,
)
from fourfold.cli import command_line
from fourfold.config import Config, load_config
from fourfold.errors import UserError
from fourfold.launch.supervisor import supervise
from fourfold.parallel import data_parallel

CONFIGS = Path(__file__).parent.parent.parent / "configs"
FILE = CONFIGS / "gpt" / "hybrid_parallel" / "configs_175B_mp8_pp16.yaml"
EIGHT = ("Distributed.pp_degree=4", "Distributed.mp_degree=2", "Model.num_layers=4")


def configured(*overrides: str) -> Config:
    return load_config(FILE, overrides)


def test_eight_processes_of_the_175b_file_equal_one() -> None:
    words = ["rehearse", "-c", str(FILE), "--processes", "--json"]
    for override in EIGHT:
        words += ["-o", override]
    ended = CliRunner().invoke(command_line(), words)
    assert ended.exit_code == 0, ended.output
    told = json.loads(ended.stdout)
    assert told["equal"] and told["processes"] == 8 and told["micro_batches"] == 4
    assert told["largest"]["most"] <= 1e-5
    assert len(told["losses"]) == len(told["norms"]) == 2 and told["losses"][0] != told["losses"][1]
    assert told["narrowed"]["Model.hidden_size"] == [12288, 32]
    assert told["memory_bytes"] > 8 * 10e6


def test_a_wrong_gradient_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def send(bucket: data_parallel.Bucket) -> None:
        bucket.is_sent = True

    monkeypatch.setattr(data_parallel.Bucket, "send", send)  # forked ranks have it too
    told = rehearse_processes(
        configured("Distributed.pp_degree=1", "Distributed.mp_degree=1", "Distributed.dp_degree=2",
                   "Model.num_layers=2"),
    )  # fmt: skip
    assert not told.equal and told.gradients.most > 0.1
    *_, verdict, _ = process_rehearsal_lines(told)
    assert verdict.startswith("NOT equal: ")


@pytest.mark.slow
def test_128_processes_of_the_175b_file_equal_one() -> None:
    told = rehearse_processes(configured())
    print(*process_rehearsal_lines(told), sep="\n")
    assert told.processes == 128 and told.micro_batches == 16
    assert told.equal, told.largest


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "pp_degree=2 mp_degree=2 sharding.sharding_degree=2 sharding.sharding_stage=3",
        "pp_degree=2 mp_degree=2 dp_degree=2 virtual_pp_degree=2 pp_schedule=ZBVZeroBubble",
        "pp_degree=4 virtual_pp_degree=2 pp_schedule=Interleaved1F1B mp_degree=1 dp_degree=2",
    ],
)
def test_other_layouts_and_schedules(words: str) -> None:
    given = [f"Distributed.{word}" for word in words.split()]
    told = rehearse_processes(
        configured(*given, "Model.num_layers=8", "Model.sequence_parallel=True")
        if "mp_degree=2" in words
        else configured(*given, "Model.num_layers=8")
    )
    assert told.equal, told.largest


# -- what is narrowed -----------------------------------------------------------------------------


@pytest.mark.parametrize("network", NETWORKS)
def test_every_network_can_be_narrowed(network: str, tmp_path: Path) -> None:
    own = [one for one in NETWORKS[network] if "head_dim" not in one]
    config = configured(*own, "Distributed.mp_degree=4", "Model.num_attention_heads=16")
    tree, changed = narrowed(config, 16)
    file = tmp_path / "narrow.yaml"
    file.write_text(yaml.safe_dump(tree))
    narrow = load_config(file, ["Data.dataset.input_dir=data"], 64).Model
    assert narrow.hidden_size <= 64 and "Model.hidden_size" in changed
    assert narrow.num_layers == 96 and narrow.num_attention_heads % 4 == 0
    shares = [
        model.num_attention_heads // model.num_key_value_heads for model in (narrow, config.Model)
    ]
    assert (shares[0] > 1) == (shares[1] > 1)
    kept = ("normalization", "activation", "bias", "qk_norm", "tie_word_embeddings", "z_loss")
    for name in kept:
        assert getattr(narrow, name) == getattr(config.Model, name)


def test_a_vocabulary_that_does_not_divide_stays_one() -> None:
    tree, changed = narrowed(configured("Model.vocab_size=50257"), 16)
    assert tree["Model"]["vocab_size"] % 8 == 50257 % 8 != 0
    assert changed["Model.vocab_size"] == (50257, tree["Model"]["vocab_size"])


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("free_memory", lambda: 1 << 30, "128 processes need about 12.9 GB, and this machine has"),
        ("_pids_left", lambda: 100.0, "pids.max allows 100 here"),
        ("_soft", lambda limit: 512.0, "ulimit -"),
    ],
)
def test_what_does_not_fit_is_refused(
    name: str, value: Callable[..., Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_rehearsal, name, value)
    monkeypatch.setattr(process_rehearsal, "supervise", None)
    with pytest.raises(UserError, match="rehearse without --processes") as refused:
        rehearse_processes(configured())
    assert said in str(refused.value)


def test_other_refusals() -> None:
    check_room(2)
    assert process_rehearsal.supervise is supervise
    with pytest.raises(UserError, match="this layout has one"):
        rehearse_processes(configured("Distributed.pp_degree=1", "Distributed.mp_degree=1"))
    with pytest.raises(UserError, match="a pipeline of 16 stages needs at least as many"):
        rehearse_processes(configured(), micro_batches=4)
    ended = CliRunner().invoke(
        command_line(), ["rehearse", "-c", str(FILE), "--processes", "--all-ranks"]
    )
    assert isinstance(ended.exception, UserError) and "--all-ranks" in str(ended.exception)


def test_a_number_that_is_not_one_is_the_furthest() -> None:
    apart = Apart()
    apart.take(1e-7, "a")
    apart.take(float("nan"), "b")
    assert apart.tensor == "b" and not apart.most <= 1
