"""Which flags `pretrain_gpt.py` of Megatron-DeepSpeed takes, and which of them go together.

`read_flags` gives those that were given, checked as Megatron checks them. Flags that Megatron has
and Fourfold cannot honour are refused with what to do; those that leave Fourfold nothing to choose
are `WITHOUT_EFFECT`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fourfold.compat.flags import FlagParser, number, whole
from fourfold.errors import UserError

PROGRAM = "pretrain_gpt.py"
Given = dict[str, Any]


def _words(text: str) -> list[str]:
    return text.split()


# Flag and its meaning, as --help shows it.
WHOLE = {
    "--tensor-model-parallel-size": "ranks that share each layer (1)",
    "--pipeline-model-parallel-size": "ranks that each hold some of the layers (1)",
    "--num-layers-per-virtual-pipeline-stage": "layers of a stage, for several stages per rank",
    "--num-layers": "transformer layers",
    "--hidden-size": "width of the residual stream",
    "--ffn-hidden-size": "width inside the feed-forward block (4 x hidden size)",
    "--num-attention-heads": "attention heads",
    "--seq-length": "tokens per sample",
    "--max-position-embeddings": "learned positions, at least --seq-length",
    "--micro-batch-size": "samples per forward pass",
    "--global-batch-size": "samples per step over all ranks (micro-batch size x data ranks)",
    "--train-samples": "samples of the whole run",
    "--train-iters": "steps of the whole run, in place of --train-samples",
    "--lr-decay-samples": "samples after which the learning rate is --min-lr (the whole run)",
    "--lr-decay-iters": "the same in steps, with --train-iters",
    "--lr-warmup-samples": "samples over which the learning rate rises (0)",
    "--lr-warmup-iters": "the same in steps, with --train-iters",
    "--make-vocab-size-divisible-by": "pad the vocabulary to a multiple of it x tensor ranks (128)",
    "--vocab-size": "size of the vocabulary, with NullTokenizer",
    "--seed": "seed of weights, order and dropout (1234)",
    "--log-interval": "steps between log lines (100)",
    "--save-interval": "steps between checkpoints (only at the end)",
    "--eval-interval": "steps between evaluations (1000)",
    "--eval-iters": "batches of an evaluation (100)",
    "--recompute-num-layers": "layers recomputed together; always 1 here",
    "--distributed-timeout-minutes": "how long a rank may wait for the others (10)",
}
NUMBERS = {
    "--lr": "learning rate after the warm-up",
    "--min-lr": "learning rate at the end (0)",
    "--lr-warmup-fraction": "warm-up as a share of the decay",
    "--clip-grad": "largest norm of the gradient (1.0)",
    "--weight-decay": "decoupled weight decay (0.01)",
    "--adam-beta1": "decay of the average of gradients (0.9)",
    "--adam-beta2": "decay of the average of squared gradients (0.999)",
    "--adam-eps": "added to the denominator of the update (1e-8)",
    "--init-method-std": "standard deviation of the initial weights (0.02)",
    "--initial-loss-scale": "loss scale to begin with, for --fp16",
    "--hidden-dropout": "dropout of embeddings and blocks (0.1)",
    "--attention-dropout": "dropout of attention probabilities (0.1)",
}
TEXTS = {
    "--split": "shares of the documents for training, validation and test (969, 30, 1)",
    "--data-cache-path": "directory of the sample indices",
    "--vocab-file": "GPT-2's vocab.json",
    "--merge-file": "GPT-2's merges.txt",
    "--tokenizer-model": "tokenizer.json or its directory, with HuggingFaceTokenizer",
    "--save": "directory of checkpoints, logs and config.yaml",
    "--load": "directory to start from, if it has checkpoints",
    "--tensorboard-dir": "directory of TensorBoard event files",
}
LISTS = {
    "--data-path": "token files, divided by --split",
    "--train-data-path": "token files to train on, in place of --data-path",
    "--valid-data-path": "token files to validate on",
    "--test-data-path": "token files to test on",
}
CHOICES = {
    "--lr-decay-style": (["cosine", "linear", "constant"], "how the learning rate falls (linear)"),
    "--tokenizer-type": (
        ["GPT2BPETokenizer", "HuggingFaceTokenizer", "NullTokenizer"],
        "which tokenizer the data was made with; NullTokenizer knows only its size",
    ),
    "--recompute-granularity": (
        ["full", "selective"],
        "recompute whole layers, or attention only, in the backward pass",
    ),
    "--recompute-method": (["uniform"], "with --recompute-granularity full"),
    "--data-impl": (["mmap", "infer"], "changes nothing: files are memory-mapped"),
    "--optimizer": (["adam"], "changes nothing: the optimizer is AdamW"),
}
SWITCHES = {
    "--fp16": "train in float16 with fp32 master weights",
    "--bf16": "train in bfloat16",
    "--sequence-parallel": "split activations along the sequence too, over the tensor ranks",
    "--recompute-activations": "the same as --recompute-granularity selective",
    "--checkpoint-activations": "the same as --recompute-granularity full",
    "--use-distributed-optimizer": "divide the optimizer state over the data ranks",
    "--reset-position-ids": "count positions from 0 after each end of text",
    "--reset-attention-mask": "let no token attend beyond its own document",
    "--eod-mask-loss": "leave positions that read the end of text out of the loss",
}
# What they ask for is always so, is decided by the device, or has nothing here to switch off.
WITHOUT_EFFECT = _words("""
    --use-flash-attn --use-flash-attn-v1 --use-flash-attn-v2 --use-flash-attn-triton
    --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
    --no-gradient-accumulation-fusion --no-async-tensor-model-parallel-allreduce
    --no-persist-layer-norm --no-query-key-layer-scaling --no-pipeline-parallel
    --no-contiguous-buffers-in-local-ddp --no-scatter-gather-tensors-in-pipeline
    --use-cpu-initialization --exit-signal-handler --override-opt_param-scheduler
    --log-validation-ppl-to-tensorboard --log-timers-to-tensorboard --log-memory-to-tensorboard
    --log-batch-size-to-tensorboard
