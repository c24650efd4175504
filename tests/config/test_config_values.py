"""Derived values, adjusted values, and the constraints between keys."""

from __future__ import annotations

import pytest
from helpers.yaml_text import Load, Problems
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SMALL = ["Model.use_recompute=False"]


def test_all_problems_in_one_report(problems: Problems) -> None:
    assert problems(
        """\
        Engine:
          max_steps: 0
          logging_freq: True
        Model:
          hiden_size: 1024
          num_attention_heads: 16
          hidden_dropout_prob: 1.5
          recompute_granularity: full_atn
        Distributed:
          mp_degree: 3
          sharding:
            sharding_stage: 4
        """,
        ["Data.dataset.split=0,0,0", "Global.peak_tflops=fast"],
    ) == [
        "run.yaml:2: Engine.max_steps=0 is not an integer of at least 1",
        "run.yaml:3: Engine.logging_freq=True is not an integer of at least 1",
        "run.yaml:5: Model.hiden_size: unknown key; did you mean hidden_size?",
        "run.yaml:7: Model.hidden_dropout_prob=1.5 is not a number of at least 0 and below 1",
        "run.yaml:8: Model.recompute_granularity='full_atn' is not one of full, ops, "
        "full_attn, core_attn or null; did you mean full_attn?",
        "run.yaml:10: Distributed.mp_degree=3 does not divide Model.num_attention_heads=16; "
        "choose 1, 2, 4, 8 or 16",
        "run.yaml:12: Distributed.sharding.sharding_stage=4 is not one of 1, 2, 3",
        "-o Global.peak_tflops=fast: Global.peak_tflops='fast' is not measure, a number above 0 "
        "or null",
        "-o Data.dataset.split=0,0,0: Data.dataset.split='0,0,0': at least one share must be "
        "above 0, as in '949,50,1'",
    ]


def test_defaults_of_an_empty_file(load: Load) -> None:
    config = load("", world_size=1)
    assert config.Global.device == "auto"
    assert config.Model.ffn_hidden_size == 4 * config.Model.hidden_size
    assert config.Engine.test_iters == 10 * config.Engine.eval_iters
    assert config.Optimizer.lr.decay_steps == config.Engine.max_steps
    assert config.Optimizer.lr.max_lr > config.Optimizer.lr.min_lr
    assert config.Model.recompute_granularity == "full"
    assert config.Engine.mix_precision.dtype == "float32"
    assert config.Engine.mix_precision.level is None
    assert config.Inference.model_dir == config.Engine.save_load.output_dir == "./output"
    assert config.Data.batch_size.local_batch_size == 8
    assert ["neither global_batch_size nor local_batch_size" in n for n in config.notices] == [True]


def test_gpu_is_cuda(load: Load) -> None:
    assert load("Global:\n  device: gpu\n").Global.device == "cuda"


def test_save_steps_has_one_way_to_say_never(load: Load) -> None:
    assert load("", ["Engine.save_load.save_steps=-1"]).Engine.save_load.save_steps == 0


@pytest.mark.parametrize(
    ("settings_given", "dtype", "level", "noticed"),
    [
        ([], "float32", None, False),
        (["use_pure_fp16=True"], "float16", "O2", False),
        (["use_pure_fp16=False"], "float32", None, False),
        (["dtype=bfloat16"], "bfloat16", None, False),  # it depends on the device
        (["dtype=bfloat16", "level=o1"], "bfloat16", "O1", False),
        (["dtype=bfloat16", "level=O2"], "bfloat16", "O2", False),
        (["dtype=float32", "level=O2"], "float32", None, True),
        (["use_pure_fp16=True", "dtype=bfloat16"], "bfloat16", None, True),
    ],
)
def test_precision(
    settings_given: list[str], dtype: str, level: str | None, noticed: bool, load: Load
) -> None:
    overrides = [f"Engine.mix_precision.{setting}" for setting in settings_given]
    config = load("", overrides)
    precision = config.Engine.mix_precision
    assert (precision.dtype, precision.level) == (dtype, level)
    assert precision.use_pure_fp16 == (dtype == "float16")
    assert any("mix_precision" in notice for notice in config.notices) == noticed


def batch(load: Load, world_size: int | None = 1, **sizes: int) -> tuple[int, int, int, int]:
    overrides = [f"Data.batch_size.{name}_batch_size={size}" for name, size in sizes.items()]
    config = load("", overrides, world_size)
    found = config.Data.batch_size
    return (
        found.global_batch_size,
        found.local_batch_size,
        found.micro_batch_size,
        config.Engine.accumulate_steps,
    )


