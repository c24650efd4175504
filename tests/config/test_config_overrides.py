"""`-o Section.key=value` on the command line."""

from __future__ import annotations

import pytest
from helpers.yaml_text import Load, Problems

from fourfold.config.findings import nearest


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("Engine.max_steps=10", "Engine.max_steps", 10),
        ("Optimizer.lr.max_lr=1e-3", "Optimizer.lr.max_lr", 1e-3),
        ("Engine.tensorboard=False", "Engine.tensorboard", False),
        ("Engine.tensorboard=false", "Engine.tensorboard", False),
        ("Engine.save_load.ckpt_dir=None", "Engine.save_load.ckpt_dir", None),
        ("Engine.save_load.ckpt_dir=null", "Engine.save_load.ckpt_dir", None),
        ("Engine.save_load.ckpt_dir=", "Engine.save_load.ckpt_dir", None),
        ("Engine.save_load.ckpt_dir='None'", "Engine.save_load.ckpt_dir", "None"),
        ("Engine.save_load.ckpt_dir=/a=b/c", "Engine.save_load.ckpt_dir", "/a=b/c"),
        ("Engine.save_load.ckpt_dir=a: b #c", "Engine.save_load.ckpt_dir", "a: b #c"),
        ("Engine.save_load.ckpt_dir=*x", "Engine.save_load.ckpt_dir", "*x"),
        ("Profiler.scheduler=[1,5]", "Profiler.scheduler", [1, 5]),
        ("Profiler.scheduler.1=9", "Profiler.scheduler", [2, 9]),
        ('Data.dataset.input_dir=["a", b]', "Data.dataset.input_dir", ["a", "b"]),
        ("Data.dataset.split=98,2,0", "Data.dataset.split", "98,2,0"),
        ("Data.dataset.split=[98, 2]", "Data.dataset.split", "98,2"),
        ("Optimizer.lr={max_lr: 2e-3}", "Optimizer.lr.max_lr", 2e-3),
        (" Engine . max_steps = 10 ", "Engine.max_steps", 10),
    ],
)
def test_override_grammar(override: str, path: str, value: object, load: Load) -> None:
    node: object = load(
        "Engine:\n  save_load:\n    ckpt_dir: ./there\nProfiler:\n  scheduler: [2, 5]\n", [override]
    )
    for name in path.split("."):
        node = getattr(node, name)
    assert node == value
    assert type(node) is type(value)


def test_nothing_is_evaluated(load: Load) -> None:
    text = "__import__('os').getcwd()"
    config = load("", [f"Engine.save_load.output_dir={text}"])
    assert config.Engine.save_load.output_dir == text


def test_an_argument_in_another_encoding_is_refused(problems: Problems) -> None:
    (line,) = problems("", ["Engine.save_load.output_dir=caf\udce9"])
    assert line == "-o Engine.save_load.output_dir=caf\\udce9: not UTF-8 text"


def test_the_last_override_wins(load: Load) -> None:
    config = load("", ["Engine.max_steps=1", "Engine.max_steps=2"])
    assert config.Engine.max_steps == 2


def test_null_gives_the_default_back(load: Load) -> None:
    config = load("Engine:\n  max_steps: 7\n", ["Engine.max_steps=null"])
    assert config.Engine.max_steps == 500000


def test_an_override_wins_over_the_file_in_any_spelling(load: Load) -> None:
    text = "Global:\n  local_batch_size: 8\nOptimizer:\n  adam_beta1: 0.5\n"
    config = load(text, ["Data.batch_size.local_batch_size=2", "Optimizer.beta1=0.6"])
    assert config.Data.batch_size.local_batch_size == 2
    assert config.Optimizer.adam_beta1 == 0.6
    config = load("PreTraining:\n  max_steps: 3\n", ["Engine.max_steps=4"])
    assert config.Engine.max_steps == 4
    precision = "Engine:\n  mix_precision:\n    enable: False\n    dtype: float16\n"
    config = load(precision, ["Engine.mix_precision.dtype=bfloat16"])
    assert config.Engine.mix_precision.dtype == "bfloat16"
    config = load(
        "Engine:\n  mix_precision:\n    dtype: bfloat16\n", ["Engine.mix_precision.use_pure_fp16=1"]
    )
    assert config.Engine.mix_precision.dtype == "float16"


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("Engine.max_steps", "write it as Section.key=value"),
        ("=1", "write it as Section.key=value"),
        ("Engine..max_steps=1", "write it as Section.key=value"),
        ("Engine.max_step=1", "Engine.max_step: unknown key; did you mean max_steps?"),
        ("engine.max_steps=1", "engine: unknown section; did you mean Engine?"),
        ("Model.seed=1", "Model.seed: unknown key; did you mean Global.seed or Generation.seed?"),
        ("Engine.max_steps.x=1", "Engine.max_steps={'x': 1} is not an integer of at least 1"),
        ("Model=5", "Model=5: this is a section; write its keys below it"),
        ("Profiler.scheduler.2=1", "Profiler.scheduler.2: the list has items 0 to 1"),
        (
            "Model.hidden_size=99999999999999999999",
            "Model.hidden_size=99999999999999999999 is too large; choose at most 2147483647",
        ),
        ("Global.device=tpu", "Global.device='tpu' is not one of auto, cpu, gpu, cuda"),
        ("Engine.max_steps=1e12", "Engine.max_steps=1000000000000.0 is too large; choose at most"),
        ("Profiler.scheduler=[1", "[1 is no complete list, mapping or quoted string"),
        ("Engine.save_load.ckpt_dir='x", "'x is no complete list, mapping or quoted string"),
    ],
)
def test_override_problems_name_the_override(
    override: str, problem: str, problems: Problems
) -> None:
    (line,) = problems("Profiler:\n  scheduler: [2, 5]\n", [override])
    assert line.startswith(f"-o {override}: {problem}")


def test_short_words_are_no_slips_of_each_other() -> None:
    assert nearest("tpu", ["cpu", "gpu"]) == [] and nearest("gup", ["cpu", "gpu"]) == ["gpu"]
    assert nearest("hiden_size", ["hidden_size", "num_layers"]) == ["hidden_size"]