""")
WITHOUT_EFFECT_WITH_VALUE = _words("""
    --distributed-backend --DDP-impl --num-workers --local_rank --local-rank
    --tensorboard-queue-size --tensorboard-log-interval --timing-log-level
""")

_NETWORK = (
    "the network is GPT-3's (learned positions, GELU, LayerNorm, biases, tied embeddings); leave "
    "it out"
)
_SCALE = (
    "the loss scale doubles after 1000 good steps, halves at each overflow and stays at 1 or "
    "more; leave it out, or give only --initial-loss-scale"
)
_SAMPLES = "lengths are counted in samples; divide by --seq-length and give"
_WHOLE_CHECKPOINT = (
    "a checkpoint is written and read whole; to begin with weights alone, bring them in with "
    "`fourfold convert` and name the result in --load"
)
_DEEPSPEED = (
    "no DeepSpeed runs here; leave it out, and add --use-distributed-optimizer to divide the "
    "optimizer state over the data ranks"
)
REFUSED = {
    **dict.fromkeys(_words("--deepspeed --deepspeed_config --zero-stage"), _DEEPSPEED),
    **dict.fromkeys(
        _words("--loss-scale --loss-scale-window --hysteresis --min-loss-scale"), _SCALE
    ),
    **dict.fromkeys(
        _words(
            "--use-rotary-position-embeddings --rotary-percent --swiglu --squared-relu "
            "--openai-gelu --normalization --disable-bias-linear "
            "--untie-embeddings-and-output-weights --num-key-value-heads --apply-layernorm-1p "
            "--num-experts --kv-channels "
            "--apply-residual-connection-post-layernorm"
        ),
        _NETWORK,
    ),
    **dict.fromkeys(
        _words("--finetune --no-load-optim --no-load-rng --no-save-optim --no-save-rng"),
        _WHOLE_CHECKPOINT,
    ),
    "--train-tokens": f"{_SAMPLES} --train-samples",
    "--lr-decay-tokens": f"{_SAMPLES} --lr-decay-samples",
    "--lr-warmup-tokens": f"{_SAMPLES} --lr-warmup-samples",
    "--exit-interval": "end the run with --train-iters or --train-samples",
    "--exit-duration-in-mins": "send SIGTERM when its time is over: the run saves and ends",
    "--use-checkpoint-opt_param-scheduler": "the flags decide; give those the checkpoint had",
    "--use-checkpoint-args": "the flags decide; give those the checkpoint had",
    "--weight-decay-incr-style": "weight decay is constant; give --weight-decay",
    "--start-weight-decay": "weight decay is constant; give --weight-decay",
    "--end-weight-decay": "weight decay is constant; give --weight-decay",
    "--log-params-norm": "it is not measured; leave it out",
    "--log-num-zeros-in-grad": "it is not measured; leave it out",
}
REQUIRED = _words("""
    --num-layers --hidden-size --num-attention-heads --seq-length --max-position-embeddings
    --micro-batch-size --lr --tokenizer-type
