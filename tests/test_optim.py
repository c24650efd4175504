"""Schedule, loss scale, AdamW and Muon: the documents' figures, and torch's own optimizers as
judges."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fourfold.config.batch_schedule import BatchSchedule
from fourfold.optim import EMA, LossScale, Optimizer, Schedule
from fourfold.optim import optimizer as optimizer_module
from fourfold.optim.muon import AdjustLr, Muon, MuonOptions, orthogonalize
from fourfold.optim.schedule import WsdStyle
from fourfold.shards import Shard

# Seed 002: max_lr 1.0e-5 below min_lr 5.0e-5, decay 360000, warm-up 1 %. The rate logged after
# step n is that of step n + 1.
DOCUMENTED = Schedule(max_lr=1e-5, min_lr=5e-5, warmup=3600, decay=360_000)


@pytest.mark.parametrize(
    ("logged_at", "shown"), [(1, "5.55556e-09"), (2, "8.33333e-09"), (9, "2.77778e-08")]
)
def test_learning_rates_of_the_document(logged_at: int, shown: str) -> None:
    assert f"{DOCUMENTED.lr_at(logged_at + 1):.5e}" == shown


def test_rate_of_the_sharding_document() -> None:
    schedule = Schedule(max_lr=1e-5, min_lr=5e-5, warmup=3200, decay=320_000)
    assert f"{schedule.lr_at(2):.5e}" == "6.25000e-09"


def test_an_inverted_range_follows_the_formula() -> None:
    assert DOCUMENTED.lr_at(3600) == pytest.approx(1e-5)
    assert DOCUMENTED.lr_at(180_000) == pytest.approx(2.97e-5, rel=1e-3)
    assert DOCUMENTED.lr_at(360_000) == pytest.approx(5e-5)
    assert DOCUMENTED.lr_at(400_000) == 5e-5


@given(st.integers(1, 10_000), st.floats(0, 0.99), st.floats(1e-8, 1), st.floats(0, 1e-8))
def test_rates_stay_between_their_ends(steps: int, warmup: float, top: float, low: float) -> None:
    schedule = Schedule(max_lr=top, min_lr=low, warmup=warmup * steps, decay=steps)
    for step in {1, 2, steps // 2 + 1, steps, steps + 1, 2 * steps}:
        assert 0 <= schedule.lr_at(step) <= top * (1 + 1e-9)
    assert schedule.lr_at(steps + 1) == low


@pytest.mark.parametrize(
    ("style", "middle"),
    [("linear", 0.5), ("1-sqrt", 1 - 0.5**0.5), ("cosine", 0.5), ("exponential", 2**0.5 - 1)],
)
def test_wsd_is_stable_and_then_falls(style: WsdStyle, middle: float) -> None:
    schedule = Schedule(1.0, 0.0, 10, 100, "wsd", wsd_decay=20, wsd_style=style)
    assert schedule.lr_at(5) == 0.5
    assert [schedule.lr_at(step) for step in (10, 11, 50, 80)] == [1.0] * 4
    assert schedule.lr_at(90) == pytest.approx(middle)
    assert [schedule.lr_at(step) for step in (100, 101, 500)] == pytest.approx([0.0] * 3)
    falling = [schedule.lr_at(step) for step in range(80, 101)]
    assert falling == sorted(falling, reverse=True)


def test_inverse_square_root_joins_the_warm_up() -> None:
    schedule = Schedule(0.4, 0.01, 16, 10_000, "inverse_sqrt")
    assert [schedule.lr_at(step) for step in (8, 16, 64, 1024)] == [0.2, 0.4, 0.2, 0.05]
    assert schedule.lr_at(9_999_999) == 0.01


def test_a_schedule_may_count_samples() -> None:
    by_steps = Schedule(1.0, 0.0, 2, 10, "wsd", wsd_decay=4)
    by_samples = Schedule(1.0, 0.0, 16, 80, "wsd", BatchSchedule(8), wsd_decay=32)
    # Samples are those read before a step, as Megatron counts them.
    assert [by_samples.lr_at(n + 1) for n in range(1, 12)] == [
        by_steps.lr_at(n) for n in range(1, 12)
    ]


def test_loss_scale_halves_on_overflow_and_doubles_after_a_thousand() -> None:
    scale = LossScale(32768.0)
    scale.update(overflowed=True)
    assert scale.value == 16384.0
    for _ in range(1000):
        scale.update(overflowed=False)
    assert (scale.value, scale.good_steps) == (32768.0, 0)
    for _ in range(40):
        scale.update(overflowed=True)
    assert scale.value == 1.0 and scale.exhausted


def make_parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (5, 3), "a.bias": (5,), "norm.weight": (3,), "b.weight": (2, 5)}
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in shapes.items()
    }


def make_optimizer(parameters: dict[str, nn.Parameter], **options: object) -> Optimizer:
    settings = {"weight_decay": 0.1, "betas": (0.9, 0.95), "epsilon": 1e-8, "grad_clip": 0.5}
    settings["decayed"] = [name for name in parameters if name in ("a.weight", "b.weight")]
    return Optimizer(parameters, **(settings | options))  # type: ignore[arg-type]


def set_gradients(parameters: dict[str, nn.Parameter], step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters.values():
        gradient = torch.randn(parameter.shape, generator=generator) * scale
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.copy_(gradient)


def gradient_norm(parameters: dict[str, nn.Parameter]) -> float:
    return float(torch.nn.utils.get_total_norm([p.grad for p in parameters.values()]))


@pytest.mark.parametrize("fusion", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_equals_torchs_adamw_with_its_clipping(fusion: bool, scale: float) -> None:
    ours, theirs = make_parameters(), make_parameters()
    optimizer = make_optimizer(ours, tensor_fusion=fusion)
    groups = [
        {"params": [theirs["a.weight"], theirs["b.weight"]], "weight_decay": 0.1},
        {"params": [theirs["a.bias"], theirs["norm.weight"]], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8)
    for step in range(1, 6):
        optimizer.zero_grad()
        set_gradients(ours, step, scale)
        set_gradients(theirs, step)
        norm = gradient_norm(ours) / scale
        optimizer.update(0.01 * step, norm, scale)
        expected = torch.nn.utils.clip_grad_norm_(theirs.values(), 0.5)
        assert norm == pytest.approx(float(expected), rel=1e-6)
        for group in reference.param_groups:
            group["lr"] = 0.01 * step
        reference.step()
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name], rtol=2e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize(("norm", "divides"), [(0.5, False), (1.0, False), (2.0, True)])
def test_gradients_are_divided_only_where_there_is_something_to_divide_by(
    norm: float, divides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a divisor the kernel reads the gradients and does not write them back."""
    scales = []

    def spied(*given: object, grad_scale: torch.Tensor | None, **named: object) -> None:
        scales.append(grad_scale)

    monkeypatch.setattr(optimizer_module, "adamw", spied)
    parameters = make_parameters()
    set_gradients(parameters, 1)
    make_optimizer(parameters, grad_clip=1.0).update(1e-3, norm)
    assert [None if one is None else one.item() for one in scales] == [2.0 if divides else None] * 2