def test_batch_algebra(load: Load) -> None:
    assert batch(load, 4, **{"global": 64}) == (64, 16, 8, 2)
    assert batch(load, 4, local=6, micro=2) == (24, 6, 2, 3)
    assert batch(load, 1, local=6) == (6, 6, 6, 1)
    assert batch(load, 1, local=13) == (13, 13, 1, 13)
    assert batch(load, 2, micro=3) == (6, 3, 3, 1)
    assert batch(load, None, local=8, **{"global": 64}) == (64, 8, 8, 1)


def test_micro_batches_reach_every_stage(load: Load) -> None:
    config = load("", ["Distributed.pp_degree=4", "Data.batch_size.local_batch_size=8"])
    assert config.Engine.accumulate_steps == 4


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["global_batch_size=17", "local_batch_size=8"],
            "Data.batch_size.global_batch_size=17 is not local_batch_size=8 * dp_degree=2 * "
            "sharding_degree=1 = 16; give one of the two sizes and leave the other empty",
        ),
        (
            ["global_batch_size=17"],
            "Data.batch_size.global_batch_size=17 is not a multiple of dp_degree=2 * "
            "sharding_degree=1; choose 16 or 18",
        ),
        (
            ["local_batch_size=8", "micro_batch_size=3"],
            "Data.batch_size.micro_batch_size=3 does not divide local_batch_size=8; "
            "choose a divisor of 8",
        ),
    ],
)
def test_batch_sizes_that_do_not_fit(
    overrides: list[str], problem: str, problems: Problems
) -> None:
    given_overrides = [f"Data.batch_size.{override}" for override in overrides]
    (line,) = problems("", given_overrides, 2)
    assert line.endswith(f": {problem}")


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dp=st.integers(1, 4),
    sharding=st.integers(1, 4),
    steps=st.integers(1, 6),
    micro=st.integers(1, 5),
    told=st.sets(st.sampled_from(["global", "local"]), min_size=1),
)
def test_any_consistent_batch_is_completed(
    dp: int, sharding: int, steps: int, micro: int, told: set[str], load: Load
) -> None:
    sizes = {"local": micro * steps, "global": micro * steps * dp * sharding}
    config = load(
        f"Distributed:\n  sharding:\n    sharding_degree: {sharding}\n",
        [
            f"Data.batch_size.micro_batch_size={micro}",
            *(f"Data.batch_size.{name}_batch_size={sizes[name]}" for name in told),
        ],
        dp * sharding,
    )
    found = config.Data.batch_size
    assert config.Distributed.dp_degree == dp
    assert (found.global_batch_size, found.local_batch_size) == (sizes["global"], sizes["local"])
    assert config.Engine.accumulate_steps == steps


def test_accumulate_steps_follow_the_batch(load: Load) -> None:
    sizes = "{local_batch_size: 8, micro_batch_size: 2}"
    text = f"Engine:\n  accumulate_steps: 5\nData:\n  batch_size: {sizes}\n"
    config = load(text, world_size=1)
    assert config.Engine.accumulate_steps == 4
    assert config.notices == [
        "run.yaml:2: Engine.accumulate_steps=5 becomes 4 = local_batch_size / micro_batch_size"
    ]


