"""The documents' large configurations on this machine: narrow and shallow, their degrees kept.

`fourfold train -c FILE --nproc N` with `-o` overrides for 20 steps: the loss falls, and that of
every step is the one of the same file in a single process.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.layout_runs import Command, losses, notices, records
from helpers.tiny_run import FIXTURE
from helpers.traces import relative

slow = pytest.mark.slow
CONFIGS = Path(__file__).parent.parent.parent / "configs" / "gpt" / "hybrid_parallel"
STEPS = 20

SMALL = (
    "Global.device=cpu",
    f"Engine.max_steps={STEPS}",
    "Engine.eval_freq=0",
    "Engine.test_iters=0",
    "Engine.tensorboard=False",
    "Engine.save_load.save_steps=0",
    f"Data.dataset.input_dir={FIXTURE}",
    "Data.dataset.split='90,8,2'",
    "Data.dataset.max_seq_len=16",
    "Data.dataset.eos_token_id=0",
    "Model.vocab_size=1024",
    "Model.hidden_size=32",
    "Model.max_position_embeddings=16",
    f"Optimizer.lr.decay_steps={STEPS}",
    "Optimizer.lr.warmup_rate=0.1",
    "Optimizer.lr.max_lr=1.0e-2",
)
FP32 = ("Engine.mix_precision.use_pure_fp16=False",)
FP16 = ("Engine.mix_precision.scale_loss=1024",)
ONE_PROCESS = (
    "Distributed.mp_degree=1",
    "Distributed.pp_degree=1",
    "Distributed.sharding.sharding_degree=1",
)


@dataclass(frozen=True)
class Named:
    """A file, for how many processes, in words that its plan must show."""

    file: str
    world: int
    layout: str
    overrides: tuple[str, ...] = ()
    global_batch: int = 64
    micro_batch: int = 8

    @property
    def batch(self) -> tuple[str, ...]:
        return (
            f"Data.batch_size.global_batch_size={self.global_batch}",
            "Data.batch_size.local_batch_size=null",
            f"Data.batch_size.micro_batch_size={self.micro_batch}",
        )


def sharded(degree: int) -> Named:
    layers = ("Model.num_layers=2", "Model.num_attention_heads=4")
    degrees = (f"Distributed.sharding.sharding_degree={degree}",)
    name = f"dp1 x pp1 x sharding{degree}(stage 2) x mp1"
    return Named("configs_6.7B_sharding16", degree, name, (*layers, *degrees), 8 * degree)


def piped(mp: int, pp: int) -> Named:
    layers = ("Model.num_layers=4", "Model.num_attention_heads=8")
    degrees = (f"Distributed.mp_degree={mp}", f"Distributed.pp_degree={pp}")
    # Heads on several ranks drop numbers of their own, so there that cannot be one process's.
    dropout = ("Model.attention_probs_dropout_prob=0.0",)
    name = f"dp1 x pp{pp} x sharding1 x mp{mp}"
    overrides = (*layers, *degrees, *dropout)
    return Named("configs_175B_mp8_pp16", mp * pp, name, overrides, 16, 2)


DATA_PARALLEL = Named(
    "configs_1.3B_dp8",
    8,
    "dp8 x pp1 x sharding1 x mp1",
    ("Model.num_layers=2", "Model.num_attention_heads=4"),
)


def train(named: Named, world: int, folder: Path, name: str, *overrides: str) -> Path:
    places = (
        f"Engine.save_load.output_dir={folder / name}",
        f"Data.dataset.cache_dir={folder / 'cache'}",
    )
    settings = [*SMALL, *named.batch, *named.overrides, *places, *overrides]
    given = [word for setting in settings for word in ("-o", setting)]
    file = CONFIGS / f"{named.file}.yaml"
    words = ["train", "-c", str(file), "--nproc", str(world), *given]
    with Command(words, folder / f"console_{name}") as command:
        assert command.wait() == 0, command.said()
    return folder / name


def assert_learns(run: Path) -> None:
    told = losses(run)
    assert len(told) == STEPS
    # The fixture's tokens are nearly random: there is little to learn but which ones occur.
    assert sum(told[-5:]) / 5 < told[0] - 0.15, told


@pytest.mark.parametrize(
    "named",
    [
        pytest.param(DATA_PARALLEL, marks=slow),
        pytest.param(sharded(8), marks=slow),
        pytest.param(sharded(16), marks=slow),
        pytest.param(piped(2, 4), marks=slow),
        pytest.param(piped(4, 2), marks=slow),
        pytest.param(piped(8, 2), marks=slow),
    ],
    ids=lambda named: named.layout,
)
def test_trains_on_this_machine_as_one_process_does(named: Named, tmp_path: Path) -> None:
    run = train(named, named.world, tmp_path, "run", *FP32)
    assert f"layout: {named.layout} on cpu, float32" in notices(run)
    assert_learns(run)
    one = train(named, 1, tmp_path, "one", *FP32, *ONE_PROCESS)
    assert "layout: dp1 x pp1 x sharding1 x mp1" in notices(one)
    assert relative(losses(run), losses(one)) < 1e-5


@slow
def test_trains_in_the_files_own_pure_fp16(tmp_path: Path) -> None:
    named = sharded(8)
    run = train(named, named.world, tmp_path, "run", *FP16)
    assert "float16 weights, fp32 master weights" in notices(run)
    assert_learns(run)
    assert {record["loss_scale"] for record in records(run)} <= {1024.0, 512.0, 256.0}
