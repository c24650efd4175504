"""What the documents print and what this project ships loads, and says what the code says."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from helpers.yaml_text import Load

from fourfold.config import Config, load_config
from fourfold.config.__main__ import annotated
from fourfold.config.fields import leaves
from fourfold.config.reference import json_schema, markdown_reference

ROOT = Path(__file__).parents[2]
BLOCKS = sorted((Path(__file__).parent / "blocks").glob("*.yaml"))
SHIPPED = sorted((ROOT / "configs").rglob("*.yaml"))


def shipped(name: str, **kwargs: object) -> Config:
    return load_config(ROOT / "configs" / name, **kwargs)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda path: path.stem)
def test_printed_block_loads_as_pasted(block: Path) -> None:
    assert load_config(block)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda path: path.stem)
def test_printed_block_loads_under_a_parent(block: Path, load: Load) -> None:
    indented = "\n".join("  " + line for line in block.read_text().splitlines())
    alone = load_config(block)
    assert load("PreTraining:\n" + indented).to_dict() == alone.to_dict()


def test_all_blocks_of_the_single_card_page_pasted_in_a_row(load: Load) -> None:
    order = ["data", "model", "optimizer", "engine", "fused", "generation"]
    text = "\n".join((BLOCKS[0].parent / f"{name}.yaml").read_text() for name in order)
    config = load(text)
    assert config.Data.batch_size.global_batch_size == 8
    assert (config.Model.hidden_size, config.Model.ffn_hidden_size) == (1024, 4096)
    assert config.Model.recompute_granularity == "full"
    assert (config.Optimizer.lr.max_lr, config.Optimizer.lr.min_lr) == (1e-5, 5e-5)
    assert config.Engine.mix_precision.dtype == "float16"
    assert config.Generation.top_p == 0.75
    assert any("Data.Model is read as the section Model" in notice for notice in config.notices)
    assert any("max_lr=1e-05 is below" in notice for notice in config.notices)


def test_printed_sharding_block_needs_eight_processes() -> None:
    block = BLOCKS[0].parent / "distributed.yaml"
    config = load_config(block, world_size=16)
    assert config.Distributed.sharding.sharding_degree == 8
    assert config.Distributed.dp_degree == 2


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_file_says_what_the_code_says(path: Path) -> None:
    text = path.read_text()
    assert text == annotated(text, str(path)), "run `python -m fourfold.config`"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_file_comments_every_key(path: Path) -> None:
    lines = path.read_text().splitlines()
    for above, line in pairwise(lines):
        if line.strip() and not line.lstrip().startswith("#"):
            assert above.lstrip().startswith("#"), line


def test_these_files_are_shipped() -> None:
    assert {str(path.relative_to(ROOT / "configs")) for path in SHIPPED} == {
        "gpt/quickstart.yaml",
        "gpt/quickstart_gpt2.yaml",
        "gpt/modern_124M.yaml",
        "gpt/single/configs_345m_single_card.yaml",
        "gpt/single/configs_1.3B_single_card.yaml",
        "gpt/hybrid_parallel/configs_1.3B_dp8.yaml",
        "gpt/hybrid_parallel/configs_6.7B_sharding16.yaml",
        "gpt/hybrid_parallel/configs_175B_mp8_pp16.yaml",
        "gpt/auto_parallel/configs_345M_dp8.yaml",
        "llama/llama_1B.yaml",
        "llama/llama_3B.yaml",
        "llama/llama_8B.yaml",
        "qwen3/qwen3_0.6B.yaml",
        "qwen3/qwen3_4B.yaml",
    }


@pytest.mark.parametrize(
    ("name", "world_size", "global_batch", "accumulate"),
    [
        ("gpt/quickstart.yaml", 1, 8, 1),
        ("gpt/quickstart_gpt2.yaml", 1, 16, 2),
        ("gpt/modern_124M.yaml", 1, 512, 64),
        ("gpt/single/configs_345m_single_card.yaml", 1, 8, 1),
        ("gpt/single/configs_1.3B_single_card.yaml", 1, 8, 1),
        ("gpt/hybrid_parallel/configs_1.3B_dp8.yaml", 8, 64, 1),
        ("gpt/hybrid_parallel/configs_6.7B_sharding16.yaml", 16, 128, 1),
        ("gpt/hybrid_parallel/configs_175B_mp8_pp16.yaml", 128, 1536, 1536),
        ("gpt/auto_parallel/configs_345M_dp8.yaml", 8, 64, 1),
        ("llama/llama_1B.yaml", 8, 512, 64),
        ("llama/llama_3B.yaml", 8, 512, 64),
        ("llama/llama_8B.yaml", 8, 512, 64),
        ("qwen3/qwen3_0.6B.yaml", 8, 1024, 64),
        ("qwen3/qwen3_4B.yaml", 8, 1024, 128),
    ],
)
def test_shipped_file_on_its_machine(
    name: str, world_size: int, global_batch: int, accumulate: int
) -> None:
    config = shipped(name, world_size=world_size)
    assert config.notices == []
    assert config.Data.batch_size.global_batch_size == global_batch
    assert config.Engine.accumulate_steps == accumulate


@pytest.mark.parametrize("path", [*SHIPPED, *BLOCKS], ids=lambda path: path.stem)
@pytest.mark.parametrize("comments", [True, False])
def test_resolved_yaml_loads_to_the_same_tree(path: Path, comments: bool, load: Load) -> None:
    config = load_config(path)
    again = load(config.to_yaml(comments=comments))
    assert again.to_dict() == config.to_dict()
    assert not [line for line in again.notices if "max_lr" not in line]


def test_odd_values_survive_the_round_trip(load: Load) -> None:
    odd = [
        "",
        "1e-5",
        "None",
        "a: b",
        "x #y",
        "'",
        '"',
        "tab\there",
        "line\nbreak",
        "日本",
        " pad ",
    ]
    config = load()
    config.Data.dataset.input_dir = odd
    for text in odd[1:]:
        config.Engine.save_load.output_dir = text
        config.Inference.model_dir = text
        assert load(config.to_yaml()).to_dict() == config.to_dict()


def test_yaml_with_comments_carries_every_description() -> None:
    config = shipped("gpt/quickstart.yaml")
    with_comments = " ".join(config.to_yaml(comments=True).replace("#", " ").split())
    for path, field in leaves(Config):
        assert field.description, path
        assert " ".join(field.description.split()) in with_comments, path
    assert "#" not in config.to_yaml(comments=False)


def test_reference_page_is_the_generated_one() -> None:
    page = ROOT / "docs" / "configuration.md"
    assert page.read_text() == markdown_reference(), "run `python -m fourfold.config`"


def test_schema_describes_every_key_and_allows_null() -> None:
    schema = json.loads(json.dumps(json_schema()))
    for path, field in leaves(Config):
        node = schema
        for name in path.split("."):
            reference = next((o["$ref"] for o in node.get("anyOf", []) if "$ref" in o), None)
            if reference is not None:
                node = schema["$defs"][reference.rsplit("/", 1)[-1]]
            node = node["properties"][name]
        assert node["description"] == field.description
        assert {"type": "null"} in node["anyOf"]
    assert all(part["additionalProperties"] is False for part in schema["$defs"].values())
