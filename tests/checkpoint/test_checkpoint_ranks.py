"""Ranks that save and load together: one checkpoint or none, and the same word from all."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from helpers.checkpoint_ranks import on_all, rank_groups, rows_of, save_rows
from helpers.checkpoint_samples import Tensors, blank, same_bits, sample, state_of

from fourfold import checkpoint
from fourfold.checkpoint import RankGroup, Shard, reading, streams, writing
from fourfold.checkpoint.rendezvous import SaveRendezvous
from fourfold.errors import CheckpointError


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def load_rows(where: Path, like: Tensors, size: int) -> tuple[list[Any], Tensors]:
    """What `resume` gives on each rank, and the tensors they filled together."""
    into = blank(like)
    return on_all(
        rank_groups(size),
        lambda ranks: checkpoint.resume(where, rows_of(into, ranks), lambda _: None, ranks=ranks),
    ), into


# --- what the ranks must agree on -------------------------------------------------------------


def given_by(
    *pieces: Shard | torch.Tensor,
) -> Callable[[RankGroup], dict[str, Shard | torch.Tensor]]:
    return lambda ranks: {"model.w": pieces[ranks.rank]}


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        (given_by(Shard(torch.ones(2, 3), (5, 3), (0, 0)), Shard(torch.ones(2, 3), (5, 3), (3, 0))),
         "3 of its 15 elements are in no piece"),
        (given_by(Shard(torch.ones(3, 3), (5, 3), (0, 0)), Shard(torch.ones(3, 3), (5, 3), (2, 0))),
         "its pieces overlap"),
        (given_by(torch.ones(2), torch.ones(2)), "its pieces overlap"),
        (given_by(Shard(torch.ones(2), (4,), (0,)), Shard(torch.ones(2).half(), (4,), (2,))),
         r"float16 \[4\] on rank 1 and float32 \[4\]"),
        (given_by(Shard(torch.ones(2), (4,), (0,)), Shard(torch.ones(2), (5,), (2,))),
         r"float32 \[5\] on rank 1 and float32 \[4\]"),
    ],
    ids=["gap", "overlap", "replica", "dtype", "shape"],
)  # fmt: skip
def test_pieces_that_make_no_whole_are_not_committed(tmp_path: Path, pieces, reason) -> None:
    save_rows(tmp_path, 1, sample(1), state_of(1), size=2)
    results = on_all(
        rank_groups(2), lambda ranks: checkpoint.save(tmp_path, 2, pieces(ranks), {}, ranks=ranks)
    )
    with pytest.raises(CheckpointError, match=f"cannot save checkpoint .*step_2.*{reason}"):
        raise results[0]
    assert results[1] == tmp_path / "step_2"
    assert names(tmp_path) == {"step_1", "latest"}


def test_a_piece_outside_its_tensor_is_a_mistake_of_the_caller(tmp_path: Path) -> None:
    for piece in (Shard(torch.ones(3), (4,), (2,)), Shard(torch.ones(3), (3, 1), (0, 0))):
        with pytest.raises(ValueError, match="no piece of a tensor"):
            checkpoint.save(tmp_path, 1, {"model.w": piece}, {})


def test_a_tensor_no_rank_asks_for_is_named_on_every_rank(tmp_path: Path) -> None:
    save_rows(tmp_path, 1, {f"model.{i}": torch.ones(2) for i in range(4)}, {}, size=2)
    results = on_all(
        rank_groups(3),
        lambda ranks: checkpoint.load(
            tmp_path / "step_1", {f"model.{ranks.rank}": torch.zeros(2)}, ranks=ranks
        ),
    )
    assert {type(result) for result in results} == {checkpoint.MismatchError}
    assert len({str(result) for result in results}) == 1
    assert "1 only in it: model.3." in str(results[0])


def test_a_misfit_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    save_rows(tmp_path, 1, {"model.w": torch.ones(4)}, {}, size=2)
    into = [torch.zeros(4), torch.zeros(5)]
    results = on_all(
        rank_groups(2),
        lambda ranks: checkpoint.resume(
            tmp_path, {"model.w": into[ranks.rank]}, pytest.fail, ranks=ranks
        ),
    )
    assert {type(result) for result in results} == {checkpoint.MismatchError}
    assert "rank 1: " in str(results[0]) and "here float32 [5]" in str(results[0])
    assert not into[0].any()


@pytest.mark.parametrize("file", ["rank00000", "rank00002", "state.json", "manifest.json"])
def test_all_ranks_fall_back_together(tmp_path: Path, file: str) -> None:
    tensors = {step: sample(step, floats=24) for step in (1, 2)}
    for step in (1, 2):
        save_rows(tmp_path, step, tensors[step], state_of(step), size=3)
    damaged = next(path for path in sorted((tmp_path / "step_2").iterdir()) if file in path.name)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    notices: list[str] = []
    into = blank(tensors[1])
    results = on_all(
        rank_groups(2),
        lambda ranks: checkpoint.resume(
            tmp_path, rows_of(into, ranks), notices.append, ranks=ranks
        ),
    )
    assert results == [(tmp_path / "step_1", state_of(1))] * 2
    assert same_bits(into, tensors[1])
    assert len(notices) == 2 and notices[0] == notices[1] and damaged.name in notices[0]


def test_nothing_to_resume_from_is_told_by_every_rank(tmp_path: Path) -> None:
    results, _ = load_rows(tmp_path, sample(1), size=3)
    assert all("no checkpoint at" in str(result) for result in results)


def test_a_rank_that_sees_a_replaced_checkpoint_makes_all_start_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 reads the manifest just before, the others just after step_2 is written again."""
    save_rows(tmp_path, 1, sample(1), state_of(1), size=2)
    save_rows(tmp_path, 2, sample(2), state_of(2), size=2)
    old = reading.read_manifest(tmp_path / "step_2")
    save_rows(tmp_path, 2, sample(22), state_of(22), size=2)
    real, reads = reading.read_manifest, itertools.count()
    lock = threading.Lock()

    def stale_once(directory: Path, prefix: str) -> object:
        with lock:
            return old if next(reads) == 0 else real(directory, prefix)

    monkeypatch.setattr(reading, "read_manifest", stale_once)
    results, into = load_rows(tmp_path, sample(2), size=3)
    assert results == [(tmp_path / "step_2", state_of(22))] * 3
    assert same_bits(into, sample(22)) and next(reads) > 4


