"""The flags of `pretrain_gpt.py`, Megatron-DeepSpeed's and for the network also Megatron-LM's, and
which of them go together.

`read_flags` checks what was given as Megatron does. Flags that Megatron has and Fourfold cannot
honour are `REFUSED`, with what to do instead; those that leave Fourfold nothing to choose are taken
and have no effect.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from fourfold.compat.flags import Flag, FlagParser, Flags, number, whole
from fourfold.errors import UserError

PROGRAM = "pretrain_gpt.py"


def _words(text: str) -> list[str]:
    return text.split()


# Megatron's names of schedules, with ours.
DECAY_STYLES = {
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "inverse-square-root": "inverse_sqrt",
    "WSD": "wsd",
}
WSD_STYLES = {
    "exponential": "exponential",
    "linear": "linear",
    "cosine": "cosine",
    "minus_sqrt": "1-sqrt",
}


def _norm(text: str) -> str:
    """Megatron-LM writes RMSNorm, Megatron-DeepSpeed rmsnorm."""
    names = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
    if text.lower() not in names:
        raise argparse.ArgumentTypeError(f"{text!r} is neither LayerNorm nor RMSNorm")
    return names[text.lower()]


def _window(text: str) -> int:
    """How many tokens before its own one sees; Megatron has those after it too: `(127,0)`."""
    found = re.fullmatch(r"\(?\s*(\d+)\s*,\s*(-?\d+)\s*\)?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a pair of numbers such as 127,0")
    if found[2] != "0":
        raise argparse.ArgumentTypeError(f"{text!r} looks ahead; attention is causal, give 0 there")
    return int(found[1])


FLAGS = (
    # The network.
    Flag("--num-layers", whole, "transformer layers"),
    Flag("--hidden-size", whole, "width of the residual stream"),
    Flag(
        "--ffn-hidden-size",
        whole,
        "width inside the feed-forward block (4 x hidden size; with --swiglu 8/3, in steps of 64)",
    ),
    Flag("--num-attention-heads", whole, "attention heads"),
    Flag("--seq-length", whole, "tokens per sample"),
    Flag("--max-position-embeddings", whole, "learned positions, at least --seq-length"),
    Flag(
        "--position-embedding-type",
        ("learned_absolute", "rope", "none"),
        "how the network knows positions",
        "learned_absolute",
    ),
    Flag("--use-rotary-position-embeddings", "switch", "the same as the type rope"),
    Flag("--no-position-embedding", "switch", "no learned positions"),
    Flag("--rotary-base", number, "base of the rotary frequencies", 10000.0),
    Flag("--rotary-percent", number, "share of each head that is rotated", 1.0),
    Flag("--rotary-seq-len-interpolation-factor", number, "divide rotary positions by this"),
    Flag("--use-rope-scaling", "switch", "stretch rotary positions as Llama 3.1 does"),
    Flag("--rope-scaling-factor", number, "how many times, with --use-rope-scaling", 8.0),
    Flag("--normalization", _norm, "LayerNorm or RMSNorm", "LayerNorm", "LayerNorm|RMSNorm"),
    Flag("--norm-epsilon", number, "added under the root of a norm", 1e-5),
    Flag("--layernorm-epsilon", number, "the same under its older name"),
    Flag("--qk-layernorm", "switch", "normalize the queries and keys of each head"),
    Flag("--swiglu", "switch", "a feed-forward block gated by SiLU"),
    Flag("--squared-relu", "switch", "squared ReLU in place of GELU"),
    Flag("--openai-gelu", "switch", "GELU in its tanh form, which is the default"),
    Flag("--no-bias-gelu-fusion", "switch", "exact GELU; fused with the bias it is the tanh form"),
    Flag("--group-query-attention", "switch", "heads share keys and values"),
    Flag("--num-query-groups", whole, "heads of keys and values, with the flag before", 1),
    Flag("--num-key-value-heads", whole, "Megatron-DeepSpeed's name for both of these"),
    Flag("--kv-channels", whole, "width of an attention head (hidden size / heads)"),
    Flag("--untie-embeddings-and-output-weights", "switch", "a head with weights of its own"),
    Flag("--disable-bias-linear", "switch", "no bias in linear layers"),
    Flag("--add-qkv-bias", "switch", "but in those of queries, keys and values"),
    Flag("--window-size", _window, "tokens seen before and after each, as 127,0", metavar="N,0"),
    Flag("--window-attn-skip-freq", whole, "every N-th layer has no window"),
    Flag("--init-method-std", number, "standard deviation of the initial weights", 0.02),
    Flag("--hidden-dropout", number, "dropout of embeddings and blocks", 0.1),
    Flag("--attention-dropout", number, "dropout of attention probabilities", 0.1),
    Flag("--seed", whole, "seed of weights, order and dropout", 1234),
    # The layout.
    Flag("--tensor-model-parallel-size", whole, "ranks that share each layer", 1),
    Flag("--pipeline-model-parallel-size", whole, "ranks that each hold some of the layers", 1),
    Flag(
        "--num-layers-per-virtual-pipeline-stage",
        whole,
        "layers of a stage, where a rank has several",
    ),
    Flag("--sequence-parallel", "switch", "split activations along the sequence too"),
    Flag("--use-distributed-optimizer", "switch", "divide the optimizer state over data ranks"),
    Flag("--recompute-granularity", ("full", "selective"), "recompute layers, or attention only"),
    Flag("--recompute-method", ("uniform", "block"), "with --recompute-granularity full"),
    Flag("--recompute-num-layers", whole, "layers recomputed together, or the first of a stage", 1),
    Flag("--recompute-activations", "switch", "the same as --recompute-granularity selective"),
    Flag("--checkpoint-activations", "switch", "the same as --recompute-granularity full"),
    Flag("--distributed-timeout-minutes", whole, "how long a rank may wait for the others (10)"),
    # Batches and length.
    Flag("--micro-batch-size", whole, "samples per forward pass"),
    Flag("--global-batch-size", whole, "samples per step (micro-batch size x data ranks)"),
    Flag(
        "--rampup-batch-size",
        whole,
        "the global batch grows from START by INCREMENT over SAMPLES",
        nargs=3,
        metavar=("START", "INCREMENT", "SAMPLES"),
    ),
    Flag("--train-samples", whole, "samples of the whole run"),
    Flag("--train-iters", whole, "steps of the whole run, in place of --train-samples"),
    # The optimizer.
    Flag("--lr", number, "learning rate after the warm-up"),
    Flag("--min-lr", number, "learning rate at the end", 0.0),
    Flag("--lr-decay-style", tuple(DECAY_STYLES), "how the rate falls", "linear"),
    Flag("--lr-wsd-decay-style", tuple(WSD_STYLES), "the same at the end of WSD", "exponential"),
    Flag("--lr-wsd-decay-samples", whole, "samples at the end in which the rate of WSD falls"),
    Flag("--lr-wsd-decay-iters", whole, "the same in steps, with --train-iters"),
    Flag("--lr-decay-samples", whole, "samples until the rate is --min-lr (the whole run)"),
    Flag("--lr-decay-iters", whole, "the same in steps, with --train-iters"),
    Flag("--lr-warmup-samples", whole, "samples over which the learning rate rises", 0),
    Flag("--lr-warmup-iters", whole, "the same in steps, with --train-iters", 0),
    Flag("--lr-warmup-fraction", number, "warm-up as a share of the decay"),
    Flag("--clip-grad", number, "largest norm of the gradient", 1.0),
    Flag("--weight-decay", number, "decoupled weight decay", 0.01),
    Flag("--adam-beta1", number, "decay of the average of gradients", 0.9),
    Flag("--adam-beta2", number, "decay of the average of squared gradients", 0.999),
    Flag("--adam-eps", number, "added to the denominator of the update", 1e-8),
    Flag("--optimizer", ("adam",), "changes nothing: the optimizer is AdamW"),
    Flag("--fp16", "switch", "train in float16 with fp32 master weights"),
    Flag("--bf16", "switch", "train in bfloat16"),
    Flag("--initial-loss-scale", number, "loss scale to begin with, for --fp16"),
    # The data.
    Flag(
        "--data-path",
        str,
        "token files, divided by --split: prefixes, or weights and prefixes",
        nargs="+",
        metavar="PREFIX",
    ),
    Flag("--train-data-path", str, "token files to train on", nargs="+", metavar="PREFIX"),
    Flag("--valid-data-path", str, "token files to validate on", nargs="+", metavar="PREFIX"),
    Flag("--test-data-path", str, "token files to test on", nargs="+", metavar="PREFIX"),
    Flag("--split", str, "shares of documents to train, validate and test on", "969, 30, 1"),
    Flag("--data-cache-path", str, "directory of the sample indices"),
    Flag("--data-impl", ("mmap", "infer"), "changes nothing: files are memory-mapped"),
    Flag("--reset-position-ids", "switch", "count positions from 0 after each end of text", False),
    Flag("--reset-attention-mask", "switch", "let no token attend beyond its own document", False),
    Flag("--eod-mask-loss", "switch", "no loss where the end of text is read", False),
    Flag(
        "--tokenizer-type",
        ("GPT2BPETokenizer", "HuggingFaceTokenizer", "NullTokenizer"),
        "which tokenizer the data was made with; NullTokenizer knows only its size",
    ),
    Flag("--vocab-file", str, "GPT-2's vocab.json"),
    Flag("--merge-file", str, "GPT-2's merges.txt"),
    Flag("--tokenizer-model", str, "tokenizer.json or its directory, with HuggingFaceTokenizer"),
    Flag("--vocab-size", whole, "size of the vocabulary, with NullTokenizer"),
    Flag(
        "--make-vocab-size-divisible-by",
        whole,
        "pad the vocabulary to a multiple of it x tensor ranks",
        128,
    ),
    # Checkpoints, evaluation and logs.
    Flag("--save", str, "directory of checkpoints, logs and config.yaml", "./output"),
    Flag("--load", str, "directory to start from, if it has checkpoints"),
    Flag("--save-interval", whole, "steps between checkpoints; 0 saves only at the end", 0),
    Flag("--eval-interval", whole, "steps between evaluations", 1000),
    Flag("--eval-iters", whole, "batches of an evaluation", 100),
    Flag("--log-interval", whole, "steps between log lines", 100),
    Flag("--tensorboard-dir", str, "directory of TensorBoard event files"),
)
# Flags that are keys of ours under another name.
KEYS = {
    "--seed": "Global.seed",
    "--num-layers": "Model.num_layers",
    "--hidden-size": "Model.hidden_size",
    "--ffn-hidden-size": "Model.ffn_hidden_size",
    "--num-attention-heads": "Model.num_attention_heads",
    "--kv-channels": "Model.head_dim",
    "--normalization": "Model.normalization",
    "--max-position-embeddings": "Model.max_position_embeddings",
    "--init-method-std": "Model.initializer_range",
    "--hidden-dropout": "Model.hidden_dropout_prob",
    "--attention-dropout": "Model.attention_probs_dropout_prob",
    "--sequence-parallel": "Model.sequence_parallel",
    "--tensor-model-parallel-size": "Distributed.mp_degree",
    "--pipeline-model-parallel-size": "Distributed.pp_degree",
    "--seq-length": "Data.dataset.max_seq_len",
    "--split": "Data.dataset.split",
    "--data-path": "Data.dataset.input_dir",
    "--train-data-path": "Data.dataset.train_data",
    "--valid-data-path": "Data.dataset.valid_data",
    "--test-data-path": "Data.dataset.test_data",
    "--data-cache-path": "Data.dataset.cache_dir",
    "--eod-mask-loss": "Data.dataset.eod_mask_loss",
    "--reset-position-ids": "Data.dataset.reset_position_ids",
    "--reset-attention-mask": "Data.dataset.reset_attention_mask",
    "--micro-batch-size": "Data.batch_size.micro_batch_size",
    "--global-batch-size": "Data.batch_size.global_batch_size",
    "--rampup-batch-size": "Data.batch_size.rampup",
    "--weight-decay": "Optimizer.weight_decay",
    "--adam-beta1": "Optimizer.adam_beta1",
    "--adam-beta2": "Optimizer.adam_beta2",
    "--adam-eps": "Optimizer.adam_epsilon",
    "--clip-grad": "Optimizer.grad_clip",
    "--lr": "Optimizer.lr.max_lr",
    "--min-lr": "Optimizer.lr.min_lr",
    "--train-iters": "Engine.max_steps",
    "--train-samples": "Engine.train_samples",
    "--log-interval": "Engine.logging_freq",
    "--save-interval": "Engine.save_load.save_steps",
    "--save": "Engine.save_load.output_dir",
    "--tensorboard-dir": "Engine.tensorboard_dir",
}
# What they ask for is always so, is decided by the device, or has nothing here to switch off.
SWITCHES_WITHOUT_EFFECT = _words("""
    --use-flash-attn --use-flash-attn-v1 --use-flash-attn-v2 --use-flash-attn-triton
    --no-masked-softmax-fusion --no-bias-dropout-fusion --no-bias-swiglu-fusion --no-rope-fusion
    --no-gradient-accumulation-fusion --no-async-tensor-model-parallel-allreduce
    --no-persist-layer-norm --no-query-key-layer-scaling --no-pipeline-parallel
    --attention-softmax-in-fp32 --accumulate-allreduce-grads-in-fp32 --use-mcore-models
    --overlap-grad-reduce --overlap-param-gather
    --no-contiguous-buffers-in-local-ddp --no-scatter-gather-tensors-in-pipeline
    --use-cpu-initialization --exit-signal-handler --override-opt_param-scheduler
    --log-validation-ppl-to-tensorboard --log-timers-to-tensorboard --log-memory-to-tensorboard
    --log-batch-size-to-tensorboard
