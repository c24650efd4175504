"""The sections for using and watching a model: Generation, Inference, Eval, Profiler."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Gt, Le

from fourfold.config.fields import (
    Count,
    CountOrZero,
    Number,
    Positive,
    Section,
    derived,
    key,
    section,
)
from fourfold.config.run import Seed


class Generation(Section):
    decode_strategy: Literal["sampling", "greedy_search", "beam_search"] = key(
        "sampling", "How the next token is chosen."
    )
    top_k: CountOrZero = key(5, "Sample among the k most probable tokens; 0 among all.")
    top_p: Annotated[float, Number, Gt(0), Le(1)] = key(
        1.0, "Sample among the most probable tokens whose probabilities add up to top_p or more."
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


class Inference(Section):
    model_dir: str = derived(
        "Directory of FleetX's exported model. Without effect: nothing is exported here, and "
        "checkpoints serve as they are. Null is output_dir."
    )
    mp_degree: Count = derived(
        "Tensor-parallel ranks of FleetX's inference. Without effect: generation is spread as "
        "Distributed says. Null is Distributed.mp_degree."
    )
    weights: Literal["float32", "bfloat16", "float16", "int8"] = key(
        "float32",
        "Number format of the weights for generation and serving. The narrower ones are faster "
        "and less exact; int8 rounds activations too and runs in one process on a CPU only.",
    )


class Eval(Section):
    eval_path: str | None = key(
        None, "File to evaluate on: raw text for perplexity, JSON lines with `text` for cloze."
    )
    cloze_eval: bool = key(
        False, "True measures the accuracy of the last word (LAMBADA), False perplexity (WikiText)."
    )
    overlapping_eval: Count = derived(
        "Tokens between the starts of two perplexity windows; only the new ones of each count. "
        "Null is Eval.max_seq_len, windows side by side."
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


class ProfilerSummary(Section):
    overview: bool = key(True, "Print the share of each kind of work.")
    device: bool = key(False, "Print the use of each device.")
    model: bool = key(True, "Print the time of each part of the step.")
    dist: bool = key(False, "Print communication against computation.")
    kernel: bool = key(True, "Print the device kernels.")
    op: bool = key(True, "Print the operators.")
    mem: bool = key(False, "Print memory by operator.")
    memcpy: bool = key(False, "Print copies between memories.")
    udf: bool = key(False, "Print user-marked ranges.")


class Profiler(Section):
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
    summary: ProfilerSummary = section(ProfilerSummary, "Tables printed at the end of the profile.")
