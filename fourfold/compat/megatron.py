"""The command line of Megatron-DeepSpeed's `pretrain_gpt.py`, as a Fourfold run.

The flags become a `config.yaml` in the directory of --save that names the flag behind each value,
and that file is trained. Flags left out have Megatron's defaults, not Fourfold's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fourfold.cli import main as fourfold
from fourfold.compat.flags import Flags, Translation
from fourfold.compat.megatron_flags import (
    DECAY_STYLES,
    KEYS,
    PROGRAM,
    WSD_STYLES,
    is_rotary,
    read_flags,
    without_effect,
)
from fourfold.compat.megatron_preprocess import tokenizer_path
from fourfold.errors import ConfigError, UserError, report
from fourfold.launch.launchers import join_launcher

FIXED: tuple[tuple[str, Any, str], ...] = (
    ("Model.depth_scaled_init", True, "Megatron's output projections begin smaller"),
    ("Data.dataset.order", "megatron", "Megatron's order of documents and samples"),
    ("Data.dataset.blend_rounding", "megatron_deepspeed", "as Megatron-DeepSpeed rounds"),
    ("Engine.log_style", "megatron", "Megatron's log line"),
    ("Engine.save_load.keep_last", 0, "Megatron keeps every checkpoint"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train here, as one of the processes a launcher started or alone."""
    try:
        file = write_config(sys.argv[1:] if arguments is None else arguments)
    except UserError as error:
        sys.exit(report(error))
    fourfold(["train", "-c", str(file)])


def write_config(arguments: Sequence[str]) -> Path:
    """The configuration file of the run, and its tokenizer beside it.

    Every process writes the same, so that machines without a common directory have both.
    """
    flags = read_flags(arguments)
    launcher = join_launcher(os.environ)
    directory = Path(flags["--save"])
    vocabulary = read_vocabulary(flags, directory)
    run = translate(flags, vocabulary, launcher.world_size if launcher else 1)
    if problems := run.problems():
        raise ConfigError(problems)
    if os.environ.get("RANK", "0") == "0":
        for line in notices(flags):
            print(line, flush=True)
    return run.write(directory)


def notices(flags: Flags) -> list[str]:
    lines = []
    if useless := without_effect(flags):
        lines.append(
            f"{', '.join(useless)}: changes nothing here; Fourfold does so always, decides it by "
            "the device, or has no such choice"
        )
    if "--initial-loss-scale" in flags and "--fp16" not in flags:
        lines.append("--initial-loss-scale: changes nothing without --fp16")
    if "--save" not in flags:
        lines.append(f"--save is not given: checkpoints and logs go to {flags['--save']}")
    return lines


@dataclass(frozen=True)
class VocabularyFlags:
    """What the tokenizer flags name."""

    size: int
    file: Path | None = None
    eos_id: int | None = None


def read_vocabulary(flags: Flags, directory: Path) -> VocabularyFlags:
    """The tokenizer's size; its one-file form is kept in the run's directory for later use."""
    if flags["--tokenizer-type"] == "NullTokenizer":
        return VocabularyFlags(flags["--vocab-size"] + 1, eos_id=flags["--vocab-size"])
    from fourfold.tokenizer import Tokenizer

    tokenizer, file = Tokenizer.load(tokenizer_path(flags)), directory / "tokenizer.json"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Many processes, on several machines, may be writing here at once.
        with TemporaryDirectory(dir=directory, prefix=".tokenizer-") as own:
            tokenizer.save(own)
            for written in Path(own).iterdir():
                written.replace(directory / written.name)
        return VocabularyFlags(tokenizer.vocab_size, file)
    except OSError as error:
        raise UserError(
            f"--save {directory}: cannot be written to ({error.strerror}); choose another"
        ) from error


def translate(flags: Flags, vocabulary: VocabularyFlags, world_size: int) -> Translation:
    run = Translation(PROGRAM)
    run.set_keys(flags, KEYS)
    _set_network(run, flags)
    _set_vocabulary(run, flags, vocabulary)
    if "--data-path" not in flags:
        del run.values[KEYS["--split"]]
    _set_layout(run, flags, world_size)
    _set_recompute(run, flags)
    _set_precision(run, flags)
    _set_schedule(run, flags, world_size)
    _set_evaluation(run, flags)
    _set_checkpoints(run, flags)
    for key, value, reason in FIXED:
        run.set(key, value, reason)
    return run


