"""The configuration schema: every section and key, with its type, default and meaning.

`Config` is the whole tree, resolved and checked by `fourfold.config.load.load_config`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BeforeValidator, PrivateAttr, field_validator

from fourfold.config.batch_schedule import BatchSchedule, LeftOut, Ramp
from fourfold.config.fields import (
    LARGEST,
    BelowOne,
    Count,
    CountOrZero,
    NotNegative,
    Number,
    Positive,
    Probability,
    Section,
    derived,
    key,
    render_yaml,
    section,
)
from fourfold.config.model_section import ModelSection
from fourfold.config.recipe import Rounding, parse_recipe, parse_split
from fourfold.errors import Setting

# -- the run: Global, Engine, Data --------------------------------------------------------------

Seed = Annotated[int, Number, Ge(0), Le(2**32 - 1)]
Dtype = Literal["float32", "bfloat16", "float16"]
Level = Literal["O1", "O2"]
Interval = Annotated[int, Number, Ge(-1), Le(LARGEST)]


class GlobalSection(Section):
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
        "Path of a tokenizer.json, a SentencePiece .model, a file of merge ranks, a tekken.json, "
        "or a directory with one of these or with vocab.json and merges.txt, for encoding prompts "
        "and decoding text. Null takes the one beside an imported checkpoint, else the one the "
        "run's data was made with, else GPT-2's if the vocabulary is large enough; training on "
        "tokens needs none.",
    )
    peak_tflops: Literal["measure"] | Positive | None = key(
        None,
        "Peak TFLOP/s of one device, the denominator of MFU: a number, or measure to time matrix "
        "products at start. Null takes the known figure of the device, else MFU is n/a.",
    )


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


class BatchSizeSection(Section):
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
        "in equal parts of the first samples, up to global_batch_size. Null is the full batch from "
        "the start.",
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


class DatasetSection(Section):
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
        "Where one part of a split ends and the next begins. megatron_core rounds the shares added "
        "up so far; megatron_deepspeed, whose rule is FleetX's too, rounds each share and takes "
        "what the rounding errors add up to off every border. Null is blend_rounding, and "
        "megatron_deepspeed in the order fleetx."
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
    block_cache_gb: Annotated[float, Number, Gt(0), Le(LARGEST)] = key(
        20.0,
        "Space in the user's cache directory, in GB, for blocks of token files that are read from "
        "an address (s3://bucket/data); those used least recently make room.",
    )
    allow_tokenizer_mismatch: bool = key(
        False,
        "Train even if the data was made with a tokenizer other than Global.tokenizer or that of "
        "the checkpoint's data, or with one that does not fit Model.vocab_size.",
    )
    leave_out: list[list[CountOrZero]] = key(
        [],
        "Training samples that are not read: pairs [first, after the last] of sample numbers, as "
        "`fourfold data at` prints them. The order of all others stays; samples after them move "
        "up.",
    )
    prefetch: CountOrZero = key(2, "Batches read ahead in the background; 0 reads on demand.")

    @field_validator("input_dir", "train_data", "valid_data", "test_data")
    @classmethod
    def _check_recipe(cls, value: str | list[str] | None) -> str | list[str] | None:
        if value is not None:
            parse_recipe(value)
        return value

    @field_validator("leave_out")
    @classmethod
    def _check_left_out(cls, value: list[list[int]]) -> list[list[int]]:
        if any(len(pair) != 2 or pair[0] >= pair[1] for pair in value):
            raise ValueError("give pairs of numbers, such as [[640, 648]] for samples 640 to 647")
        return value

    @field_validator("split")
    @classmethod
    def _check_split(cls, text: str) -> str:
        parse_split(text)
        return text


class DataSection(Section):
    batch_size: BatchSizeSection = section(
        BatchSizeSection, "global = local * data ranks; local = micro * accumulate_steps."
    )
    dataset: DatasetSection = section(
        DatasetSection, "Which tokens are read, and how they become samples."
    )


# -- the layout and the optimizer: Distributed, Fused, Optimizer (Model: model_section.py) -------


class ShardingSection(Section):
    sharding_degree: Count = key(
        1, "Data ranks that share one copy of the state named by sharding_stage."
    )
    sharding_stage: Literal[1, 2, 3] = key(
        1,
        "What is sharded: 1 the optimizer state, 2 also the gradients, 3 also the parameters.",
    )
    sharding_offload: bool = key(
        False, "Keep the sharded state in CPU memory and copy it to the device when needed."
    )


PipelineSchedule = Literal[
    "1F1B",
    "GPipe",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "LoopedBFS",
    "DualPipeV",
]


class DistributedSection(Section):
    auto: bool = key(
        False,
        "Let fourfold train choose the layout for the processes it has, by its cost model; "
        "`Distributed: auto` means the same. Degrees above 1 and whatever -o sets are kept.",
    )
    dp_degree: Count = derived(
        "Copies of the model that each read their own samples. Null is what the number of "
        "processes leaves: processes / (mp_degree * pp_degree * sharding_degree)."
    )
    mp_degree: Count = key(
        1,
        "Ranks that share each layer (tensor parallel); divides the heads and the ffn width.",
    )
    pp_degree: Count = key(1, "Pipeline stages: ranks that each hold some of the layers.")
    pp_schedule: PipelineSchedule = key(
        "1F1B",
        "Order of forward and backward passes in the pipeline. 1F1B and GPipe hold one stage per "
        "rank, ZBVZeroBubble and DualPipeV two, the others virtual_pp_degree.",
    )
    virtual_pp_degree: Count = key(1, "Stages per pipeline rank, for the interleaved schedules.")
    pp_layers: list[Count] | None = key(
        None,
        "Layers of each pipeline stage, first stage first. Null divides them as evenly as "
        "possible, with the longer stages in the middle.",
    )
    timeout_seconds: Positive = key(
        600.0,
        "How long a rank may wait for the others before the run is aborted; the launcher considers "
        "a run hung after the same time without progress.",
    )
    sharding: ShardingSection = section(
        ShardingSection, "Group sharding (ZeRO). The world is dp * pp * sharding * mp processes."
    )


class FusedSection(Section):
    tensor_fusion: bool = key(
        False,
        "Keep parameters and gradients in a few flat buffers, so that the optimizer runs few large "
        "operations. Only on one device or with data parallelism alone.",
    )


class LearningRateSection(Section):
    decay_steps: Count = derived(
        "Step at which the learning rate reaches min_lr. Null is max_steps. (FleetX's default was "
        "360000.)"
    )
    warmup_rate: Probability = key(
        0.01, "The learning rate rises linearly over the first warmup_rate * decay_steps steps."
    )
    decay_samples: Count | None = key(
        None,
        "In place of decay_steps: the samples after which the learning rate is min_lr. The rate "
        "then follows the samples read before a step, as Megatron's does, so the first step of a "
        "warm-up has rate 0. Null with warmup_samples given is the samples of the whole run.",
    )
    warmup_samples: NotNegative | None = key(
        None,
        "The learning rate rises over this many samples. Null with decay_samples given is "
        "warmup_rate * decay_samples.",
    )
    decay_style: Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"] = key(
        "cosine",
        "How the rate falls from max_lr to min_lr. constant stays at max_lr; wsd (warm-up, stable, "
        "decay) stays there until the last wsd_decay_steps before decay_steps; inverse_sqrt falls "
        "with the square root of the step from the end of the warm-up on.",
    )
    wsd_decay_style: Literal["linear", "1-sqrt", "cosine", "exponential"] = key(
        "linear",
        "With decay_style wsd, how the rate falls at the end; done is the share of that behind: "
        "linear is 1 - done, 1-sqrt is 1 - sqrt(done), exponential is 2 * 0.5^done - 1.",
    )
    wsd_decay_rate: Probability = key(
        0.2, "With decay_style wsd, the share of decay_steps (or decay_samples) that decays."
    )
    wsd_decay_steps: CountOrZero | None = key(
        None,
        "With decay_style wsd, the last steps up to decay_steps, in which the rate falls. Null is "
        "wsd_decay_rate * decay_steps.",
    )
    wsd_decay_samples: CountOrZero | None = key(
        None, "The same in samples, where the rate follows samples (decay_samples)."
    )
    max_lr: NotNegative = key(
        5.0e-5,
        "Learning rate at the end of the warm-up. (FleetX's default, 1e-5, was below its min_lr.)",
    )
    min_lr: NotNegative = key(
        1.0e-5,
        "Learning rate at the end of the cosine decay and after. (FleetX's default was 5e-5.)",
    )


class MuonSection(Section):
    lr: NotNegative | None = key(
        None,
        "Muon's own learning rate at the end of the warm-up, from where it follows the same "
        "schedule. Null is Optimizer.lr.max_lr, AdamW's.",
    )
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = derived(
        "How the learning rate is adjusted to a matrix of A x B: original multiplies it with "
        "sqrt(max(1, A / B)), match_rms_adamw (Moonlight's) with 0.2 * sqrt(max(A, B)), so that "
        "updates are as large as AdamW's. Null is original, torch's default, with an lr of its "
        "own, and match_rms_adamw without."
    )
    weight_decay: NotNegative = derived(
        "Decoupled weight decay of Muon's matrices. Null is Optimizer.weight_decay."
    )
    momentum: BelowOne = key(0.95, "Decay of the average of gradients that is orthogonalised.")
    nesterov: bool = key(True, "Orthogonalise the gradient moved towards that average, not it.")
    ns_steps: Annotated[int, Number, Ge(1), Lt(100)] = key(
        5, "Newton-Schulz iterations by which a matrix is orthogonalised."
    )
    ns_dtype: Literal["float32", "bfloat16"] | None = key(
        None,
        "Number format of the iterations. bfloat16 is torch's; it turns the last bit of a gradient "
        "into percents of single updates, so that layouts agree in the loss curve and not in "
        "digits. float32 agrees to 1e-5. Null is bfloat16 on a GPU and float32 on a CPU.",
    )


def default_ns_dtype(*, on_cpu: bool) -> Literal["float32", "bfloat16"]:
    return "float32" if on_cpu else "bfloat16"


class OptimizerSection(Section):
    name: Literal["AdamW", "Muon"] = key(
        "AdamW",
        "AdamW for all parameters, or Muon for the matrices of the layers and AdamW for the rest: "
        "embeddings, head, norms and biases.",
    )
    weight_decay: NotNegative = key(
        0.0, "Decoupled weight decay of matrices and embeddings; biases and norms have none."
    )
    adam_beta1: BelowOne = key(0.9, "Decay of AdamW's average of gradients.")
    adam_beta2: BelowOne = key(0.999, "Decay of AdamW's average of squared gradients.")
    adam_epsilon: Positive = key(1.0e-8, "Added to AdamW's denominator.")
    grad_clip: NotNegative = key(0.0, "Largest global norm of the gradient; 0 does not clip.")
    ema_decay: BelowOne | None = key(
        None,
        "Keep an exponential moving average of the weights with this decay, in float32: saved in "
        "checkpoints, evaluated beside the weights. The decay of update t is at most "
        "(1 + t) / (10 + t), so that the first weights are soon forgotten. Null keeps none.",
    )
    muon: MuonSection = section(
        MuonSection, "Muon, in the words of torch.optim.Muon; without effect with name AdamW."
    )
    lr: LearningRateSection = section(LearningRateSection, "Linear warm-up, then decay.")


# -- use of a model: Generation, Inference, Eval, Profiler --------------------------------------


class GenerationSection(Section):
    decode_strategy: Literal["sampling", "greedy_search", "beam_search"] = key(
        "sampling", "How the next token is chosen."
    )
    top_k: CountOrZero = key(5, "Sample among the k most probable tokens; 0 among all.")
    top_p: Annotated[float, Number, Gt(0), Le(1)] = key(
        1.0,
        "Nucleus sampling: among the most probable tokens whose probabilities add up to top_p or "
        "more.",
    )
    temperature: Positive = key(1.0, "Logits are divided by it: below 1 sharper, above 1 flatter.")
    repetition_penalty: Positive = key(
        1.0, "Above 1, tokens that already occurred become less likely; 1 changes nothing."
    )
    min_dec_len: CountOrZero = key(1, "Fewest tokens to generate before the end-of-text token.")
    max_dec_len: Count = key(16, "Most tokens to generate.")
    num_return_sequences: Count = key(1, "Texts generated for each prompt.")
    num_beams: CountOrZero = key(0, "Beams of beam_search; unused by the other strategies.")
    length_penalty: Annotated[float, Number] = key(
        1.0, "Exponent of the length that beam scores are divided by: above 0 favours longer texts."
    )
    early_stopping: bool = key(False, "End beam_search as soon as num_beams finished texts exist.")
    seed: Seed | None = key(None, "Seed of sampling. Null takes Global.seed.")
    stop: list[str] = key([], "A text ends before the first of these strings; not for beam_search.")


class InferenceSection(Section):
    model_dir: str = derived(
        "Directory of FleetX's exported model. Without effect: nothing is exported here, and "
        "checkpoints serve as they are. Null is output_dir."
    )
    mp_degree: Count = derived(
        "Tensor-parallel ranks of FleetX's inference. Without effect: generation is spread as "
        "Distributed says. Null is Distributed.mp_degree."
    )
    weights: Literal["float32", "bfloat16", "float16", "int8", "int4"] = key(
        "float32",
        "Number format of the weights for generation and serving. The narrower ones are faster and "
        "less precise; int8 (which rounds activations too) and int4 (in groups of 32) run only in "
        "one process on a CPU.",
    )
    draft_tokens: CountOrZero = key(
        0,
        "Tokens guessed at once from what followed the same words earlier in the text, and checked "
        "in one step (n-gram speculation). Never changes a text; pays where texts repeat "
        "themselves. Only on a CPU with the compiled kernels.",
    )


class EvalSection(Section):
    eval_path: str | None = key(
        None, "File to evaluate on: raw text for perplexity, JSON lines with `text` for cloze."
    )
    cloze_eval: bool = key(
        False, "True measures the accuracy of the last word (LAMBADA), False perplexity (WikiText)."
    )
    overlapping_eval: Count = derived(
        "Tokens between the starts of two perplexity windows; only the new ones of each count. "
        "Null is Eval.max_seq_len: windows that do not overlap."
    )
    ckpt_dir: str | None = key(
        None, "Checkpoint to evaluate. Null takes Engine.save_load.ckpt_dir."
    )
    batch_size: Count = key(8, "Windows or examples per forward pass.")
    max_seq_len: Count = derived("Tokens per window. Null is Data.dataset.max_seq_len.")
    logging_freq: Count = key(100, "Print progress every this many batches.")
    detokenize: bool = key(
        True, "Undo WikiText's spacing ( @-@ , a blank before each comma) before perplexity."
    )
    part: Literal["train", "valid", "test"] = key(
        "valid", "Part of Data.dataset that is evaluated when eval_path is null."
    )
    max_tokens: Count | None = key(
        None, "Tokens of Data.dataset to evaluate, from the first on. Null is all of the part."
    )


class ProfilerSummarySection(Section):
    overview: bool = key(True, "Print the share of each kind of work.")
    device: bool = key(False, "Print the use of each device.")
    model: bool = key(True, "Print the time of each part of the step.")
    dist: bool = key(False, "Print communication against computation.")
    kernel: bool = key(True, "Print the device kernels.")
    op: bool = key(True, "Print the operators.")
    mem: bool = key(False, "Print memory by operator.")
    memcpy: bool = key(False, "Print copies between memories.")
    udf: bool = key(False, "Print user-marked ranges.")


class ProfilerSection(Section):
    enable: bool = key(False, "Record a profile of the run and write a Chrome trace.")
    scheduler: list[CountOrZero] | None = key(
        None, "[start, end]: profile the steps from start up to, not including, end. Null is all."
    )
    ranks: list[CountOrZero] = key(
        [0],
        "Ranks that are profiled. Each writes a trace of its own; the tables of rank 0 go to "
        "the run's log, those of the others to their own.",
    )
    profiler_log: str = key("profiler_log", "Directory the trace is written to.")
    detailed: bool = key(False, "Print every summary table, whatever summary says.")
    record_shapes: bool = key(True, "Record the shapes of operator inputs.")
    profile_memory: bool = key(True, "Record memory use.")
    summary: ProfilerSummarySection = section(
        ProfilerSummarySection, "Tables printed at the end of the profile."
    )


# -- the whole tree -----------------------------------------------------------------------------


class Config(Section):
    """One attribute per section; `notices` holds what the user should know about the result."""

    Global: GlobalSection = section(GlobalSection, "The machine and the seed.")
    Engine: EngineSection = section(EngineSection, "The training loop.")
    Data: DataSection = section(DataSection, "Batch sizes and training data.")
    Model: ModelSection = section(ModelSection, "The network.")
    Distributed: DistributedSection = section(
        DistributedSection, "How the model and the batch are spread over processes."
    )
    Fused: FusedSection = section(FusedSection, "Fusions that change speed and not results.")
    Optimizer: OptimizerSection = section(OptimizerSection, "AdamW or Muon, and the learning rate.")
    Generation: GenerationSection = section(GenerationSection, "Text generation.")
    Inference: InferenceSection = section(InferenceSection, "The exported model.")
    Eval: EvalSection = section(EvalSection, "Offline evaluation of a checkpoint.")
    Profiler: ProfilerSection = section(ProfilerSection, "Where the time of a step goes.")

    _notices: list[str] = PrivateAttr(default_factory=list)
    # Steps done and samples read when another batch began, where one did.
    _continued: tuple[int, int] = PrivateAttr(default=(0, 0))
    # Samples that the run left out on its way, beside those of Data.dataset.leave_out.
    _left_out: LeftOut = PrivateAttr(default=LeftOut())

    @property
    def notices(self) -> list[str]:
        """Old spellings used, values adjusted, keys without effect: one line each."""
        return self._notices

    @property
    def batch_schedule(self) -> BatchSchedule:
        """The samples of every step, once the batch is resolved."""
        sizes = self.Data.batch_size
        ramp = None if sizes.rampup is None else Ramp(*sizes.rampup)
        return BatchSchedule(sizes.global_batch_size, ramp, *self._continued, self.left_out)

    @property
    def left_out(self) -> LeftOut:
        """The training samples that are not read."""
        return self._left_out.joined(self.Data.dataset.leave_out)

    def leave_out(self, left_out: LeftOut) -> None:
        """Read none of these either."""
        self._left_out = left_out

    def continue_batches(self, step: int, consumed: int) -> None:
        """Let the batches of this configuration begin after `step` steps that read `consumed`
        samples with others. A length given in samples stays; in steps, too."""
        engine, lr = self.Engine, self.Optimizer.lr
        before, steps = self.batch_schedule, engine.max_steps
        self._continued = (step, consumed)
        length = engine.train_samples
        if length is not None and before.steps_within(length) == steps:
            engine.max_steps = max(step, self.batch_schedule.steps_within(length))
        # Where the decay ended with the run, it still does.
        if lr.decay_steps == steps:
            lr.decay_steps = engine.max_steps
        if lr.decay_samples == before.consumed(steps):
            lr.decay_samples = self.batch_schedule.consumed(engine.max_steps)

    def setting(self, path: str) -> Setting:
        """The key at "Distributed.mp_degree" and its value, to look at and to name in a message."""
        value: Any = self
        for name in path.split("."):
            value = getattr(value, name)
        return Setting(path, value)

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump()

    def to_yaml(self, comments: bool = True) -> str:
        """The resolved tree; with comments each key is preceded by its description."""
        return render_yaml(type(self), self.to_dict(), comments=comments)
