"""Logical tensors: what modules compute on any layout are parts of what one process computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from helpers.ranks import on_ranks
from helpers.tiny_run import TINY

from fourfold.config import Config, load_config
from fourfold.engine import build_engine
from fourfold.trace import SeenTensor, TokenLosses, watch_modules

LAYOUTS = {
    "mp2": ["Distributed.mp_degree=2"],
    "mp2 sequence": ["Distributed.mp_degree=2", "Model.sequence_parallel=True"],
    "pp2": ["Distributed.pp_degree=2"],
    "dp2 grouped": [
        "Distributed.dp_degree=2",
        "Data.batch_size.local_batch_size=4",
        "Model.num_key_value_heads=2",
        "Model.activation=swiglu",
    ],
    "mp2 grouped": [
        "Distributed.mp_degree=2",
        "Model.num_key_value_heads=1",
        "Model.activation=swiglu",
        "Model.qk_norm=per_head",
    ],
}
# (name, backward, micro-batch) -> pieces: where each begins, the whole's shape, values
Pieces = dict[tuple[str, bool, int], list[tuple[tuple[int, ...], tuple[int, ...], np.ndarray]]]


def trace(config: Config, world: int) -> Pieces:
    engine = build_engine(config, world)
    batch, seen = engine.data.loaders["train"].batch(0), Pieces()

    def take(one: SeenTensor) -> None:
        if not one.recomputed:
            key = (one.name, one.backward, one.micro_batch)
            piece = (one.box.offsets, one.shape, one.tensor.double().numpy().copy())
            seen.setdefault(key, []).append(piece)

    with watch_modules(engine.runner, 1, len(batch.tokens), take):
        engine.runner.run(batch, 1)
    engine.mesh.close()
    return seen


def configured(folder: Path, name: str, world: int, *overrides: str) -> Config:
    file = folder / "tiny.yaml"
    file.write_text(yaml.safe_dump(TINY))
    places = [
        f"Engine.save_load.output_dir={folder / name}",
        f"Data.dataset.cache_dir={folder / 'cache'}",
        "Model.hidden_dropout_prob=0",
        "Model.attention_probs_dropout_prob=0",
    ]
    return load_config(file, [*places, *overrides], world)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_output_is_a_part_of_one_process_output(tmp_path: Path, layout: str) -> None:
    keys = LAYOUTS[layout]
    alone_keys = [text for text in keys if "Distributed" not in text and "local" not in text]
    alone = trace(
        configured(tmp_path, "one", 1, *(t for t in alone_keys if "sequence" not in t)), 1
    )
    ranks = on_ranks(2, lambda _: trace(configured(tmp_path, "two", 2, *keys), 2))
    names = {key[0] for key in alone}
    assert {"layers.0", "layers.1.attn", "layers.1.mlp", "norm", "embeddings"} <= names
    assert {key[2] for key in alone} == {0, 1}
    covered: dict[tuple[str, bool, int], np.ndarray] = {}
    for seen in ranks:
        for key, pieces in seen.items():
            for offsets, shape, values in pieces:
                ((_, whole_shape, whole),) = alone[key]
                assert shape == whole_shape, key
                place = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape))
                if not key[1]:  # a gradient may be one rank's part of a sum
                    np.testing.assert_allclose(values, whole[place], atol=2e-5, err_msg=str(key))
                covered.setdefault(key, np.zeros(shape, bool))[place] = True
    assert covered.keys() == alone.keys()
    assert all(mask.all() for mask in covered.values())
    for key in [("layers.0", True, 0), ("layers.1", True, 1)]:
        ((_, _, whole),) = alone[key]
        for seen in ranks:
            for offsets, _, values in seen.get(key, []):
                place = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape))
                np.testing.assert_allclose(values, whole[place], atol=2e-6, err_msg=str(key))


def test_a_watched_step_has_the_bits_of_one_that_is_not(tmp_path: Path) -> None:
    gradients = []
    for watched in (False, True):
        engine = build_engine(configured(tmp_path, f"run{watched}", 1, "Model.use_recompute=True"))
        batch = engine.data.loaders["train"].batch(0)
        losses = TokenLosses(engine.runner, logits=True)
        if watched:
            losses.attach()
            losses.begin(1, batch)
            with watch_modules(engine.runner, 1, len(batch.tokens), lambda one: None):
                share = engine.runner.run(batch, 1)
            losses.detach()
            table = losses.table(1, 16)
            assert table is not None and table.shape == (8, 16)
            mean = float((table * batch.loss_mask).sum()) / batch.global_valid_tokens
            assert mean == pytest.approx(float(share), rel=1e-6)
        else:
            engine.runner.run(batch, 1)
        gradients.append([p.grad.clone() for p in engine.runner.masters.values()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients))
