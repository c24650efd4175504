"""Copies in memory: a run that loses a machine or its processes goes on from its last step.

Two ranks with a directory each in the place of /dev/shm are two machines. A machine that is lost is
a directory that is emptied.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import pytest
from helpers.ranks import on_ranks
from helpers.tiny_run import Configure, exit_status, start_child

from fourfold.checkpoint import copy_store
from fourfold.engine import build_engine
from fourfold.engine.memory_copies import TIMELINE_FILE, MemoryCopies
from fourfold.errors import CheckpointError, UserError
from fourfold.metrics import read_jsonl

COPIES = "Engine.save_load.memory_copy_steps=1"
QUIET = (
    "Engine.eval_freq=0",
    "Engine.test_iters=0",
    "Engine.preflight=none",
    "Data.batch_size.local_batch_size=null",
)
FEW_SAVES = "Engine.save_load.save_steps=4"


class Killed(BaseException):
    """Ends a rank as a signal would: nothing is tidied up on the way."""


@pytest.fixture
def machines(tmp_path: Path) -> list[Path]:
    made = [tmp_path / f"memory{number}" for number in range(3)]
    for path in made:
        path.mkdir()
    return made


def losses(output_dir: Path) -> dict[int, float]:
    records = read_jsonl(output_dir / "metrics.jsonl")
    return {r["step"]: r["loss"] for r in records if r["kind"] == "train"}


def run_until(engine, step: int) -> None:  # type: ignore[no-untyped-def]
    """Train, and be killed after the copy of `step`, while the next step is computed."""
    real = engine.runner.run

    def run(batch, number, scale):  # type: ignore[no-untyped-def]
        if number == step + 1:
            if engine.saves.copying is not None:
                with suppress(CheckpointError):
                    engine.saves.copying.wait()
            raise Killed
        return real(batch, number, scale)

    engine.runner.run = run
    try:
        engine.fit()
    except Killed:
        return
    raise AssertionError("the run was to be killed")


def train(
    configure: Configure, memories: list[Path], *settings: str, until: int | None = None
) -> list[list[str]]:
    """A run on as many ranks as there are memories; returns the notices of each."""

    def work(rank: int) -> list[str]:
        copy_store.MEMORY = memories[rank]
        config = configure("run", *QUIET, *settings, world_size=len(memories))
        engine = build_engine(config, len(memories))
        if until is None:
            engine.fit()
        else:
            run_until(engine, until)
        return engine.notices

    return on_ranks(len(memories), work)


def straight(configure: Configure, tmp_path: Path, *settings: str) -> dict[int, float]:
    def work(rank: int) -> None:
        build_engine(configure("straight", *QUIET, *settings)).fit()

    on_ranks(1, work)
    return losses(tmp_path / "straight")


def said(notices: list[list[str]], word: str) -> bool:
    return any(word in line for line in notices[0])


TWO = ["Distributed.dp_degree=2"]
LAYOUTS = {
    "data": TWO,
    "sharded, average": [
        "Distributed.sharding.sharding_degree=2",
        "Distributed.sharding.sharding_stage=2",
        "Optimizer.ema_decay=0.9",
    ],
    "pipeline, Muon": [
        "Distributed.pp_degree=2",
        "Data.batch_size.micro_batch_size=4",
        "Optimizer.name=Muon",
    ],
}


def close(one: dict[int, float], other: dict[int, float]) -> bool:
    return one.keys() == other.keys() and all(abs(one[s] - other[s]) < 1e-5 for s in one)


def quick(names: Iterable[str], *chosen: str) -> list[object]:
    return [pytest.param(n, marks=() if n in chosen else pytest.mark.slow) for n in names]


@pytest.mark.parametrize("layout", quick(LAYOUTS, "sharded, average"))
def test_a_machine_is_lost_and_no_step_is(
    layout: str, configure: Configure, tmp_path: Path, machines: list[Path]
) -> None:
    given, still = LAYOUTS[layout], ["Model.hidden_dropout_prob=0"]
    still += ["Model.attention_probs_dropout_prob=0", FEW_SAVES]
    optimizer = [word for word in given if word.startswith("Optimizer")]
    train(configure, machines[:2], *given, *still, COPIES, until=7)
    shutil.rmtree(machines[1])
    machines[1].mkdir()
    notices = train(configure, machines[:2], *given, *still, COPIES)
    assert said(notices, "resumed from copies in memory at step 7"), notices[0]
    assert close(losses(tmp_path / "run"), straight(configure, tmp_path, *still, *optimizer))
    assert not any([*machine.iterdir()] for machine in machines), "removed at the end of the run"
    assert not (tmp_path / "run" / TIMELINE_FILE).exists()


def test_fewer_machines_go_on(configure: Configure, tmp_path: Path, machines: list[Path]) -> None:
    """Also with the same bits: two ranks of data parallelism and one that does all."""
    train(configure, machines[:2], *TWO, FEW_SAVES, COPIES, until=6)
    for left in (0, 1):
        assert len([*machines[left].rglob("rank*.json")]) >= 2, "its own part and its neighbour's"
    notices = train(configure, machines[1:2], FEW_SAVES, COPIES)
    assert said(notices, "resumed from copies in memory at step 6"), notices[0]
    assert said(notices, "all ranks are on one machine")
    assert close(losses(tmp_path / "run"), straight(configure, tmp_path, FEW_SAVES))


def test_more_machines_go_on(configure: Configure, tmp_path: Path, machines: list[Path]) -> None:
    """A rank 0 that has nothing itself gets everything from others."""
    train(configure, machines[:1], FEW_SAVES, COPIES, until=5)
    notices = train(configure, machines[::-1][1:], *TWO, FEW_SAVES, COPIES)
    assert said(notices, "resumed from copies in memory at step 5"), notices[0]
    assert close(losses(tmp_path / "run"), straight(configure, tmp_path, FEW_SAVES))


def test_the_checkpoint_is_used_where_it_is_newer(
    configure: Configure, machines: list[Path]
) -> None:
    train(configure, machines[:2], *TWO, FEW_SAVES, COPIES, until=4)
    notices = train(configure, machines[:2], *TWO, FEW_SAVES, COPIES)
    assert said(notices, "step_4 at step 4") and not said(notices, "copies in memory at step")


Damage = Callable[[Path], None]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, tuple[Damage, str]] = {
    "a byte of a file": (lambda copy: flip(next(copy.glob("model-rank*"))), "digest"),
    "a file cut short": (
        lambda copy: os.truncate(next(copy.glob("optim-rank*")), 100),
        "has 100 bytes",
    ),
    "a file gone": (lambda copy: next(copy.glob("model-rank*")).unlink(), "cannot be read"),
    "a byte of the state": (lambda copy: flip(copy / "state.json"), "digest"),
    "a byte of a record": (lambda copy: flip(next(copy.glob("rank*.json"))), "incomplete"),
    "a record gone": (lambda copy: next(copy.glob("rank00000*.json")).unlink(), "incomplete"),
}


@pytest.mark.parametrize("damage", quick(DAMAGE, "a byte of a file", "a record gone"))
def test_damage_is_said_and_the_checkpoint_used(
    damage: str, configure: Configure, tmp_path: Path, machines: list[Path]
) -> None:
    """One machine is gone, and what is left on the other is damaged."""
    train(configure, machines[:2], *TWO, FEW_SAVES, COPIES, until=6)
    spoil, word = DAMAGE[damage]
    shutil.rmtree(machines[0])
    machines[0].mkdir()
    for copy in machines[1].glob("*/*/step_*"):
        spoil(copy)
    notices = train(configure, machines[:2], *TWO, FEW_SAVES, COPIES)
    assert said(notices, "the copy of step 6 in memory cannot be used"), notices[0]
    assert said(notices, word), notices[0]
    assert said(notices, "step_4 at step 4")
    assert close(losses(tmp_path / "run"), straight(configure, tmp_path, FEW_SAVES))


def test_damage_on_one_machine_is_mended_by_the_other(
    configure: Configure, machines: list[Path]
) -> None:
    train(configure, machines[:2], *TWO, FEW_SAVES, COPIES, until=6)
    for copy in machines[0].glob("*/*/step_6"):
        flip(next(copy.glob("model-rank00001*")))
        flip(next(copy.glob("optim-rank00000*")))
    notices = train(configure, machines[:2], *TWO, FEW_SAVES, COPIES)
    assert said(notices, "is left out") and said(notices, "copies in memory at step 6"), notices[0]


def test_what_the_run_went_on_without_is_not_taken(
    configure: Configure, tmp_path: Path, machines: list[Path]
) -> None:
    """A machine is cut off with copies of step 7; the others go on from the disk, to step 5."""
    train(configure, machines[:2], *TWO, FEW_SAVES, COPIES, until=7)
    notices = train(configure, machines[2:3], FEW_SAVES, COPIES, until=5)
    assert said(notices, "step_4 at step 4")
    notices = train(configure, [machines[2], machines[1]], *TWO, FEW_SAVES, COPIES)
    assert said(notices, "the run went on without them"), notices[0]
    assert said(notices, "resumed from copies in memory at step 5")
    assert close(losses(tmp_path / "run"), straight(configure, tmp_path, FEW_SAVES))


def test_a_second_failure_at_once_loses_nothing(configure: Configure, machines: list[Path]) -> None:
    """The run began from a copy and is killed before it has made a step, or a copy of its own."""
    train(configure, machines[:1], FEW_SAVES, COPIES, until=6)

    def work(rank: int) -> None:
        copy_store.MEMORY = machines[0]
        engine = build_engine(configure("run", *QUIET, FEW_SAVES, COPIES))
        MemoryCopies.copy = killed  # type: ignore[assignment, method-assign]
        with pytest.raises(Killed):
            engine.fit()

    def killed(copies: MemoryCopies, sinks: object) -> None:
        raise Killed

    on_ranks(1, work)
    notices = train(configure, machines[:1], FEW_SAVES, COPIES)
    assert said(notices, "resumed from copies in memory at step 6"), notices[0]


def test_another_configuration_goes_on_from_the_checkpoint(
    configure: Configure, machines: list[Path]
) -> None:
    train(configure, machines[:1], FEW_SAVES, COPIES, until=6)
    changed = "Optimizer.lr.max_lr=0.02"
    notices = train(configure, machines[:1], FEW_SAVES, COPIES, changed)
    assert said(notices, "made with another Optimizer.lr.max_lr"), notices[0]
    assert said(notices, "step_4 at step 4")


def test_what_is_left_is_removed_by_a_run_that_keeps_none(
    configure: Configure, machines: list[Path]
) -> None:
    train(configure, machines[:1], FEW_SAVES, COPIES, until=6)
    assert [*machines[0].iterdir()]
    notices = train(configure, machines[:1], FEW_SAVES)
    assert said(notices, "were removed") and not [*machines[0].iterdir()]


def test_a_run_at_an_address(
    configure: Configure, tmp_path: Path, machines: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (tmp_path / "far" / "run").mkdir(parents=True)
    there = f"Engine.save_load.output_dir=file://{tmp_path}/far/run"
    train(configure, machines[:1], FEW_SAVES, COPIES, there, until=6)
    assert (tmp_path / "far" / "run" / TIMELINE_FILE).exists()
    notices = train(configure, machines[:1], FEW_SAVES, COPIES, there)
    assert said(notices, "resumed from copies in memory at step 6"), notices[0]
    assert not (tmp_path / "far" / "run" / TIMELINE_FILE).exists()


def test_copies_that_would_never_be_taken_are_refused(configure: Configure) -> None:
    with pytest.raises(UserError, match="memory_copy_steps=1 is for a run that resumes"):
        configure("run", COPIES, "Engine.save_load.auto_resume=False")


def test_too_little_memory_is_refused(
    configure: Configure, machines: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_store, "MEMORY", machines[0])
    monkeypatch.setattr("fourfold.engine.memory_copies._free_bytes", lambda place: 100_000)
    with pytest.raises(UserError, match=r"memory_copy_steps=1 takes .* has 0.000 GB of memory"):
        build_engine(configure("run", *QUIET, COPIES)).fit()


def test_a_directory_of_somebody_else_is_refused(
    configure: Configure, tmp_path: Path, machines: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_store, "MEMORY", machines[0])
    root = copy_store.CopyStore(tmp_path / "run").root
    root.mkdir(mode=0o777)
    root.chmod(0o777)
    with pytest.raises(UserError, match="not a directory of this user alone"):
        build_engine(configure("run", *QUIET, COPIES)).fit()
    root.rmdir()
    root.symlink_to(tmp_path)
    with pytest.raises(UserError, match="not a directory of this user alone"):
        build_engine(configure("run", *QUIET, COPIES)).fit()


def test_a_copy_that_fails_does_not_end_the_run(
    configure: Configure, machines: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of one of two machines is full at step 3."""
    real = copy_store.write_shards

    def full(place, *rest):  # type: ignore[no-untyped-def]
        if place.name == "step_3" and "memory1" in str(place):
            raise OSError(28, "No space left on device")
        return real(place, *rest)

    monkeypatch.setattr(copy_store, "write_shards", full)
    train(configure, machines[:2], *TWO, FEW_SAVES, COPIES, until=3)
    notices = train(configure, machines[:2], *TWO, FEW_SAVES, COPIES)
    assert said(notices, "resumed from copies in memory at step 2"), notices[0]


def test_a_killed_process_is_started_again_from_memory(
    configure: Configure, machines: list[Path], tmp_path: Path
) -> None:
    """By SIGKILL, in the middle of a step."""

    def work() -> None:
        copy_store.MEMORY = machines[0]
        engine = build_engine(configure("run", *QUIET, FEW_SAVES, COPIES))
        real = engine.runner.run

        def run(batch, number, scale):  # type: ignore[no-untyped-def]
            if number == 8:
                assert engine.saves.copying is not None
                engine.saves.copying.wait()
                os.kill(os.getpid(), signal.SIGKILL)
            return real(batch, number, scale)

        engine.runner.run = run  # type: ignore[method-assign]
        engine.fit()

    assert exit_status(start_child(work)) == -signal.SIGKILL
    notices = train(configure, machines[:1], FEW_SAVES, COPIES)
    assert said(notices, "resumed from copies in memory at step 7"), notices[0]
    assert losses(tmp_path / "run") == straight(configure, tmp_path, FEW_SAVES), "to the bit"