def test_no_clip_leaves_large_gradients_alone() -> None:
    clipped, free = make_parameters(), make_parameters()
    for parameters, clip in ((clipped, 1e-3), (free, 0.0)):
        optimizer = make_optimizer(parameters, grad_clip=clip, epsilon=1.0)
        set_gradients(parameters, 1)
        optimizer.update(0.1, gradient_norm(parameters))
    assert not torch.allclose(clipped["a.weight"], free["a.weight"])


@pytest.mark.parametrize(("saved", "loaded"), [(False, True), (True, False), (True, True)])
def test_moments_move_between_fused_and_unfused(saved: bool, loaded: bool) -> None:
    first = make_parameters()
    before = make_optimizer(first, tensor_fusion=saved)
    set_gradients(first, 1)
    before.update(0.01, gradient_norm(first))

    second = make_parameters()
    after = make_optimizer(second, tensor_fusion=loaded)
    with torch.no_grad():
        for name, parameter in second.items():
            parameter.copy_(first[name])
        for name, moment in after.named_moments().items():
            moment.copy_(before.named_moments()[name])
    after.restore_updates(before.updates)

    for parameters, optimizer in ((first, before), (second, after)):
        optimizer.zero_grad()
        set_gradients(parameters, 2)
        optimizer.update(0.01, 1.0)
    for name, parameter in first.items():
        assert torch.equal(parameter, second[name]), name


