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
from fourfold.compat.flags import Translation
from fourfold.compat.megatron_flags import PROGRAM, Given, read_flags, without_effect
from fourfold.compat.megatron_preprocess import tokenizer_place
from fourfold.errors import ConfigError, UserError, report

NO_SAVE = "./output"
# Flag, key, and what Megatron takes where the flag is missing (None: what Fourfold derives).
DIRECT: tuple[tuple[str, str, Any], ...] = (
    ("--seed", "Global.seed", 1234),
    ("--num-layers", "Model.num_layers", None),
    ("--hidden-size", "Model.hidden_size", None),
    ("--ffn-hidden-size", "Model.ffn_hidden_size", None),
    ("--num-attention-heads", "Model.num_attention_heads", None),
    ("--max-position-embeddings", "Model.max_position_embeddings", None),
    ("--init-method-std", "Model.initializer_range", 0.02),
    ("--hidden-dropout", "Model.hidden_dropout_prob", 0.1),
    ("--attention-dropout", "Model.attention_probs_dropout_prob", 0.1),
    ("--sequence-parallel", "Model.sequence_parallel", None),
    ("--tensor-model-parallel-size", "Distributed.mp_degree", 1),
    ("--pipeline-model-parallel-size", "Distributed.pp_degree", 1),
    ("--seq-length", "Data.dataset.max_seq_len", None),
    ("--split", "Data.dataset.split", "969, 30, 1"),
    ("--data-cache-path", "Data.dataset.cache_dir", None),
    ("--eod-mask-loss", "Data.dataset.eod_mask_loss", False),
    ("--reset-position-ids", "Data.dataset.reset_position_ids", False),
    ("--reset-attention-mask", "Data.dataset.reset_attention_mask", False),
    ("--micro-batch-size", "Data.batch_size.micro_batch_size", None),
    ("--global-batch-size", "Data.batch_size.global_batch_size", None),
    ("--rampup-batch-size", "Data.batch_size.rampup", None),
    ("--weight-decay", "Optimizer.weight_decay", 0.01),
    ("--adam-beta1", "Optimizer.adam_beta1", 0.9),
    ("--adam-beta2", "Optimizer.adam_beta2", 0.999),
    ("--adam-eps", "Optimizer.adam_epsilon", 1e-8),
    ("--clip-grad", "Optimizer.grad_clip", 1.0),
    ("--lr", "Optimizer.lr.max_lr", None),
    ("--min-lr", "Optimizer.lr.min_lr", 0.0),
    ("--lr-decay-style", "Optimizer.lr.decay_style", "linear"),
    ("--train-iters", "Engine.max_steps", None),
    ("--train-samples", "Engine.train_samples", None),
    ("--log-interval", "Engine.logging_freq", 100),
    ("--save-interval", "Engine.save_load.save_steps", 0),
    ("--tensorboard-dir", "Engine.tensorboard_dir", None),
)
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
    from fourfold.launch.launchers import join_launcher

    given = read_flags(arguments)
    launcher = join_launcher(os.environ)
    directory = Path(given.get("--save", NO_SAVE))
    vocabulary = read_vocabulary(given, directory)
    run = translate(given, vocabulary, launcher.world_size if launcher else 1)
    if problems := run.problems():
        raise ConfigError(problems)
    if os.environ.get("RANK", "0") == "0":
        for line in notices(given):
            print(line, flush=True)
    return run.write(directory)


def notices(given: Given) -> list[str]:
    lines = []
    if flags := without_effect(given):
        lines.append(
            f"{', '.join(flags)}: changes nothing here; Fourfold does so always, decides it by the "
            "device, or has no such choice"
        )
    if given.get("--recompute-num-layers", 1) > 1:
        lines.append("--recompute-num-layers: each layer is recomputed by itself, as with 1")
    if "--initial-loss-scale" in given and "--fp16" not in given:
        lines.append("--initial-loss-scale: changes nothing without --fp16")
    if "--save" not in given:
        lines.append(f"--save is not given: checkpoints and logs go to {NO_SAVE}")
    return lines


