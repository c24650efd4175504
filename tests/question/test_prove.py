"""`fourfold prove`: flipped bits and forged files are found; a sound run is not accused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from helpers.checkpoint_samples import record_of, reseal
from helpers.ranks import on_ranks
from helpers.tiny_run import TINY
from helpers.tiny_text_run import VOCAB, sentences
from safetensors.torch import load_file, save_file

from fourfold.config import Config, load_config
from fourfold.data.datasets import read_manifest
from fourfold.engine import build_engine
from fourfold.metrics.jsonl import JsonLines
from fourfold.question.prove import Discrepancy, Proof
from fourfold.tokenizer import Tokenizer, train
from fourfold.tools.prepare.pipeline import prepare

STEPS = 6


@dataclass(frozen=True)
class Ground:
    """A finished run on text, whose files tests damage and mend."""

    place: Path

    @property
    def run(self) -> Path:
        return self.place / "run"

    def files(self) -> dict[str, list[Path]]:
        steps = sorted(self.run.glob("step_*"))
        return {
            "weights": [file for step in steps for file in step.glob("model-*.safetensors")],
            "moments": [file for step in steps for file in step.glob("optim-*.safetensors")],
            "manifest": [file for step in steps for file in step.glob("*.json")],
            "data": [*(self.place / "data").glob("words.*")],
            "log": [self.run / "metrics.jsonl", self.run / "metrics.seal"],
        }

    def first_finding(self, **asked: bool) -> Discrepancy | None:
        return next(Proof(self.run).steps(**asked or {"every": True}), None)


def configured(place: Path, name: str, *overrides: str, world: int = 1) -> Config:
    tree = TINY | {"Engine": TINY["Engine"] | {"max_steps": STEPS}}
    file = place / "run.yaml"
    file.write_text(yaml.safe_dump(tree))
    keys = [
        f"Engine.save_load.output_dir={place / name}",
        "Engine.save_load.keep_last=0",
        f"Data.dataset.input_dir={place / 'data'}",
        f"Data.dataset.cache_dir={place / 'cache'}",
        "Data.dataset.eos_token_id=null",
    ]
    return load_config(file, [*keys, *overrides], world)


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    place = tmp_path_factory.mktemp("proved")
    texts = sentences(60, seed=1)
    train(texts, VOCAB).save(place / "tokenizer.json")
    prepare(iter(texts), place / "data" / "words", Tokenizer.load(place / "tokenizer.json"))
    build_engine(configured(place, "run")).fit()
    return Ground(place)


def flips(ground: Ground, count: int, seed: int) -> Iterator[tuple[str, Path, bytes, bytes]]:
    """Random bits: what they are in, the file, its bytes before and after."""
    source = random.Random(seed)
    files = ground.files()
    for _ in range(count):
        kind = source.choice(list(files))
        file = source.choice(files[kind])
        before = file.read_bytes()
        after = bytearray(before)
        after[source.randrange(len(after))] ^= 1 << source.randrange(8)
        yield kind, file, before, bytes(after)


# What the run depends on. Without `append_eod` the ends of documents are searched for; the format
# is known by the files.
READ = ("documents", "tokens", "dtype", "bytes", "sha256")


def cannot_matter(file: Path, before: bytes, after: bytes) -> bool:
    """Only what no run reads: who made the data's manifest, and what it counted along the way.

    The size of the tokenizer is compared with the model's, which is larger.
    """
    if file.name != "words.json":
        return False
    try:
        was, now = json.loads(before), json.loads(after)
    except ValueError:
        return False
    return (
        isinstance(now, dict)
        and "fourfold" in now
        and all(now.get(key) == was[key] for key in READ)
        and all(
            now["tokenizer"].get(key) == was["tokenizer"][key] for key in ("identity", "eos_id")
        )
    )


def find_flips(ground: Ground, count: int, seed: int) -> list[str]:
    """The flips that were not found and may matter."""
    missed = []
    for kind, file, before, after in flips(ground, count, seed):
        file.write_bytes(after)
        try:
            found = ground.first_finding()
        finally:
            file.write_bytes(before)
        if found is None and not cannot_matter(file, before, after):
            place = next(i for i, (a, b) in enumerate(zip(before, after)) if a != b)
            missed.append(f"{kind}: {file}, byte {place}: {before[place]} -> {after[place]}")
    return missed


def test_a_sound_run_is_not_accused(ground: Ground) -> None:
    proof = Proof(ground.run)
    assert list(proof.steps(every=True)) == []
    assert f"all {STEPS} steps, recomputed" in proof.checked and proof.unchecked == []
    assert list(Proof(ground.run).steps(sample=2, seed=3)) == []
    assert read_manifest(ground.place / "data" / "words.bin") is not None


def test_flipped_bits_are_found(ground: Ground) -> None:
    assert find_flips(ground, 40, seed=1) == []


@pytest.mark.slow
def test_a_thousand_flipped_bits_are_found(ground: Ground) -> None:
    assert find_flips(ground, 1000, seed=2) == []


@pytest.mark.parametrize("kind", ["model", "optim"])
def test_a_forged_tensor_is_named(ground: Ground, kind: str) -> None:
    """Every hash fits: only computing the steps again can tell."""
    step = ground.run / "step_4"
    kept = {file: file.read_bytes() for file in step.iterdir()}
    (file,) = step.glob(f"{kind}-*.safetensors")
    tensors = load_file(file)
    name = sorted(tensors)[3]
    bits = tensors[name].view(torch.int32)
    bits.view(-1)[5] ^= 1  # the last bit of one number
    save_file(tensors, file)
    index = step / f"index-{kind}.json"
    described = json.loads(index.read_text())
    for entry in described["files"]:
        if isinstance(entry, dict):
            entry.update(record_of(file))
        elif isinstance(described["files"][entry], dict):
            described["files"][entry].update(record_of(file))
    index.write_text(json.dumps(described))
    reseal(step)
    try:
        proof = Proof(ground.run)
        found = list(proof.steps(every=True))
    finally:
        for path, data in kept.items():
            path.write_bytes(data)
    assert not [one for one in found if one.what == "file"]
    tensors_named = [one for one in found if one.what == "tensor" and one.step == 4]
    assert [one.name for one in tensors_named] == [name]
    assert "1 element of" in tensors_named[0].text


def test_forged_records_are_named(ground: Ground) -> None:
    """With a seal that fits, what can be computed is found still."""
    log, seal = ground.run / "metrics.jsonl", ground.run / "metrics.seal"
    kept = log.read_bytes(), seal.read_bytes()
    lines = [json.loads(line) for line in kept[0].splitlines()]
    trains = [record for record in lines if record["kind"] == "train"]
    evals = [record for record in lines if record["kind"] == "eval"]
    forged: dict[str, Callable[[], object]] = {
        "loss": lambda: trains[2].update(loss=trains[2]["loss"] - 1e-12),
        "grad_norm": lambda: trains[4].update(grad_norm=trains[4]["grad_norm"] * 2),
        "learning_rate": lambda: trains[3].update(learning_rate=1e-3),
        "samples": lambda: trains[1].update(samples=17),
        "ips_total": lambda: trains[5].update(ips_total=1.0),
        "evaluation": lambda: evals[0].update(loss=1.0),
        "missing": lambda: lines.remove(trains[3]),
    }
    try:
        for name, forge in forged.items():
            lines = [json.loads(line) for line in kept[0].splitlines()]
            trains = [record for record in lines if record["kind"] == "train"]
            evals = [record for record in lines if record["kind"] == "eval"]
            forge()
            log.write_text("".join(json.dumps(record) + "\n" for record in lines))
            JsonLines(log, resume_step=STEPS).close()
            found = list(Proof(ground.run).steps(every=True))
            assert found and all(one.what in ("log", "loss", "evaluation") for one in found), name
            assert any(name in str(one) or one.what == name for one in found), name
    finally:
        log.write_bytes(kept[0])
        seal.write_bytes(kept[1])


def test_a_changed_token_is_found_by_the_steps_that_read_it(ground: Ground) -> None:
    """Data whose manifest was forged too, and whose length is that of before."""
    data, manifest = ground.place / "data" / "words.bin", ground.place / "data" / "words.json"
    kept = data.read_bytes(), manifest.read_bytes()
    changed = bytearray(kept[0])
    changed[100] ^= 1
    data.write_bytes(changed)
    described = json.loads(kept[1])
    from hashlib import sha256

    described["sha256"]["bin"] = sha256(changed).hexdigest()
    manifest.write_text(json.dumps(described))
    try:
        found = list(Proof(ground.run).steps(every=True))
    finally:
        data.write_bytes(kept[0])
        manifest.write_bytes(kept[1])
    assert {one.what for one in found} >= {"data"}


def test_the_command(ground: Ground, command: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = command("prove", ground.run, "--sample", 1)
    assert code == 0 and "as it was trained" in out
    file = ground.run / "step_2" / "model-00001-of-00001.safetensors"
    kept = file.read_bytes()
    file.write_bytes(kept[:-1] + bytes([kept[-1] ^ 128]))
    try:
        code, out, _ = command("prove", ground.run, "--all", "--json")
    finally:
        file.write_bytes(kept)
    told = json.loads(out)
    assert code == 1 and {one["what"] for one in told["findings"]} == {"file", "tensor"}
    assert command("prove", ground.run, "--all", "--sample", 2)[0] == 2


@pytest.mark.slow
def test_on_several_ranks(ground: Ground, tmp_path: Path) -> None:
    place = ground.place
    config = configured(place, "two", "Distributed.mp_degree=2", world=2)
    on_ranks(2, lambda _: build_engine(config, 2).fit())
    assert list(Proof(place / "two").steps(every=True)) == []
    assert list(Proof(place / "two", nproc=1).steps(every=True)) == []
