"""The flags of PaddleNLP's gpt-3 scripts, of all their versions, and the defaults they have here.

Both scripts take all of them: the static one began with `--use_amp` and `--use_sharding`, the
dygraph one later had `--use_pure_fp16` and `--sharding_stage` in their place. A switch without a
value is on; the original's `const=False` turned off what `--use_amp` seems to ask for.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fourfold.errors import ConfigError
from fourfold.flags.reading import FlagReader, number, whole
from fourfold.flags.starting import SIZES

REQUIRED = ("model_type", "model_name_or_path", "input_dir", "output_dir")
# The last versions' defaults; the first had max_lr 1e-5 below min_lr 5e-5, and a --scale_loss of
# 128 that was not used.
DEFAULTS: Mapping[str, Any] = {
    "split": "949,50,1",
    "max_seq_len": 1024,
    "micro_batch_size": 8,
    "weight_decay": 0.0,
    "grad_clip": 0.0,
    "max_lr": 1e-4,
    "min_lr": 1e-5,
    "warmup_rate": 0.01,
    "decay_steps": 360000,
    "lr_decay_style": "cosine",
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "num_train_epochs": 1,
    "max_steps": 500000,
    "save_steps": 500,
    "logging_freq": 1,
    "eval_freq": 500,
    "eval_iters": 10,
    "dp_degree": 1,
    "mp_degree": 1,
    "pp_degree": 1,
    "sharding_degree": 1,
    "sharding_stage": 1,
    "amp_level": "O1",
    "scale_loss": 32768.0,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "seed": 1234,
    "device": "gpu",
    "max_dec_len": 20,
    "decoding_strategy": "topk_sampling",
    "temperature": 1.0,
    "topk": 10,
    "topp": 0.9,
    "beam_size": 1,
}


@dataclass(frozen=True)
class Flags:
    """What was given, over the defaults; a flag with neither is None."""

    given: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.given.get(name, DEFAULTS.get(name))

    def said(self, name: str) -> str:
        """How a reader of the configuration finds the flag."""
        return f"--{name}" if name in self.given else f"--{name} by default"

    def shown(self, name: str) -> str:
        return f"--{name} {self[name]}"


def true_or_false(text: str) -> bool:
    if text.lower() in ("yes", "true", "t", "y", "1"):
        return True
    if text.lower() in ("no", "false", "f", "n", "0"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


@dataclass(frozen=True)
class ProfileWish:
    """`--profiler_options`: the steps [start, end) to profile, and what follows."""

    steps: tuple[int, int] = (10, 20)
    path: str | None = None
    exits: bool = True
    useless: tuple[str, ...] = ()


def profile_wish(text: str) -> ProfileWish:
    """`batch_range=[50,60];profile_path=somewhere`, in any order."""
    wish, useless = ProfileWish(), []
    for pair in filter(None, text.replace(" ", "").split(";")):
        name, _, value = pair.partition("=")
        if name == "batch_range" and (steps := _steps(value)):
            wish = replace(wish, steps=steps)
        elif name == "profile_path" and value:
            wish = replace(wish, path=value)
        elif name == "exit_on_finished":
            wish = replace(wish, exits=true_or_false(value))
        elif name in ("state", "sorted_key", "tracer_option", "timer_only"):
            useless.append(pair)
        else:
            raise argparse.ArgumentTypeError(
                f"{pair!r} is not understood; write it like "
                "'batch_range=[10,20];profile_path=profile;exit_on_finished=true'"
            )
    return replace(wish, useless=tuple(useless))


def _steps(text: str) -> tuple[int, int] | None:
    found = re.fullmatch(r"\[?(\d{1,9}),(\d{1,9})\]?", text)
    return (int(found[1]), int(found[2])) if found and int(found[1]) < int(found[2]) else None


def read_flags(program: str, arguments: Sequence[str]) -> Flags:
    reader = FlagReader(program, "Pre-train a GPT model with the flags of PaddleNLP's gpt-3.")
    _add_run(reader)
    _add_schedule(reader)
    _add_parallelism(reader)
    _add_generation(reader)
    given = {flag.removeprefix("--"): value for flag, value in reader.read(arguments).items()}
    if missing := [f"--{name} must be given" for name in REQUIRED if name not in given]:
        raise ConfigError(missing)
    return Flags(given)


def _switch(reader: FlagReader, flag: str, meaning: str) -> None:
    reader.value(flag, meaning, type=true_or_false, nargs="?", const=True, metavar="true|false")


def _add_run(reader: FlagReader) -> None:
    reader.value("--model_type", "English or Chinese.", choices=("gpt", "gpt-cn"), metavar="TYPE")
    reader.value("--model_name_or_path", "Such as gpt2-en, or a checkpoint.", metavar="NAME")
    for name in SIZES:
        reader.value(f"--{name}", "In place of the named model's; not in PaddleNLP.", type=whole)
    reader.value("--input_dir", "Token files, all of a directory.", metavar="PATH")
    reader.value("--output_dir", "For config.yaml, logs and checkpoints.", metavar="PATH")
    reader.value("--split", "Shares of train, valid and test (949,50,1).")
    reader.value("--max_seq_len", "Tokens of a sample (1024).", type=whole)
    reader.value("--micro_batch_size", "Samples of one forward pass (8).", type=whole)
    reader.value("--local_batch_size", "Samples of a step on one data rank.", type=whole)
    reader.value("--global_batch_size", "Samples of a step on all.", type=whole)
    reader.value("--hidden_dropout_prob", "(0.1)", type=number)
    reader.value("--attention_probs_dropout_prob", "(0.1)", type=number)
    reader.value("--seed", "(1234)", type=whole)
    reader.value("--device", "gpu or cpu (gpu).", metavar="DEVICE")
    _switch(reader, "--check_accuracy", "No dropout, no evaluation, one checkpoint at the end.")
    reader.add_argument(
        "-p",
        "--profiler_options",
        dest="--profiler_options",
        type=profile_wish,
        default=argparse.SUPPRESS,
        metavar="'K=V;K=V'",
        help="batch_range=[10,20], profile_path and exit_on_finished.",
    )


def _add_schedule(reader: FlagReader) -> None:
    reader.value("--max_steps", "Steps of the run (500000).", type=whole)
    reader.value("--num_train_epochs", "Without effect: --max_steps ends the run.", type=whole)
    reader.value("--save_steps", "Steps between checkpoints (500).", type=whole)
    reader.value("--logging_freq", "Steps between log lines (1).", type=whole)
    reader.value("--eval_freq", "Steps between evaluations (500).", type=whole)
    reader.value("--eval_iters", "Batches of an evaluation (10).", type=whole)
    reader.value("--max_lr", "Learning rate after the warm-up (1e-4).", type=number)
    reader.value("--min_lr", "Learning rate after --decay_steps (1e-5).", type=number)
    reader.value("--warmup_rate", "Share of --decay_steps (0.01).", type=number)
    reader.value("--decay_steps", "(360000)", type=whole)
    reader.value(
        "--lr_decay_style", "none: --max_lr throughout (cosine).", choices=("cosine", "none")
    )
    reader.value("--weight_decay", "(0)", type=number)
    reader.value("--grad_clip", "Largest norm of the gradient; 0 does not clip (0).", type=number)
    reader.value("--adam_beta1", "(0.9)", type=number)
    reader.value("--adam_beta2", "(0.999)", type=number)
    reader.value("--adam_epsilon", "(1e-8)", type=number)


def _add_parallelism(reader: FlagReader) -> None:
    for name in ("dp", "mp", "pp"):
        reader.value(f"--{name}_degree", "(1)", type=whole)
    _switch(reader, "--use_sharding", "Whether --sharding_degree counts.")
    reader.value("--sharding_degree", "(1)", type=whole)
    reader.value("--sharding_stage", "1, 2 or 3 (1).", type=whole)
    _switch(reader, "--sharding_offload", "Keep the divided state in host memory.")
    _switch(reader, "--use_recompute", "Recompute layers in the backward pass.")
    _switch(reader, "--use_amp", "float16, at --amp_level.")
    reader.value("--amp_level", "O1 or O2 (O1).", choices=("O1", "O2"))
    _switch(reader, "--use_pure_fp16", "float16 at level O2.")
    reader.value("--scale_loss", "First loss scale of float16 (32768).", type=number)
    for flag in ("--enable_addto", "--fuse_transformer", "--fuse", "--fuse_mt"):
        _switch(reader, flag, "Without effect here.")


def _add_generation(reader: FlagReader) -> None:
    """For `fourfold generate` with the run's file; the script itself only trains."""
    reader.value("--max_dec_len", "Most tokens to generate (20).", type=whole)
    reader.value(
        "--decoding_strategy",
        "(topk_sampling)",
        choices=("topk_sampling", "topp_sampling", "sampling"),
    )
    reader.value("--temperature", "(1)", type=number)
    reader.value("--topk", "For topk_sampling (10).", type=whole)
    reader.value("--topp", "For topp_sampling (0.9).", type=number)
    reader.value("--beam_size", "Without effect: the strategies all sample.", type=whole)
    _switch(reader, "--save_inference_model_then_exist", "Not here: see fourfold convert.")
