"""Runs on a bucket: data, checkpoints, records, requests and the lock."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml
from helpers.bucket import forked
from helpers.tiny_run import FIXTURE, TINY, exit_status

from fourfold import storage
from fourfold.config import Config, load_config
from fourfold.engine import build_engine, lock
from fourfold.errors import RunError, UserError

FEW = ("Engine.max_steps=4", "Engine.eval_freq=0", "Engine.test_iters=0")


def upload_data(address: str) -> str:
    for file in FIXTURE.iterdir():
        if file.is_file():
            storage.upload(file, f"{address}/data/{file.name}")
    return f"{address}/data"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY))
    return path


def config_of(file: Path | str, output_dir: str, *overrides: str) -> Config:
    return load_config(file, [f"Engine.save_load.output_dir={output_dir}", *FEW, *overrides], 1)


def fit(config: Config) -> list[float]:
    build_engine(config).fit()
    place = config.Engine.save_load.output_dir
    return losses(
        storage.read(f"{place}/metrics.jsonl")
        if storage.is_address(place)
        else (Path(place) / "metrics.jsonl").read_bytes()
    )


def losses(records: bytes) -> list[float]:
    found = [json.loads(line) for line in records.splitlines()]
    return [one["loss"] for one in found if "loss" in one and "grad_norm" in one]


def test_all_of_it_in_a_bucket_is_the_same_to_the_bit(
    address: str, tiny: Path, tmp_path: Path
) -> None:
    """Configuration, data and checkpoints there; half the run, then the rest of it."""
    here = fit(config_of(tiny, str(tmp_path / "here")))
    assert len(here) == 4
    storage.write(f"{address}/gpt.yaml", b"_base_: base/tiny.yaml\n")
    storage.write(f"{address}/base/tiny.yaml", tiny.read_bytes())
    data = f"Data.dataset.input_dir={upload_data(address)}"
    file, run = f"{address}/gpt.yaml", f"{address}/run"
    assert fit(config_of(file, run, data, "Engine.max_steps=2")) == here[:2]
    assert fit(config_of(file, run, data)) == here
    assert storage.children(run).keys() >= {"latest", "metrics.jsonl", "step_2", "step_4"}
    assert ".lock" not in storage.children(run)
    face = storage.local_path(f"{address}/data")
    assert not list(face.glob("*.bin"))  # read in blocks


def test_fleetx_files_and_prefixes_in_a_bucket(address: str, tmp_path: Path) -> None:
    from helpers.token_files import write_fleetx

    from fourfold.data.readers import open_datasets

    documents = [list(range(start, start + 50)) for start in range(0, 500, 50)]
    write_fleetx(tmp_path / "x", documents)
    for file in tmp_path.glob("x_*"):
        storage.upload(file, f"{address}/d/{file.name}")
    (here,) = open_datasets(tmp_path / "x")
    for named in (f"{address}/d", f"{address}/d/x", f"{address}/d/x_ids.npy"):
        (there,) = open_datasets(named)
        assert there.is_remote and there.fingerprint == here.fingerprint
        assert [list(there.tokens(d)) for d in range(10)] == documents
    with pytest.raises(UserError, match=rf"{address}/nothing: no such directory or dataset"):
        open_datasets(f"{address}/nothing")


def test_one_run_at_a_time(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "WAIT_SECONDS", 0.2)
    monkeypatch.setattr(lock, "SETTLE_SECONDS", 0.05)
    place = storage.local_path(address)
    held = lock.claim(place)

    def try_it() -> None:
        lock._held.clear()
        with pytest.raises(UserError, match=rf"{address} is in use by another run \(process"):
            lock.claim(place)

    assert exit_status(forked(try_it)) == 0
    held.check()
    held.release()
    assert storage.children(address) == {}
    # One whose process has ended keeps nobody out, and finds out if it has not.
    assert exit_status(forked(lambda: (lock.claim(place), os._exit(0)))) == 0
    again = lock.claim(place)
    again.check()
    storage.write(f"{address}/.lock", json.dumps({"token": "x", "pid": 1, "host": "h"}).encode())
    with pytest.raises(RunError, match="was taken over by process 1 on h"):
        again.check()
    again.release()
    assert ".lock" in storage.children(address)


def test_a_bucket_that_cannot_be_written_is_said_before_the_first_step(
    address: str, tiny: Path
) -> None:
    with pytest.raises(UserError, match=r"a run cannot write there.*no such bucket"):
        build_engine(config_of(tiny, "s3://no-such-bucket-here/run")).fit()


def test_requests_come_from_the_bucket(address: str, tiny: Path) -> None:
    engine = build_engine(config_of(tiny, address, "Engine.save_load.save_steps=0"))
    storage.write(f"{address}/SAVE", b"")
    assert engine.remote is not None
    engine.output_dir.mkdir(parents=True, exist_ok=True)
    engine.remote.look_for_requests()
    engine.fit()
    assert storage.children(address).keys() >= {"step_1", "step_4"}
    assert "SAVE" not in storage.children(address)
    assert not (engine.output_dir / "SAVE").exists()