# -- Muon -----------------------------------------------------------------------------------------

SHAPES = [(8, 8), (24, 8), (8, 32), (32, 8), (48, 16), (5, 7)]
RATES = [0.02, 0.015, 0.01, 0.03, 0.005]


def make_muon(matrices: dict[str, nn.Parameter], **options: object) -> Muon:
    shards = {name: Shard.whole(one) for name, one in matrices.items()}
    return Muon(shards, MuonOptions(**options))  # type: ignore[arg-type]


def make_matrices() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return {str(s): nn.Parameter(torch.randn(s, generator=generator)) for s in SHAPES}


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_equals_torchs_muon(nesterov: bool, adjust: AdjustLr) -> None:
    ours, theirs = make_matrices(), make_matrices()
    muon = make_muon(ours, nesterov=nesterov, adjust_lr_fn=adjust, weight_decay=0.3, ns_steps=4)
    reference = torch.optim.Muon(
        theirs.values(), weight_decay=0.3, nesterov=nesterov, ns_steps=4, adjust_lr_fn=adjust
    )
    for step, rate in enumerate(RATES):
        set_gradients(ours, step, scale=8.0)
        set_gradients(theirs, step)
        with torch.no_grad():
            muon.update(rate, 8.0, None)
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-6, atol=1e-6, msg=name)
        state = reference.state[theirs[name]]["momentum_buffer"]
        torch.testing.assert_close(muon.momentum[name], state, rtol=1e-6, atol=1e-6, msg=name)


def test_muon_orthogonalises_in_float32_too() -> None:
    """Singular values come near one, whatever they were, and the vectors stay."""
    matrix = torch.randn(16, 48, generator=torch.Generator().manual_seed(2))
    values = torch.linalg.svdvals(orthogonalize(matrix, 5, None))
    assert float(values.min()) > 0.65 and float(values.max()) < 1.25
    low = orthogonalize(matrix, 5, torch.bfloat16).float()
    assert (low - orthogonalize(matrix, 5, None)).abs().max() < 0.05


def test_muon_skips_where_something_is_not_finite() -> None:
    matrices, before = make_matrices(), make_matrices()
    muon = make_muon(matrices)
    set_gradients(matrices, 1)
    next(iter(matrices.values())).grad.fill_(float("nan"))  # type: ignore[union-attr]
    with torch.no_grad():
        muon.update(0.1, torch.tensor(2.0), torch.tensor(1.0))
    for name, matrix in matrices.items():
        assert torch.equal(matrix, before[name])
        assert not muon.momentum[name].any()


def test_matrices_are_muons_and_the_rest_is_adamws() -> None:
    ours, theirs = make_parameters(), make_parameters()
    muon = make_muon({"a.weight": ours["a.weight"]}, weight_decay=0.2, lr_ratio=3.0)
    optimizer = make_optimizer(ours, grad_clip=0.0, muon=muon)
    alone = make_optimizer(theirs, grad_clip=0.0)
    reference = torch.optim.Muon([nn.Parameter(ours["a.weight"].clone())], 0.03, weight_decay=0.2)
    (expected,) = reference.param_groups[0]["params"]
    for parameters in (ours, theirs):
        set_gradients(parameters, 1)
    expected.grad = ours["a.weight"].grad.clone()  # type: ignore[union-attr]
    optimizer.update(0.01, 1.0)
    alone.update(0.01, 1.0)
    reference.step()
    torch.testing.assert_close(ours["a.weight"].data, expected.data, rtol=1e-6, atol=1e-6)
    for name in ("a.bias", "norm.weight", "b.weight"):
        assert torch.equal(ours[name], theirs[name]), name
    assert optimizer.moments("a.weight").keys() == {"momentum_buffer"}
    assert optimizer.moments("b.weight").keys() == {"exp_avg", "exp_avg_sq"}


