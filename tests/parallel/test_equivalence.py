"""Every layout of the table gives the numbers of one process, and goes on where another stopped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.equivalence_page import Row
from helpers.layout_table import CASES, Case
from helpers.traces import SAVED_STEP, Workshop, deviation, relative, whole


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("layouts"))


def marked(case: Case, *more: Case) -> object:
    marks = [] if case.quick and all(one.quick for one in more) else [pytest.mark.slow]
    name = " then ".join(one.name for one in (case, *more))
    return pytest.param(case, *more, id=name.replace(" ", "-"), marks=marks)


@pytest.mark.parametrize("case", [marked(case) for case in CASES])
def test_equals_one_process(case: Case, workshop: Workshop, table_rows: list[Row]) -> None:
    (reference,), traces = workshop.reference(case), workshop.trace(case)
    trace = traces[0]
    for other in traces[1:]:
        assert other.losses == trace.losses, "all ranks must know the same loss"
        assert other.norms == trace.norms
    initial, expected = whole(t.initial for t in traces), whole([reference.initial])
    for name, tensor in expected.items():
        assert np.array_equal(initial[name], tensor), f"{name} must start bit-equal"
    gradients = whole(t.gradients for t in traces)
    weights = whole(t.weights for t in traces)
    row = Row(
        case.name,
        case.world,
        loss=relative(trace.losses, reference.losses),
        gradient=deviation(gradients, whole([reference.gradients])),
        norm=relative(trace.norms, reference.norms),
        weights=deviation(weights, whole([reference.weights])),
        evaluation=relative([trace.evaluation], [reference.evaluation]),
        bounds=case.tolerances,
    )
    table_rows.append(row)
    assert row.holds(), row


def pairs(steps: tuple[int, ...]) -> list[tuple[Case, Case]]:
    """Each case with some others that share its settings, so that its trace can go on."""
    found = []
    for group in {(case.dtype, *case.shared()): case for case in CASES}.values():
        alike = [
            case for case in CASES if (case.dtype, *case.shared()) == (group.dtype, *group.shared())
        ]
        for place, case in enumerate(alike):
            targets = {(place + step) % len(alike) for step in steps} - {place}
            found += [(case, alike[target]) for target in sorted(targets)]
    return found


QUICK = [case for case in CASES if case.quick]
QUICK_PAIRS = [
    (first, second)
    for first, second in zip(QUICK, [*QUICK[7:], *QUICK[:7]])
    if first.shared() == second.shared() and first.dtype == second.dtype
]
ALL_PAIRS = [pair for pair in pairs((3, 10, 17)) if pair not in QUICK_PAIRS]


@pytest.mark.parametrize(
    ("saved", "case"),
    [marked(*pair) for pair in QUICK_PAIRS]
    + [
        pytest.param(*pair, id=f"{pair[0].name} then {pair[1].name}".replace(" ", "-"), marks=slow)
        for pair in ALL_PAIRS
        for slow in [pytest.mark.slow]
    ],
)
def test_goes_on_under_another_layout(saved: Case, case: Case, workshop: Workshop) -> None:
    (reference,), traces = workshop.reference(case), workshop.resumed(saved, case)
    scalars, tensors = case.tolerances
    assert relative(traces[0].losses, reference.losses[SAVED_STEP:]) < scalars
    assert relative(traces[0].norms, reference.norms[SAVED_STEP:]) < scalars
    weights = whole(trace.weights for trace in traces)
    assert deviation(weights, whole([reference.weights])) < tensors


def test_the_page_lists_the_table(page: Path) -> None:
    text = page.read_text()
    missing = [case.name for case in CASES if f"| {case.name} |" not in text]
    assert not missing, "run `make equivalence` to write the page anew"
