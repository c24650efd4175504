"""The table of layouts that are proven equal to one process: the claim of the project.

A case is a layout and the settings it shares with its one-process reference. Those marked `quick`
are in `make test`, all of them in `make test-all`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

SCHEDULES = {
    "gpipe": ("GPipe", 1),
    "interleaved": ("Interleaved1F1B", 2),
    "bfs": ("LoopedBFS", 2),
    "izb": ("InterleavedZeroBubble", 2),
    "zbv": ("ZBVZeroBubble", 2),
    "dualpipe": ("DualPipeV", 2),
}
# How far a trace may be from its reference, relative: losses and norms, then whole tensors. In low
# precision another order of additions already moves single elements by some of their few digits.
TOLERANCES = {
    "float32": (1e-5, 1e-5),
    "float64": (1e-9, 1e-9),
    "bfloat16": (2e-3, 6e-2),
    "float16": (1e-3, 3e-2),
}

# What stands before the last word of a key.
SECTIONS = re.compile(r"^(\w+\.)+")

FIVE_LAYERS = ("Model.num_layers=5",)
ODD_VOCABULARY = ("Model.vocab_size=1027",)
DROPOUT = ("Model.hidden_dropout_prob=0.2",)
MUP = ("Model.mup_base_width=8",)
DOCUMENTS = ("Data.dataset.reset_attention_mask=True", "Data.dataset.reset_position_ids=True")
MUON = ("Optimizer.name=Muon",)


# Networks of other families than GPT-2, each small; between them every option of the block.
_ROTARY = "Model.position_embedding=rotary"
NETWORKS = {
    "llama": (
        _ROTARY,
        "Model.rope_scaling.type=llama3",
        "Model.rope_scaling.factor=4",
        "Model.rope_scaling.original_max_position_embeddings=16",
        "Model.normalization=RMSNorm",
        "Model.activation=swiglu",
        "Model.bias=none",
        "Model.num_key_value_heads=2",
        "Model.tie_word_embeddings=False",
    ),
    "qwen2": (
        _ROTARY,
        "Model.normalization=RMSNorm",
        "Model.activation=swiglu",
        "Model.bias=qkv",
        "Model.num_key_value_heads=1",
        "Model.sliding_window=5",
        "Model.sliding_window_layers=[1, 2]",
    ),
    "qwen3": (
        _ROTARY,
        "Model.rope_scaling.type=yarn",
        "Model.rope_scaling.factor=4",
        "Model.normalization=RMSNorm",
        "Model.activation=swiglu",
        "Model.bias=none",
        "Model.num_key_value_heads=2",
        "Model.head_dim=24",
        "Model.qk_norm=per_head",
    ),
    "olmo2": (
        _ROTARY,
        "Model.normalization=RMSNorm",
        "Model.norm_placement=post",
        # At 0.02 blocks this narrow give next to nothing, and the norm behind them mostly epsilon.
        "Model.initializer_range=0.1",
        "Model.qk_norm=all_heads",
        "Model.num_key_value_heads=1",
        "Model.activation=swiglu",
        "Model.bias=none",
        "Model.tie_word_embeddings=False",
    ),
    "neox": (
        _ROTARY,
        "Model.partial_rotary_factor=0.25",
        "Model.parallel_residual=True",
        "Model.activation=gelu",
        "Model.tie_word_embeddings=False",
    ),
    "other": (
        "Model.position_embedding=none",
        "Model.qk_norm=per_head",
        "Model.activation=relu_squared",
        "Model.logit_softcap=8",
        "Model.z_loss=1.0e-3",
        "Model.embedding_scale=4",
        "Model.logit_scale=0.5",
        "Model.attention_scale=0.2",
    ),
}


@dataclass(frozen=True)
class Case:
    """A layout in words such as "dp2 pp2 mp2 sp zbv", under settings that change the numbers."""

    layout: str
    settings: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()  # settings that must not change the numbers
    dtype: str = "float32"
    level: str | None = None
    quick: bool = False
    network: str | None = None  # of `NETWORKS`, in place of GPT-2

    @property
    def name(self) -> str:
        told = [SECTIONS.sub("", setting) for setting in (*self.settings, *self.extras)]
        if self.dtype != "float32":
            told.append(f"{self.dtype} {self.level}" if self.level else self.dtype)
        return ", ".join([self.layout, *([self.network] if self.network else []), *told])

    @property
    def degrees(self) -> dict[str, int]:
        """Of each axis named in the layout."""
        words = [word for word in self.layout.split() if word.rstrip("0123456789") in AXIS_KEYS]
        return {word.rstrip("0123456789"): int(word.lstrip("dpshm")) for word in words}

    @property
    def world(self) -> int:
        product = 1
        for degree in self.degrees.values():
            product *= degree
        return product

    @property
    def tolerances(self) -> tuple[float, float]:
        """Of losses and norms, and of gradients and weights."""
        return TOLERANCES[self.dtype]

    def overrides(self) -> list[str]:
        """The `-o` assignments of the layout and of everything else about the case."""
        given = [f"{AXIS_KEYS[axis]}={degree}" for axis, degree in self.degrees.items()]
        for word in self.layout.split():
            if word in SCHEDULES:
                schedule, per_rank = SCHEDULES[word]
                given += [f"Distributed.pp_schedule={schedule}"]
                given += [f"Distributed.virtual_pp_degree={per_rank}"]
            elif word in ("stage2", "stage3"):
                given.append(f"Distributed.sharding.sharding_stage={word[-1]}")
            elif word == "offload":
                given.append("Distributed.sharding.sharding_offload=True")
            elif word == "sp":
                given.append("Model.sequence_parallel=True")
        return [*given, *self.shared(), *self.extras]

    def shared(self) -> list[str]:
        """What the reference has too."""
        given = [*(NETWORKS[self.network] if self.network else ()), *self.settings]
        if self.dtype in ("bfloat16", "float16"):
            given.append(f"Engine.mix_precision.dtype={self.dtype}")
        if self.level:
            given.append(f"Engine.mix_precision.level={self.level}")
        return given


AXIS_KEYS = {
    "dp": "Distributed.dp_degree",
    "pp": "Distributed.pp_degree",
    "sh": "Distributed.sharding.sharding_degree",
    "mp": "Distributed.mp_degree",
}


def recompute(granularity: str, method: str = "uniform", layers: int = 1) -> tuple[str, ...]:
    asked = ("Model.use_recompute=True", f"Model.recompute_granularity={granularity}")
    if (method, layers) == ("uniform", 1):
        return asked
    return (*asked, f"Model.recompute_method={method}", f"Model.recompute_num_layers={layers}")


def micro(size: int) -> tuple[str, ...]:
    return (f"Data.batch_size.micro_batch_size={size}",)


CASES = [
    # One axis at a time.
    Case("dp2", quick=True),
    Case("dp4", extras=micro(2)),
    Case("dp8"),
    Case("mp2"),
    Case("mp4"),
    Case("mp2 sp", quick=True),
    Case("mp4 sp", extras=micro(4)),
    Case("sh2"),
    Case("sh2 stage2"),
    Case("sh2 stage3", quick=True),
    Case("sh4 stage3", extras=micro(2)),
    Case("sh8 stage2"),
    Case("sh2 stage3 offload"),
    Case("sh2 offload"),
    Case("pp2"),
    Case("pp4"),
    Case("pp2 gpipe"),
    Case("pp2 interleaved", quick=True),
    Case("pp2 bfs"),
    Case("pp2 izb"),
    Case("pp2 zbv", quick=True),
    Case("pp2 dualpipe"),
    # Two axes.
    Case("dp2 mp2"),
    Case("dp2 pp2"),
    Case("dp2 pp2 zbv"),
    Case("dp2 sh2"),
    Case("dp2 sh2 stage2"),
    Case("dp2 sh2 stage3", quick=True),
    Case("sh2 stage2 mp2"),
    Case("sh2 stage3 mp2 sp", quick=True),
    Case("pp2 mp2 sp"),
    Case("pp2 zbv mp2"),
    Case("pp2 zbv mp2 sp"),
    Case("pp2 sh2"),
    Case("pp2 sh2 stage2"),
    Case("pp2 sh2 stage3"),
    Case("pp2 interleaved sh2 stage3"),
    Case("pp2 zbv sh2"),
    # Three and four.
    Case("dp2 pp2 mp2", quick=True),
    Case("dp2 sh2 stage3 mp2 sp"),
    Case("dp2 pp2 sh2 stage2"),
    Case("pp2 sh2 stage3 mp2 sp"),
    Case("dp2 pp2 sh2 stage3 mp2 sp"),
    # What must not change the numbers on any axis.
    Case("sh2 stage3 mp2", extras=recompute("full")),
    Case("pp2 mp2 sp", extras=recompute("full_attn")),
    Case("dp2 pp2 interleaved", extras=recompute("core_attn")),
    Case("sh2 stage3", extras=recompute("full")),
    Case("sh2 stage3", extras=recompute("full", layers=3)),
    Case("pp2 mp2 sp", extras=recompute("full", layers=2)),
    Case("sh2 stage3 mp2 sp", extras=recompute("ops")),
    Case("pp2 interleaved", extras=recompute("ops", "block", 1)),
    Case("pp2 zbv mp2 sp", extras=recompute("full", "block", 1)),
    Case("sh2 stage3", extras=("Engine.graph_mode=static",)),
    Case("dp2 mp2", extras=("Engine.graph_mode=static",)),
    Case("mp2 sp", extras=("Engine.graph_mode=static",)),
    Case("mp2 sp", extras=("Engine.graph_mode=static", *recompute("full", layers=2))),
    Case("dp2", extras=("Fused.tensor_fusion=True",)),
    # Sizes that do not divide.
    Case("pp2", FIVE_LAYERS, quick=True),
    Case("pp4 mp2", FIVE_LAYERS, extras=("Distributed.pp_layers=[1,2,1,1]",)),
    Case("pp2 interleaved", FIVE_LAYERS),
    Case("mp2 sp", ODD_VOCABULARY),
    Case("sh4 stage3 mp2", ODD_VOCABULARY),
    # Dropout and packed documents.
    Case("dp2", DROPOUT),
    Case("mp2", DROPOUT),
    Case("pp2 sh2 stage2", DROPOUT),
    Case("pp2 zbv mp2", DROPOUT, extras=recompute("full")),
    Case("pp2 zbv mp2 sp", extras=recompute("full")),
    Case("pp2 mp2 sp", DOCUMENTS, quick=True),
    Case("sh2 stage3", DOCUMENTS),
    # muP: initial weights, learning rates and logits by width.
    Case("mp2 sp", MUP, quick=True),
    Case("pp2 sh2 stage3", MUP),
    Case("dp2 pp2 mp2", MUP, extras=recompute("full")),
    Case("dp2", MUP, extras=("Fused.tensor_fusion=True",)),
    # Precisions.
    Case("mp2 sp", dtype="float64"),
    Case("pp2 sh2 stage3", dtype="float64"),
    Case("dp2 pp2 zbv", dtype="float64"),
    Case("pp2 sh2 stage3 mp2 sp", dtype="float64"),
    Case("dp2", dtype="bfloat16", level="O1"),
    Case("sh2 stage3", dtype="bfloat16", level="O2", quick=True),
    Case("pp2 mp2 sp", dtype="bfloat16", level="O2"),
    Case("dp2 pp2 zbv", dtype="bfloat16", level="O2"),
    Case("pp2 sh2 stage2 mp2", dtype="bfloat16", level="O1"),
    Case("mp2 sp", dtype="bfloat16", level="O1"),
    Case("dp2", dtype="float16", level="O2"),
    Case("pp2 mp2", dtype="float16", level="O2", quick=True),
    Case("sh2 stage3 mp2 sp", dtype="float16", level="O2"),
    Case("pp2 sh2 stage2", dtype="float16", level="O1"),
    Case("pp2 mp2 sp", extras=recompute("ops"), dtype="float16", level="O2"),
    # Other networks.
    Case("mp4 sp", network="llama", quick=True),
    Case("mp4", network="llama"),
    Case("mp2", network="llama"),
    Case("mp4", ("Model.num_key_value_heads=1",), network="llama"),
    Case("mp4 sp", ("Model.num_key_value_heads=1",), network="llama"),
    Case("mp4 sp", ("Model.num_key_value_heads=4",), network="llama"),
    Case("dp2", network="llama"),
    Case("pp2", network="llama"),
    Case("pp2 interleaved", network="llama"),
    Case("pp2 zbv mp2 sp", network="llama"),
    Case("sh2 stage3", network="llama", quick=True),
    Case("sh2 mp4", network="llama"),
    Case("sh2 stage3 mp4 sp", network="llama"),
    Case("pp2 sh2 stage2", network="llama"),
    Case("dp2 pp2 mp2", network="llama"),
    Case("pp2 mp2 sp", DOCUMENTS, network="llama"),
    Case("mp2 sp", extras=recompute("full"), network="llama"),
    Case("mp2 sp", extras=recompute("ops"), network="llama"),
    Case("pp2 mp2 sp", dtype="bfloat16", level="O2", network="llama"),
    Case("sh2 stage3 mp2", dtype="bfloat16", level="O1", network="llama"),
    Case("pp2 mp2", dtype="float16", level="O2", network="llama"),
    Case("mp2 sp", extras=("Engine.graph_mode=static",), network="llama"),
    Case("mp4 sp", dtype="float64", network="llama"),
    Case("mp2", network="qwen2"),
    Case("mp4 sp", network="qwen2"),
    Case("sh2 stage3 mp2 sp", network="qwen2"),
    Case("pp2 mp2 sp", DOCUMENTS, network="qwen2", quick=True),
    Case("mp4 sp", network="qwen3"),
    Case("mp4", network="qwen3"),
    Case("pp2 sh2 stage3 mp2 sp", network="qwen3"),
    Case("dp2 mp2", network="qwen3"),
    Case("mp4 sp", network="olmo2"),
    Case("mp2", network="olmo2"),
    Case("mp4", dtype="float64", network="olmo2"),
    Case("pp2 sh2 mp2", network="olmo2"),
    Case("mp2 sp", network="neox"),
    Case("pp2 zbv", network="neox"),
    Case("sh2 stage3 mp2", network="neox"),
    Case("mp4 sp", network="other"),
    Case("mp2 sp", ODD_VOCABULARY, network="other"),
    Case("pp2 sh2 stage3", network="other"),
    Case("dp2 pp2 mp2", network="other"),
    # Muon: the update of a matrix depends on all of it.
    Case("dp2", MUON),
    Case("mp2", MUON),
    Case("mp2 sp", MUON, quick=True),
    Case("mp4", MUON),
    Case("sh2", MUON),
    Case("sh2 stage2", MUON),
    Case("sh2 stage3", MUON, quick=True),
    Case("sh2 stage3 offload", MUON),
    Case("pp2", MUON),
    Case("pp2 zbv", MUON),
    Case("dp2 mp2", MUON),
    Case("dp2 sh2 stage2", MUON),
    Case("sh2 mp2", MUON),
    Case("sh2 stage3 mp2 sp", MUON),
    Case("pp2 mp2", MUON),
    Case("pp2 sh2 stage3 mp2 sp", MUON),
    Case("dp2 pp2 mp2", MUON),
    Case("dp2 pp2 sh2 mp2 sp", MUON),
    Case("pp2 interleaved", (*MUON, *FIVE_LAYERS)),
    Case("dp2 sh2 stage3", MUON, extras=("Optimizer.ema_decay=0.9",)),
    Case("sh4 stage3", (*MUON, "Model.hidden_size=36", "Model.num_attention_heads=6")),
    Case("mp4 sp", MUON, network="llama"),
    Case("sh2 stage3 mp4", MUON, network="olmo2"),
    Case("dp2", (*MUON, "Optimizer.muon.lr=2.0e-3", "Optimizer.muon.nesterov=False")),
    Case("pp2 sh2 stage3", MUON, dtype="float64"),
    Case("sh2 stage3", MUON, dtype="bfloat16", level="O2"),
    Case("pp2 mp2", MUON, dtype="float16", level="O2"),
]
