"""What must hold between the flags of PaddleNLP's gpt-3, and which of them do nothing.

The two rules of its document:

    mp_degree * sharding_degree * pp_degree * dp_degree = number of processes
    global_batch_size = micro_batch_size * sharding_degree * dp_degree * accumulated micro-batches

Each message names the flags, the rule they break and what to choose instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fourfold.config.suggest import multiple_near
from fourfold.flags.paddlenlp_options import Flags
from fourfold.flags.presets import PRESETS, model_type_of
from fourfold.flags.translation import Translation

GraphMode = Literal["static", "dynamic"]
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


# --- what does nothing ------------------------------------------------------------------------


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