@dataclass(frozen=True)
class VocabularyFlags:
    """What the tokenizer flags name."""

    size: int
    file: Path | None = None
    eos_id: int | None = None


def read_vocabulary(given: Given, directory: Path) -> VocabularyFlags:
    """The tokenizer's size; its one-file form is kept in the run's directory for later use."""
    if given["--tokenizer-type"] == "NullTokenizer":
        return VocabularyFlags(given["--vocab-size"] + 1, eos_id=given["--vocab-size"])
    from fourfold.tokenizer import Tokenizer

    tokenizer, file = Tokenizer.load(tokenizer_place(given)), directory / "tokenizer.json"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Many processes, on several machines, may be writing here at once.
        with TemporaryDirectory(dir=directory, prefix=".tokenizer-") as own:
            tokenizer.save(own).replace(file)
        return VocabularyFlags(tokenizer.vocab_size, file)
    except OSError as error:
        raise UserError(
            f"--save {directory}: cannot be written to ({error.strerror}); choose another"
        ) from error


def translate(given: Given, vocabulary: VocabularyFlags, world_size: int) -> Translation:
    run = Translation(PROGRAM)
    for flag, key, default in DIRECT:
        if flag in given:
            run.set(key, given[flag], flag)
        elif default is not None:
            run.set(key, default, f"{flag} by default")
    _set_vocabulary(run, given, vocabulary)
    _set_data(run, given)
    _set_layout(run, given, world_size)
    _set_recompute(run, given)
    _set_precision(run, given)
    _set_schedule(run, given, world_size)
    _set_evaluation(run, given)
    _set_checkpoints(run, given)
    for key, value, reason in FIXED:
        run.set(key, value, reason)
    return run


