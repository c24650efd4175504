"""The configuration schema: every section and key, with its type, default and meaning.

The sections of the network, the training loop and the optimizer have files of their own. `Config`
is the whole tree, resolved and checked by `fourfold.config.load.load_config`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator, PrivateAttr, field_validator

from fourfold.config.batch_schedule import BatchSchedule, LeftOut, Ramp
from fourfold.config.engine_section import EngineSection
from fourfold.config.fields import (
    LARGEST,
    Count,
    CountOrZero,
    Number,
    Positive,
    Section,
    derived,
    key,
    render_yaml,
    section,
)
from fourfold.config.model_section import ModelSection
from fourfold.config.optimizer_section import OptimizerSection
from fourfold.config.recipe import Rounding, parse_recipe, parse_split
from fourfold.errors import Setting

# -- the run: Global, Data ---------------------------------------------------------------------

Seed = Annotated[int, Number, Ge(0), Le(2**32 - 1)]


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


# -- the layout: Distributed, Fused ---------------------------------------------------------------


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