def test_a_parameter_trains_at_its_share_of_the_rate() -> None:
    """Under muP a row of the table of parameters may have a rate of its own; Muon's update is as
    large as Moonlight has it without that factor's growth with the width."""
    halved, plain = make_parameters(), make_parameters()
    scales = {"a.weight": 0.5, "norm.weight": 0.25}
    optimizer = make_optimizer(halved, lr_scales=scales, grad_clip=0.0, weight_decay=0.0)
    reference = make_optimizer(plain, grad_clip=0.0, weight_decay=0.0)
    start = make_parameters()
    for parameters in (halved, plain):
        set_gradients(parameters, 1)
    optimizer.update(0.01, 1.0)
    reference.update(0.01, 1.0)
    for name, parameter in halved.items():
        moved, usual = parameter - start[name], plain[name] - start[name]
        torch.testing.assert_close(moved, usual * scales.get(name, 1.0), rtol=1e-3, atol=1e-7)
    matrices, whole = make_matrices(), make_matrices()
    shards = {name: Shard.whole(one) for name, one in matrices.items()}
    options = MuonOptions(weight_decay=0.0)
    factor = {"original": 1.0, "match_rms_adamw": 0.5**0.5}[options.adjust_lr_fn]
    scaled = Muon(shards, options, lr_scales=dict.fromkeys(matrices, 0.5))
    for parameters in (matrices, whole):
        set_gradients(parameters, 1)
    with torch.no_grad():
        scaled.update(0.2, 1.0, None)
        make_muon(whole, weight_decay=0.0).update(0.2 * factor, 1.0, None)
    for name, matrix in matrices.items():
        torch.testing.assert_close(matrix, whole[name], rtol=1e-6, atol=1e-7)


# -- the average of weights -----------------------------------------------------------------------


def test_the_average_is_torchs_once_it_is_warm() -> None:
    parameters = make_parameters()
    ema = EMA({name: Shard.whole(one) for name, one in parameters.items()}, 0.9)
    theirs = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    expected = [one.detach().clone() for one in parameters.values()]
    optimizer = make_optimizer(parameters, ema=ema)
    optimizer.restore_updates(100)  # the decay is 0.9 from the 81st on
    for step in range(3):
        set_gradients(parameters, step)
        optimizer.update(0.1, 1.0)
        theirs(expected, [one.detach() for one in parameters.values()], step)
    for average, other in zip(ema.values.values(), expected):
        torch.testing.assert_close(average, other)


def test_the_average_soon_forgets_the_first_weights() -> None:
    weight = nn.Parameter(torch.zeros(1))
    ema = EMA({"w": Shard.whole(weight)}, 0.9999)
    with torch.no_grad():
        weight.fill_(1.0)
    for updates in range(1, 101):
        ema.update(updates)
    assert float(ema.values["w"]) > 0.999


def test_a_skipped_update_is_not_averaged() -> None:
    weight = nn.Parameter(torch.zeros(2))
    ema = EMA({"w": Shard.whole(weight)}, 0.5)
    with torch.no_grad():
        weight.fill_(1.0)
    ema.update(50, torch.tensor(1.0))
    assert ema.values["w"].tolist() == [0.0, 0.0]
    ema.update(50, torch.tensor(0.0))
    assert ema.values["w"].tolist() == [0.5, 0.5]
    with ema.in_place():
        assert weight.tolist() == [0.5, 0.5]
    assert weight.tolist() == [1.0, 1.0]
