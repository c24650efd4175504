"""The flags of PaddleNLP's gpt-3: what each becomes, what is refused, what is useless."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from fourfold.compat.flags import Flags
from fourfold.compat.paddlenlp import prepare, translate
from fourfold.compat.paddlenlp_flags import (
    FLAGS,
    GraphMode,
    PaddleLayout,
    read_flags,
    without_effect,
)
from fourfold.compat.paddlenlp_models import PRESETS, find_model, initial_weights_dir
from fourfold.config import Config, load_config
from fourfold.convert import load_foreign
from fourfold.engine import build_engine
from fourfold.errors import UserError
from fourfold.model import ModelShape, count_parameters

FLEETX_TINY = Path(__file__).parent.parent / "fixtures" / "fleetx_tiny"
PLACES = "--input_dir data --output_dir output"
GPT2 = f"--model_type gpt --model_name_or_path gpt2-en {PLACES}"
STATIC = "run_pretrain_static.py"


def read(text: str) -> Flags:
    return read_flags(STATIC, text.split())


def resolved(
    tmp_path: Path, text: str, graph_mode: GraphMode = "static", processes: int | None = None
) -> Config:
    flags = read(f"{GPT2} {text}")
    model = find_model(flags["model_name_or_path"], {})
    return load_config(translate(flags, graph_mode, model).write(tmp_path), (), processes)


def refused(text: str, base: str = GPT2) -> str:
    with pytest.raises(UserError) as caught:
        prepare("static", STATIC, f"{base} --device cpu {text}".split())
    return str(caught.value)


# --- presets ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("gpt2-en", 117),
        ("gpt2-medium-en", 345),
        ("gpt3-1.3B-en", 1300),
        ("gpt3-13B-en", 13000),
        ("gpt3-89B-en", 89000),
        ("gpt3-175B-en", 175000),
        ("gpt-cpm-large-cn", 2600),
        ("gpt-cpm-small-cn-distill", 109),
    ],
)
def test_presets_have_the_size_in_their_name(tmp_path: Path, name: str, millions: int) -> None:
    kind = "gpt-cn" if name.endswith("-cn") or "-cn-" in name else "gpt"
    flags = read(f"--model_type {kind} --model_name_or_path {name} {PLACES}")
    file = translate(flags, "static", find_model(name, {})).write(tmp_path)
    shape = ModelShape.of(load_config(file).Model)
    assert count_parameters(shape) == pytest.approx(millions * 1e6, rel=0.07)


def test_a_name_that_is_nearly_right_is_suggested() -> None:
    unknown = f"--model_type gpt --model_name_or_path gpt3-1.3b-eng {PLACES}"
    told = refused("--mp_degree 3 --max_seq_len 2048 --seed -1", unknown)
    assert "did you mean gpt3-1.3B-en?" in told
    assert len(told.splitlines()) == 3, "the model's own sizes are not known"
    assert all(name in told for name in PRESETS)


def test_sizes_of_a_preset_can_be_changed(tmp_path: Path) -> None:
    sizes = {"hidden_size": 96, "num_layers": 2}
    flags = read(f"{GPT2} --hidden_size 96 --num_layers 2")
    file = translate(flags, "static", find_model("gpt2-en", sizes)).write(tmp_path)
    model = load_config(file).Model
    assert (model.hidden_size, model.num_layers, model.ffn_hidden_size) == (96, 2, 384)
    assert model.num_attention_heads == 12
    assert "hidden_size: 96  # --hidden_size\n" in file.read_text()
    assert "num_attention_heads: 12  # --model_name_or_path gpt2-en\n" in file.read_text()


# --- what a flag becomes ----------------------------------------------------------------------


def test_without_flags_the_defaults_are_the_scripts(tmp_path: Path) -> None:
    config = resolved(tmp_path, "", processes=1)
    assert config.Engine.graph_mode == "static"
    assert config.Engine.mix_precision.dtype == "float32"
    assert not config.Model.use_recompute
    assert (config.Global.seed, config.Engine.save_load.save_steps) == (1234, 500)
    assert (config.Optimizer.lr.max_lr, config.Optimizer.lr.min_lr) == (1e-4, 1e-5)
    assert config.Optimizer.lr.decay_steps == 360000
    assert config.Engine.test_iters == 100
    assert config.Data.batch_size.global_batch_size == 8
    assert config.Data.dataset.order == "fleetx"


@pytest.mark.parametrize("word", ["yes", "True", "T", "y", "1", ""])
def test_a_switch_is_on_by_any_word_for_it_or_none(word: str) -> None:
    assert read(f"{GPT2} --use_amp {word}")["use_amp"] is True


@pytest.mark.parametrize("word", ["no", "False", "f", "N", "0"])
def test_a_switch_is_off_by_any_word_for_that(word: str) -> None:
    assert read(f"{GPT2} --use_amp {word}")["use_amp"] is False


@pytest.mark.parametrize(
    ("text", "dtype", "level"),
    [
        ("--use_amp true", "float16", "O1"),
        ("--use_amp true --amp_level O2", "float16", "O2"),
        ("--use_pure_fp16 true", "float16", "O2"),
        ("--use_amp false", "float32", None),
    ],
)
def test_precision(tmp_path: Path, text: str, dtype: str, level: str | None) -> None:
    precision = resolved(tmp_path, f"{text} --scale_loss 128").Engine.mix_precision
    assert (precision.dtype, precision.level, precision.scale_loss) == (dtype, level, 128)


@pytest.mark.parametrize(
    ("text", "graph_mode", "degree"),
    [
        ("--use_sharding true", "static", 4),
        ("--use_sharding false", "static", 1),
        ("", "static", 1),
        ("", "dynamic", 4),
        ("--use_sharding false", "dynamic", 1),
    ],
)
def test_sharding_counts_when_it_is_on(
    tmp_path: Path, text: str, graph_mode: GraphMode, degree: int
) -> None:
    config = resolved(tmp_path, f"--sharding_degree 4 {text}", graph_mode, processes=degree)
    assert config.Distributed.sharding.sharding_degree == degree
    assert config.Distributed.dp_degree == 1
    assert config.Data.batch_size.global_batch_size == 8 * degree


def test_no_decay_means_one_rate_from_the_first_step(tmp_path: Path) -> None:
    lr = resolved(tmp_path, "--lr_decay_style none --max_lr 0.01").Optimizer.lr
    assert (lr.decay_style, lr.max_lr, lr.warmup_rate) == ("constant", 0.01, 0)


def test_checking_accuracy_leaves_out_dropout_and_evaluation(tmp_path: Path) -> None:
    config = resolved(tmp_path, "--check_accuracy true")
    assert config.Model.hidden_dropout_prob == config.Model.attention_probs_dropout_prob == 0
    assert config.Engine.eval_freq == config.Engine.test_iters == 0
    assert config.Engine.save_load.save_steps == 0


@pytest.mark.parametrize(
    ("strategy", "top_k", "top_p"),
    [("topk_sampling", 7, 1.0), ("topp_sampling", 0, 0.5), ("sampling", 0, 1.0)],
)
def test_decoding(tmp_path: Path, strategy: str, top_k: int, top_p: float) -> None:
    config = resolved(tmp_path, f"--decoding_strategy {strategy} --topk 7 --topp 0.5")
    assert (config.Generation.top_k, config.Generation.top_p) == (top_k, top_p)
    assert config.Generation.decode_strategy == "sampling"


def test_profiling_ends_the_run_unless_told_otherwise(tmp_path: Path) -> None:
    config = resolved(tmp_path, "-p batch_range=[5,9];profile_path=here")
    assert config.Profiler.enable and config.Profiler.scheduler == [5, 9]
    assert (config.Profiler.profiler_log, config.Engine.max_steps) == ("here", 9)
    stays = resolved(tmp_path, "-p batch_range=[5,9];exit_on_finished=false --max_steps 20")
    assert stays.Engine.max_steps == 20


# --- what is refused, and what is useless -----------------------------------------------------


def test_all_problems_are_told_at_once_by_their_flags() -> None:
    told = refused(
        "--mp_degree 5 --sharding_degree 4 --use_sharding false --global_batch_size 30 "
        "--max_seq_len 2048 --grad_clip -1 --seed -3"
    ).splitlines()
    assert len(told) == 6
    assert "--mp_degree 5 * --sharding_degree 1 (--use_sharding is not on)" in told[0]
    assert "must be the number of processes, which is 1" in told[0]
    assert told[1].startswith("--global_batch_size 30 is no multiple of micro_batch_size * ")
    assert told[1].endswith("= 8 * 1 * 1 = 8; choose 24 or 32, or change a factor")
    rest = "\n".join(told[2:])
    for part in (
        "--seed -3 is not",
        "--grad_clip -1.0 is not",
        "--max_seq_len 2048 is longer than Model.max_position_embeddings=1024 "
        "(--model_name_or_path gpt2-en)",
        "--mp_degree 5 does not divide",
    ):
        assert part in rest


def test_nothing_is_said_about_a_model_that_was_not_found() -> None:
    base = GPT2.replace("gpt2-en", "gpt9-en")
    told = refused("--max_seq_len 2048 --eval_freq -1", base).splitlines()
    assert len(told) == 2 and "gpt9-en is neither" in told[0] and "--eval_freq -1 is" in told[1]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("--device xpu", "--device xpu is not supported"),
        ("--use_amp perhaps", "--use_amp: 'perhaps' is neither true nor false"),
        ("--max_step 3", "--max_step: unknown flag; did you mean --max_steps?"),
        ("--model_type gpt-cn", "give --model_type gpt"),
        ("--local_batch_size 12", "--local_batch_size 12 is no multiple of --micro_batch_size 8"),
        ("--local_batch_size 8 --global_batch_size 16", "give one of the two"),
        ("-p batch_range=[9,5]", "'batch_range=[9,5]' is not understood"),
        ("--save_inference_model_then_exist", "fourfold convert"),
        ("--pp_degree 0", "--pp_degree 0 is not an integer of at least 1"),
        ("--micro_batch_size 0", "--micro_batch_size 0 is not an integer of at least 1"),
    ],
)
def test_refusals(text: str, part: str) -> None:
    assert part in refused(text)


def test_missing_flags_are_named_together() -> None:
    with pytest.raises(UserError, match=r"--input_dir and --output_dir missing"):
        read("--model_type gpt --model_name_or_path gpt2-en")


def test_a_refused_run_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused("--dp_degree 2")
    assert not list(tmp_path.iterdir())


def test_what_does_nothing_is_said() -> None:
    flags = read(
        f"{GPT2} --enable_addto true --fuse false --sharding_degree 4 --scale_loss 128 --topp 0.5 "
        "--num_train_epochs 3 -p batch_range=[5,9];state=GPU"
    )
    said = without_effect(flags, PaddleLayout.of(flags, "static"))
    assert [text.split(" ")[0] for text in said] == [
        "--enable_addto",
        "--sharding_degree",
        "--scale_loss",
        "--topp",
        "--num_train_epochs",
        "state=GPU",
    ]
    assert said[1] == "--sharding_degree 4 (--use_sharding is not on)"


def test_every_default_belongs_to_a_flag() -> None:
    defaults = {flag.name: flag.default for flag in FLAGS if flag.default is not None}
    words = [f"{name} {value}" for name, value in defaults.items()]
    assert read(f"{GPT2} {' '.join(words)}").given.items() >= defaults.items()


# --- checkpoints ------------------------------------------------------------------------------


def numbers(directory: Path) -> None:
    """Token files in PaddleNLP's older form."""
    directory.mkdir()
    ids = np.arange(4000, dtype=np.uint16) % 100
    np.savez(directory / "train.data.json_ids.npz", ids=ids, lens=np.full(40, 100, np.uint16))


