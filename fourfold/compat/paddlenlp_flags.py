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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fourfold.compat.flags import (
    Flag,
    FlagParser,
    Flags,
    Translation,
    number,
    true_or_false,
    whole,
)
from fourfold.compat.paddlenlp_models import PRESETS, SIZES, model_type_of
from fourfold.config.findings import multiple_near

GraphMode = Literal["static", "dynamic"]


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


REQUIRED = ("--model_type", "--model_name_or_path", "--input_dir", "--output_dir")
_NOTHING = "without effect here"
# Defaults are the last versions'; the first had max_lr 1e-5 below min_lr 5e-5, and a --scale_loss
# of 128 that was not used.
FLAGS = (
    # The run.
    Flag("--model_type", ("gpt", "gpt-cn"), "English or Chinese"),
    Flag("--model_name_or_path", str, "such as gpt2-en, or a checkpoint", metavar="NAME"),
    *(Flag(f"--{name}", whole, "in place of the model's; not in PaddleNLP") for name in SIZES),
    Flag("--input_dir", str, "token files, all of a directory", metavar="PATH"),
    Flag("--output_dir", str, "for config.yaml, logs and checkpoints", metavar="PATH"),
    Flag("--split", str, "shares of train, valid and test", "949,50,1"),
    Flag("--max_seq_len", whole, "tokens per sample", 1024),
    Flag("--micro_batch_size", whole, "samples per forward pass", 8),
    Flag("--local_batch_size", whole, "samples per step on one data rank"),
    Flag("--global_batch_size", whole, "samples per step over all ranks"),
    Flag("--hidden_dropout_prob", number, "dropout of embeddings and blocks", 0.1),
    Flag("--attention_probs_dropout_prob", number, "dropout of attention probabilities", 0.1),
    Flag("--seed", whole, "seed of weights, order and dropout", 1234),
    Flag("--device", str, "gpu or cpu", "gpu", metavar="DEVICE"),
    Flag("--check_accuracy", true_or_false, "no dropout, no evaluation, one checkpoint at the end"),
    Flag(
        "--profiler_options",
        profile_request,
        "batch_range=[10,20], profile_path and exit_on_finished",
        metavar="'K=V;K=V'",
        short="-p",
    ),
    # Length and learning rate.
    Flag("--max_steps", whole, "steps of the run", 500000),
    Flag("--num_train_epochs", whole, "without effect: --max_steps ends the run", 1),
    Flag("--save_steps", whole, "steps between checkpoints", 500),
    Flag("--logging_freq", whole, "steps between log lines", 1),
    Flag("--eval_freq", whole, "steps between evaluations", 500),
    Flag("--eval_iters", whole, "batches of an evaluation", 10),
    Flag("--max_lr", number, "learning rate after the warm-up", 1e-4),
    Flag("--min_lr", number, "learning rate after --decay_steps", 1e-5),
    Flag("--warmup_rate", number, "warm-up as a share of --decay_steps", 0.01),
    Flag("--decay_steps", whole, "steps until the rate is --min_lr", 360000),
    Flag("--lr_decay_style", ("cosine", "none"), "none: --max_lr throughout", "cosine"),
    Flag("--weight_decay", number, "decoupled weight decay", 0.0),
    Flag("--grad_clip", number, "largest norm of the gradient; 0 does not clip", 0.0),
    Flag("--adam_beta1", number, "decay of the average of gradients", 0.9),
    Flag("--adam_beta2", number, "decay of the average of squared gradients", 0.999),
    Flag("--adam_epsilon", number, "added to the denominator of the update", 1e-8),
    # Parallelism and precision.
    Flag("--dp_degree", whole, "data parallelism", 1),
    Flag("--mp_degree", whole, "tensor parallelism", 1),
    Flag("--pp_degree", whole, "pipeline parallelism", 1),
    Flag("--use_sharding", true_or_false, "whether --sharding_degree counts"),
    Flag("--sharding_degree", whole, "ranks that divide the state", 1),
    Flag("--sharding_stage", whole, "1, 2 or 3", 1),
    Flag("--sharding_offload", true_or_false, "keep the divided state in host memory"),
    Flag("--use_recompute", true_or_false, "recompute layers in the backward pass"),
    Flag("--use_amp", true_or_false, "float16, at --amp_level"),
    Flag("--amp_level", ("O1", "O2"), "level of mixed precision", "O1"),
    Flag("--use_pure_fp16", true_or_false, "float16 at level O2"),
    Flag("--scale_loss", number, "first loss scale of float16", 32768.0),
    Flag("--enable_addto", true_or_false, _NOTHING),
    Flag("--fuse_transformer", true_or_false, _NOTHING),
    Flag("--fuse", true_or_false, _NOTHING),
    Flag("--fuse_mt", true_or_false, _NOTHING),
    # Generation, for `fourfold generate` with the run's file; the script itself only trains.
    Flag("--max_dec_len", whole, "most tokens to generate", 20),
    Flag(
        "--decoding_strategy",
        ("topk_sampling", "topp_sampling", "sampling"),
        "how tokens are drawn",
        "topk_sampling",
    ),
    Flag("--temperature", number, "divides the logits", 1.0),
    Flag("--topk", whole, "for topk_sampling", 10),
    Flag("--topp", number, "for topp_sampling", 0.9),
    Flag("--beam_size", whole, "without effect: the strategies all sample", 1),
    Flag("--save_inference_model_then_exist", true_or_false, "not here: see fourfold convert"),
)
# Flags that are keys of ours under another name.
KEYS = {
    "device": "Global.device",
    "seed": "Global.seed",
    "max_steps": "Engine.max_steps",
    "logging_freq": "Engine.logging_freq",
    "eval_freq": "Engine.eval_freq",
    "eval_iters": "Engine.eval_iters",
    "save_steps": "Engine.save_load.save_steps",
    "output_dir": "Engine.save_load.output_dir",
    "scale_loss": "Engine.mix_precision.scale_loss",
    "input_dir": "Data.dataset.input_dir",
    "split": "Data.dataset.split",
    "max_seq_len": "Data.dataset.max_seq_len",
    "micro_batch_size": "Data.batch_size.micro_batch_size",
    "hidden_dropout_prob": "Model.hidden_dropout_prob",
    "attention_probs_dropout_prob": "Model.attention_probs_dropout_prob",
    "dp_degree": "Distributed.dp_degree",
    "mp_degree": "Distributed.mp_degree",
    "pp_degree": "Distributed.pp_degree",
    "weight_decay": "Optimizer.weight_decay",
    "grad_clip": "Optimizer.grad_clip",
    "adam_beta1": "Optimizer.adam_beta1",
    "adam_beta2": "Optimizer.adam_beta2",
    "adam_epsilon": "Optimizer.adam_epsilon",
    "max_lr": "Optimizer.lr.max_lr",
    "min_lr": "Optimizer.lr.min_lr",
    "warmup_rate": "Optimizer.lr.warmup_rate",
    "decay_steps": "Optimizer.lr.decay_steps",
    "max_dec_len": "Generation.max_dec_len",
    "temperature": "Generation.temperature",
}


def read_flags(program: str, arguments: Sequence[str]) -> Flags:
    about = "Pre-train a GPT model with the flags of PaddleNLP's gpt-3."
    return FlagParser(program, about, FLAGS).read(arguments, REQUIRED)


# -- what must hold -----------------------------------------------------------------------------

BATCH_KEYS = tuple(f"Data.batch_size.{size}_batch_size" for size in ("global", "local", "micro"))
DEVICE_KEY = "Global.device"


@dataclass(frozen=True)
class PaddleLayout:
    """The degrees that count. The static script shards by `--use_sharding` only; the dygraph one,
    which lost that flag, by `--sharding_degree` unless `--use_sharding` is false."""

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
    given = [name.removeprefix("--") for name in flags.given]
    useless = [f"{flags.shown(name)} ({reasons[name]})" for name in given if name in reasons]
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
