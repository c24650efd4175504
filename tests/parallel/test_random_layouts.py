"""Layouts and options drawn at random, each held against one process: what no table lists.

A case is drawn from its seed alone: a layout of up to eight ranks, a second one that goes on from
its checkpoint, and a handful of options. Compared are losses, gradients, norms, weights, an
evaluation, the steps after the change of layout, and the tokens both write from the checkpoint.
A case that fails is made smaller, one word or option at a time, before it is reported.

`make test` runs a few seeds, `make test-all` goes on drawing for ten minutes:

    FOURFOLD_FUZZ_SECONDS=600   how long
    FOURFOLD_FUZZ_SEED=17       the first seed; with 0 seconds the only one
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from helpers.equivalence_page import Row
from helpers.layout_table import DOCUMENTS, NETWORKS, SCHEDULES, Case, micro, recompute
from helpers.ranks import on_ranks
from helpers.tiny_text_run import sentences
from helpers.traces import SAVED_STEP, Workshop, deviation, relative, whole

from fourfold.device import select_device
from fourfold.errors import UserError
from fourfold.generate.module import GenerationModule
from fourfold.mesh import connect
from fourfold.parallel import layout_of
from fourfold.tokenizer import train

BLEND = Path(__file__).parent.parent / "fixtures" / "megatron_blend"
QUICK_SEEDS = (74,)

# What changes the numbers, and so is the reference's too.
SHARED = {
    "five layers": ("Model.num_layers=5",),
    "eight layers": ("Model.num_layers=8",),
    "odd vocabulary": ("Model.vocab_size=1027",),
    "narrow": ("Model.ffn_hidden_size=96",),
    "deep init": ("Model.depth_scaled_init=True",),
    "hidden dropout": ("Model.hidden_dropout_prob=0.2",),
    "attention dropout": ("Model.attention_probs_dropout_prob=0.2",),
    "documents": DOCUMENTS,
    "documents apart": DOCUMENTS[:1],
    "every token counts": ("Data.dataset.eod_mask_loss=False",),
    "mixture": (
        f'Data.dataset.input_dir=["0.35","{BLEND}/part0_text_document",'
        f'"0.65","{BLEND}/part1_text_document"]',
    ),
    "elastic": ("Data.dataset.order=elastic",),
    "growing batch": ("Data.batch_size.rampup=[8,8,24]",),
    "clipped": ("Optimizer.grad_clip=0.1",),
    "not clipped": ("Optimizer.grad_clip=0",),
    **NETWORKS,
}
# What must change nothing.
EXTRAS = {
    "recompute full": recompute("full"),
    "recompute full_attn": recompute("full_attn"),
    "recompute core_attn": recompute("core_attn"),
    "recompute ops": recompute("ops"),
    "recompute together": recompute("full", layers=3),
    "recompute some": recompute("full_attn", "block", 1),
    "micro 2": micro(2),
    "micro 4": micro(4),
    "async save": ("Engine.save_load.async_save=True",),
    "static": ("Engine.graph_mode=static",),
    "unfused": ("Model.fused_linear=False",),
    "flat optimizer": ("Fused.tensor_fusion=True",),
    "short chunks": ("Model.loss_chunk_tokens=5",),
    "nothing read ahead": ("Data.dataset.prefetch=0",),
}
# Options of which one excludes the others.
RIVALS = [
    {"five layers", "eight layers"},
    {"documents", "documents apart"},
    {"clipped", "not clipped"},
    {*NETWORKS},
    {"micro 2", "micro 4", "hidden dropout", "attention dropout"},
    {name for name in EXTRAS if name.startswith("recompute")},
]
PRECISIONS = {
    "bfloat16 O1": ("bfloat16", "O1"),
    "bfloat16 O2": ("bfloat16", "O2"),
    "float16 O1": ("float16", "O1"),
    "float16 O2": ("float16", "O2"),
    "float64": ("float64", None),
}
STRATEGIES = {
    "greedy": ["Generation.decode_strategy=greedy_search"],
    "sampling": ["Generation.decode_strategy=sampling", "Generation.top_k=40"],
    "beam": ["Generation.decode_strategy=beam_search", "Generation.num_beams=3"],
}
PROMPTS = [[5, 6, 7], [250], [9, 8, 7, 6, 5, 4]]


@dataclass(frozen=True)
class Titled(Case):
    """A case under a short name, which the directory of its run has too."""

    title: str = ""

    @property
    def name(self) -> str:
        return self.title


@dataclass(frozen=True)
class Draw:
    seed: int
    layout: str
    other: str  # goes on from what the first saved
    options: tuple[str, ...] = ()  # names of SHARED, EXTRAS and PRECISIONS
    pp_layers: tuple[int, ...] = ()
    strategy: str = "greedy"

    def case(self, layout: str, title: str) -> Titled:
        dtype, level = next(
            (PRECISIONS[o] for o in self.options if o in PRECISIONS), ("float32", None)
        )
        settings = [word for one in self.options for word in SHARED.get(one, ())]
        extras: list[str] = []
        if title == "first":
            extras = [word for one in self.options for word in EXTRAS.get(one, ())]
            if self.pp_layers:
                extras.append(f"Distributed.pp_layers=[{','.join(map(str, self.pp_layers))}]")
        given = tuple(settings), tuple(extras)
        return Titled(layout, *given, dtype=dtype, level=level, title=title)

    def cases(self) -> tuple[Titled, Titled]:
        return self.case(self.layout, "first"), self.case(self.other, "other")

    def writing(self) -> Titled:
        """The first layout as generation runs it: without copies, and whole positions."""
        words = [word for word in self.layout.split() if word != "sp" and not word.startswith("dp")]
        return self.case(" ".join(words) or "one", "writing")


def draw(seed: int, most_ranks: int = 8, static: bool = True) -> Draw:
    source = random.Random(seed)
    while True:
        options = list({*SHARED, *EXTRAS} - (set() if static else {"static"}))
        chosen = source.sample(sorted(options), source.randint(1, 8))
        if source.random() < 0.3:
            chosen.append(source.choice([*PRECISIONS]))
        layout, other = (random_layout(source, most_ranks) for _ in range(2))
        one = Draw(seed, layout, other, tuple(chosen), strategy=source.choice([*STRATEGIES]))
        if "pp" in layout and source.random() < 0.3:
            one = replace(one, pp_layers=random_stages(one, source))
        if is_legal(one):
            return one


def random_layout(source: random.Random, most_ranks: int) -> str:
    while True:
        degrees = {axis: source.choice([1, 1, 2, 2, 4]) for axis in ("dp", "pp", "sh", "mp")}
        words = [f"{axis}{degree}" for axis, degree in degrees.items() if degree > 1]
        if 1 < Case(" ".join(words)).world <= most_ranks:
            break
    if degrees["pp"] > 1:
        words.append(source.choice(["", *SCHEDULES]))
    if degrees["sh"] > 1:
        words += [source.choice(["", "stage2", "stage3"]), source.choice(["", "", "offload"])]
    if degrees["mp"] > 1:
        words.append(source.choice(["", "sp"]))
    return " ".join(filter(None, words))


def random_stages(one: Draw, source: random.Random) -> tuple[int, ...]:
    """Layers of each stage, at least one."""
    layers = {"five layers": 5, "eight layers": 8}
    left = next((layers[option] for option in one.options if option in layers), 4)
    per_rank = next((SCHEDULES[w][1] for w in one.layout.split() if w in SCHEDULES), 1)
    stages = Case(one.layout).degrees["pp"] * per_rank
    if stages > left:
        return ()
    cuts = sorted(source.sample(range(1, left), stages - 1))
    return tuple(stop - start for start, stop in zip([0, *cuts], [*cuts, left]))


def is_legal(one: Draw) -> bool:
    """Whether it means anything, and the product's own checks let it through."""
    if any(len(rivals.intersection(one.options)) > 1 for rivals in RIVALS):
        return False
    words = {*one.layout.split(), *one.other.split()}
    heads_are_cut = any(word.startswith("mp") for word in words)
    if ("hidden dropout" in one.options and "sp" in words) or (
        "attention dropout" in one.options and heads_are_cut
    ):
        return False  # these drop elsewhere than one process does
    if "static" in one.options and Case(one.layout).world > 2:
        return False  # every rank compiles for itself, and they share the processors
    with tempfile.TemporaryDirectory() as folder:
        workshop = Workshop(Path(folder))
        try:
            for case in (*one.cases(), one.writing()):
                workshop.config(case.world, "run", case.overrides())
        except UserError:
            return False
    return True


