"""YAML to values: scalars, lines, inheritance, and text that is no configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from helpers.yaml_text import Load, Problems
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fourfold.config import Config, load_config
from fourfold.config.compat_keys import NOT_OFFERED, ONLY, RENAMED, USUAL, WITHOUT_EFFECT
from fourfold.config.fields import leaves
from fourfold.config.yaml_nodes import parse_scalar
from fourfold.errors import ConfigError

BLOCKS = Path(__file__).parent / "blocks"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1.0e-5", 1e-5),
        ("5E5", 5e5),
        (".5", 0.5),
        ("-3", -3),
        ("1_000", 1000),
        ("5_", 5),
        ("1__0", 10),
        ("None", None),
        ("~", None),
        ("", None),
        ("True", True),
        ("off", False),
        ("010", "010"),
        ("1:30", "1:30"),
        ("2022-07-27", "2022-07-27"),
        ("949,50,1", "949,50,1"),
        ("__import__('os')", "__import__('os')"),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_scalars(text: str, value: object) -> None:
    read = parse_scalar(text)
    assert read == value
    assert type(read) is type(value)


def test_null_stands_for_the_default(load: Load) -> None:
    config = load(
        "Fused:\nModel:\n  hidden_size:\n  ffn_hidden_size: ~\nEval:\n  eval_path: None\n"
    )
    assert config.Model.hidden_size == 2048
    assert config.Model.ffn_hidden_size == 8192
    assert config.Eval.eval_path is None


def test_a_quoted_none_is_a_name(load: Load) -> None:
    assert load("Eval:\n  eval_path: 'None'\n").Eval.eval_path == "None"


def test_whole_floats_are_integers(load: Load) -> None:
    assert load("Engine:\n  max_steps: 5e5\n").Engine.max_steps == 500000


def test_numbers_serve_as_paths(load: Load) -> None:
    assert load("Engine:\n  save_load:\n    output_dir: 7\n").Engine.save_load.output_dir == "7"


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("Model:\n  num_layers: 1\n  num_layers: 2\n", 3, "given twice; first at run.yaml:2"),
        ("Model:\n  num_layers: !!python/object:os.system 1\n", 2, "tag"),
        ("Model:\n  num_layers: !x 1\n", 2, "tag"),
        ("Model:\n  [a]: 1\n", 2, "a key must be a plain word"),
        ("Engine.max_steps: 1\n", 1, "a dot in a key; write one key below the other"),
        ("Model: {}\n---\nModel: {}\n", 2, "second document"),
        ("Model:\n\tnum_layers: 1\n", 2, "not valid YAML"),
        ("Model: [1\n", 2, "not valid YAML"),
        ("Model: &a\n  x: *a\n", 2, "*a refers to no finished &a"),
        ("- Model\n", 1, "must hold sections"),
        ("x: " + "[" * 60 + "]" * 60, 1, "nested deeper"),
        ("  Model:\n    num_layers: 1\nData:\n", 3, "start it at the column of 'Model'"),
    ],
)
def test_malformed_text_names_its_line(
    text: str, line: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config("run.yaml")
    (problem,) = map(str, caught.value.problems)
    assert problem.startswith(f"run.yaml:{line}: ")
    assert words in problem


def test_alias_bomb_is_refused(problems: Problems) -> None:
    lines = ["a0: &a0 {x: 1, y: 2}"]
    lines += [f"a{i}: &a{i} {{l: *a{i - 1}, r: *a{i - 1}}}" for i in range(1, 40)]
    assert "more than 100000 values" in problems("\n".join(lines))[0]


def test_list_alias_bomb_is_refused(problems: Problems) -> None:
    lines = ["a0: &a0 [lol, lol]"]
    lines += [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 40)]
    assert "more than 100000 values" in problems("\n".join(lines))[0]


def test_anchors_and_merge_keys_are_copies(load: Load) -> None:
    config = load(
        """
        Data: &data
          dataset: &set
            max_seq_len: 128
            split: '9,1'
        Model:
          max_position_embeddings: 128
        Engine:
          save_load: {output_dir: ./out}
        """,
        ["Data.dataset.max_seq_len=64"],
    )
    assert config.Data.dataset.max_seq_len == 64
    merged = load("Optimizer:\n  lr: {<<: {max_lr: 1e-3, min_lr: 1e-4}, max_lr: 2e-3}\n")
    assert (merged.Optimizer.lr.max_lr, merged.Optimizer.lr.min_lr) == (2e-3, 1e-4)


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "large.yaml").write_bytes(b"#" * 1_000_001)
    (tmp_path / "latin.yaml").write_bytes(b"Model:\n  x: \xe9\n")
    (tmp_path / "control.yaml").write_bytes(b"Model: \x01\n")
    for name, words in {
        "absent.yaml": "cannot be read: No such file",
        ".": "cannot be read: Is a directory",
        "large.yaml": "larger than 1000000 bytes",
        "latin.yaml": "latin.yaml:2: not UTF-8",
        "control.yaml": "not valid YAML",
        "a\0b": "cannot be read",
    }.items():
        with pytest.raises(ConfigError, match=words):
            load_config(tmp_path / name)


def write_chain(**files: str) -> None:
    for name, text in files.items():
        path = Path(f"{name.replace('__', '/')}.yaml")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def test_base_files_are_inherited_key_by_key(load: Load) -> None:
    load()  # moves to a fresh directory
    write_chain(
        root="Engine:\n  max_steps: 1\n  eval_iters: 7\nOptimizer:\n  beta1: 0.5\n",
        shared__middle="_base_: ../root.yaml\nEngine:\n  max_steps: 2\n",
    )
    config = load(
        "_base_: ./shared/middle.yaml\nEngine:\n  logging_freq: 3\nOptimizer:\n  adam_beta1: 0.6\n"
    )
    engine = config.Engine
    assert (engine.max_steps, engine.eval_iters, engine.logging_freq) == (2, 7, 3)
    assert config.Optimizer.adam_beta1 == 0.6, "a file's own key wins over its base's spelling"


def test_inheritance_can_be_stopped(load: Load) -> None:
    load()
    write_chain(root="Engine:\n  max_steps: 1\n  eval_iters: 7\nModel:\n  num_layers: 2\n")
    config = load("_base_: root.yaml\nEngine:\n  _inherited_: False\n  max_steps: 5\n")
    assert (config.Engine.max_steps, config.Engine.eval_iters) == (5, 10)
    assert config.Model.num_layers == 2


def test_null_in_a_file_undoes_its_base(load: Load) -> None:
    load()
    write_chain(root="Engine:\n  max_steps: 1\n  eval_iters: 7\n")
    config = load("_base_: root.yaml\nEngine:\n  eval_iters:\n")
    assert (config.Engine.max_steps, config.Engine.eval_iters) == (1, 10)


def test_base_problems(problems: Problems, load: Load) -> None:
    load()
    write_chain(one="_base_: run.yaml\n", bad="Model:\n  num_layers: x\n")
    assert "leads back to this file" in problems("_base_: one.yaml\n")[0]
    assert problems("\n_base_: none.yaml\n") == [
        "run.yaml:2: _base_='none.yaml': no file none.yaml"
    ]
    assert "give the path of one file" in problems("_base_: [a, b]\n")[0]
    assert problems("_base_: bad.yaml\n")[0].startswith("bad.yaml:2: Model.num_layers='x'")


KEY_NAMES = (
    "Model Engine Data Distributed Optimizer Global PreTraining Compress Quantization Train Eval "
    "dataset batch_size sharding mix_precision lr grad_clip enable dtype name split clip_norm "
    "input_dir hidden_size num_attention_heads mp_degree pp_degree dp_degree sharding_degree "
    "global_batch_size local_batch_size micro_batch_size max_seq_len vocab_size scheduler Profiler "
    "vocab_size_divisible_unit use_recompute _base_ _inherited_ num_layers virtual_pp_degree"
)
KEYS = st.sampled_from(KEY_NAMES.split())
PATHS = st.sampled_from(
    [path for path, _ in leaves(Config)]
    + [*RENAMED, *WITHOUT_EFFECT, *USUAL, *ONLY, *NOT_OFFERED, "Engine.mix_precision.enable"]
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 100),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["full", "1F1B", "float16", "949,50,1", "."]),
)
TREES = st.recursive(
    VALUES,
    lambda inner: st.one_of(st.dictionaries(KEYS, inner, max_size=6), st.lists(inner, max_size=3)),
    max_leaves=25,
)


def loads_or_says_why(path: Path, overrides: list[str], world_size: int | None) -> None:
    try:
        config = load_config(path, overrides, world_size)
    except ConfigError as error:
        assert error.problems
    else:
        path.write_text(config.to_yaml())
        assert load_config(path, (), world_size).to_dict() == config.to_dict()


WORLD = st.sampled_from([None, 1, 8, 12])
FUZZ = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@FUZZ
@given(tree=st.dictionaries(KEYS, TREES, max_size=8), world_size=WORLD)
def test_any_tree_loads_or_says_why(
    tree: dict[str, object], world_size: int | None, tmp_path: Path
) -> None:
    path = tmp_path / "fuzz.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    loads_or_says_why(path, [], world_size)


@FUZZ
@given(text=st.one_of(st.text(), st.text("{}[]:,-&*!|>'\"%@`#?<~ \n\tab1.")), world_size=WORLD)
def test_any_text_loads_or_says_why(text: str, world_size: int | None, tmp_path: Path) -> None:
    path = tmp_path / "fuzz.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    loads_or_says_why(path, [], world_size)


@FUZZ
@given(data=st.data())
def test_a_damaged_document_loads_or_says_why(data: st.DataObject, tmp_path: Path) -> None:
    name = data.draw(st.sampled_from(["data", "model", "optimizer", "engine", "generation"]))
    content = bytearray((BLOCKS / f"{name}.yaml").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "fuzz.yaml"
    path.write_bytes(bytes(content))
    loads_or_says_why(path, [], None)


@FUZZ
@given(
    overrides=st.lists(
        st.one_of(
            st.text(max_size=20),
            st.builds("{}.{}={}".format, KEYS, KEYS, VALUES),
            st.builds("{}={}".format, PATHS, VALUES),
            st.builds("Data.dataset.{}={}".format, KEYS, st.text("[]{}'\",:1a ", max_size=8)),
        ),
        max_size=6,
    )
)
def test_any_override_loads_or_says_why(overrides: list[str], tmp_path: Path) -> None:
    path = tmp_path / "fuzz.yaml"
    path.write_text("Profiler:\n  scheduler: [1, 5]\n")
    loads_or_says_why(path, overrides, None)