@pytest.fixture
def from_paddle(tmp_path: Path) -> list[str]:
    numbers(tmp_path / "data")
    return (
        f"--model_type gpt --model_name_or_path {FLEETX_TINY} --num_attention_heads 4 "
        f"--input_dir {tmp_path / 'data'} --output_dir {tmp_path / 'run'} --device cpu "
        "--max_seq_len 16 --micro_batch_size 2 --max_steps 1 --eval_iters 1 --decay_steps 8"
    ).split()


def test_a_run_starts_from_paddles_weights_and_then_goes_on_by_itself(
    tmp_path: Path, from_paddle: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = prepare("dynamic", "run_pretrain.py", from_paddle)
    with (
        load_foreign(initial_weights_dir(tmp_path / "run")) as taken,
        load_foreign(FLEETX_TINY, 4) as own,
    ):
        theirs = dict(own.tensors())
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in taken.tensors())
    build_engine(load_config(file, (), 1)).fit()
    assert "starting at step 0 with the weights of" in capsys.readouterr().out

    shutil.rmtree(initial_weights_dir(tmp_path / "run"))
    file = prepare("dynamic", "run_pretrain.py", [*from_paddle, "--max_steps", "2"])
    assert not initial_weights_dir(tmp_path / "run").exists()
    engine = build_engine(load_config(file, (), 1))
    engine.fit()
    assert engine.step == 2
    assert "at step 1" in capsys.readouterr().out

    again = [*from_paddle, "--output_dir", str(tmp_path / "next")]
    again[again.index(str(FLEETX_TINY))] = str(tmp_path / "run")
    prepare("dynamic", "run_pretrain.py", again)
    assert (initial_weights_dir(tmp_path / "next") / "step_0").is_dir()


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (["--hidden_size", "64"], "has its own sizes"),
        (["--num_attention_heads", "3"], "heads"),
    ],
)
def test_a_checkpoint_has_its_own_sizes(
    from_paddle: list[str], change: list[str], part: str
) -> None:
    with pytest.raises(UserError, match=part):
        prepare("dynamic", "run_pretrain.py", [*from_paddle, *change])


def test_heads_that_paddle_does_not_say_are_asked_for(from_paddle: list[str]) -> None:
    place = from_paddle.index("--num_attention_heads")
    with pytest.raises(UserError, match=r"give --num_attention_heads"):
        prepare("dynamic", "run_pretrain.py", from_paddle[:place] + from_paddle[place + 2 :])