def _set_vocabulary(run: Translation, given: Given, vocabulary: VocabularyFlags) -> None:
    multiple = given.get("--make-vocab-size-divisible-by", 128)
    tp = given.get("--tensor-model-parallel-size", 1)
    padded = -(-vocabulary.size // (multiple * tp)) * multiple * tp
    why = f"{vocabulary.size} padded to a multiple of --make-vocab-size-divisible-by {multiple}"
    run.set("Model.vocab_size", padded, f"{why} * --tensor-model-parallel-size {tp}")
    if vocabulary.file is not None:
        run.set("Global.tokenizer", str(vocabulary.file), "--tokenizer-type and its files")
    if vocabulary.eos_id is not None:
        run.set("Data.dataset.eos_token_id", vocabulary.eos_id, "--vocab-size")


def _set_data(run: Translation, given: Given) -> None:
    keys = {
        "--data-path": "input_dir",
        "--train-data-path": "train_data",
        "--valid-data-path": "valid_data",
        "--test-data-path": "test_data",
    }
    for flag, key in keys.items():
        if flag in given:
            run.set(f"Data.dataset.{key}", given[flag], flag)
    if "--data-path" not in given:
        del run.values["Data.dataset.split"]


def _data_ranks(given: Given, world_size: int) -> int:
    """What the model's own ranks leave; a remainder is refused when the run is set up."""
    tp = given.get("--tensor-model-parallel-size", 1)
    pp = given.get("--pipeline-model-parallel-size", 1)
    return max(1, world_size // (tp * pp))


def _set_layout(run: Translation, given: Given, world_size: int) -> None:
    if "--use-distributed-optimizer" in given:
        ranks = _data_ranks(given, world_size)
        reason = f"--use-distributed-optimizer over {ranks} data ranks"
        run.set("Distributed.sharding.sharding_degree", ranks, reason)
        run.set("Distributed.sharding.sharding_stage", 1, reason)
    if minutes := given.get("--distributed-timeout-minutes"):
        run.set("Distributed.timeout_seconds", 60.0 * minutes, "--distributed-timeout-minutes")
    flag = "--num-layers-per-virtual-pipeline-stage"
    if flag in given:
        pp = given["--pipeline-model-parallel-size"]
        virtual = given["--num-layers"] // (pp * given[flag])
        if virtual > 1:
            run.set("Distributed.pp_schedule", "Interleaved1F1B", flag)
            run.set("Distributed.virtual_pp_degree", virtual, f"{flag} {given[flag]}")


def _set_recompute(run: Translation, given: Given) -> None:
    granularity = {"selective": "core_attn", "full": "full"}
    asked = [
        ("--recompute-granularity", granularity.get(given.get("--recompute-granularity", ""))),
        ("--recompute-activations", "core_attn"),
        ("--checkpoint-activations", "full"),
    ]
    for flag, kept in asked:
        if flag in given:
            run.set("Model.use_recompute", True, flag)
            run.set("Model.recompute_granularity", kept, flag)
            return
    run.set("Model.use_recompute", False, "Megatron's default")


def _set_precision(run: Translation, given: Given) -> None:
    key = "Engine.mix_precision"
    if "--fp16" in given:
        run.set(f"{key}.dtype", "float16", "--fp16")
        run.set(f"{key}.level", "O2", "--fp16")
        start, flag = given.get("--initial-loss-scale"), "--initial-loss-scale"
        run.set(f"{key}.scale_loss", start or 2.0**32, flag if start else f"{flag}, 2**32")
    elif "--bf16" in given:
        run.set(f"{key}.dtype", "bfloat16", "--bf16")
        run.set(f"{key}.level", "O2", "--bf16")
    else:
        run.set(f"{key}.dtype", "float32", "neither --fp16 nor --bf16")


def _set_schedule(run: Translation, given: Given, world_size: int) -> None:
    """Megatron counts samples; what was given in iterations is multiplied by the global batch."""
    kind, each = "samples", 1
    if "--train-iters" in given:
        kind = "iters"
        own = given["--micro-batch-size"] * _data_ranks(given, world_size)
        each = given.get("--global-batch-size", own)
    times = "" if each == 1 else f" * {each} samples"
    flag = next(f for f in (f"--lr-decay-{kind}", f"--train-{kind}") if f in given)
    decay = given[flag] * each
    run.set("Optimizer.lr.decay_samples", decay, f"{flag} {given[flag]}{times}")
    if "--lr-warmup-fraction" in given:
        share = given["--lr-warmup-fraction"]
        reason = f"--lr-warmup-fraction {share:g} of {decay}"
        run.set("Optimizer.lr.warmup_samples", share * decay, reason)
    else:
        flag = f"--lr-warmup-{kind}"
        steps = given.get(flag, 0)
        run.set("Optimizer.lr.warmup_samples", float(steps * each), f"{flag} {steps}{times}")


def _set_evaluation(run: Translation, given: Given) -> None:
    iterations = given.get("--eval-iters", 100)
    every = given.get("--eval-interval", 1000) if iterations else 0
    run.set("Engine.eval_freq", every, "--eval-interval" if iterations else "--eval-iters 0")
    if iterations:
        run.set("Engine.eval_iters", iterations, "--eval-iters")
    run.set("Engine.test_iters", iterations, "--eval-iters, which Megatron tests with too")
    run.set("Engine.tensorboard", "--tensorboard-dir" in given, "--tensorboard-dir")


def _set_checkpoints(run: Translation, given: Given) -> None:
    place, source = given.get("--save", NO_SAVE), given.get("--load")
    run.set("Engine.save_load.output_dir", place, "--save")
    run.set("Engine.save_load.auto_resume", source is not None, "--load")
    if source is not None and Path(source).resolve() != Path(place).resolve():
        run.set("Engine.save_load.ckpt_dir", source, "--load")
