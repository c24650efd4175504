"""Loss spikes: found by all ranks alike, the document named, and a run that goes back."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from helpers.ranks import on_ranks

from fourfold import checkpoint
from fourfold.checkpoint import copy_store
from fourfold.config import Config, load_config
from fourfold.config.engine_section import SpikesSection
from fourfold.data.provenance import pieces_of
from fourfold.engine import build_engine
from fourfold.engine.run_data import open_run_data
from fourfold.engine.spikes import SpikeDetector
from fourfold.engine.updates import StepResult
from fourfold.mesh import Layout
from fourfold.metrics.jsonl import read_jsonl
from fourfold.question.history import RunHistory
from fourfold.question.prove import Proof
from fourfold.question.replay import Replay

VOCABULARY, KNOWN, LENGTH, DOCUMENTS, DOCUMENT_TOKENS = 64, 20, 32, 200, 36
STEPS, BATCH, WARM = 44, 4, 24
KINDS = ("repeated", "shuffled", "foreign")
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one": (1, []),
    "dp2": (2, ["Distributed.dp_degree=2"]),
    "mp2 pp2": (4, ["Distributed.mp_degree=2", "Distributed.pp_degree=2"]),
}


def document(source: random.Random) -> list[int]:
    """Token k + 1 follows from token k but for a choice of two: there is a loss to lower."""
    tokens = [source.randrange(1, KNOWN)]
    while len(tokens) < DOCUMENT_TOKENS - 1:
        tokens.append(1 + (tokens[-1] + source.randrange(2)) % (KNOWN - 1))
    return [*tokens, 0]


def poisoned(kind: str, clean: Sequence[int], source: random.Random) -> list[int]:
    body = list(clean[:-1])
    if kind == "repeated":
        body = [source.randrange(KNOWN, VOCABULARY)] * len(body)
    elif kind == "shuffled":  # the bytes of 16-bit ids, as a file read one byte off has them
        data = bytearray(np.array(body, np.uint16).tobytes())
        source.shuffle(data)
        body = (1 + np.frombuffer(bytes(data), np.uint16) % (VOCABULARY - 1)).tolist()
    else:  # another tokenizer's ids
        body = [KNOWN + (token * 37 + 11) % (VOCABULARY - KNOWN) for token in body]
    return [*body, 0]


def write_data(folder: Path, seed: int, poison: tuple[int, str] | None = None) -> Path:
    source = random.Random(seed)
    documents = [document(source) for _ in range(DOCUMENTS)]
    if poison is not None:
        number, kind = poison
        documents[number] = poisoned(kind, documents[number], random.Random(seed + 1))
    folder.mkdir(parents=True)
    lengths = np.array([len(one) for one in documents], np.int32)
    np.save(folder / "x_ids.npy", np.concatenate([np.array(d, np.uint16) for d in documents]))
    np.savez(folder / "x_idx.npz", lens=lengths, docs=np.arange(len(lengths) + 1))
    return folder


def config_of(folder: Path, data: Path, name: str, world: int = 1, *overrides: str) -> Config:
    tree: dict[str, Any] = {
        "Global": {"device": "cpu", "seed": 5},
        "Engine": {
            "max_steps": STEPS, "logging_freq": 1, "eval_freq": 0, "test_iters": 0,
            "tensorboard": False,
            "save_load": {
                "save_steps": 5, "keep_last": 0, "output_dir": str(folder / name),
            },
            "spikes": {"action": "warn", "window": 8, "warm_up": WARM},
        },
        "Data": {
            "batch_size": {"global_batch_size": BATCH, "micro_batch_size": 2},
            "dataset": {
                "input_dir": str(data), "split": "1", "max_seq_len": LENGTH, "eos_token_id": 0,
                "cache_dir": str(folder / "cache"),
            },
        },
        "Model": {
            "vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2,
            "num_attention_heads": 2, "max_position_embeddings": LENGTH,
            "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
            "use_recompute": False,
        },
        "Optimizer": {"lr": {"max_lr": 1e-2, "min_lr": 1e-3, "decay_steps": STEPS}},
    }  # fmt: skip
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(tree))
    return load_config(file, list(overrides), world)


def fit(config: Config, world: int = 1) -> None:
    if world == 1:
        build_engine(config).fit()
    else:
        on_ranks(world, lambda _: build_engine(config, world).fit())


def events(run: Path, kind: str) -> list[dict]:
    return [r for r in read_jsonl(run / "metrics.jsonl") if r.get("event") == kind]


def readable_document(folder: Path, seed: int, *overrides: str) -> int:
    """One that a step after the warm-up reads most of, chosen by the seed."""
    data = write_data(folder / "probe", seed)
    opened = open_run_data(config_of(folder, data, "probed", 1, *overrides), Layout())
    loader = opened.loaders["train"]
    readable = {
        piece.document
        for step in range(WARM + 4, STEPS + 1)
        for sample in loader.sample_ids(step - 1)
        for piece in pieces_of(loader.samples, int(sample))
        if piece.stop - piece.start > DOCUMENT_TOKENS // 2
    }
    return random.Random(seed).choice(sorted(readable))


def poison_is_named(folder: Path, seed: int, kind: str, layout: str) -> bool:
    world, keys = LAYOUTS[layout]
    folder.mkdir()
    number = readable_document(folder, seed)
    data = write_data(folder / "data", seed, (number, kind))
    fit(config_of(folder, data, "run", world, *keys), world)
    first = [
        json.loads(file.read_text())["documents"][0]["document"]
        for file in sorted((folder / "run" / "spikes").glob("*.json"))
    ]
    return number in first


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("repeated", "one"),
        pytest.param("shuffled", "dp2", marks=pytest.mark.slow),
        pytest.param("foreign", "mp2 pp2", marks=pytest.mark.slow),
    ],
)
def test_the_poisoned_document_comes_first(tmp_path: Path, kind: str, layout: str) -> None:
    assert poison_is_named(tmp_path / "ground", 1, kind, layout)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
def test_of_a_hundred_poisoned_documents(tmp_path: Path, part: int) -> None:
    """Twenty in each part: at least 95 of 100 in all, so at most one missing here."""
    named = []
    for number in range(20 * part, 20 * part + 20):
        kind, layout = KINDS[number % 3], list(LAYOUTS)[number // 3 % 3]
        named.append(poison_is_named(tmp_path / str(number), 1000 + number, kind, layout))
    print(f"{sum(named)} of 20 named")
    assert sum(named) >= 19


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 20), marks=pytest.mark.slow)])
def test_no_spike_in_clean_runs(tmp_path: Path, seeds: range) -> None:
    for seed in seeds:
        folder = tmp_path / str(seed)
        folder.mkdir()
        data = write_data(folder / "data", seed)
        fit(config_of(folder, data, "run", 1, f"Global.seed={seed}"))
        assert events(folder / "run", "spike") == []
        assert not (folder / "run" / "spikes").exists()


def losses(run: Path) -> dict[int, tuple[float, float]]:
    records = read_jsonl(run / "metrics.jsonl")
    return {r["step"]: (r["loss"], r["grad_norm"]) for r in records if r["kind"] == "train"}


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    names = checkpoint.tensor_names(directory)
    held = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in names.items()}
    checkpoint.load(directory, held)
    return held


def assert_same_run(one: Path, other: Path) -> None:
    assert losses(one) == losses(other)
    ours, theirs = (tensors(run / f"step_{STEPS}") for run in (one, other))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("layout", "order"),
    [
        ("one", "megatron"),
        pytest.param("one", "elastic", marks=pytest.mark.slow),
        pytest.param("dp2", "megatron", marks=pytest.mark.slow),
        pytest.param("mp2 pp2", "megatron", marks=pytest.mark.slow),
    ],
)
def test_the_rewound_run_is_one_that_never_had_the_window(
    tmp_path: Path, layout: str, order: str
) -> None:
    world, keys = LAYOUTS[layout]
    keys = [*keys, f"Data.dataset.order={order}"]
    number = readable_document(tmp_path, 3, f"Data.dataset.order={order}")
    data = write_data(tmp_path / "data", 3, (number, "repeated"))
    make = partial(config_of, tmp_path, data)
    fit(make("rewound", world, *keys, "Engine.spikes.action=rewind"), world)
    rewinds = events(tmp_path / "rewound", "rewind")
    assert rewinds and sorted(losses(tmp_path / "rewound")) == [*range(1, STEPS + 1)]
    samples = [sample for event in rewinds for sample in event["sample_ids"]]
    assert len(samples) == BATCH * len(rewinds)
    ranges = [[sample, sample + 1] for sample in samples]
    fit(make("never", world, *keys, f"Data.dataset.leave_out={ranges}"), world)
    assert_same_run(tmp_path / "rewound", tmp_path / "never")
    if world == 1:
        # What it read can be asked for, computed again and proved.
        history = RunHistory(tmp_path / "rewound")
        replay = Replay(history, STEPS - 2)
        answer = replay.run(replay.segment.config(tmp_path / "scratch"), 1)
        assert answer is not None and answer["equal"] is True
        assert list(Proof(tmp_path / "rewound").steps(every=True)) == []


@pytest.mark.slow
def test_a_killed_run_knows_what_it_left_out(tmp_path: Path) -> None:
    number = readable_document(tmp_path, 3)
    data = write_data(tmp_path / "data", 3, (number, "repeated"))
    keys = ["Engine.spikes.action=rewind", f"Optimizer.lr.decay_steps={STEPS}"]
    make = partial(config_of, tmp_path, data)
    fit(make("straight", 1, *keys))
    (rewind, *_) = events(tmp_path / "straight", "rewind")
    # Ends with the very checkpoint that it went back to and saved again.
    engine = build_engine(make("stopped", 1, *keys))
    assert engine.spikes is not None
    answer = engine.spikes.answer

    def stop_after(*given: Any) -> bool:
        went_back = answer(*given)
        if went_back:
            raise KeyboardInterrupt
        return went_back

    engine.spikes.answer = stop_after  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.fit()
    state = checkpoint.read_state(checkpoint.candidates(tmp_path / "stopped")[0])
    assert state["step"] == rewind["step"] and state["spikes"]["rewinds"] == 1
    assert state["left_out"] == [[min(rewind["sample_ids"]), max(rewind["sample_ids"]) + 1]]
    fit(make("stopped", 1, *keys))
    assert_same_run(tmp_path / "straight", tmp_path / "stopped")


@pytest.mark.slow
def test_copies_in_memory_know_what_was_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed some steps after it went back, and before it saved: the copies of the steps that it
    dropped do not count, those it made since do."""
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(copy_store, "MEMORY", memory)
    number = readable_document(tmp_path, 3)
    data = write_data(tmp_path / "data", 3, (number, "repeated"))
    keys = ["Engine.spikes.action=rewind", "Engine.save_load.memory_copy_steps=1"]
    make = partial(config_of, tmp_path, data)
    fit(make("straight", 1, *keys))
    (rewind, *_) = events(tmp_path / "straight", "rewind")
    engine = build_engine(make("killed", 1, *keys))
    compute = engine.runner.run

    def run(batch: Any, step: int, scale: Any) -> Any:
        spikes = engine.spikes
        if spikes is not None and spikes.rewinds and step == rewind["step"] + 3:
            assert engine.saves.copying is not None
            engine.saves.copying.wait()
            raise KeyboardInterrupt
        return compute(batch, step, scale)

    engine.runner.run = run  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.fit()
    again = build_engine(make("killed", 1, *keys))
    again.fit()
    resumed = f"resumed from copies in memory at step {rewind['step'] + 2}"
    assert any(resumed in notice for notice in again.notices), again.notices
    assert_same_run(tmp_path / "straight", tmp_path / "killed")


