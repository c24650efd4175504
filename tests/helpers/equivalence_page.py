"""docs/equivalence.md: the table of layouts with the deviations a test run measured."""

from __future__ import annotations

from dataclasses import astuple, dataclass


@dataclass
class Row:
    """Largest relative deviations of a layout from one process."""

    name: str
    world: int
    loss: float
    gradient: float
    norm: float
    weights: float
    evaluation: float
    bounds: tuple[float, float]  # of losses and norms, and of gradients and weights

    def holds(self) -> bool:
        scalars = max(self.loss, self.norm, self.evaluation)
        return scalars < self.bounds[0] and max(self.gradient, self.weights) < self.bounds[1]


HEADER = """# Every layout, the same numbers

Each row is a run on a layout next to a run of one process with the same seed, data and global
batch: five optimizer steps of a four-layer GPT in gloo processes on one machine. The figures are
the largest relative deviations: of the five losses, of all gradients of step 1 (each tensor
against its own largest value), of the five gradient norms, of all weights after step 5, and of an
evaluation loss. Initial weights are equal to the bit in every row. Every row's state, saved after
step 3, also goes on under three other layouts within the same bound.

The words: `dp` data, `pp` pipeline, `sh` sharding (stage 1 unless said), `mp` model parallel,
`sp` sequence parallel; `gpipe`, `interleaved`, `bfs`, `izb`, `zbv`, `dualpipe` are the schedules
GPipe, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble and DualPipeV, without one
it is 1F1B. bf16 and fp16 rows are compared with one process in that precision, where another
order of additions already moves the last digits; their two bounds are of losses and norms, and of
gradients and weights.

The network is GPT-2's unless a row names another: `llama` (rotary positions stretched by Llama 3's
rule, RMSNorm, SwiGLU, two key-value heads, a head of its own, no biases), `qwen2` (biases of
queries, keys and values, one key-value head, a sliding window in two layers), `qwen3` (a norm of
each head, heads wider than hidden over heads, yarn), `olmo2` (norms after the blocks and over all
heads), `neox` (a quarter rotated, parallel residual, exact GELU), `other` (no positions, squared
ReLU, soft-capped logits, z-loss, scales). With more model-parallel ranks than key-value heads,
ranks share them.

`make equivalence` runs the table and writes this page; `make test` runs a third of it,
`make test-all` all of it. Measured on 2 cores of an AMD EPYC (Zen 4) with torch 2.13.0.

What no table lists is drawn: `tests/parallel/test_random_layouts.py` combines layouts of up to
eight processes with schedules, precisions, recomputation, dropout, packed documents, mixtures,
uneven stages and more, and holds each against one process within the same bounds, also after a
change of layout and in the tokens both write. `make test-all` does so for ten minutes
(`FOURFOLD_FUZZ_SECONDS`), from a seed that `FOURFOLD_FUZZ_SEED` chooses; what fails is reported
with its seed, and with the least that still fails.

The models of these tests are small. That the gradient norm of a tensor of 40 million elements is
that of its eight shards to 1e-6 is tested by itself.

| layout | processes | losses | gradients | norms | weights | evaluation | bound |
|---|---|---|---|---|---|---|---|
"""


def page_of(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        name, world, *figures, bounds = astuple(row)
        bound = " / ".join(f"{bound:g}" for bound in dict.fromkeys(bounds))
        cells = [name, str(world), *(f"{figure:.0e}" for figure in figures), bound]
        lines.append(f"| {' | '.join(cells)} |")
    return HEADER + "\n".join(lines) + "\n"
