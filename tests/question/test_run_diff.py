"""`fourfold diff`: pairs of runs with one planted difference, which `--explain` names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.tiny_run import FIXTURE, TINY

from fourfold.config import load_config
from fourfold.engine import build_engine
from fourfold.question.explain import Explanation, Takeover, minimal
from fourfold.question.history import RunHistory
from fourfold.question.run_diff import RunDiff, compare_runs

STEPS = 4
# Differences that are not the reason for anything.
DECOYS = (
    "Engine.spikes.window=65",
    "Optimizer.muon.momentum=0.9",
    "Model.rope_theta=20000.0",
    "Model.recompute_num_layers=2",
)
PLANTED = [
    "Optimizer.weight_decay=0.02",
    "Model.norm_epsilon=1.0e-3",
    "Data.dataset.eod_mask_loss=False",
    "Global.seed=7",
    "Optimizer.lr.max_lr=1.1e-2",
    "Optimizer.lr.min_lr=2.0e-3",
    "Optimizer.lr.warmup_rate=0.5",
    "Optimizer.lr.decay_steps=6",
    "Optimizer.lr.decay_style=linear",
    "Optimizer.adam_beta1=0.8",
    "Optimizer.adam_beta2=0.99",
    "Optimizer.adam_epsilon=1.0e-6",
    "Optimizer.grad_clip=0.5",
    "Optimizer.name=Muon",
    "Model.hidden_dropout_prob=0.2",
    "Model.attention_probs_dropout_prob=0.0",
    "Model.initializer_range=0.03",
    "Model.activation=gelu",
    "Model.ffn_hidden_size=64",
    "Model.hidden_size=64",
    "Model.num_layers=3",
    "Model.num_attention_heads=2",
    "Model.num_key_value_heads=2",
    "Model.normalization=RMSNorm",
    "Model.norm_placement=post",
    "Model.parallel_residual=True",
    "Model.qk_norm=per_head",
    "Model.bias=none",
    "Model.tie_word_embeddings=False",
    "Model.position_embedding=rotary",
    "Model.sliding_window=4",
    "Model.embedding_scale=2",
    "Model.logit_scale=0.5",
    "Model.logit_softcap=8",
    "Model.z_loss=1.0e-3",
    "Model.depth_scaled_init=True",
    "Model.mup_base_width=16",
    "Engine.mix_precision.dtype=bfloat16",
    "Data.batch_size.global_batch_size=4",
    "Data.batch_size.micro_batch_size=2",
    "Data.dataset.split=80,18,2",
    "Data.dataset.max_seq_len=8",
    "Data.dataset.reset_attention_mask=True",
    "Data.dataset.reset_position_ids=True",
    "Data.dataset.leave_out=[[0, 8]]",
]
QUICK = PLANTED[:3]
Train = Callable[..., Path]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """`train("name", "A.b=c", ...)`: a run of the tiny model; its directory."""
    folder = tmp_path_factory.mktemp("diff")
    file = folder / "tiny.yaml"
    file.write_text(yaml.safe_dump(TINY))

    def made(name: str, *overrides: str) -> Path:
        given = [
            f"Engine.save_load.output_dir={folder / name}",
            f"Data.dataset.cache_dir={folder / 'cache'}",
            f"Engine.max_steps={STEPS}",
            "Engine.eval_freq=0",
            "Engine.test_iters=0",
            "Engine.save_load.keep_last=0",
            "Data.batch_size.local_batch_size=null",
        ]
        if not (folder / name).exists():
            build_engine(load_config(file, [*given, *overrides], 1)).fit()
        return folder / name

    return made


def explained(one: Path, other: Path) -> tuple[RunDiff, dict[str, Any]]:
    ours, theirs = RunHistory(one), RunHistory(other)
    found = compare_runs(ours, theirs)
    assert found.parts_at is not None
    return found, Explanation(ours, theirs, found).run()


def decoys_beside(setting: str) -> list[str]:
    """Those that are without effect also with the setting."""
    used = {"Optimizer.name=Muon": "muon", "Model.position_embedding=rotary": "rope_theta"}
    return [one for one in DECOYS if setting not in used or used[setting] not in one]


def is_named(train: Train, setting: str) -> str | None:
    """What is wrong with the reason that is given for a planted setting."""
    key = setting.partition("=")[0]
    other = train(setting.replace("/", "_"), setting, *decoys_beside(setting))
    found, told = explained(train("base"), other)
    if key not in found.settings:
        return f"the setting is not among {sorted(found.settings)}"
    decoys = {one.partition("=")[0] for one in DECOYS}
    if key not in told["keys"] or decoys & set(told["keys"]):
        return str(told)
    return None


@pytest.mark.parametrize("setting", QUICK)
def test_a_planted_setting_is_the_reason(train: Train, setting: str) -> None:
    assert is_named(train, setting) is None


@pytest.mark.slow
def test_every_planted_setting_is_the_reason(train: Train) -> None:
    assert len(PLANTED) >= 40
    problems = {setting: is_named(train, setting) for setting in PLANTED}
    assert not {setting: why for setting, why in problems.items() if why is not None}


def test_a_planted_byte_of_data_is_the_reason(train: Train, tmp_path: Path) -> None:
    changed = tmp_path / "data"
    shutil.copytree(FIXTURE, changed)
    tokens = changed / "part0_text_document.bin"
    raw = bytearray(tokens.read_bytes())
    for place in range(0, len(raw), 2):  # so that some of the first samples have one
        if place % 64 == 0:
            raw[place] ^= 1
    tokens.write_bytes(raw)
    other = train("other data", f"Data.dataset.input_dir={changed}", *DECOYS)
    found, told = explained(train("base"), other)
    assert "data_fingerprint" in found.data
    assert [one.file for one in found.files] == ["part0_text_document.bin"]
    assert found.files[0].first == 0
    assert told["keys"] == ["Data.dataset.input_dir"]
    assert any("part0_text_document.bin, from byte 0" in line for line in told["reason"])


def test_the_command(train: Train, tmp_path: Path, command: Callable[..., Any]) -> None:
    base, other = train("base"), train(QUICK[0], QUICK[0], *DECOYS)
    code, shown, _ = command("diff", base, other, "--json", "--plot", tmp_path / "both.png")
    told = json.loads(shown)
    assert code == 1 and told["parts_at"] == 2 and told["explained"] is None
    assert told["settings"]["Optimizer.weight_decay"] == [0.01, 0.02]
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    code, shown, _ = command("diff", base, base)
    assert code == 0 and "agree to the bit" in shown
    code, _, said = command("diff", base, tmp_path / "nowhere")
    assert code == 2 and "no directory" in said


def test_of_many_changes_the_needed_ones_are_left() -> None:
    changes = [Takeover(str(number), {}) for number in range(20)]
    for needed in ({"3"}, {"0", "19"}, {"4", "5", "12"}, {str(one) for one in range(20)}):
        left = minimal(changes, lambda tried: needed <= {one.name for one in tried})  # noqa: B023
        assert {one.name for one in left} == needed