def test_dp_follows_the_number_of_processes(load: Load, problems: Problems) -> None:
    layout = "Distributed:\n  dp_degree: {}\n  mp_degree: 2\n  pp_degree: 2\n"
    assert load(layout.format(""), SMALL, 16).Distributed.dp_degree == 4
    adjusted = load(layout.format(3), SMALL, 16)
    assert adjusted.Distributed.dp_degree == 4
    assert any("dp_degree becomes 4" in notice for notice in adjusted.notices)
    assert load(layout.format(3), SMALL).Distributed.dp_degree == 3
    (problem,) = problems(layout.format(3), SMALL, 6)
    assert problem == (
        "run.yaml:3: Distributed: mp_degree=2 * pp_degree=2 * sharding_degree=1 = 4 does not "
        "divide the 6 processes started; start 12, or another multiple of 4, or lower a degree"
    )


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["Model.num_attention_heads=12"],
            "Model.num_attention_heads=12 does not divide Model.hidden_size=2048; "
            "choose 1, 2, 4, 8, 16, 32, 64 or 128",
        ),
        (
            ["Distributed.pp_degree=2", "Distributed.pp_layers=[12,11]"],
            "Distributed.pp_layers=[12, 11] gives 23 layers to 2 stages, but there are "
            "Model.num_layers=24 and pp_degree * virtual_pp_degree = 2 stages; list one number",
        ),
        (
            [
                "Distributed.pp_degree=2",
                "Distributed.virtual_pp_degree=2",
                "Distributed.pp_schedule=ZBVZeroBubble",
                "Distributed.sharding.sharding_degree=2",
                "Distributed.sharding.sharding_stage=2",
            ],
            "Distributed.sharding.sharding_stage=2 cannot be combined with "
            "pp_schedule=ZBVZeroBubble, which splits the backward pass",
        ),
        (
            ["Distributed.mp_degree=2", "Model.ffn_hidden_size=4095"],
            "Distributed.mp_degree=2 does not divide Model.ffn_hidden_size=4095; "
            "choose a multiple of 2",
        ),
        (
            ["Data.dataset.max_seq_len=2048"],
            "Data.dataset.max_seq_len=2048 is longer than Model.max_position_embeddings=1024; "
            "choose at most 1024, or raise max_position_embeddings",
        ),
        (
            ["Distributed.pp_degree=32", "Data.batch_size.local_batch_size=32"],
            "Distributed.pp_degree=32 * virtual_pp_degree=1 = 32 stages are more than "
            "Model.num_layers=24; choose at most 24 stages",
        ),
        (
            ["Distributed.pp_degree=4", "Data.batch_size.micro_batch_size=8"],
            "local_batch_size / micro_batch_size = 1 micro-batches are too few for "
            "pp_schedule=1F1B with pp_degree=4, which needs 4; lower micro_batch_size or raise "
            "local_batch_size",
        ),
        (
            ["Distributed.pp_degree=2", "Distributed.pp_schedule=ZBVZeroBubble"],
            "Distributed.virtual_pp_degree=1 does not go with pp_schedule=ZBVZeroBubble, which "
            "holds 2 stages per rank; set it to 2",
        ),
        (
            ["Distributed.pp_degree=2", "Distributed.virtual_pp_degree=2"],
            "Distributed.virtual_pp_degree=2 does not go with pp_schedule=1F1B, which holds "
            "1 stage per rank; set it to 1",
        ),
        (
            ["Distributed.mp_degree=2", "Fused.tensor_fusion=True"],
            "Fused.tensor_fusion works on one device or with data parallelism alone, not with "
            "mp_degree=2; turn it off",
        ),
        (
            [
                "Model.sequence_parallel=True",
                "Distributed.mp_degree=2",
                "Data.dataset.max_seq_len=1023",
            ],
            "Model.sequence_parallel needs Data.dataset.max_seq_len=1023 to be a multiple of "
            "Distributed.mp_degree=2; choose 1024 or turn it off",
        ),
        (
            ["Data.dataset.eos_token_id=50304"],
            "Data.dataset.eos_token_id=50304 is outside Model.vocab_size=50304; "
            "choose an id below 50304",
        ),
        (
            ["Generation.decode_strategy=beam_search"],
            "Generation.num_beams=0 is too few for decode_strategy=beam_search with "
            "num_return_sequences=1; choose at least 1",
        ),
        (
            ["Generation.min_dec_len=50"],
            "Generation.min_dec_len=50 is above Generation.max_dec_len=16; lower one or raise "
            "the other",
        ),
        (
            ["Profiler.scheduler=[5,1]"],
            "Profiler.scheduler=[5, 1] is not [start, end] with start below end; "
            "choose for example [1, 5]",
        ),
        (
            ["Eval.overlapping_eval=2000"],
            "Eval.overlapping_eval=2000 would skip tokens between windows of "
            "Eval.max_seq_len=1024; choose at most 1024",
        ),
        (
            ["Optimizer.lr.warmup_rate=1.5"],
            "Optimizer.lr.warmup_rate=1.5 is too large; choose at most 1",
        ),
        (["Optimizer.lr.max_lr=.inf"], "Optimizer.lr.max_lr=inf is not a number of at least 0"),
        (["Data.dataset.split=1,2,3,4"], "Data.dataset.split='1,2,3,4': give one to three shares"),
        (["Data.dataset.split=-1,2"], "Data.dataset.split='-1,2': give one to three shares"),
        (["Global.seed=-1"], "Global.seed=-1 is not an integer of at least 0"),
        (
            ["Model.recompute_num_layers=2", "Model.recompute_granularity=core_attn"],
            "Model.recompute_num_layers=2 layers are recomputed together, which goes with whole",
        ),
        (
            ["Model.recompute_granularity=ops", "Engine.graph_mode=static"],
            "Model.recompute_granularity=ops cannot be combined with Engine.graph_mode=static",
        ),
        (
            [
                "Model.recompute_granularity=ops",
                "Distributed.pp_degree=2",
                "Distributed.pp_schedule=ZBVZeroBubble",
                "Distributed.virtual_pp_degree=2",
            ],
            "Model.recompute_granularity=ops cannot be combined with Distributed.pp_schedule=",
        ),
        (["Model.num_layers=2.5"], "Model.num_layers=2.5 is not an integer of at least 1"),
    ],
)
def test_constraint(overrides: list[str], problem: str, problems: Problems) -> None:
    (line,) = problems("", overrides)
    source, message = line.split(": ", 1)
    assert source.removeprefix("-o ") in overrides
    assert message.startswith(problem)