def _set_network(run: Translation, flags: Flags) -> None:
    """The flags of the network that are not keys under another name; see `_check_network`."""
    if "--swiglu" in flags and "--ffn-hidden-size" not in flags:
        width = int(4 * flags["--hidden-size"] * 2 / 3 / 64) * 64
        reason = f"8/3 of --hidden-size {flags['--hidden-size']} in steps of 64, by --swiglu"
        run.set("Model.ffn_hidden_size", width, reason)
    activations = {
        "--swiglu": "swiglu", "--squared-relu": "relu_squared", "--no-bias-gelu-fusion": "gelu"
    }  # fmt: skip
    for flag, name in activations.items():
        if flag in flags:
            run.set("Model.activation", name, flag)
            break
    for flag in ("--norm-epsilon", "--layernorm-epsilon"):
        if flag in flags or flag == "--norm-epsilon":
            run.set("Model.norm_epsilon", flags[flag], flags.origin(flag))
    if "--qk-layernorm" in flags:
        run.set("Model.qk_norm", "per_head", "--qk-layernorm")
    for flag in ("--num-query-groups", "--num-key-value-heads"):
        if flag in flags or (flag == "--num-query-groups" and "--group-query-attention" in flags):
            run.set("Model.num_key_value_heads", flags[flag], flags.origin(flag))
    if "--untie-embeddings-and-output-weights" in flags:
        flag = "--untie-embeddings-and-output-weights"
        run.set("Model.tie_word_embeddings", False, flag)
    if "--disable-bias-linear" in flags:
        with_qkv = "--add-qkv-bias" in flags
        reason = "--disable-bias-linear" + (" and --add-qkv-bias" if with_qkv else "")
        run.set("Model.bias", "qkv" if with_qkv else "none", reason)
    _set_positions(run, flags)
    if "--window-size" in flags:
        flag, before = "--window-size", flags["--window-size"]
        run.set("Model.sliding_window", before + 1, f"{flag} {before},0 and the token itself")
        if (every := flags["--window-attn-skip-freq"]) is not None:
            layers = [one for one in range(flags["--num-layers"]) if (one + 1) % every]
            run.set("Model.sliding_window_layers", layers, f"--window-attn-skip-freq {every}")


def _set_positions(run: Translation, flags: Flags) -> None:
    if not is_rotary(flags):
        kind, flag = flags["--position-embedding-type"], "--position-embedding-type"
        if "--no-position-embedding" in flags:
            kind, flag = "none", "--no-position-embedding"
        learned = kind == "learned_absolute"
        run.set("Model.position_embedding", "learned" if learned else "none", flag)
        return
    old = "--use-rotary-position-embeddings"
    run.set(
        "Model.position_embedding",
        "rotary",
        old if old in flags else "--position-embedding-type rope",
    )
    run.set("Model.rope_theta", flags["--rotary-base"], flags.origin("--rotary-base"))
    run.set("Model.partial_rotary_factor", flags["--rotary-percent"], "--rotary-percent")
    key = "Model.rope_scaling"
    if "--use-rope-scaling" in flags:
        run.set(f"{key}.type", "llama3", "--use-rope-scaling")
        flag = "--rope-scaling-factor"
        run.set(f"{key}.factor", flags[flag], flags.origin(flag))
        run.set(f"{key}.original_max_position_embeddings", 8192, "Megatron's, with that flag")
    elif (factor := flags["--rotary-seq-len-interpolation-factor"]) is not None:
        run.set(f"{key}.type", "linear", "--rotary-seq-len-interpolation-factor")
        run.set(f"{key}.factor", factor, "--rotary-seq-len-interpolation-factor")


