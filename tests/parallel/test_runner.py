"""What is applied to the model from outside must not change what it computes."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
import yaml
from helpers.layout_runs import Runs
from helpers.one_process import runner_of
from helpers.tiny_run import TINY
from torch._dynamo.utils import counters

from fourfold.config import load_config
from fourfold.data import Batch
from fourfold.engine import Engine
from fourfold.errors import UserError
from fourfold.mesh import Layout, Mesh
from fourfold.model import GPT, ModelShape, initialize
from fourfold.parallel import Precision, Runner, parallelize
from fourfold.parallel.apply import compile_layers
from fourfold.parallel.precision import unmet_list_entries
from fourfold.parallel.recompute import Recompute, apply_recompute
from fourfold.parallel.runner import sum_of_squares

SHAPE = ModelShape(
    vocab_size=96,
    hidden_size=32,
    num_layers=2,
    num_attention_heads=4,
    ffn_hidden_size=64,
    max_position_embeddings=24,
    hidden_dropout_prob=0.1,
    attention_probs_dropout_prob=0.1,
)


def make_runner(
    shape: ModelShape = SHAPE,
    *,
    dtype: str = "float32",
    level: str | None = None,
    micro: int = 8,
    recompute: Recompute | str | None = None,
    compiled: bool = False,
) -> Runner:
    model = GPT(shape)
    initialize(model, seed=1)
    if compiled:
        compile_layers(model)
    if recompute:
        asked = Recompute(recompute) if isinstance(recompute, str) else recompute
        apply_recompute(model, asked)
    return runner_of(model, Precision(dtype, level), micro)


def ragged_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 96, (8, 17), generator=generator)
    mask = torch.zeros(8, 16)
    for row, length in enumerate([16, 1, 9, 3, 16, 5, 12, 0]):
        mask[row, :length] = 1.0
    positions = torch.arange(16).repeat(8, 1)
    return Batch(
        tokens[:, :-1].contiguous(),
        tokens[:, 1:].contiguous(),
        mask,
        positions,
        np.arange(8),
        float(mask.sum()),
    )


def run(runner: Runner, scale: float = 1.0) -> tuple[float, dict[str, torch.Tensor]]:
    loss = runner.run(ragged_batch(), step=3, loss_scale=scale).item()
    gradients = {name: p.grad / scale for name, p in runner.masters.items() if p.grad is not None}
    assert gradients.keys() == runner.masters.keys()
    return loss, gradients


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_micro_batch_size_does_not_matter(micro: int) -> None:
    """Ragged masks, one row without a single valid token: same loss, same gradients."""
    shape = dataclasses.replace(SHAPE, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    loss, gradients = run(make_runner(shape, micro=8))
    other_loss, others = run(make_runner(shape, micro=micro))
    assert other_loss == pytest.approx(loss, abs=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    "recompute",
    [
        Recompute("full"),
        Recompute("ops"),
        Recompute("ops", keep=["products"]),
        Recompute("ops", keep=["attention"]),
        Recompute("full_attn"),
        Recompute("core_attn"),
        Recompute("full", layers=2),  # with one left over
        Recompute("full", "block", 2),
        Recompute("ops", "block", 1),
        Recompute("core_attn", "block", 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_recomputation_is_exact(recompute: Recompute, dropout: float) -> None:
    shape = dataclasses.replace(
        SHAPE,
        num_layers=3,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    loss, gradients = run(make_runner(shape, micro=4))
    other_loss, others = run(make_runner(shape, micro=4, recompute=recompute))
    assert other_loss == loss
    for name, gradient in gradients.items():
        assert torch.equal(others[name], gradient), name


def test_parameter_names_survive_recomputation_and_compilation() -> None:
    plain = make_runner().masters.keys()
    assert make_runner(recompute="full", compiled=True).masters.keys() == plain


def test_static_graph_computes_the_same() -> None:
    shape = dataclasses.replace(
        SHAPE, num_layers=1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    loss, gradients = run(make_runner(shape))
    other_loss, others = run(make_runner(shape, compiled=True))
    assert other_loss == pytest.approx(loss, abs=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-5, atol=1e-6, msg=name)


def test_the_norm_of_a_large_tensor_is_that_of_its_shards() -> None:
    """An embedding of forty million elements, as one process and as each of eight ranks has it."""
    whole = torch.randn(5000, 8000, generator=torch.Generator().manual_seed(0))
    exact = float(whole.double().square().sum())
    assert float(sum_of_squares([whole])) == pytest.approx(exact, rel=1e-6)
    assert sum(float(sum_of_squares([shard])) for shard in whole.chunk(8)) == pytest.approx(
        float(sum_of_squares([whole])), rel=1e-6
    )
    assert float(sum_of_squares([whole[:0]])) == 0.0


def run_static(tmp_path, granularity: str | None) -> tuple[float, torch.Tensor]:
    """The loss and the embedding's gradient of a run that `parallelize` compiles."""
    torch._dynamo.reset()
    counters.clear()
    path = tmp_path / "static.yaml"
    path.write_text(yaml.safe_dump(TINY | {"Engine": {"graph_mode": "static"}}))
    model = [f"Model.use_recompute={granularity is not None}", "Data.batch_size.micro_batch_size=8"]
    model += [f"Model.recompute_granularity={granularity}"] if granularity else []
    runner = parallelize(load_config(path, model), Mesh(Layout()), torch.device("cpu"))
    loss = runner.run(ragged_batch(), step=3).item()
    assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    gradient = runner.masters["embeddings.word.weight"].grad
    assert gradient is not None
    return loss, gradient