@pytest.mark.parametrize("split", ["949,50,1", "98,2,0", "1", "90/10", "0.9,0.1"])
def test_splits_of_the_documents(split: str, load: Load) -> None:
    assert load(f"Data:\n  dataset:\n    split: {split}\n").Data.dataset.split == split


@pytest.mark.parametrize(
    ("overrides", "notice"),
    [
        (["Model.sequence_parallel=True"], "Model.sequence_parallel has no effect with"),
        (["Model.fuse_attn_qkv=False"], "Model.fuse_attn_qkv=False has no effect"),
        (["Model.type_vocab_size=2"], "Model.type_vocab_size=2 has no effect"),
        (["Engine.num_train_epochs=3"], "Engine.num_train_epochs=3 has no effect"),
        (
            ["Model.use_recompute=False", "Model.recompute_granularity=full"],
            "Model.recompute_granularity=full has no effect",
        ),
        (
            ["Model.use_recompute=False", "Model.recompute_method=block"],
            "Model.recompute_method=block has no effect with Model.use_recompute=False",
        ),
        (
            ["Model.recompute_keep=[products]"],
            "Model.recompute_keep=['products'] has no effect with Model.recompute_granularity=full",
        ),
        (
            ["Distributed.sharding.sharding_stage=3"],
            "Distributed.sharding.sharding_stage=3 has no effect with sharding_degree=1",
        ),
        (["Distributed.pp_schedule=GPipe"], "Distributed.pp_schedule=GPipe has no effect with"),
        (
            ["Model.hidden_size=512", "Model.ffn_hidden_size=4096"],
            "Model.ffn_hidden_size=4096 is 8 times Model.hidden_size=512",
        ),
        (["Optimizer.lr.max_lr=1e-6"], "Optimizer.lr.max_lr=1e-06 is below"),
    ],
)
def test_key_without_effect_is_said(overrides: list[str], notice: str, load: Load) -> None:
    config = load("", ["Data.batch_size.local_batch_size=8", *overrides], 1)
    (line,) = config.notices
    assert line.startswith("-o ")
    assert notice in line


@pytest.mark.parametrize(
    ("dtype", "device", "level"),
    [
        ("float32", "gpu", None),
        ("float16", "auto", "O2"),
        ("bfloat16", "cpu", "O1"),
        ("bfloat16", "gpu", "O2"),
        ("bfloat16", "auto", None),
    ],
)
def test_the_level_follows_from_the_device(
    dtype: str, device: str, level: str | None, load: Load
) -> None:
    values = [f"Engine.mix_precision.dtype={dtype}", f"Global.device={device}"]
    assert load("", values).Engine.mix_precision.level == level


def test_uneven_stages_are_said(load: Load) -> None:
    config = load("", ["Distributed.pp_degree=5", "Data.batch_size.local_batch_size=8"])
    assert any("do not divide Model.num_layers=24" in notice for notice in config.notices)


def test_a_misspelt_key_causes_no_second_problem(problems: Problems) -> None:
    (line,) = problems("Model:\n  hiden_size: 768\n  num_attention_heads: 12\n")
    assert "did you mean hidden_size?" in line
    (line,) = problems("Model: 768\nDistributed:\n  mp_degree: 3\n")
    assert "this is a section" in line


def test_a_reported_key_causes_no_second_problem(problems: Problems) -> None:
    (line,) = problems("Model:\n  num_attention_heads: many\n", ["Distributed.mp_degree=32"])
    assert "num_attention_heads='many'" in line