# --- ranks that fail, hang or come late -------------------------------------------------------


def test_a_failing_rank_is_named_by_rank_0_and_the_others_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_rows(tmp_path, 1, sample(1), state_of(1), size=3)
    real = writing.write_shards

    def full_on_rank_1(directory: Path, pieces: Any, label: str, *rest: Any) -> object:
        tables = real(directory, pieces, label, *rest)
        if label == "rank00001-":
            raise OSError(28, "No space left on device")
        return tables

    monkeypatch.setattr(writing, "write_shards", full_on_rank_1)
    results = save_rows(tmp_path, 2, sample(2), state_of(2), size=3)
    assert isinstance(results[0], CheckpointError) and isinstance(results[1], CheckpointError)
    assert "step_2: rank 1: [Errno 28] No space left" in str(results[0])
    assert "make room (" in str(results[0])
    assert "step_2: [Errno 28] No space left" in str(results[1])
    assert results[2] == tmp_path / "step_2"
    assert names(tmp_path) == {"step_1", "latest"}
    monkeypatch.undo()
    assert save_rows(tmp_path, 2, sample(2), state_of(2), size=3) == [tmp_path / "step_2"] * 3
    assert load_rows(tmp_path, sample(2), size=2)[0][0][1] == state_of(2)


def test_a_rank_without_room_for_its_record_is_named_by_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for it until the time runs out: it would be an hour."""

    def full(*given: Any) -> NoReturn:
        raise OSError(28, "No space left on device")

    real = writing.write_shards
    monkeypatch.setattr(SaveRendezvous, "report_bytes", full)
    monkeypatch.setattr(
        writing, "write_shards", lambda *given: real(*given) if "00000" in given[2] else full()
    )
    monkeypatch.setattr(writing, "NO_ROOM_SECONDS", 0.2)
    results = on_all(
        rank_groups(3, timeout_seconds=3600.0),
        lambda ranks: checkpoint.save(tmp_path, 2, rows_of(sample(2), ranks), {}, ranks=ranks),
    )
    assert {type(result) for result in results} == {CheckpointError}
    for rank in (1, 2):
        assert f"rank {rank}: No space left on device, not even to say so" in str(results[0])
    assert f"(on {socket.gethostname()})" in str(results[0])
    assert names(tmp_path) == set()


def test_rank_0_failing_is_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = writing.write_shards

    def full_on_rank_0(directory: Path, pieces: Any, label: str, *rest: Any) -> object:
        if label == "rank00000-":
            raise OSError(5, "I/O")
        return real(directory, pieces, label, *rest)

    monkeypatch.setattr(writing, "write_shards", full_on_rank_0)
    results = save_rows(tmp_path, 2, sample(2), state_of(2), size=2)
    assert "rank 0: [Errno 5] I/O" in str(results[0]) and results[1] == tmp_path / "step_2"
    assert names(tmp_path) == set()


@pytest.mark.parametrize("begin", [checkpoint.save, checkpoint.begin_save])
def test_what_keeps_rank_0_from_beginning_is_raised_on_all_ranks_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: Callable[..., object]
) -> None:
    def no_inodes(meeting: SaveRendezvous) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SaveRendezvous, "open", no_inodes)
    # Nobody waits for the time to run out: it would be an hour.
    results = on_all(
        rank_groups(3, timeout_seconds=3600.0),
        lambda ranks: begin(tmp_path, 2, rows_of(sample(2), ranks), {}, ranks=ranks),
    )
    assert len({str(result) for result in results}) == 1
    assert isinstance(results[2], CheckpointError) and "step_2: [Errno 28] No" in str(results[2])
    assert names(tmp_path) == set()


def test_the_parts_of_all_ranks_must_fit_and_not_only_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = sum(tensor.nbytes for tensor in sample(2, floats=1 << 20).values())
    monkeypatch.setattr(writing, "free_bytes", lambda place: int(0.6 * needed))
    monkeypatch.setattr(writing, "write_shards", pytest.fail)
    results = save_rows(tmp_path, 2, sample(2, floats=1 << 20), state_of(2), size=2)
    assert {type(result) for result in results} == {CheckpointError}
    assert all("the disk is too full: it needs" in str(result) for result in results)


def test_a_rank_that_takes_long_is_waited_for_while_its_files_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = writing.write_shards

    def slow_on_rank_1(directory: Path, pieces: Any, label: str, *rest: Any) -> object:
        if label == "rank00001-":
            for number in range(12):
                (directory / "growing").write_bytes(bytes(number))
                time.sleep(0.1)
            (directory / "growing").unlink()
        return real(directory, pieces, label, *rest)

    monkeypatch.setattr(writing, "write_shards", slow_on_rank_1)
    results = save_rows(tmp_path, 2, sample(2), state_of(2), size=3, timeout_seconds=0.5)
    assert results == [tmp_path / "step_2"] * 3


def test_a_file_system_that_remembers_old_answers_about_names_is_asked_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS tells from memory, for up to a minute, that a name it was asked for is not there."""
    real = os.stat
    forgotten: dict[str, int] = {}

    def stale(path: Any, *given: Any, **named: Any) -> os.stat_result:
        name = os.fspath(path) if isinstance(path, str | Path) else ""
        if ".tmp-crew-" in name and forgotten.setdefault(name, 0) < 1000:
            forgotten[name] += 1
            raise FileNotFoundError(2, "No such file or directory", name)
        return real(path, *given, **named)

    monkeypatch.setattr(os, "stat", stale)
    results = save_rows(tmp_path, 2, sample(2), state_of(2), size=3, timeout_seconds=2.0)
    assert results == [tmp_path / "step_2"] * 3