# -- the comparison -------------------------------------------------------------------------------


def check(one: Draw) -> None:
    """Raise AssertionError where a layout does not do what one process does."""
    with tempfile.TemporaryDirectory() as folder:
        workshop = Workshop(Path(folder))
        first, other = one.cases()
        check_training(workshop, first)
        check_going_on(workshop, first, other)
        if first.dtype != "float64":
            check_writing(workshop, one)


def check_training(workshop: Workshop, case: Case) -> None:
    (reference,), traces = workshop.reference(case), workshop.trace(case)
    for trace in traces:
        assert trace.losses == traces[0].losses, "all ranks must know the same loss"
        assert trace.norms == traces[0].norms, "all ranks must know the same norm"
    weights = deviation(whole(t.weights for t in traces), whole([reference.weights]))
    row = Row(
        case.layout,
        case.world,
        loss=relative(traces[0].losses, reference.losses),
        gradient=deviation(whole(t.gradients for t in traces), whole([reference.gradients])),
        norm=relative(traces[0].norms, reference.norms),
        weights=weights / slack(case),
        evaluation=relative([traces[0].evaluation], [reference.evaluation]),
        bounds=case.tolerances,
    )
    assert row.holds(), row


def slack(case: Case) -> float:
    """How much further than gradients the weights may be apart.

    Adam makes a step of a gradient that is nothing but rounding, and over more layers than the
    table's such steps add up. A wrong sum shows in gradients and norms, and in float64.
    """
    return 1.0 if case.dtype == "float64" else 5.0


