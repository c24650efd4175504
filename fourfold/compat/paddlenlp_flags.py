"""The flags of PaddleNLP's gpt-3 scripts: which there are, what must hold, and what does nothing.

Both scripts take the flags of all versions: the static one began with `--use_amp` and
`--use_sharding`, the dygraph one later had `--use_pure_fp16` and `--sharding_stage` in their place.
A switch without a value is on; the original's `const=False` turned off what `--use_amp` seems to
ask for.

The two rules of its document:

    mp_degree * sharding_degree * pp_degree * dp_degree = number of processes
    global_batch_size = micro_batch_size * sharding_degree * dp_degree * accumulated micro-batches

Each message names the flags, the rule they break and what to choose instead.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from fourfold.compat.flags import FlagParser, Translation, number, whole
from fourfold.compat.paddlenlp_models import PRESETS, SIZES, model_type_of
from fourfold.config.suggest import multiple_near
from fourfold.errors import ConfigError

GraphMode = Literal["static", "dynamic"]
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
class ProfileRequest:
    """`--profiler_options`: the steps [start, end) to profile, and what follows."""

    steps: tuple[int, int] = (10, 20)
    path: str | None = None
    exits: bool = True
    useless: tuple[str, ...] = ()


def profile_request(text: str) -> ProfileRequest:
    """`batch_range=[50,60];profile_path=somewhere`, in any order."""
    request, useless = ProfileRequest(), []
    for pair in filter(None, text.replace(" ", "").split(";")):
        name, _, value = pair.partition("=")
        if name == "batch_range" and (steps := _steps(value)):
            request = replace(request, steps=steps)
        elif name == "profile_path" and value:
            request = replace(request, path=value)
        elif name == "exit_on_finished":
            request = replace(request, exits=true_or_false(value))
        elif name in ("state", "sorted_key", "tracer_option", "timer_only"):
            useless.append(pair)
        else:
            raise argparse.ArgumentTypeError(
                f"{pair!r} is not understood; write it like "
                "'batch_range=[10,20];profile_path=profile;exit_on_finished=true'"
            )
    return replace(request, useless=tuple(useless))


def _steps(text: str) -> tuple[int, int] | None:
    found = re.fullmatch(r"\[?(\d{1,9}),(\d{1,9})\]?", text)
    return (int(found[1]), int(found[2])) if found and int(found[1]) < int(found[2]) else None


def read_flags(program: str, arguments: Sequence[str]) -> Flags:
    reader = FlagParser(program, "Pre-train a GPT model with the flags of PaddleNLP's gpt-3.")
    _add_run(reader)
    _add_schedule(reader)
    _add_parallelism(reader)
    _add_generation(reader)
    given = {flag.removeprefix("--"): value for flag, value in reader.read(arguments).items()}
    if missing := [f"--{name} must be given" for name in REQUIRED if name not in given]:
        raise ConfigError(missing)
    return Flags(given)


def _switch(reader: FlagParser, flag: str, meaning: str) -> None:
    reader.value(flag, meaning, type=true_or_false, nargs="?", const=True, metavar="true|false")


def _add_run(reader: FlagParser) -> None:
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
        type=profile_request,
        default=argparse.SUPPRESS,
        metavar="'K=V;K=V'",
        help="batch_range=[10,20], profile_path and exit_on_finished.",
    )


def _add_schedule(reader: FlagParser) -> None:
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


def _add_parallelism(reader: FlagParser) -> None:
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


def _add_generation(reader: FlagParser) -> None:
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


# -- what must hold -----------------------------------------------------------------------------

BATCH_KEYS = tuple(f"Data.batch_size.{size}_batch_size" for size in ("global", "local", "micro"))
DEVICE_KEY = "Global.device"


@dataclass(frozen=True)
class PaddleLayout:
    """The degrees that count. The static script shards by `--use_sharding` only; the dygraph one,
    which lost that flag, by `--sharding_degree` unless told not to."""

    dp: int
    mp: int
    pp: int
    sharding: int
    shards: bool

    @classmethod
    def of(cls, flags: Flags, graph_mode: GraphMode) -> PaddleLayout:
        switch = flags["use_sharding"]
        shards = graph_mode == "dynamic" if switch is None else switch
        dp, mp, pp = (flags[f"{axis}_degree"] for axis in ("dp", "mp", "pp"))
        return cls(dp, mp, pp, flags["sharding_degree"] if shards else 1, shards)

    @property
    def world_size(self) -> int:
        return self.mp * self.sharding * self.pp * self.dp

    @property
    def data_ranks(self) -> int:
        return self.sharding * self.dp


def problems_of(
    flags: Flags, layout: PaddleLayout, translation: Translation, processes: int, program: str
) -> list[str]:
    """Everything that keeps these flags from being a run."""
    device = list(_device_problems(flags))
    batch = list(_batch_problems(flags, layout))
    doubtful = {DEVICE_KEY} if device else set()
    doubtful.update(BATCH_KEYS if batch else ())
    # Of a model that was not found nothing is known, so nothing about it is wrong.
    if "Model.hidden_size" not in translation.values:
        doubtful.update(f"Model.{name}" for name in (*SIZES, "ffn_hidden_size"))
    return [
        *device,
        *_purpose_problems(flags),
        *_world_problems(flags, layout, processes, program),
        *batch,
        *translation.problems(doubtful),
    ]


def _device_problems(flags: Flags) -> Iterator[str]:
    device = flags["device"]
    if device not in ("gpu", "cpu"):
        yield f"--device {device} is not supported; give --device gpu or --device cpu"
    elif device == "gpu":
        import torch

        if not torch.cuda.is_available():
            yield f"{flags.shown('device')}: this machine has no usable GPU; give --device cpu"


def _purpose_problems(flags: Flags) -> Iterator[str]:
    named = flags["model_name_or_path"]
    if named in PRESETS and model_type_of(named) != flags["model_type"]:
        yield (
            f"{flags.shown('model_type')} has another vocabulary than --model_name_or_path "
            f"{named}; give --model_type {model_type_of(named)}"
        )
    if flags["save_inference_model_then_exist"]:
        yield (
            "--save_inference_model_then_exist true: this script trains; checkpoints serve for "
            "inference as they are, and `fourfold convert` writes them for other tools"
        )


def _world_problems(
    flags: Flags, layout: PaddleLayout, processes: int, program: str
) -> Iterator[str]:
    needed = layout.world_size
    if needed == processes or min(layout.mp, layout.sharding, layout.pp, layout.dp) < 1:
        return
    off = " (--use_sharding is not on)" if flags["sharding_degree"] != layout.sharding else ""
    devices = ",".join(str(device) for device in range(min(needed, 8)))
    yield (
        f"--mp_degree {layout.mp} * --sharding_degree {layout.sharding}{off} * --pp_degree "
        f"{layout.pp} * --dp_degree {layout.dp} = {needed}; mp_degree * sharding_degree * "
        f"pp_degree * dp_degree must be the number of processes, which is {processes}: change a "
        f'degree, or start {needed}, as `python -m fourfold.launch --gpus "{devices}" {program} '
        "...` does"
    )


def _batch_problems(flags: Flags, layout: PaddleLayout) -> Iterator[str]:
    micro, whole, local = (flags[f"{size}_batch_size"] for size in ("micro", "global", "local"))
    if min(micro, layout.sharding, layout.dp) < 1:
        return
    once = micro * layout.data_ranks
    product = f"{micro} * {layout.sharding} * {layout.dp} = {once}"
    if whole is not None and (whole < 1 or whole % once):
        yield (
            f"--global_batch_size {whole} is no multiple of micro_batch_size * sharding_degree * "
            f"dp_degree = {product}; choose {multiple_near(whole, once)}, or change a factor"
        )
    if local is not None and (local < 1 or local % micro):
        yield (
            f"--local_batch_size {local} is no multiple of {flags.shown('micro_batch_size')}; "
            f"choose {multiple_near(local, micro)}, or another --micro_batch_size"
        )
    elif None not in (whole, local) and whole != local * layout.data_ranks:
        yield (
            f"--global_batch_size {whole} is not local_batch_size * sharding_degree * dp_degree = "
            f"{local} * {layout.sharding} * {layout.dp} = {local * layout.data_ranks}; give one of "
            "the two"
        )


# -- what does nothing --------------------------------------------------------------------------


def without_effect(flags: Flags, layout: PaddleLayout) -> list[str]:
    """Flags that were given and change nothing, each with the reason."""
    reasons = dict(_reasons(flags, layout))
    useless = [f"{flags.shown(name)} ({reasons[name]})" for name in flags.given if name in reasons]
    if profile := flags["profiler_options"]:
        useless += [f"{pair} of --profiler_options (torch's profiler)" for pair in profile.useless]
    return useless


def _reasons(flags: Flags, layout: PaddleLayout) -> Iterator[tuple[str, str]]:
    for name, reason in (
        ("enable_addto", "gradients are always added in place"),
        ("fuse_transformer", "attention and linear layers are fused as they are"),
        ("fuse", "attention and linear layers are fused as they are"),
        ("fuse_mt", "generation has its own kernels"),
    ):
        if flags[name]:
            yield name, reason
    if not layout.shards and flags["sharding_degree"] > 1:
        yield "sharding_degree", "--use_sharding is not on"
    if layout.sharding == 1:
        yield "sharding_stage", "nothing is sharded"
        yield "sharding_offload", "nothing is sharded"
    if flags["use_pure_fp16"]:
        yield "use_amp", "--use_pure_fp16 goes further"
        yield "amp_level", "--use_pure_fp16 is level O2"
    elif not flags["use_amp"]:
        yield "amp_level", "--use_amp is not on"
        yield "scale_loss", "float32 has no loss scale"
    if flags["lr_decay_style"] == "none":
        for name in ("min_lr", "warmup_rate", "decay_steps"):
            yield name, "--lr_decay_style none keeps --max_lr"
    if flags["check_accuracy"]:
        for name in ("eval_freq", "eval_iters", "save_steps"):
            yield name, "--check_accuracy evaluates nothing and saves at the end"
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            yield name, "--check_accuracy drops nothing"
    if flags["num_train_epochs"] != 1:
        yield "num_train_epochs", "--max_steps ends the run"
    yield from _generation_reasons(flags)


def _generation_reasons(flags: Flags) -> Iterator[tuple[str, str]]:
    strategy = flags["decoding_strategy"]
    if flags["beam_size"] != 1:
        yield "beam_size", f"--decoding_strategy {strategy} has no beams"
    if strategy != "topk_sampling":
        yield "topk", f"--decoding_strategy {strategy} does not use it"
    if strategy != "topp_sampling":
        yield "topp", f"--decoding_strategy {strategy} does not use it"