def test_a_mistake_of_ours_on_one_rank_reaches_rank_0_and_keeps_its_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = writing.write_shards

    def broken_on_rank_1(directory: Path, pieces: Any, label: str, *rest: Any) -> object:
        if label == "rank00001-":
            raise ZeroDivisionError("ours")
        return real(directory, pieces, label, *rest)

    monkeypatch.setattr(writing, "write_shards", broken_on_rank_1)
    results = save_rows(tmp_path, 2, sample(2), state_of(2), size=2)
    assert "rank 1: ZeroDivisionError('ours')" in str(results[0])
    assert isinstance(results[1], ZeroDivisionError)


def test_missing_ranks_are_named_and_a_late_one_leaves_nothing(tmp_path: Path) -> None:
    # Each by itself: the collectives of the others are not waited for.
    together = [RankGroup(rank, 4, "a session", timeout_seconds=0.2) for rank in range(4)]

    def save(ranks: RankGroup) -> Path:
        return checkpoint.save(tmp_path, 1, rows_of(sample(1), ranks), {}, ranks=ranks)

    with pytest.raises(CheckpointError, match=r"no part came from rank 1, 2, 3 within 0\.2 s"):
        save(together[0])
    assert names(tmp_path) == set()
    with pytest.raises(CheckpointError, match=r"rank 0 did not begin this save within 0\.2 s"):
        save(together[3])
    assert names(tmp_path) == set()