""")
VALUES_WITHOUT_EFFECT = _words("""
    --distributed-backend --DDP-impl --num-workers --local_rank --local-rank
    --tensorboard-queue-size --tensorboard-log-interval --timing-log-level --transformer-impl
    --attention-backend
""")

_EXPERTS = "there are no experts here, every layer is dense; leave it out"
_NO_SUCH_NETWORK = {
    "--apply-layernorm-1p": "a norm's weight is what it multiplies with, not that less 1",
    "--rotary-interleaved": "rotary pairs are a head's halves (i and i + size / 2), not neighbours",
    "--no-rope-freq": "rotary positions are in every layer or in none",
    "--mrope-section": "rotary positions have one dimension",
    "--multi-latent-attention": "keys and values are not compressed; --group-query-attention is",
    "--mtp-num-layers": "only the next token is predicted",
    "--quick-geglu": "the gated activation is --swiglu, or Model.activation: geglu in a file",
    "--glu-linear-offset": "gates have no offset",
    "--softmax-type": "softmax of attention has no offset",
    "--apply-residual-connection-post-layernorm": "the residual stream is not normalized itself",
    "--heterogeneous-layers-config-path": "all layers are alike",
}
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
    **{flag: f"{why}; leave it out" for flag, why in _NO_SUCH_NETWORK.items()},
    **dict.fromkeys(
        _words("--num-experts --moe-router-topk --moe-layer-freq --expert-model-parallel-size"),
        _EXPERTS,
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


def read_flags(arguments: Sequence[str]) -> Flags:
    """The flags given, each legal by itself and together."""
    parser = FlagParser(
        PROGRAM,
        "Train a GPT by the flags of Megatron-DeepSpeed's pretrain_gpt.py. They become a "
        "config.yaml in the directory of --save, which names the flag behind each value.",
        [
            *FLAGS,
            *(Flag(name, "switch", "changes nothing") for name in SWITCHES_WITHOUT_EFFECT),
            *(Flag(name, str, "changes nothing") for name in VALUES_WITHOUT_EFFECT),
        ],
    )
    flags = parser.read(arguments, REQUIRED, REFUSED)
    _check_sizes(flags)
    _check_network(flags)
    _check_length(flags)
    _check_learning_rate(flags)
    _check_data(flags)
    _check_tokenizer(flags)
    _exclusive(flags, "--fp16", "--bf16")
    return flags


def without_effect(flags: Flags) -> list[str]:
    known = [*SWITCHES_WITHOUT_EFFECT, *VALUES_WITHOUT_EFFECT, "--data-impl", "--optimizer"]
    known.append("--openai-gelu")
    if "--disable-bias-linear" not in flags:
        known.append("--add-qkv-bias")
    if "--swiglu" in flags or "--squared-relu" in flags:
        known.append("--no-bias-gelu-fusion")
    if is_rotary(flags):
        known.append("--no-position-embedding")
    return [flag for flag in flags.given if flag in known]


def _check_sizes(flags: Flags) -> None:
    may_be_zero = ("--seed", "--eval-iters", "--eval-interval", "--save-interval")
    for flag in [flag.name for flag in FLAGS if flag.kind is whole and flag.nargs is None]:
        zero_too = flag in may_be_zero or flag.startswith("--lr-warmup")
        if flag in flags and flags[flag] < (0 if zero_too else 1):
            raise UserError(f"{flag} {flags[flag]}: choose {0 if zero_too else 1} or more")
    for flag in ("--recompute-method", "--recompute-num-layers"):
        if flag in flags and flags["--recompute-granularity"] != "full":
            raise UserError(f"{flag} goes with --recompute-granularity full; add that")
    pp = flags["--pipeline-model-parallel-size"]
    per_stage = flags["--num-layers-per-virtual-pipeline-stage"]
    if per_stage is None:
        return
    if pp == 1:
        raise UserError(
            "--num-layers-per-virtual-pipeline-stage needs a pipeline; give "
            "--pipeline-model-parallel-size 2 or more, or leave it out"
        )
    if flags["--num-layers"] % (pp * per_stage):
        raise UserError(
            f"--num-layers-per-virtual-pipeline-stage {per_stage} on {pp} pipeline ranks does not "
            f"divide --num-layers {flags['--num-layers']}; choose a number for which "
            f"{pp} times it does"
        )


# Flags that mean nothing without another.
_GO_WITH = {
    "--num-query-groups": "--group-query-attention",
    "--rope-scaling-factor": "--use-rope-scaling",
    "--window-attn-skip-freq": "--window-size",
}
_ROTARY_ONLY = _words("""
    --rotary-base --rotary-percent --rotary-seq-len-interpolation-factor --use-rope-scaling
