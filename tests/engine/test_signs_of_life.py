"""A long phase says that it makes progress, so that nobody takes it for a hang."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from helpers.ranks import on_ranks
from helpers.tiny_run import Configure

from fourfold import heartbeat
from fourfold.engine import build_engine
from fourfold.parallel.runner import MOST_AT_ONCE


@pytest.fixture
def counted() -> Iterator[Counter[str]]:
    """How often each phase gave a sign of life."""
    signs: Counter[str] = Counter()
    heartbeat.relay(lambda: signs.update([heartbeat._last[1]]), 0.0)
    yield signs
    heartbeat.relay(None)


MICRO = "Data.batch_size.micro_batch_size=1"


def test_every_micro_batch_is_one(configure: Configure, counted: Counter[str]) -> None:
    engine = build_engine(configure("run", MICRO, "Engine.max_steps=3"))
    assert counted["start"] >= len(engine.runner.parameters) // 3, "one for each matrix drawn"
    engine.fit()
    assert counted["forward_backward"] >= 3 * 8
    together = min(len(engine.runner.parts[0].layers), MOST_AT_ONCE)
    assert counted["evaluate"] >= (2 + 2) * 8 // together, "two batches evaluated and two tested"


def test_every_micro_batch_of_a_pipeline_is_one(configure: Configure) -> None:
    settings = (MICRO, "Engine.max_steps=3", "Distributed.pp_degree=2")
    config = configure("run", *settings, world_size=2)

    def work(rank: int) -> Counter[str]:
        signs: Counter[str] = Counter()
        engine = build_engine(config, world_size=2)
        heartbeat.relay(lambda: signs.update([heartbeat._last[1]]), 0.0)
        engine.fit()
        return signs

    for signs in on_ranks(2, work):
        assert signs["forward_backward"] >= 3 * 8 * 2, "forward and backward"
        assert signs["evaluate"] >= (2 + 2) * 8
