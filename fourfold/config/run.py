"""The sections that describe a run: Global, Engine and Data."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import BeforeValidator, field_validator

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
from fourfold.config.recipe import Rounding, parse_recipe, parse_split

Seed = Annotated[int, Number, Ge(0), Le(2**32 - 1)]
Dtype = Literal["float32", "bfloat16", "float16"]
Level = Literal["O1", "O2"]
Interval = Annotated[int, Number, Ge(-1), Le(LARGEST)]


class Global(Section):
    device: Literal["auto", "cpu", "gpu", "cuda"] = key(
        "auto",
        "Where to run: auto takes CUDA devices when there are any and the CPU otherwise; gpu is "
        "another name for cuda. (FleetX's default was gpu.)",
    )
    seed: Seed = key(
        1024,
        "Seed of the initial weights, the order of the samples and dropout. The same seed gives "
        "the same run on any layout.",
    )
    tokenizer: str | None = key(
        None,
        "Path of a tokenizer.json, or of a directory with tokenizer.json or vocab.json and "
        "merges.txt, by which prompts are read and text is written. Null takes the one beside a "
        "foreign checkpoint, else the one the run's data was made with, else GPT-2's where the "
        "vocabulary has room for it; training on tokens needs none.",
    )
    peak_tflops: Literal["measure"] | Positive | None = key(
        None,
        "Peak TFLOP/s of one device, the denominator of MFU: a number, or measure to time matrix "
        "products at start. Null takes the known figure of the device, else MFU is n/a.",
    )


class MixPrecision(Section):
    use_pure_fp16: bool = derived(
        "Train in float16 with float32 master weights, the originals' switch. Null follows dtype. "
        "(FleetX's default was True; here a run without a word about precision is float32.)"
    )
    dtype: Dtype = derived(
        "Arithmetic of the model. Null is float16 with use_pure_fp16, else float32."
    )
    level: Level | None = key(
        None,
        "How dtype is applied: O1 is autocast with float32 weights, O2 is weights of that type "
        "with float32 master weights. Null is O1 with bfloat16, O2 with float16; float32 has no "
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


class SaveLoad(Section):
    save_steps: Interval = key(
        1000, "Write a checkpoint every this many steps; 0 or -1 only at the end of the run."
    )
    output_dir: str = key(
        "./output", "Run directory: checkpoints step_N, logs and metrics are written here."
    )
    ckpt_dir: str | None = key(
        None, "Checkpoint to start from: a step_N directory, an output directory, or latest."
    )
    keep_last: CountOrZero = key(3, "How many of the newest checkpoints to keep; 0 keeps all.")
    async_save: bool = key(
        False,
        "Write checkpoints in the background: a copy of the state in host memory, and training "
        "goes on. The next save waits for the one before.",
    )
    max_failed_saves: CountOrZero = key(
        3,
        "Stop the run after this many failed saves in a row, each tried three times; 0 goes on "
        "however many fail. The last save of a run must succeed.",
    )
    verify_hashes: bool = key(
        True,
        "Hash every file of a checkpoint before it is loaded. False checks sizes and headers only, "
        "so that values changed on the disk go unnoticed.",
    )
    auto_resume: bool = key(
        True, "With ckpt_dir null, continue from the newest whole checkpoint in output_dir."
    )


class Engine(Section):
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
    num_train_epochs: Count = key(
        1,
        "Kept for the originals' files and without effect: max_steps ends the run, and the data "
        "repeats, reshuffled, as often as that needs.",
    )
    accumulate_steps: Count = derived(
        "Micro-batches per optimizer step on each data rank. Always local_batch_size / "
        "micro_batch_size; a different value given here is replaced."
    )
    logging_freq: Count = key(1, "Print a log line every this many steps.")
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
    max_skipped_steps: Count = key(
        10,
        "An update with a non-finite loss or gradient is skipped; after this many in a row the "
        "run stops.",
    )
    check_replicas_freq: CountOrZero = key(
        0,
        "Every this many steps compare, bit by bit, what several ranks must hold alike; 0 only "
        "after loading a checkpoint.",
    )
    tensorboard: bool = key(True, "Write TensorBoard event files.")
    tensorboard_dir: str | None = key(
        None, "Where the TensorBoard event files go. Null is tensorboard in output_dir."
    )
    wandb: bool = key(False, "Log to Weights & Biases as well; needs the wandb package.")
    mix_precision: MixPrecision = section(MixPrecision, "Number formats of training.")
    save_load: SaveLoad = section(SaveLoad, "Checkpoints: when, where, and what to start from.")


class BatchSize(Section):
    global_batch_size: Count = derived(
        "Samples per optimizer step over all ranks. Null is local_batch_size * dp_degree * "
        "sharding_degree."
    )
    local_batch_size: Count = derived(
        "Samples per optimizer step on one data rank. Null is global_batch_size / (dp_degree * "
        "sharding_degree); with both null it is micro_batch_size, else 8."
    )
    micro_batch_size: Count = derived(
        "Samples per forward pass. Null is the largest divisor of local_batch_size up to 8 that "
        "leaves a micro-batch for every pipeline stage. (FleetX's default was 8.)"
    )
    rampup: list[Count] | None = key(
        None,
        "[start, increment, samples]: begin with a global batch of start and raise it by increment "
        "in equal parts of the first samples, up to global_batch_size. Null is whole from the "
        "start.",
    )

    @field_validator("rampup")
    @classmethod
    def _check_rampup(cls, value: list[int] | None) -> list[int] | None:
        if value is not None and len(value) != 3:
            raise ValueError(
                "give three numbers: start, increment, samples, such as [16, 16, 1000]"
            )
        return value


def _split_text(value: Any) -> Any:
    """`[969, 30, 1]`, as later FleetX files write it, is '969,30,1'."""
    if isinstance(value, list):
        return ",".join(str(part) for part in value)
    return value


class Dataset(Section):
    input_dir: str | list[str] | None = key(
        None,
        "Token files: a directory (every dataset in it is used), a dataset's path without its "
        "suffix, a list of such paths, or a mixture of weights and paths, '0.35 A 0.65 B' or the "
        "same as a list. A weight is a share of the samples. Training needs this or train_data.",
    )
    train_data: str | list[str] | None = key(
        None, "In place of input_dir: the training data, all of it; split does not apply."
    )
    valid_data: str | list[str] | None = key(
        None, "The validation data when train_data is given; null is none."
    )
    test_data: str | list[str] | None = key(
        None, "The test data when train_data is given; null is none."
    )
    blend_rounding: Rounding = key(
        "megatron_core",
        "How the samples of a mixture are rounded in the orders megatron and fleetx. "
        "megatron_core mixes ceil(N w) of each source and opens half a percent more; "
        "megatron_deepspeed mixes all it opens, ceil(N w 1.005).",
    )
    split: Annotated[str, BeforeValidator(_split_text)] = key(
        "949,50,1",
        "Shares of the documents for training, validation and test, in file order; comma or "
        "slash separated. Missing parts are 0.",
    )
    split_rounding: Rounding = derived(
        "Which document the parts of a split meet at. megatron_core rounds the shares added up so "
        "far; megatron_deepspeed, whose rule is FleetX's too, rounds each share and takes what "
        "that adds up to off every border. Null is blend_rounding, and megatron_deepspeed in the "
        "order fleetx."
    )
    max_seq_len: Count = key(1024, "Tokens per sample.")
    order: Literal["megatron", "fleetx", "elastic"] = key(
        "megatron",
        "Order of documents before samples are cut: megatron shuffles them over all epochs, "
        "fleetx keeps file order, elastic shuffles each epoch by itself. Samples are shuffled in "
        "all. Only with elastic may max_steps or a mixture change without repeating or missing "
        "samples.",
    )
    eos_token_id: CountOrZero | None = key(
        None,
        "Id of the end-of-text token in the data. Null takes what the data's manifest says, else "
        "50256 (GPT-2's) when the vocabulary has it.",
    )
    eod_mask_loss: bool = key(
        True, "Leave out of the loss the positions whose input is the end-of-text token."
    )
    reset_position_ids: bool = key(
        False, "Count positions from 0 again after each end-of-text token of a sample."
    )
    reset_attention_mask: bool = key(
        False,
        "Keep the documents of a sample apart: a token attends to earlier tokens of its own "
        "document only, up to and including its end-of-text token.",
    )
    cache_dir: str | None = key(
        None,
        "Directory of the sample index caches. Null keeps them beside the data, or in the user's "
        "cache directory where that cannot be written.",
    )
    allow_tokenizer_mismatch: bool = key(
        False,
        "Train although the data was made with another tokenizer than Global.tokenizer, than the "
        "checkpoint's data, or than one that fits Model.vocab_size.",
    )
    prefetch: CountOrZero = key(2, "Batches read ahead in the background; 0 reads on demand.")

    @field_validator("input_dir", "train_data", "valid_data", "test_data")
    @classmethod
    def _check_recipe(cls, value: str | list[str] | None) -> str | list[str] | None:
        if value is not None:
            parse_recipe(value)
        return value

    @field_validator("split")
    @classmethod
    def _check_split(cls, text: str) -> str:
        parse_split(text)
        return text


class Data(Section):
    batch_size: BatchSize = section(
        BatchSize, "global = local * data ranks; local = micro * accumulate_steps."
    )
    dataset: Dataset = section(Dataset, "Which tokens are read, and how they become samples.")