def check_going_on(workshop: Workshop, first: Case, other: Case) -> None:
    (reference,), traces = workshop.reference(first), workshop.resumed(first, other)
    scalars, tensors = other.tolerances
    assert relative(traces[0].losses, reference.losses[SAVED_STEP:]) < scalars, "losses go on"
    assert relative(traces[0].norms, reference.norms[SAVED_STEP:]) < scalars, "norms go on"
    weights = whole(trace.weights for trace in traces)
    apart = deviation(weights, whole([reference.weights]))
    assert apart < tensors * slack(other), "weights go on"


def check_writing(workshop: Workshop, one: Draw) -> None:
    """The tokens that the checkpoint continues prompts with, in one process and spread."""
    tokenizer = workshop.folder / "tokenizer.json"
    train(sentences(50, seed=1), 300).save(tokenizer)
    case = one.writing()
    places = [
        f"Global.tokenizer={tokenizer}",
        f"Engine.save_load.ckpt_dir={workshop.folder / 'first' / f'step_{SAVED_STEP}'}",
        "Generation.max_dec_len=6",
        *(["Generation.top_k=0"] if one.strategy != "sampling" else []),
        *STRATEGIES[one.strategy],
    ]

    def work(world: int, overrides: list[str]) -> Callable[[int], list[list[int]]]:
        def ids(rank: int) -> list[list[int]]:
            config = workshop.config(world, "writing", [*overrides, *places])
            mesh = connect(layout_of(config), select_device("cpu"), 60.0)
            module = GenerationModule(config, lambda text: None, mesh)
            written = [found.ids for each in module.complete(PROMPTS) for found in each]
            mesh.close()
            return written

        return ids

    (alone,) = on_ranks(1, work(1, case.shared()))
    assert len(alone) == len(PROMPTS) and all(alone)
    for written in on_ranks(case.world, work(case.world, case.overrides())):
        assert written == alone, "the same tokens as one process"


# -- making a failure smaller ---------------------------------------------------------------------


def smaller(one: Draw) -> Iterator[Draw]:
    """Each with one thing less."""
    for option in one.options:
        yield replace(one, options=tuple(o for o in one.options if o != option))
    yield replace(one, pp_layers=())
    yield replace(one, strategy="greedy")
    yield replace(one, other="one")
    for name in ("layout", "other"):
        words = getattr(one, name).split()
        for word in words:
            yield replace(one, **{name: " ".join(w for w in words if w != word) or "one"})


def shrink(one: Draw, fails: Callable[[Draw], bool]) -> Draw:
    """The least that still fails: without any one thing more it does not."""
    for candidate in smaller(one):
        if candidate != one and is_legal(candidate) and fails(candidate):
            return shrink(candidate, fails)
    return one


def fails(one: Draw) -> bool:
    try:
        check(one)
    except AssertionError:
        return True
    return False


def try_seed(seed: int, most_ranks: int = 8, static: bool = True) -> None:
    one = draw(seed, most_ranks, static)
    print(f"seed {seed}: {one}", flush=True)
    try:
        check(one)
    except AssertionError as error:
        least = shrink(one, fails)
        first, other = least.cases()
        pytest.fail(
            f"FOURFOLD_FUZZ_SEED={seed}: {one} is not what one process is:\n{error}\n\n"
            f"The least that fails: {least}\n"
            f"first: {' '.join(first.overrides())}\nthen: {' '.join(other.overrides())}"
        )


@pytest.mark.parametrize("seed", QUICK_SEEDS)
def test_a_drawn_case_equals_one_process(seed: int) -> None:
    try_seed(seed, most_ranks=4, static=False)


@pytest.mark.slow
def test_many_drawn_cases_equal_one_process() -> None:
    seed = int(os.environ.get("FOURFOLD_FUZZ_SEED", "1000"))
    end = time.monotonic() + float(os.environ.get("FOURFOLD_FUZZ_SECONDS", "600"))
    while True:
        try_seed(seed)
        seed += 1
        if time.monotonic() >= end:
            return


def test_a_seed_is_a_case_and_cases_differ() -> None:
    drawn = [draw(seed) for seed in range(40)]
    assert drawn[:5] == [draw(seed) for seed in range(5)]
    words = {word for one in drawn for word in one.layout.split()}
    assert words >= {"dp2", "pp2", "sh2", "mp2", "sp", "stage3", "offload"}
    assert len({word for word in words if word in SCHEDULES}) >= 4
    assert len({option for one in drawn for option in one.options}) >= 20


def test_a_failure_is_made_as_small_as_it_gets() -> None:
    """Played: it fails wherever sequence parallelism meets an odd vocabulary."""
    large = Draw(
        0,
        "dp2 pp2 mp2 zbv sp",
        "sh2 stage3",
        ("odd vocabulary", "clipped", "async save"),
        strategy="beam",
    )
    assert is_legal(large)

    def fails(one: Draw) -> bool:
        return {"mp2", "sp"} <= {*one.layout.split()} and "odd vocabulary" in one.options

    least = shrink(large, fails)
    assert least == Draw(0, "mp2 sp", "one", ("odd vocabulary",))