""")


def read_flags(arguments: Sequence[str]) -> Given:
    """The flags given, each legal by itself and together."""
    given = _reader().read(arguments, REFUSED)
    if missing := [flag for flag in REQUIRED if flag not in given]:
        raise UserError(f"{' and '.join(missing)} missing; every run needs them")
    _check_sizes(given)
    _check_length(given)
    _check_learning_rate(given)
    _check_data(given)
    _check_tokenizer(given)
    _exclusive(given, "--fp16", "--bf16")
    return given


def without_effect(given: Given) -> list[str]:
    known = (*WITHOUT_EFFECT, *WITHOUT_EFFECT_WITH_VALUE, "--data-impl", "--optimizer")
    return [flag for flag in given if flag in known]


def _reader() -> FlagParser:
    flags = FlagParser(
        PROGRAM,
        "Train a GPT by the flags of Megatron-DeepSpeed's pretrain_gpt.py. They become a "
        "config.yaml in the directory of --save, which names the flag behind each value.",
    )
    for flag, meaning in WHOLE.items():
        flags.value(flag, meaning, type=whole)
    for flag, meaning in NUMBERS.items():
        flags.value(flag, meaning, type=number)
    for flag, meaning in TEXTS.items():
        flags.value(flag, meaning)
    for flag, meaning in LISTS.items():
        said = f"{meaning}: prefixes, or weights and prefixes"
        flags.value(flag, said, nargs="+", metavar="PREFIX")
    for flag, (choices, meaning) in CHOICES.items():
        flags.value(flag, meaning, choices=choices, metavar="|".join(choices))
    flags.value(
        "--rampup-batch-size",
        "the global batch grows from START by INCREMENT over SAMPLES",
        type=whole,
        nargs=3,
        metavar=("START", "INCREMENT", "SAMPLES"),
    )
    for flag, meaning in SWITCHES.items():
        flags.switch(flag, meaning)
    for flag in WITHOUT_EFFECT:
        flags.switch(flag, "changes nothing")
    for flag in WITHOUT_EFFECT_WITH_VALUE:
        flags.value(flag, "changes nothing")
    return flags


def _check_sizes(given: Given) -> None:
    may_be_zero = ("--seed", "--eval-iters", "--eval-interval", "--save-interval")
    for flag in WHOLE:
        zero_too = flag in may_be_zero or flag.startswith("--lr-warmup")
        if flag in given and given[flag] < (0 if zero_too else 1):
            raise UserError(f"{flag} {given[flag]}: choose {0 if zero_too else 1} or more")
    for flag in ("--recompute-method", "--recompute-num-layers"):
        if flag in given and given.get("--recompute-granularity") != "full":
            raise UserError(f"{flag} goes with --recompute-granularity full; add that")
    pp = given.get("--pipeline-model-parallel-size", 1)
    per_stage = given.get("--num-layers-per-virtual-pipeline-stage")
    if per_stage is None:
        return
    if pp == 1:
        raise UserError(
            "--num-layers-per-virtual-pipeline-stage needs a pipeline; give "
            "--pipeline-model-parallel-size 2 or more, or leave it out"
        )
    if given["--num-layers"] % (pp * per_stage):
        raise UserError(
            f"--num-layers-per-virtual-pipeline-stage {per_stage} on {pp} pipeline ranks does not "
            f"divide --num-layers {given['--num-layers']}; choose a number for which "
            f"{pp} times it does"
        )


def _check_length(given: Given) -> None:
    _exclusive(given, "--train-samples", "--train-iters")
    if "--train-samples" not in given and "--train-iters" not in given:
        raise UserError("--train-samples or --train-iters missing; say how long the run is")
    if "--rampup-batch-size" in given and "--train-samples" not in given:
        raise UserError(
            "--rampup-batch-size goes with --train-samples only: a batch that grows makes "
            "iterations of unequal size; give --train-samples in place of --train-iters"
        )
    if "--rampup-batch-size" in given and "--global-batch-size" not in given:
        raise UserError("--rampup-batch-size grows to --global-batch-size; give that too")


def _check_learning_rate(given: Given) -> None:
    by_samples = "--train-samples" in given
    kind, other = ("samples", "iters") if by_samples else ("iters", "samples")
    for name in ("--lr-decay", "--lr-warmup"):
        if f"{name}-{other}" in given:
            raise UserError(f"{name}-{other} does not go with --train-{kind}; give {name}-{kind}")
    _exclusive(given, "--lr-warmup-fraction", f"--lr-warmup-{kind}")
    if given["--lr"] < given.get("--min-lr", 0.0):
        raise UserError(
            f"--min-lr {given['--min-lr']:g} is above --lr {given['--lr']:g}; the rate falls from "
            "--lr to --min-lr"
        )
    if not 0 <= given.get("--lr-warmup-fraction", 0.0) < 1:
        raise UserError(
            f"--lr-warmup-fraction {given['--lr-warmup-fraction']:g}: choose at least 0 and less "
            "than 1"
        )
    decay_flag = f"--lr-decay-{kind}"
    decay = given.get(decay_flag, given[f"--train-{kind}"])
    warmup = given.get(f"--lr-warmup-{kind}", 0)
    if warmup >= decay:
        raise UserError(
            f"--lr-warmup-{kind} {warmup} is not less than {decay_flag} {decay}, after which the "
            "rate is --min-lr; warm up for less"
        )


def _check_data(given: Given) -> None:
    own = [flag for flag in list(LISTS)[1:] if flag in given]
    if "--data-path" in given and own:
        _exclusive(given, "--data-path", own[0])
    if "--data-path" not in given and "--train-data-path" not in given:
        raise UserError("--data-path missing; name the token files to train on")


def _check_tokenizer(given: Given) -> None:
    """That there is a vocabulary; the files of the other types are checked where they are read."""
    is_null = given["--tokenizer-type"] == "NullTokenizer"
    if is_null and "--vocab-size" not in given:
        raise UserError("--tokenizer-type NullTokenizer needs --vocab-size; add it")
    if not is_null and "--vocab-size" in given:
        raise UserError(
            f"--vocab-size goes with --tokenizer-type NullTokenizer; {given['--tokenizer-type']} "
            "knows its own, leave it out"
        )
    for flag in ("--vocab-file", "--merge-file", "--tokenizer-model"):
        if is_null and flag in given:
            raise UserError(f"{flag} does not go with --tokenizer-type NullTokenizer; leave it out")


def _exclusive(given: Given, first: str, second: str) -> None:
    if first in given and second in given:
        raise UserError(f"{first} and {second} exclude each other; leave one of them out")
