"""Cluster notation and files: what is read, what is refused, and in which words."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.errors import UserError
from fourfold.plan.cluster import PRESETS, load_cluster, parse_cluster, save_cluster


@pytest.mark.parametrize(
    ("text", "nodes", "per_node", "device"),
    [
        ("16x8xA100-80G", 16, 8, "A100-80G"),
        ("8xH100", 1, 8, "H100-80G"),
        ("V100-32G", 1, 1, "V100-32G"),
        ("64xa100-40gb", 8, 8, "A100-40G"),
        ("2x16xMI300X", 2, 16, "MI300X"),
    ],
)
def test_notation(text: str, nodes: int, per_node: int, device: str) -> None:
    cluster = parse_cluster(text)
    assert (cluster.nodes, cluster.devices_per_node, cluster.device.name) == (
        nodes,
        per_node,
        device,
    )
    assert parse_cluster(str(cluster)) == cluster


def test_a_misspelt_device_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"A100-80F.*did you mean A100-80G"):
        parse_cluster("8xA100-80F")


@given(st.text(max_size=30) | st.from_regex(r"[0-9x]{0,12}[A-Z0-9-]{0,12}", fullmatch=True))
def test_any_text_is_a_cluster_or_a_clear_error(text: str) -> None:
    if text.strip().upper().endswith("CPU"):
        return
    try:
        cluster = parse_cluster(text)
    except UserError as error:
        assert str(error)
    else:
        assert cluster.world >= 1


def test_a_file_overrides_single_numbers_of_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("nodes: 4\ndevice: {preset: H100, inter_gbps: 12.5}\n")
    cluster = load_cluster(path)
    assert cluster.world == 32
    assert cluster.device.inter_gbps == 12.5
    assert cluster.device.memory_gbps == PRESETS["H100-80G"].memory_gbps


def test_a_written_file_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    cluster = parse_cluster("3x4xV100-16G")
    save_cluster(cluster, path, "Two lines\nof heading")
    assert load_cluster(path) == cluster


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nodes: 0\ndevice: A100", "nodes: Input should be greater than or equal to 1"),
        ("nodes: 1\ndevice: {preset: A100, memory: 3}", "device.memory: Extra inputs"),
        ("nodes: 1\ndevice: {preset: A100, sustained: .nan}", "device.sustained"),
        ("nodes: 1", "device: Field required"),
        ("- 1", "must hold the keys"),
        ("{", "is not YAML"),
    ],
)
def test_a_wrong_file_says_where(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"cluster\.yaml") as error:
        load_cluster(path)
    assert words in str(error.value)


def test_fp32_is_assumed_for_bf16_where_the_device_has_none() -> None:
    cluster = parse_cluster("V100-32G")
    assert cluster.machine("bfloat16").peak == cluster.machine("float32").peak
    assert cluster.machine("float16").peak > cluster.machine("float32").peak