def test_meetings_of_dead_sessions_are_cleared_away(tmp_path: Path) -> None:
    for name in (".step_5.tmp-crew-00112233aabbccdd", ".step_5.tmp-crew-00112233aabbccdd-0a1b2c3d"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
    save_rows(tmp_path, 5, sample(5), state_of(5), size=2, session="another")
    assert names(tmp_path) == {"step_5", "latest"}


def test_the_same_step_again_at_once_by_ranks_that_run_ahead(tmp_path: Path) -> None:
    times = 15

    def save(ranks: RankGroup) -> None:
        for number in range(times):
            tensors = rows_of(sample(number, floats=64), ranks)
            checkpoint.save(tmp_path, 7, tensors, state_of(number), ranks=ranks)

    assert on_all(rank_groups(4), save) == [None] * 4
    results, into = load_rows(tmp_path, sample(0, floats=64), size=1)
    assert results[0][1] == state_of(times - 1)
    assert same_bits(into, sample(times - 1, floats=64))
    assert checkpoint.verify(tmp_path / "step_7") == []


# --- in the background ------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3])
def test_a_save_in_the_background_holds_what_there_was_when_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    gate = threading.Event()
    real = writing.write_shards

    def gated(*arguments: Any) -> object:
        assert gate.wait(20)
        return real(*arguments)

    monkeypatch.setattr(writing, "write_shards", gated)
    tensors = sample(4, floats=24)

    def begin(ranks: RankGroup) -> checkpoint.PendingSave:
        return checkpoint.begin_save(
            tmp_path, 4, rows_of(tensors, ranks), state_of(4), keep_last=2, ranks=ranks
        )

    pending = on_all(rank_groups(size), begin)
    assert not any(save.done for save in pending)
    for tensor in tensors.values():
        tensor.zero_()
    gate.set()
    assert [save.wait() for save in pending] == [tmp_path / "step_4"] * size
    assert all(save.done for save in pending)
    _, into = load_rows(tmp_path, tensors, size=2)
    assert same_bits(into, sample(4, floats=24))


def test_tensors_left_in_place_may_change_once_they_are_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some are written by then, one is half read, and the rest is copied."""
    monkeypatch.setattr(streams, "CHUNK_BYTES", streams.BLOCK_BYTES)
    real, half, gate = streams.Outgoing.fill, threading.Event(), threading.Event()
    calls = itertools.count()

    def gated(self: streams.Outgoing, into: streams.Bytes) -> None:
        real(self, into)
        if next(calls) == 20:
            half.set()
            assert gate.wait(20)

    monkeypatch.setattr(streams.Outgoing, "fill", gated)
    tensors = sample(4, floats=1 << 14)
    pending = checkpoint.begin_save(tmp_path, 4, tensors, state_of(4), in_place=True)
    assert half.wait(20)
    pending.settle()
    for tensor in tensors.values():
        tensor.zero_()
    gate.set()
    into = blank(tensors)
    checkpoint.load(pending.wait(), into)
    assert same_bits(into, sample(4, floats=1 << 14))


def test_an_error_in_the_background_appears_at_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, "write_shards", fail)
    pending = checkpoint.begin_save(tmp_path, 1, sample(1), state_of(1))
    for _ in range(2):
        with pytest.raises(CheckpointError, match="No space left"):
            pending.wait()
    assert pending.done and names(tmp_path) == set()
    with pytest.raises(TypeError):
        checkpoint.begin_save(tmp_path, 1, sample(1), {"tuple": (1, 2)})