def _set_vocabulary(run: Translation, flags: Flags, vocabulary: VocabularyFlags) -> None:
    multiple = flags["--make-vocab-size-divisible-by"]
    tp = flags["--tensor-model-parallel-size"]
    padded = -(-vocabulary.size // (multiple * tp)) * multiple * tp
    why = f"{vocabulary.size} padded to a multiple of --make-vocab-size-divisible-by {multiple}"
    run.set("Model.vocab_size", padded, f"{why} * --tensor-model-parallel-size {tp}")
    if vocabulary.file is not None:
        run.set("Global.tokenizer", str(vocabulary.file), "--tokenizer-type and its files")
    if vocabulary.eos_id is not None:
        run.set("Data.dataset.eos_token_id", vocabulary.eos_id, "--vocab-size")


def _data_ranks(flags: Flags, world_size: int) -> int:
    """What the model's own ranks leave; a remainder is refused when the run is set up."""
    tp = flags["--tensor-model-parallel-size"]
    pp = flags["--pipeline-model-parallel-size"]
    return max(1, world_size // (tp * pp))


def _set_layout(run: Translation, flags: Flags, world_size: int) -> None:
    if "--use-distributed-optimizer" in flags:
        ranks = _data_ranks(flags, world_size)
        reason = f"--use-distributed-optimizer over {ranks} data ranks"
        run.set("Distributed.sharding.sharding_degree", ranks, reason)
        run.set("Distributed.sharding.sharding_stage", 1, reason)
    if minutes := flags["--distributed-timeout-minutes"]:
        run.set("Distributed.timeout_seconds", 60.0 * minutes, "--distributed-timeout-minutes")
    flag = "--num-layers-per-virtual-pipeline-stage"
    if flag in flags:
        pp = flags["--pipeline-model-parallel-size"]
        virtual = flags["--num-layers"] // (pp * flags[flag])
        if virtual > 1:
            run.set("Distributed.pp_schedule", "Interleaved1F1B", flag)
            run.set("Distributed.virtual_pp_degree", virtual, f"{flag} {flags[flag]}")


def _set_recompute(run: Translation, flags: Flags) -> None:
    granularity = {"selective": "core_attn", "full": "full"}
    asked = [
        ("--recompute-granularity", granularity.get(flags["--recompute-granularity"])),
        ("--recompute-activations", "core_attn"),
        ("--checkpoint-activations", "full"),
    ]
    for flag, kept in asked:
        if flag in flags:
            run.set("Model.use_recompute", True, flag)
            run.set("Model.recompute_granularity", kept, flag)
            for more in ("method", "num-layers"):
                if (flag := f"--recompute-{more}") in flags:
                    run.set(f"Model.recompute_{more.replace('-', '_')}", flags[flag], flag)
            return
    run.set("Model.use_recompute", False, "Megatron's default")


def _set_precision(run: Translation, flags: Flags) -> None:
    key = "Engine.mix_precision"
    if "--fp16" in flags:
        run.set(f"{key}.dtype", "float16", "--fp16")
        run.set(f"{key}.level", "O2", "--fp16")
        start, flag = flags["--initial-loss-scale"], "--initial-loss-scale"
        run.set(f"{key}.scale_loss", start or 2.0**32, flag if start else f"{flag}, 2**32")
    elif "--bf16" in flags:
        run.set(f"{key}.dtype", "bfloat16", "--bf16")
        run.set(f"{key}.level", "O2", "--bf16")
    else:
        run.set(f"{key}.dtype", "float32", "neither --fp16 nor --bf16")


def _set_schedule(run: Translation, flags: Flags, world_size: int) -> None:
    """Megatron counts samples; what was given in iterations is multiplied by the global batch."""
    kind, each = "samples", 1
    if "--train-iters" in flags:
        kind = "iters"
        own = flags["--micro-batch-size"] * _data_ranks(flags, world_size)
        each = flags["--global-batch-size"] or own
    times = "" if each == 1 else f" * {each} samples"
    flag = next(f for f in (f"--lr-decay-{kind}", f"--train-{kind}") if f in flags)
    decay = flags[flag] * each
    run.set("Optimizer.lr.decay_samples", decay, f"{flag} {flags[flag]}{times}")
    style = flags["--lr-decay-style"]
    given = "" if "--lr-decay-style" in flags else " by default"
    run.set("Optimizer.lr.decay_style", DECAY_STYLES[style], f"--lr-decay-style{given}")
    if style == "WSD":
        flag = f"--lr-wsd-decay-{kind}"
        run.set("Optimizer.lr.wsd_decay_samples", flags[flag] * each, f"{flag}{times}")
        flag = "--lr-wsd-decay-style"
        run.set("Optimizer.lr.wsd_decay_style", WSD_STYLES[flags[flag]], flag)
    if "--lr-warmup-fraction" in flags:
        share = flags["--lr-warmup-fraction"]
        reason = f"--lr-warmup-fraction {share:g} of {decay}"
        run.set("Optimizer.lr.warmup_samples", share * decay, reason)
    else:
        flag = f"--lr-warmup-{kind}"
        steps = flags[flag]
        run.set("Optimizer.lr.warmup_samples", float(steps * each), f"{flag} {steps}{times}")


def _set_evaluation(run: Translation, flags: Flags) -> None:
    iterations = flags["--eval-iters"]
    every = flags["--eval-interval"] if iterations else 0
    run.set("Engine.eval_freq", every, "--eval-interval" if iterations else "--eval-iters 0")
    if iterations:
        run.set("Engine.eval_iters", iterations, "--eval-iters")
    run.set("Engine.test_iters", iterations, "--eval-iters, which Megatron tests with too")
    run.set("Engine.tensorboard", "--tensorboard-dir" in flags, "--tensorboard-dir")


def _set_checkpoints(run: Translation, flags: Flags) -> None:
    directory, source = flags["--save"], flags["--load"]
    run.set("Engine.save_load.auto_resume", source is not None, "--load")
    if source is not None and Path(source).resolve() != Path(directory).resolve():
        run.set("Engine.save_load.ckpt_dir", source, "--load")