@pytest.mark.parametrize("granularity", ["full", "full_attn", "core_attn"])
def test_static_graph_is_compiled_whatever_is_recomputed(tmp_path, granularity: str) -> None:
    """And what is computed again drops what was dropped."""
    loss, gradient = run_static(tmp_path, None)
    other_loss, other = run_static(tmp_path, granularity)
    assert other_loss == loss
    assert torch.equal(other, gradient)


@pytest.mark.parametrize(
    "granularity", [None, "full", "full_attn", "core_attn", Recompute("full", layers=5)], ids=str
)
def test_layers_share_one_graph_however_many_there_are(
    granularity: Recompute | str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch gives up after eight graphs of one function and runs the rest uncompiled.

    What a graph is made into does not matter here, and takes long.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    shape = dataclasses.replace(
        SHAPE, num_layers=12, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    loss, gradients = run(make_runner(shape))
    torch._dynamo.reset()
    counters.clear()
    other_loss, others = run(make_runner(shape, recompute=granularity, compiled=True))
    assert counters["stats"]["unique_graphs"] == 1
    assert other_loss == pytest.approx(loss, abs=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-5, atol=1e-6, msg=name)


LOW = [("bfloat16", "O1"), ("bfloat16", "O2"), ("float16", "O1"), ("float16", "O2")]


@pytest.mark.parametrize(("dtype", "level"), LOW)
def test_low_precision_is_close_and_its_gradients_are_fp32(dtype: str, level: str) -> None:
    shape = dataclasses.replace(SHAPE, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    loss, gradients = run(make_runner(shape))
    runner = make_runner(shape, dtype=dtype, level=level, micro=4)
    low_loss, low = run(runner, scale=1024.0 if runner.precision.scales_loss else 1.0)
    assert 0 < abs(low_loss - loss) < 0.02
    for name, gradient in gradients.items():
        assert low[name].dtype == torch.float32
        assert (low[name] - gradient).norm() < 0.05 * gradient.norm() + 1e-3, name


def test_cut_layers_give_what_whole_ones_give_in_low_precision(runs: Runs) -> None:
    """Every linear layer, with its bias added to its product or after the ranks have summed."""

    def work(engine: Engine) -> dict[str, str]:
        types = {}
        for name, module in engine.runner.parts[0].named_modules():
            if isinstance(module, torch.nn.Linear):
                hook = partial(lambda name, _, __, y: types.update({name: str(y.dtype)}), name)
                module.register_forward_hook(hook)
        engine.runner.run(engine.data.loaders["train"].batch(0), 1)
        engine.data.close()
        return types

    low = ("Engine.mix_precision.dtype=bfloat16", "Engine.mix_precision.level=O1")
    (one,) = runs.on_ranks("one", "one", work, *low)
    assert set(one.values()) == {"torch.bfloat16"} and len(one) == 16
    assert runs.on_ranks("mp2", "cut", work, *low, "Model.fused_linear=False") == [one, one]


def test_level_o2_keeps_masters_in_fp32() -> None:
    runner = make_runner(dtype="float16", level="O2")
    for name, parameter in runner.parameters.items():
        assert parameter.dtype == torch.float16, name
        assert runner.masters[name].dtype == torch.float32
    with torch.no_grad():
        runner.masters["embeddings.word.weight"].fill_(0.5)
    runner.sync_weights_from_masters()
    assert (runner.parameters["embeddings.word.weight"] == 0.5).all()


def test_evaluation_has_no_dropout_and_leaves_no_gradients() -> None:
    runner = make_runner()
    first, second = runner.evaluate(ragged_batch()), runner.evaluate(ragged_batch())
    assert first == second
    assert all(p.grad is None for p in runner.masters.values())


def test_lists_of_the_documents_are_met_and_others_said() -> None:
    black = ["reduce_sum", "c_softmax_with_cross_entropy", "elementwise_div"]
    white = ["lookup_table", "lookup_table_v2"]
    assert unmet_list_entries(black, white, "O2") == []
    assert len(unmet_list_entries(black, white, "O1")) == 1  # autocast looks up fp32 weights
    said = unmet_list_entries(["matmul_v2"], ["reduce_mean"], "O2")
    assert len(said) == 2 and "matmul_v2" in said[0] and "reduce_mean" in said[1]


def test_layouts_describe_and_check_themselves() -> None:
    layout = Layout(dp=2, pp=2, sharding=2, mp=2, stage=3)
    assert str(layout) == "dp2 x pp2 x sharding2(stage 3) x mp2"
    assert (layout.world_size, layout.data_degree) == (16, 4)
    with pytest.raises(
        UserError, match=r"needs 16 process.*8 are running; start it with --nproc 16"
    ):
        layout.check(8)
    Layout().check(1)
