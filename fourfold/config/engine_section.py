"""The `Engine` section: the training loop, its checkpoints, spikes and number formats."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import field_validator

from fourfold.config.fields import (
    LARGEST,
    Count,
    CountOrZero,
    Number,
    Positive,
    Section,
    derived,
    key,
    section,
)

Dtype = Literal["float32", "bfloat16", "float16"]
Level = Literal["O1", "O2"]
Interval = Annotated[int, Number, Ge(-1), Le(LARGEST)]


def default_level(dtype: Dtype, *, on_cpu: bool) -> Level | None:
    """Of mixed precision, where none is given."""
    if dtype == "float32":
        return None
    return "O1" if on_cpu and dtype == "bfloat16" else "O2"


class MixPrecisionSection(Section):
    use_pure_fp16: bool = derived(
        "Mixed precision: float16 with float32 master weights, the originals' switch. Null follows "
        "dtype. (FleetX's default was True; here a run that does not mention precision is "
        "float32.)"
    )
    dtype: Dtype = derived(
        "Arithmetic of the model. Null is float16 with use_pure_fp16, else float32."
    )
    level: Level | None = key(
        None,
        "How dtype is applied: O1 is autocast with float32 weights, O2 is weights of that type "
        "with float32 master weights. Null is O2, but O1 with bfloat16 on a CPU; float32 has no "
        "level.",
    )
    scale_loss: Positive = key(32768.0, "Initial dynamic loss scale; used with float16 only.")
    custom_black_list: list[str] = key(
        ["reduce_sum", "c_softmax_with_cross_entropy", "elementwise_div"],
        "Paddle operator names kept in float32. Those with a counterpart here are float32 "
        "already; the run says which others it cannot map.",
    )
    custom_white_list: list[str] = key(
        ["lookup_table", "lookup_table_v2"],
        "Paddle operator names computed in the low precision. The run says which it cannot map.",
    )

    @field_validator("level", mode="before")
    @classmethod
    def _level_in_capitals(cls, value: Any) -> Any:
        return value.upper() if isinstance(value, str) else value


class SaveLoadSection(Section):
    save_steps: Interval = key(
        1000, "Write a checkpoint every this many steps; 0 or -1 only at the end of the run."
    )
    output_dir: str = key(
        "./output",
        "Run directory: checkpoints step_N, logs and metrics are written here. An address "
        "(s3://bucket/run) is written to from a local copy, while training continues.",
    )
    ckpt_dir: str | None = key(
        None,
        "Checkpoint to start from: a step_N directory, an output directory, or latest; a path or "
        "an address (s3://bucket/run/step_1000).",
    )
    keep_last: CountOrZero = key(3, "How many of the newest checkpoints to keep; 0 keeps all.")
    keep_every_n_steps: CountOrZero = key(
        0,
        "Beside the newest, keep the checkpoints whose step is a multiple of this for good; 0 "
        "keeps none for its step.",
    )
    keep_every_hours: Annotated[float, Number, Ge(0), Le(LARGEST)] = key(
        0.0,
        "Beside the newest, keep for good the first checkpoint and each that was saved at least "
        "this many hours after the last one kept so; 0 keeps none for its time.",
    )
    async_save: bool = key(
        False,
        "Write checkpoints in the background: the state is copied to host memory and training "
        "continues. The next save waits for the previous one.",
    )
    memory_copy_steps: CountOrZero = key(
        0,
        "Every this many steps, keep a copy of the state in the memory of the machines (/dev/shm), "
        "each rank's also on the next machine, so that a run that loses a machine or a process "
        "continues from there instead of from its last checkpoint; 0 keeps none. Takes four times "
        "a machine's share of a checkpoint, on a single machine twice.",
    )
    max_failed_saves: CountOrZero = key(
        3,
        "Stop the run after this many failed saves in a row, each tried three times; 0 never stops "
        "for them. The last save of a run must succeed.",
    )
    verify_hashes: bool = key(
        True,
        "Hash every file of a checkpoint before it is loaded. False checks sizes and headers only, "
        "so values corrupted on disk go unnoticed.",
    )
    auto_resume: bool = key(
        True, "With ckpt_dir null, continue from the newest complete checkpoint in output_dir."
    )


class SpikesSection(Section):
    action: Literal["none", "warn", "skip", "rewind"] = key(
        "none",
        "What to do about a loss spike: none does not look for any; warn says so and writes which "
        "documents it was to spikes/ in output_dir; skip also holds its update back; rewind goes "
        "back to the checkpoint before it and on without the samples of the steps in question.",
    )
    window: Annotated[int, Number, Ge(8), Le(LARGEST)] = key(
        64,
        "Steps that the band around loss and gradient norm is made of: their median, and the "
        "median change from one to the next. Nothing is called a spike before the run has had as "
        "many steps.",
    )
    threshold: Positive = key(
        8.0,
        "How many times their spread loss or gradient norm must be above the median. The spread is "
        "1.05 times the median absolute change from step to step, and at least 2 % of the median "
        "loss or 25 % of the median norm.",
    )
    warm_up: CountOrZero = key(100, "Steps at the start of a run without a decision.")
    steps: Count = key(
        1,
        "With rewind: the steps whose samples are left out, the one that spiked and those before "
        "it.",
    )
    most: CountOrZero = key(
        3, "With rewind: how often a run may go back. After that, spikes are only reported."
    )


class EngineSection(Section):
    max_steps: Count = key(
        500000,
        "Stop after this many optimizer steps. With train_samples the run ends at whichever comes "
        "first.",
    )
    train_samples: Count | None = key(
        None,
        "Stop when the next step would read more than this many samples; sizes the run by samples, "
        "as Megatron does.",
    )
    accumulate_steps: Count = derived(
        "Micro-batches per optimizer step on each data rank (gradient accumulation). Always "
        "local_batch_size / micro_batch_size; a different value given here is replaced."
    )
    logging_freq: Count = key(
        1,
        "Record a step and print its log line every this many steps. In a terminal a progress bar "
        "takes the place of these lines.",
    )
    log_style: Literal["fleetx", "megatron"] = key(
        "fleetx",
        "Whose log lines are printed: FleetX's, or those of Megatron-DeepSpeed with consumed "
        "samples, tokens per GPU per second and TFLOPs. metrics.jsonl is the same with both.",
    )
    eval_freq: CountOrZero = key(500, "Evaluate every this many steps; 0 never.")
    eval_iters: Count = key(10, "Batches per evaluation.")
    test_iters: CountOrZero = derived(
        "Batches of the test split at the end of the run; 0 for no test. Null is 10 * eval_iters."
    )
    graph_mode: Literal["dynamic", "static"] = key(
        "dynamic", "dynamic runs the model eagerly, static compiles it with torch.compile."
    )
    matmul_precision: Literal["highest", "high", "medium"] = key(
        "highest",
        "How exactly matrix products of float32 are computed, in torch's words: highest in "
        "float32, high in TensorFloat-32 where the device has it (an A100: 156 TFLOP/s instead of "
        "19.5, with 10 bits of mantissa), medium in bfloat16.",
    )
    deterministic: bool = key(
        False,
        "Only kernels that give the same bits every time, so that a resumed run equals the "
        "straight one to the bit on GPUs too, as it always does on a CPU; slower, above all the "
        "backward pass of attention.",
    )
    max_skipped_steps: Count = key(
        10,
        "An update with a non-finite loss or gradient is skipped; after this many in a row the "
        "run stops.",
    )
    spikes: SpikesSection = section(
        SpikesSection, "Steps whose loss or gradient norm is far above what it was before."
    )
    check_replicas_freq: CountOrZero = key(
        0,
        "Every this many steps, compare bit by bit what several ranks must hold identically; 0 "
        "only after loading a checkpoint.",
    )
    preflight: Literal["none", "short", "full"] = key(
        "short",
        "With several processes, measure every rank, link and disk before the first step, compare "
        "versions and data, and name what is slow or differs: short in a second or two, full with "
        "every pair of machines and the links of GPUs, none not at all.",
    )
    tensorboard: bool = key(True, "Write TensorBoard event files.")
    tensorboard_dir: str | None = key(
        None, "Where the TensorBoard event files go. Null is tensorboard in output_dir."
    )
    wandb: bool = key(False, "Log to Weights & Biases as well; needs the wandb package.")
    metrics_port: Annotated[CountOrZero, Le(65535)] | None = key(
        None,
        "Serve /metrics (Prometheus) and /healthz on this port while the run lasts; 0 is a free "
        "one, which the log names.",
    )
    metrics_host: str = key(
        "127.0.0.1",
        "The address metrics_port is served at. The default is reached from this machine only; "
        "0.0.0.0 from wherever the machine is, without a password.",
    )
    mix_precision: MixPrecisionSection = section(MixPrecisionSection, "Number formats of training.")
    save_load: SaveLoadSection = section(
        SaveLoadSection, "Checkpoints: when, where, and what to start from."
    )