""")


def is_rotary(flags: Flags) -> bool:
    return (
        "--use-rotary-position-embeddings" in flags or flags["--position-embedding-type"] == "rope"
    )


def _check_network(flags: Flags) -> None:
    for flag, needed in _GO_WITH.items():
        if flag in flags and needed not in flags:
            raise UserError(f"{flag} has no effect without {needed}; add that, or leave it out")
    for flag in _ROTARY_ONLY:
        if flag in flags and not is_rotary(flags):
            raise UserError(
                f"{flag} has no effect without rotary positions; add "
                "--position-embedding-type rope, or leave it out"
            )
    kind = flags["--position-embedding-type"]
    if "--use-rotary-position-embeddings" in flags and kind == "none":
        raise UserError(
            "--use-rotary-position-embeddings and --position-embedding-type none contradict; "
            "leave one of them out"
        )
    _exclusive(flags, "--swiglu", "--squared-relu")
    for other in ("--swiglu", "--squared-relu", "--no-bias-gelu-fusion"):
        _exclusive(flags, "--openai-gelu", other)
    _exclusive(flags, "--norm-epsilon", "--layernorm-epsilon")
    _exclusive(flags, "--group-query-attention", "--num-key-value-heads")
    _exclusive(flags, "--use-rope-scaling", "--rotary-seq-len-interpolation-factor")
    if "--disable-bias-linear" in flags and flags["--normalization"] == "LayerNorm":
        raise UserError(
            "--disable-bias-linear leaves Megatron's LayerNorm its bias, which here has one only "
            "where linear layers do; add --normalization RMSNorm"
        )


def _check_length(flags: Flags) -> None:
    _exclusive(flags, "--train-samples", "--train-iters")
    if "--train-samples" not in flags and "--train-iters" not in flags:
        raise UserError("--train-samples or --train-iters missing; say how long the run is")
    if "--rampup-batch-size" in flags and "--train-samples" not in flags:
        raise UserError(
            "--rampup-batch-size goes with --train-samples only: a batch that grows makes "
            "iterations of unequal size; give --train-samples in place of --train-iters"
        )
    if "--rampup-batch-size" in flags and "--global-batch-size" not in flags:
        raise UserError("--rampup-batch-size grows to --global-batch-size; give that too")


def _check_learning_rate(flags: Flags) -> None:
    by_samples = "--train-samples" in flags
    kind, other = ("samples", "iters") if by_samples else ("iters", "samples")
    for name in ("--lr-decay", "--lr-warmup", "--lr-wsd-decay"):
        if f"{name}-{other}" in flags:
            raise UserError(f"{name}-{other} does not go with --train-{kind}; give {name}-{kind}")
    _exclusive(flags, "--lr-warmup-fraction", f"--lr-warmup-{kind}")
    if flags["--lr"] < flags["--min-lr"]:
        raise UserError(
            f"--min-lr {flags['--min-lr']:g} is above --lr {flags['--lr']:g}; the rate falls from "
            "--lr to --min-lr"
        )
    if not 0 <= (flags["--lr-warmup-fraction"] or 0.0) < 1:
        raise UserError(
            f"--lr-warmup-fraction {flags['--lr-warmup-fraction']:g}: choose at least 0 and less "
            "than 1"
        )
    is_wsd = flags["--lr-decay-style"] == "WSD"
    if is_wsd and f"--lr-wsd-decay-{kind}" not in flags:
        raise UserError(f"--lr-decay-style WSD needs --lr-wsd-decay-{kind}; add it")
    for flag in ("--lr-wsd-decay-style", f"--lr-wsd-decay-{kind}"):
        if not is_wsd and flag in flags:
            raise UserError(f"{flag} goes with --lr-decay-style WSD; add that, or leave it out")
    decay_flag = f"--lr-decay-{kind}"
    decay = flags[decay_flag if decay_flag in flags else f"--train-{kind}"]
    warmup = flags[f"--lr-warmup-{kind}"]
    if warmup >= decay:
        raise UserError(
            f"--lr-warmup-{kind} {warmup} is not less than {decay_flag} {decay}, after which the "
            "rate is --min-lr; warm up for less"
        )


def _check_data(flags: Flags) -> None:
    for part in ("train", "valid", "test"):
        _exclusive(flags, "--data-path", f"--{part}-data-path")
    if "--data-path" not in flags and "--train-data-path" not in flags:
        raise UserError("--data-path missing; name the token files to train on")


def _check_tokenizer(flags: Flags) -> None:
    """That there is a vocabulary; the files of the other types are checked where they are read."""
    is_null = flags["--tokenizer-type"] == "NullTokenizer"
    if is_null and "--vocab-size" not in flags:
        raise UserError("--tokenizer-type NullTokenizer needs --vocab-size; add it")
    if not is_null and "--vocab-size" in flags:
        raise UserError(
            f"--vocab-size goes with --tokenizer-type NullTokenizer; {flags['--tokenizer-type']} "
            "knows its own, leave it out"
        )
    for flag in ("--vocab-file", "--merge-file", "--tokenizer-model"):
        if is_null and flag in flags:
            raise UserError(f"{flag} does not go with --tokenizer-type NullTokenizer; leave it out")


def _exclusive(flags: Flags, first: str, second: str) -> None:
    if first in flags and second in flags:
        raise UserError(f"{first} and {second} exclude each other; leave one of them out")
