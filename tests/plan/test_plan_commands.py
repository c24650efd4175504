"""`fourfold plan` and `fourfold doctor` as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from fourfold.cli import app
from fourfold.cli.planning import _parse_fix, _parse_tokens
from fourfold.config import load_config
from fourfold.errors import UserError
from fourfold.plan import plan as plan_of
from fourfold.plan.calibrate import calibrate
from fourfold.plan.cluster import load_cluster, parse_cluster

CONFIGS = Path(__file__).parents[2] / "configs" / "gpt"
BIG = str(CONFIGS / "hybrid_parallel" / "configs_175B_mp8_pp16.yaml")
SMALL = str(CONFIGS / "quickstart.yaml")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def plan(*arguments: str) -> str:
    result = run("plan", "-c", BIG, "--cluster", "16x8xA100-80G", *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_table_days_cost_and_the_files_row() -> None:
    text = plan("--tokens", "300B", "--price", "2", "--top", "3")
    rows = [line for line in text.splitlines() if " mbs " in line]
    assert [row.split()[0] for row in rows[:4]] == ["1", "2", "3", "file"]
    assert "dp1 pp16 sharding1 mp8" in rows[3] and "recompute full" in rows[3]
    assert "memory per device" in text and "why not" in text and "one change" in text
    assert "devices needed at this rate per device" in text


def test_json_holds_the_terms_and_the_overrides() -> None:
    answer = json.loads(plan("--json", "--top", "2", "--fix", "mp=8,pp=8"))
    best = answer["candidates"][0]
    assert best["step_seconds"] == pytest.approx(sum(best["time_seconds"].values()))
    assert best["total_bytes"] == pytest.approx(sum(best["memory_bytes"].values()))
    assert "Distributed.mp_degree=8" in best["overrides"]


@pytest.mark.parametrize("which", ["file", "1", "mp8 pp16", "mp=4,pp=16,sp=true"])
def test_explained_terms_add_up_to_the_sum(which: str) -> None:
    lines = plan("--explain", which).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("time of one step"))
    terms = [line.split(" s ")[0].split()[-1] for line in lines[start + 1 :] if " s   = " in line]
    total = next(line for line in lines[start:] if line.strip().startswith("sum"))
    assert sum(map(float, terms)) == pytest.approx(float(total.split()[1]), abs=2e-3)


def test_emitted_configuration_is_accepted(tmp_path: Path) -> None:
    out = tmp_path / "out.yaml"
    plan("--emit", str(out), "--fix", "mp=8,pp=8")
    assert run("config", "check", "-c", str(out)).exit_code == 0
    config = load_config(out, world_size=128)
    assert (config.Distributed.mp_degree, config.Distributed.pp_degree) == (8, 8)
    assert config.Data.batch_size.global_batch_size == 1536
    assert not config.notices


def test_pictures(tmp_path: Path) -> None:
    plan("--plot", str(tmp_path / "plan.png"), "--top", "2")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    plan("--plot", str(tmp_path / "plan.html"), "--top", "2")
    page = (tmp_path / "plan.html").read_text()
    assert page.count("<svg") == 2 and "<script" not in page
    assert "activations:" in page and "dp1 pp16 sharding1 mp8" in page


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan"], "needs a configuration and a cluster"),
        (["plan", "-c", BIG, "--cluster", "8xV100-16G"], "no layout fits 1x8xV100-16G"),
        (["plan", "-c", BIG, "--cluster", "8xA100", "--fix", "mp=7"], "no legal layout"),
        (["plan", "-c", BIG, "--cluster", "16x8xA100", "--explain", "999"], "rows 1 to"),
        (["plan", "-c", BIG, "--cluster", "16x8xA100", "--plot", "x.gif"], ".png or .html"),
        (["plan", "--self-test", "--rows", "missing.csv"], "cannot be read"),
        (["doctor", "--directory", "/does/not/exist"], "cannot be written"),
    ],
)
def test_errors_are_sentences(arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, UserError), result.output
    assert words in str(result.exception)


@pytest.mark.parametrize("text", ["mp", "mp=", "mp=0", "mp=-1", "sp=maybe", "recompute=all", "x=1"])
def test_wrong_fixes_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--fix"):
        _parse_fix(text, "--fix")


def test_fixes_and_tokens() -> None:
    assert _parse_fix("mp=8,pp8 mbs=2,sp=true", "--fix") == {
        "mp": 8,
        "pp": 8,
        "micro_batch": 2,
        "sequence_parallel": True,
    }
    assert _parse_tokens("300B") == 3e11 and _parse_tokens("1.5t") == 1.5e12
    for text in ("", "B", "-1B", "nan", "1e400"):
        with pytest.raises(UserError, match="--tokens"):
            _parse_tokens(text)


def test_self_test_reaches_its_targets() -> None:
    result = run("plan", "--self-test")
    assert result.exit_code == 0
    assert "MISSED" not in result.stdout
    assert result.stdout.count("met  ") >= 11


def _write_run(directory: Path, seconds: list[float]) -> None:
    lines = [
        json.dumps({"kind": "train", "step": i + 1, "batch_seconds": s, "peak_rss_bytes": 10**9})
        for i, s in enumerate(seconds)
    ]
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_calibration_moves_the_cluster_to_the_run(tmp_path: Path) -> None:
    _write_run(tmp_path, [9.0, 3.0, 0.5, 0.5, 0.5, 0.51, 0.5, 0.49, 0.5, 0.5])
    config, cluster = load_config(SMALL), parse_cluster("A100-40G")
    result = calibrate(config, cluster, tmp_path)
    again = plan_of(config, result.cluster)
    assert again.own is not None and again.own.seconds == pytest.approx(0.5, rel=0.02)
    assert result.cluster.device.band < cluster.device.band


def test_calibration_flags_an_impossible_rate(tmp_path: Path) -> None:
    _write_run(tmp_path, [1e-4] * 10)
    lines = calibrate(load_config(SMALL), parse_cluster("V100-32G"), tmp_path).lines
    assert any("of the peak" in line for line in lines)


def test_calibration_needs_steps(tmp_path: Path) -> None:
    _write_run(tmp_path, [1.0, 1.0])
    with pytest.raises(UserError, match="2 timed steps"):
        calibrate(load_config(SMALL), parse_cluster("V100-32G"), tmp_path)


def test_doctor_writes_a_cluster_that_plans(tmp_path: Path) -> None:
    out = tmp_path / "cluster.yaml"
    result = run("doctor", "--seconds", "0.05", "--out", str(out), "--directory", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "products in fp32" in result.stdout
    assert yaml.safe_load(out.read_text())["device"]["is_cpu"] is True
    cluster = load_cluster(out)
    assert cluster.device.peak_tflops_fp32 > 0
    assert run("plan", "-c", SMALL, "--cluster", str(out)).exit_code == 0


@pytest.mark.slow
def test_doctor_times_collectives_between_processes(tmp_path: Path) -> None:
    out = tmp_path / "cluster.yaml"
    result = run("doctor", "--nproc", "2", "--seconds", "0.05", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "all-reduce over 2" in result.stdout
    assert load_cluster(out).world == 2
