"""The flags of `pretrain_gpt.py`: the run they describe, and the combinations that are refused."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from helpers.raw_text import write_vocabulary

from fourfold.compat.megatron import (
    VocabularyFlags,
    notices,
    read_vocabulary,
    translate,
    write_config,
)
from fourfold.compat.megatron_flags import read_flags
from fourfold.config import Config, load_config
from fourfold.errors import ConfigError, UserError
from fourfold.model import ModelShape, count_parameters
from fourfold.model.params import RopeScaling
from fourfold.optim import build_schedule

GPT2_SIZE = 50257
MODEL = (
    "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 "
    "--max-position-embeddings 2048 --tensor-model-parallel-size 8 "
    "--pipeline-model-parallel-size 8 --use-flash-attn-v2"
)
TRAINING = (
    "--micro-batch-size 1 --global-batch-size 1536 --lr 6.0e-5 --min-lr 6.0e-6 "
    "--lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 "
    "--adam-beta2 0.95 --init-method-std 0.006 --fp16"
)
DATA = (
    "--data-path 0.35 wiki_text_document 0.65 owt_text_document --data-cache-path gptcache "
    "--tokenizer-type GPT2BPETokenizer --vocab-file v.json --merge-file m.txt --split 98,2,0"
)
OUTPUT = "--eval-interval 100 --eval-iters 40 --save-interval 1000 --save ck --tensorboard-dir tb"
COMMON = f"{MODEL} {TRAINING} {DATA} {OUTPUT} --log-validation-ppl-to-tensorboard"
TRAIN = (
    f"{COMMON} --train-samples 10846761 --rampup-batch-size 16 16 433870 "
    "--lr-decay-samples 9400526 --lr-warmup-samples 13558 --log-interval 10 --load ck"
)
TGS = f"{COMMON} --train-iters 10 --lr-decay-iters 8 --lr-warmup-fraction .001 --log-interval 1"


def config_of(directory: Path, words: str, world_size: int = 64) -> Config:
    given = read_flags(words.split())
    file = translate(given, VocabularyFlags(GPT2_SIZE), world_size).write(directory)
    return load_config(file, world_size=world_size)


def test_learning_rates_of_the_benchmark_are_those_published(tmp_path: Path) -> None:
    schedule = build_schedule(config_of(tmp_path, TGS))
    # The log shows the rate after a step, which is that of the next.
    shown = [f"{schedule.lr_at(step + 1):.3E}" for step in range(1, 11)]
    assert " ".join(shown) == (
        "5.797E-05 5.214E-05 4.338E-05 3.304E-05 2.270E-05 1.392E-05 8.059E-06 6.000E-06 "
        "6.000E-06 6.000E-06"
    )


def test_the_training_run_is_the_one_in_the_published_log(tmp_path: Path) -> None:
    config = config_of(tmp_path, TRAIN)
    assert config.Engine.max_steps == 8247
    assert config.batch_schedule.consumed(2400) == 1864624
    assert f"{build_schedule(config).lr_at(2401):.3E}" == "5.498E-05"
    assert config.Model.vocab_size == 51200
    assert count_parameters(ModelShape.of(config.Model)) == 174_615_846_912
    assert config.Model.depth_scaled_init and not config.Model.use_recompute
    assert config.Engine.mix_precision.dtype == "float16"
    assert config.Engine.mix_precision.scale_loss == 2.0**32
    assert (config.Distributed.mp_degree, config.Distributed.pp_degree) == (8, 8)
    assert config.Engine.accumulate_steps == 1536
    dataset = config.Data.dataset
    assert dataset.input_dir == ["0.35", "wiki_text_document", "0.65", "owt_text_document"]
    assert (dataset.order, dataset.blend_rounding) == ("megatron", "megatron_deepspeed")
    assert not dataset.eod_mask_loss and dataset.cache_dir == "gptcache"
    assert config.Engine.log_style == "megatron" and config.Engine.tensorboard_dir == "tb"
    assert config.Engine.save_load.auto_resume and config.Engine.save_load.ckpt_dir is None


def test_the_file_names_the_flag_behind_each_value(tmp_path: Path) -> None:
    config_of(tmp_path, TRAIN)
    lines = (tmp_path / "config.yaml").read_text().splitlines()
    assert "  num_layers: 96  # --num-layers" in lines
    assert "  adam_epsilon: 1.0e-8  # --adam-eps by default" in lines
    assert all("  # " in line for line in lines[1:] if not line.endswith(":"))
    vocabulary = next(line for line in lines if "vocab_size" in line)
    assert "50257 padded to a multiple of" in vocabulary


def test_flags_left_out_have_the_defaults_of_megatron(tmp_path: Path) -> None:
    words = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 "
        "--max-position-embeddings 16 --micro-batch-size 4 --lr 1e-3 --train-iters 50 "
        "--data-path d --tokenizer-type NullTokenizer --vocab-size 1000"
    )
    given = read_flags(words.split())
    file = translate(given, read_vocabulary(given, tmp_path), world_size=2).write(tmp_path)
    config = load_config(file, world_size=2)
    assert config.Model.vocab_size == 1024 and config.Data.dataset.eos_token_id == 1000
    assert config.Data.batch_size.global_batch_size == 8
    assert config.Optimizer.lr.decay_samples == 400 and config.Optimizer.lr.warmup_samples == 0
    assert config.Optimizer.lr.decay_style == "linear" and config.Optimizer.lr.min_lr == 0
    assert (config.Optimizer.weight_decay, config.Optimizer.grad_clip) == (0.01, 1.0)
    assert config.Engine.mix_precision.dtype == "float32" and config.Global.seed == 1234
    assert config.Engine.eval_iters == config.Engine.test_iters == 100
    assert not config.Engine.tensorboard and not config.Engine.save_load.auto_resume
    assert any("--save is not given" in line for line in notices(given))


@pytest.mark.parametrize(
    ("more", "changed"),
    [
        (
            "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 "
            "--use-distributed-optimizer",
            {"Distributed.sharding.sharding_degree": 4, "Distributed.sharding.sharding_stage": 1},
        ),
        (
            "--num-layers-per-virtual-pipeline-stage 4",
            {"Distributed.pp_schedule": "Interleaved1F1B", "Distributed.virtual_pp_degree": 3},
        ),
        ("--recompute-activations", {"Model.recompute_granularity": "core_attn"}),
        (
            "--recompute-granularity full --recompute-method uniform",
            {"Model.use_recompute": True, "Model.recompute_granularity": "full"},
        ),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
            {"Model.recompute_method": "block", "Model.recompute_num_layers": 3},
        ),
        ("--load other", {"Engine.save_load.ckpt_dir": "other"}),
        ("--initial-loss-scale 4096", {"Engine.mix_precision.scale_loss": 4096.0}),
        ("--make-vocab-size-divisible-by 1", {"Model.vocab_size": 50264}),
        ("--eval-iters 0", {"Engine.eval_freq": 0, "Engine.test_iters": 0}),
        ("--sequence-parallel --eod-mask-loss", {"Model.sequence_parallel": True}),
        ("--distributed-timeout-minutes 10", {"Distributed.timeout_seconds": 600.0}),
        ("--lr-warmup-samples 0", {"Optimizer.lr.warmup_samples": 0.0}),
    ],
)
def test_further_flags(tmp_path: Path, more: str, changed: dict[str, object]) -> None:
    given = read_flags(f"{TRAIN} {more}".split())
    file = translate(given, VocabularyFlags(GPT2_SIZE), 64).write(tmp_path)
    content = yaml.safe_load(file.read_text())
    for key, value in changed.items():
        found = content
        for name in key.split("."):
            found = found[name]
        assert found == value, key
    load_config(file, world_size=64)


def test_wsd_is_megatrons(tmp_path: Path) -> None:
    words = TGS.replace("--lr-decay-style cosine", "--lr-decay-style WSD")
    more = "--lr-wsd-decay-iters 4 --lr-wsd-decay-style minus_sqrt"
    schedule = build_schedule(config_of(tmp_path, f"{words} {more}"))
    rates = [schedule.lr_at(step) for step in range(2, 11)]
    top, low = 6e-5, 6e-6
    # Stable to the fourth of eight steps, then down with the square root of what is done.
    down = [low + (top - low) * (1 - (done / 4) ** 0.5) for done in (1, 2, 3, 4)]
    assert rates == pytest.approx([top] * 4 + down + [low])


# -- other networks ------------------------------------------------------------------------------

TINY = (
    "--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 4 --lr 1e-3 --train-iters 50 "
    "--data-path d --tokenizer-type NullTokenizer --vocab-size 1000"
)
LLAMA = (
    "--swiglu --position-embedding-type rope --rotary-base 500000 --normalization RMSNorm "
    "--group-query-attention --num-query-groups 4 --untie-embeddings-and-output-weights "
    "--disable-bias-linear"
)


def model_of(directory: Path, words: str) -> dict[str, object]:
    """The keys of the `Model` section that differ from what the flags give without `words`."""
    shapes = []
    for number, given in enumerate((TINY, f"{TINY} {words}")):
        config = config_of(directory / str(number), given, world_size=1)
        shapes.append(ModelShape.of(config.Model))
    plain, changed = shapes
    return {
        field.name: getattr(changed, field.name)
        for field in fields(ModelShape)
        if getattr(changed, field.name) != getattr(plain, field.name)
    }


def test_a_llama_in_flags(tmp_path: Path) -> None:
    assert model_of(tmp_path, f"{LLAMA} --use-rope-scaling") == {
        "activation": "swiglu",
        "ffn_hidden_size": 2688,  # 8/3 of 1024, down to a multiple of 64
        "position_embedding": "rotary",
        "rope_theta": 500000.0,
        "rope_scaling": RopeScaling("llama3", 8.0, 8192, 1.0, 4.0),
        "normalization": "RMSNorm",
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "bias": "none",
    }
    lines = (tmp_path / "1" / "config.yaml").read_text()
    assert "ffn_hidden_size: 2688  # 8/3 of --hidden-size 1024 in steps of 64, by --swiglu" in lines
    assert "factor: 8.0  # --rope-scaling-factor by default" in lines


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ("--group-query-attention", {"num_key_value_heads": 1}),
        ("--num-key-value-heads 2", {"num_key_value_heads": 2}),
        ("--kv-channels 128", {"head_dim": 128}),
        ("--qk-layernorm", {"qk_norm": "per_head"}),
        ("--squared-relu", {"activation": "relu_squared"}),
        ("--no-bias-gelu-fusion", {"activation": "gelu"}),
        ("--openai-gelu", {}),
        ("--swiglu --ffn-hidden-size 512", {"activation": "swiglu", "ffn_hidden_size": 512}),
        ("--normalization rmsnorm", {"normalization": "RMSNorm"}),
        ("--layernorm-epsilon 1e-6", {"norm_epsilon": 1e-6}),
        ("--norm-epsilon 1e-6", {"norm_epsilon": 1e-6}),
        ("--position-embedding-type none", {"position_embedding": "none"}),
        ("--no-position-embedding", {"position_embedding": "none"}),
        (
            "--use-rotary-position-embeddings --no-position-embedding --rotary-percent 0.25",
            {"position_embedding": "rotary", "partial_rotary_factor": 0.25},
        ),
        (
            "--position-embedding-type rope --rotary-seq-len-interpolation-factor 4",
            {"position_embedding": "rotary", "rope_scaling": RopeScaling("linear", 4.0, 16)},
        ),
        ("--window-size 31,0", {"sliding_window": 32}),
        (
            "--window-size=(31,0) --window-attn-skip-freq 4",
            {"sliding_window": 32, "sliding_window_layers": (0, 1, 2)},
        ),
        (
            "--normalization RMSNorm --disable-bias-linear --add-qkv-bias",
            {"normalization": "RMSNorm", "bias": "qkv"},
        ),
        ("--add-qkv-bias", {}),
    ],
)
def test_flags_of_other_networks(tmp_path: Path, words: str, changed: dict[str, object]) -> None:
    assert model_of(tmp_path, words) == changed


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--add-qkv-bias", True),
        ("--normalization RMSNorm --disable-bias-linear --add-qkv-bias", False),
        ("--swiglu --no-bias-gelu-fusion", True),
        ("--no-bias-gelu-fusion", False),
        ("--use-rotary-position-embeddings --no-position-embedding", True),
        ("--no-position-embedding", False),
    ],
)
def test_a_flag_of_the_network_that_changes_nothing_is_named(words: str, told: bool) -> None:
    last = words.split()[-1]
    lines = notices(read_flags(f"{TINY} --save x {words}".split()))
    assert any(last in line for line in lines) == told


def test_bf16_has_master_weights_as_in_megatron(tmp_path: Path) -> None:
    precision = config_of(tmp_path, TRAIN.replace("--fp16", "--bf16")).Engine.mix_precision
    assert (precision.dtype, precision.level) == ("bfloat16", "O2")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (f"{TGS} --rampup-batch-size 16 16 1000", "goes with --train-samples only"),
        (f"{TGS} --train-samples 100", "--train-samples and --train-iters exclude each other"),
        (f"{TGS} --lr-decay-samples 100", "does not go with --train-iters; give --lr-decay-iters"),
        (f"{TRAIN} --lr-warmup-iters 1", "does not go with --train-samples; give --lr-warmup-sam"),
        (f"{TRAIN} --lr-warmup-fraction .1", "--lr-warmup-fraction and --lr-warmup-samples excl"),
        (f"{TRAIN} --lr-warmup-samples 9400526", "is not less than --lr-decay-samples 9400526"),
        (f"{TRAIN} --min-lr 1", "--min-lr 1 is above --lr 6e-05"),
        (f"{TRAIN} --bf16", "--fp16 and --bf16 exclude each other"),
        (f"{TRAIN} --num-layers-per-virtual-pipeline-stage 5", "does not divide --num-layers 96"),
        (f"{TRAIN} --num-layer 96", "--num-layer: unknown flag; did you mean --num-layers?"),
        (f"{TRAIN} --hidden-size wide", "--hidden-size: 'wide' is not a whole number"),
        (f"{TRAIN} --hidden-size 0", "--hidden-size 0: choose 1 or more"),
        (f"{TRAIN} --lr-decay-style square", "invalid choice: 'square'"),
        (f"{TGS} --lr-decay-style WSD", "--lr-decay-style WSD needs --lr-wsd-decay-iters; add it"),
        (f"{TGS} --lr-wsd-decay-iters 3", "--lr-wsd-decay-iters goes with --lr-decay-style WSD"),
        (f"{TRAIN} --lr-wsd-decay-iters 3", "does not go with --train-samples"),
        (f"{TRAIN} --loss-scale 1024", "--loss-scale is not supported: .* --initial-loss-scale"),
        (f"{TRAIN} --deepspeed", "no DeepSpeed runs here; .* --use-distributed-optimizer"),
        (f"{TRAIN} --num-experts 8", "--num-experts is not supported: there are no experts here"),
        (f"{TRAIN} --rotary-interleaved", "not supported: rotary pairs are a head's halves"),
        (f"{TRAIN} --apply-layernorm-1p", "--apply-layernorm-1p is not supported: a norm's weight"),
        (f"{TRAIN} --multi-latent-attention", "keys and values are not compressed"),
        (f"{TRAIN} --position-embedding-type mrope", "invalid choice: 'mrope'"),
        (f"{TRAIN} --normalization BatchNorm", "neither LayerNorm nor RMSNorm"),
        (f"{TRAIN} --num-query-groups 8", "no effect without --group-query-attention; add that"),
        (f"{TRAIN} --rope-scaling-factor 4", "no effect without --use-rope-scaling"),
        (f"{TRAIN} --rotary-base 5e5", "no effect without rotary positions; add --position-embed"),
        (f"{TRAIN} --window-attn-skip-freq 4", "no effect without --window-size"),
        (f"{TRAIN} --window-size 127,1", "'127,1' looks ahead; attention is causal"),
        (f"{TRAIN} --window-size 127", "'127' is not a pair of numbers such as 127,0"),
        (f"{TRAIN} --window-size (-1,0)", "is not a pair of numbers"),
        (f"{TRAIN} --swiglu --squared-relu", "--swiglu and --squared-relu exclude each other"),
        (f"{TRAIN} --disable-bias-linear", "leaves Megatron's LayerNorm its bias"),
        (
            f"{TRAIN} --use-rotary-position-embeddings --position-embedding-type none",
            "contradict; leave one of them out",
        ),
        (
            f"{TRAIN} --use-rotary-position-embeddings --use-rope-scaling "
            "--rotary-seq-len-interpolation-factor 2",
            "exclude each other",
        ),
        (f"{TRAIN} --train-data-path d", "--data-path and --train-data-path exclude each other"),
        (f"{TRAIN} --vocab-size 5", "GPT2BPETokenizer knows its own"),
        (f"{TRAIN} --recompute-method uniform", "goes with --recompute-granularity full"),
        (TRAIN.replace("--lr 6.0e-5", ""), "--lr missing"),
        (TRAIN.replace("--train-samples 10846761", ""), "say how long the run is|--train-samples"),
    ],
)
def test_what_megatron_asserts_is_said_in_words(words: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        read_flags(words.split())


def test_flags_without_effect_are_named_once() -> None:
    quiet = "--no-masked-softmax-fusion --distributed-backend nccl --num-workers 2"
    (line,) = notices(read_flags(f"{TRAIN} {quiet}".split()))
    for flag in ("--use-flash-attn-v2", "--no-masked-softmax-fusion", "--distributed-backend"):
        assert flag in line


def test_a_configuration_that_cannot_be_speaks_of_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab, merges = write_vocabulary(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = TRAIN.replace("v.json", str(vocab)).replace("m.txt", str(merges))
    with pytest.raises(ConfigError, match="--tensor-model-parallel-size 5 does not divide"):
        write_config(f"{words} --tensor-model-parallel-size 5".split())
    file = write_config(words.split())
    config = load_config(file, world_size=64)
    assert config.Global.tokenizer == "ck/tokenizer.json" and Path("ck/tokenizer.json").exists()
    assert config.Model.vocab_size == 1024  # 320, padded to a multiple of 128 * 8


def test_help_has_a_word_on_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_flags(["--help"])
    entries = re.split(r"\n  (?=-)", capsys.readouterr().out)[1:]
    assert len(entries) > 80
    bare = [entry for entry in entries if not re.search(r"(\s{2,}|\n\s+)[a-zA-Z]", entry)]
    assert not bare, bare
