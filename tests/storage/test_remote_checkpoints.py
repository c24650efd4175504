"""Checkpoints in a bucket: whole or not there, whoever is killed, and read from where they are."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from helpers.bucket import S3Server, forked
from helpers.checkpoint_ranks import on_all, rank_groups, rows_of
from helpers.checkpoint_samples import blank, same_bits, sample, state_of

from fourfold import checkpoint, storage
from fourfold.checkpoint import Retention
from fourfold.errors import CheckpointError
from fourfold.storage import addresses


def save(address: str, *steps: int, keep: int | Retention = 0) -> None:
    for step in steps:
        checkpoint.save(address, step, sample(step), state_of(step), keep)


def steps_at(address: str) -> list[str]:
    return [path.name for path in checkpoint.candidates(address)]


def resumed(address: str) -> int:
    """The step resumed from, whose every byte must be its own."""
    into = blank(sample(1))
    path, state = checkpoint.resume(address, into, lambda notice: None)
    step = int(path.name.removeprefix("step_"))
    assert state == state_of(step) and same_bits(into, sample(step))
    return step


def test_saved_resumed_verified_and_removed(address: str) -> None:
    save(address, 1, 2, 3, keep=2)
    assert steps_at(address) == ["step_3", "step_2"]
    assert storage.children(address).keys() == {"latest", "step_2", "step_3"}
    assert storage.read(f"{address}/latest") == b"step_3\n"
    assert resumed(address) == 3
    assert checkpoint.verify(f"{address}/step_3") == []
    assert checkpoint.read_state(f"{address}/step_2") == state_of(2)
    # Nothing large stays on this machine.
    assert not list(storage.local_path(address).glob("step_*/*.safetensors"))


def test_another_machine_resumes(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(address, 4)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    assert resumed(address) == 4


def test_a_step_saved_again_replaces_the_one_before(address: str) -> None:
    save(address, 5, 6)
    other = {name: tensor + 1 for name, tensor in sample(5).items()}
    checkpoint.save(address, 5, other, state_of(5), 0)
    into = blank(sample(1))
    path, _ = checkpoint.resume(address, into, lambda notice: None)
    assert path.name == "step_5" and same_bits(into, other)  # saved last
    assert checkpoint.verify(f"{address}/step_5") == []


def test_verify_finds_a_changed_byte_and_resume_goes_around_it(address: str) -> None:
    save(address, 1, 2)
    chance = random.Random(1)
    for file, known in storage.children(f"{address}/step_2").items():
        place = f"{address}/step_2/{file}"
        content = bytearray(storage.read(place))
        content[chance.randrange(known.size)] ^= 16
        whole = storage.read(place)
        storage.write(place, bytes(content))
        problems = checkpoint.verify(f"{address}/step_2")
        assert problems and file in problems[0], file
        notices: list[str] = []
        path, _ = checkpoint.resume(address, blank(sample(1)), notices.append)
        assert path.name == "step_1" and f"{address}/step_2" in notices[0]
        storage.write(place, whole)
    assert checkpoint.verify(f"{address}/step_2") == []
    storage.write(f"{address}/step_2/stray", b"?")
    assert "stray is not part" in checkpoint.verify(f"{address}/step_2")[0]


def test_ranks_meet_in_the_bucket(address: str) -> None:
    tensors, size = sample(7, floats=64), 3

    def work(ranks: checkpoint.RankGroup) -> Path:
        return checkpoint.save(
            storage.local_path(address), 7, rows_of(tensors, ranks), state_of(7), 0, ranks
        )

    results = on_all(rank_groups(size), work)
    assert not [one for one in results if isinstance(one, BaseException)], results
    assert checkpoint.verify(f"{address}/step_7") == []
    into = blank(tensors)
    checkpoint.load(f"{address}/step_7", into)
    assert same_bits(into, tensors)
    assert storage.children(address).keys() == {"latest", "step_7"}


def test_a_rank_that_fails_is_named_and_nothing_is_committed(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(address, 1)
    real = storage.upload

    def failing(source: Path, place: str, beat: object = None) -> None:
        if "rank00001" in place:
            raise storage.StorageError(f"{place}: access is refused")
        real(source, place)

    monkeypatch.setattr("fourfold.storage.upload", failing)
    tensors = sample(2, floats=64)
    results = on_all(
        rank_groups(2),
        lambda ranks: checkpoint.save(address, 2, rows_of(tensors, ranks), state_of(2), 0, ranks),
    )
    assert all(isinstance(result, CheckpointError) for result in results)
    assert "rank 1" in str(results[0]) and "access is refused" in str(results[0])
    monkeypatch.undo()


def kill_and_resume(address: str, kills: int, floats: int, seed: int) -> None:
    """Kill a process that saves at a random moment, many times; what is there is always whole."""
    chance, step, newest = random.Random(seed), 1, 0
    began = time.monotonic()
    checkpoint.save(address, step, sample(step, floats), state_of(step), 2)
    usual = time.monotonic() - began
    newest = step
    for _ in range(kills):
        step += 1

        def work(step: int = step) -> None:
            checkpoint.save(address, step, sample(step, floats), state_of(step), 2)

        pid = forked(work)
        time.sleep(chance.uniform(0, 1.2 * usual))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        into = blank(sample(1, floats))
        path, state = checkpoint.resume(address, into, pytest.fail)
        found = int(path.name.removeprefix("step_"))
        assert found in (newest, step) and (code != 0 or found == step)
        assert state == state_of(found) and same_bits(into, sample(found, floats))
        newest = found
    save_step = step + 1
    checkpoint.save(address, save_step, sample(save_step, floats), state_of(save_step), 2)
    # What the killed ones left is gone.
    left = storage.children(address)
    assert len([name for name in left if name.startswith("step_")]) == 2
    assert not [name for name in left if name.startswith(".")]
    assert all(checkpoint.verify(path) == [] for path in checkpoint.candidates(address))


def test_killed_during_upload(address: str) -> None:
    kill_and_resume(address, kills=4, floats=1 << 12, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_killed_during_upload_many_times(address: str, seed: int) -> None:
    kill_and_resume(address, kills=20, floats=1 << 20, seed=seed)


def test_a_server_that_vanishes_costs_no_checkpoint(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    server = S3Server()
    for name, value in server.variables().items():
        monkeypatch.setenv(name, value)
    address = "s3://shelf/vanishing"
    # The library remembers the server of the other tests.
    addresses.file_system(address)[0].clear_instance_cache()
    try:
        server.start()
        pending = checkpoint.begin_save(address, 1, sample(1), state_of(1))
        assert pending.wait().name == "step_1"
        server.stop()
        with pytest.raises(CheckpointError, match=r"cannot save checkpoint s3://.*step_2.*server"):
            save(address, 2)
        with pytest.raises(storage.StorageError, match="check the server"):
            checkpoint.candidates(address)
    finally:
        server.stop()
    addresses.file_system(address)[0].clear_instance_cache()


# -- which stay ----------------------------------------------------------------------------------


def test_multiples_of_a_step_are_kept_for_good(tmp_path: Path) -> None:
    keep = Retention(last=2, every_steps=4)
    for step in range(1, 12):
        checkpoint.save(tmp_path, step, sample(step), state_of(step), keep)
    assert {path.name for path in tmp_path.glob("step_*")} == {
        "step_4",
        "step_8",
        "step_10",
        "step_11",
    }


def test_one_an_hour_is_kept_for_good(tmp_path: Path) -> None:
    keep, half_hour = Retention(last=1, every_hours=1.0), 1800
    began = int(time.time()) - 20 * half_hour
    for step in range(1, 10):
        checkpoint.save(tmp_path, step, sample(step), state_of(step), keep)
        when = began + step * half_hour
        os.utime(tmp_path / f"step_{step}" / "manifest.json", (when, when))
    kept = {path.name for path in tmp_path.glob("step_*")}
    assert kept == {"step_1", "step_3", "step_5", "step_7", "step_9"}


def test_the_rules_hold_in_a_bucket_too(address: str) -> None:
    save(address, 1, 2, 3, 4, 5, keep=Retention(last=1, every_steps=2))
    assert sorted(steps_at(address)) == ["step_2", "step_4", "step_5"]
