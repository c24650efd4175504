"""Trial layouts and benches of an acceptance, and how far results may be apart.

Degrees are 2 on each axis, so that two GPUs show every axis by itself, four every pair and eight
the rest. What `quick` leaves out is a variation of what it keeps. The networks are small: what is
wrong with a group of ranks, a kernel or a schedule shows in four layers as in ninety-six, and a
whole table takes minutes.
"""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.accept.trials import STEPS, Values

SECTIONS = ("collectives", "equivalence", "resuming", "speed", "memory")
MP, PP, DP = "Distributed.mp_degree", "Distributed.pp_degree", "Distributed.dp_degree"
SHARDING, STAGE = "Distributed.sharding.sharding_degree", "Distributed.sharding.sharding_stage"
SP, SCHEDULE = "Model.sequence_parallel", "Distributed.pp_schedule"
VIRTUAL, MICRO = "Distributed.virtual_pp_degree", "Data.batch_size.micro_batch_size"
RECOMPUTE, GRANULARITY = "Model.use_recompute", "Model.recompute_granularity"
COMPILED = {"Engine.graph_mode": "static"}
BFLOAT16 = {"Engine.mix_precision.dtype": "bfloat16", "Engine.mix_precision.level": "O2"}
MOST_RANKS = 8
# Relative: of losses and norms, and of weights and moments. On GPUs products of other shapes are
# other kernels, with other orders of additions.
BOUNDS = {"cpu": (1e-5, 1e-4), "gpu": (1e-4, 1e-3)}
# In bfloat16: a gradient that is lost or counted twice moves a weight by as much as it is updated.
LOW_BOUNDS = (5e-3, 0.2)


@dataclass(frozen=True)
class TrialLayout:
    """A layout to try; `quick` ones are tried with --quick too."""

    name: str
    values: Values
    quick: bool = False
    low: bool = False  # in bfloat16, against a single process in bfloat16

    @property
    def world(self) -> int:
        degrees = [int(self.values.get(key, 1)) for key in (MP, PP, DP, SHARDING)]
        product = 1
        for degree in degrees:
            product *= degree
        return product

    def is_for(self, kind: str) -> bool:
        """Compiled graphs are tried on GPUs: a processor's need a C++ compiler, and have tests."""
        return kind == "gpu" or not self.values.items() >= COMPILED.items()

    @property
    def file_name(self) -> str:
        return self.name.replace(",", "").replace(" ", "_")


LAYOUTS = [
    TrialLayout("dp2", {DP: 2}, quick=True),
    TrialLayout("mp2", {MP: 2}),
    TrialLayout("mp2, sequence parallel", {MP: 2, SP: True}, quick=True),
    TrialLayout("pp2", {PP: 2}),
    TrialLayout("pp2, interleaved", {PP: 2, SCHEDULE: "Interleaved1F1B", VIRTUAL: 2}, quick=True),
    TrialLayout("pp2, zero bubble", {PP: 2, SCHEDULE: "ZBVZeroBubble", VIRTUAL: 2}),
    TrialLayout("sharding2, stage 1", {SHARDING: 2, STAGE: 1}),
    TrialLayout("sharding2, stage 2", {SHARDING: 2, STAGE: 2}),
    TrialLayout("sharding2, stage 3", {SHARDING: 2, STAGE: 3}, quick=True),
    TrialLayout("dp2, compiled", {DP: 2, **COMPILED}),
    TrialLayout("sharding2, stage 3, compiled", {SHARDING: 2, STAGE: 3, **COMPILED}),
    TrialLayout("mp2, bfloat16", {MP: 2, **BFLOAT16}, low=True),
    TrialLayout("sharding2, stage 3, bfloat16", {SHARDING: 2, STAGE: 3, **BFLOAT16}, low=True),
    TrialLayout("mp2, all recomputed", {MP: 2, RECOMPUTE: True, GRANULARITY: "full"}),
    TrialLayout("dp2 mp2", {DP: 2, MP: 2}),
    TrialLayout("pp2 mp2, sequence parallel", {PP: 2, MP: 2, SP: True}, quick=True),
    TrialLayout("dp2 sharding2, stage 3", {DP: 2, SHARDING: 2, STAGE: 3}),
    TrialLayout("pp2 sharding2, stage 2", {PP: 2, SHARDING: 2, STAGE: 2}),
    TrialLayout("sharding2 stage 3 mp2", {SHARDING: 2, STAGE: 3, MP: 2}),
    TrialLayout("dp2 pp2 mp2", {DP: 2, PP: 2, MP: 2}),
    TrialLayout(
        "pp2 sharding2 stage 3 mp2, sequence parallel",
        {PP: 2, SHARDING: 2, STAGE: 3, MP: 2, SP: True},
    ),
]
# Ten at most, those first that need few processes: what is timed, and whose memory is compared.
BENCHES: list[tuple[str, Values]] = [
    ("one device", {MICRO: 16}),
    ("one device, micro-batches of 4", {MICRO: 4}),
    ("one device, all recomputed", {MICRO: 4, RECOMPUTE: True, GRANULARITY: "full"}),
    ("one device, norms and GELU recomputed", {MICRO: 4, RECOMPUTE: True, GRANULARITY: "ops"}),
    ("one device, compiled", {MICRO: 16, **COMPILED}),
    ("dp2", {DP: 2, MICRO: 8}),
    ("mp2, sequence parallel", {MP: 2, SP: True, MICRO: 8}),
    ("pp2, 8 micro-batches", {PP: 2, MICRO: 2}),
    ("sharding2, stage 3", {SHARDING: 2, STAGE: 3, MICRO: 8}),
    ("pp2 sharding2, stage 1", {PP: 2, SHARDING: 2, STAGE: 1, MICRO: 2}),
]
QUICK_BENCHES = ("one device, micro-batches of 4", "dp2", "mp2, sequence parallel")
BENCH_SIZES: dict[str, Values] = {
    "cpu": {
        "Model.hidden_size": 256,
        "Model.vocab_size": 8192,
        "Model.max_position_embeddings": 256,
        "Data.dataset.max_seq_len": 256,
    },
    "gpu": {
        "Model.hidden_size": 768,
        "Model.num_layers": 12,
        "Model.num_attention_heads": 12,
        "Model.vocab_size": 50304,
        "Model.max_position_embeddings": 1024,
        "Data.dataset.max_seq_len": 1024,
        **BFLOAT16,
    },
}


ABOUT = {
    "collectives": "Every group of every set of degrees sends messages with known answers, in "
    "three sizes and three number formats.",
    "equivalence": f"{STEPS} steps of a small GPT in each layout against a single process on the "
    "same kind of device: the largest relative differences of losses, of gradient norms, and of "
    "all weights and moments in the last checkpoint (in bfloat16 of the norms of weights).",
    "resuming": "Runs that were interrupted against runs that were not. In the same layout, on a "
    "processor, the difference must be zero.",
    "speed": "Seconds a step against what `fourfold plan` predicts from this machine as `fourfold "
    "doctor` measured it. Here to be read; only a run that breaks off fails.",
    "memory": "The most bytes of rank 0 against the price of the step without libraries. Above the "
    "upper end of the plan's range is a failure.",
    "not shown": "What this machine, or these options, leave open.",
}