def test_a_skipped_update_leaves_the_weights(tmp_path: Path) -> None:
    number = readable_document(tmp_path, 3)
    data = write_data(tmp_path / "data", 3, (number, "repeated"))
    fit(config_of(tmp_path, data, "run", 1, "Engine.spikes.action=skip"))
    spikes = events(tmp_path / "run", "spike")
    assert spikes
    state = checkpoint.read_state(tmp_path / "run" / f"step_{STEPS}")
    assert state["optimizer_updates"] == STEPS - len(spikes) and state["skipped_updates"] == 0
    assert list(Proof(tmp_path / "run").steps(every=True)) == []


@pytest.mark.slow
def test_at_most_so_many_times(tmp_path: Path) -> None:
    number = readable_document(tmp_path, 3)
    data = write_data(tmp_path / "data", 3, (number, "repeated"))
    keys = ["Engine.spikes.action=rewind", "Engine.spikes.most=0"]
    fit(config_of(tmp_path, data, "run", 1, *keys))
    assert events(tmp_path / "run", "spike") and not events(tmp_path / "run", "rewind")
    notices = [r["text"] for r in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "text" in r]
    assert any("Engine.spikes.most=0" in text for text in notices)


def test_the_detector() -> None:
    section = SpikesSection(action="warn", window=8, warm_up=0, threshold=8.0)
    detector, source = SpikeDetector(section), random.Random(1)
    given = [(3.0 + source.gauss(0, 0.02), 1.0 + source.gauss(0, 0.05)) for _ in range(40)]
    given[20] = (4.5, 1.0)
    given[30] = (3.0, 9.0)
    given[35] = (float("nan"), 1.0)
    found = [
        step
        for step, (loss, norm) in enumerate(given, start=1)
        if detector.take(StepResult(step, loss, norm, 1.0, False))
    ]
    assert found == [21, 31]
    # The band of a step lacks the step before it, which a GPU's host does not know yet.
    before = detector.limits(42)
    detector.take(StepResult(41, 100.0, 100.0, 1.0, False))
    assert detector.limits(42) == before
    # A new level is no spike for ever.
    late = [detector.take(StepResult(step, 6.0, 1.0, 1.0, False)) for step in range(42, 62)]
    assert late[0] is not None and late[-1] is None
