"""`fourfold plan` and `fourfold doctor` as a user meets them."""

from __future__ import annotations

import json
import platform
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from fourfold.cli import command_line
from fourfold.cli.plan import _parse_fix, _parse_tokens
from fourfold.config import load_config, read_config
from fourfold.config.auto_constraints import read_constraints
from fourfold.errors import ConfigError, UserError
from fourfold.metrics.jsonl import RunFacts
from fourfold.plan import plan as plan_of
from fourfold.plan.auto import choose, describe_cluster
from fourfold.plan.calibrate import Calibration, calibrate, read_run
from fourfold.plan.cluster import load_cluster, parse_cluster, save_cluster

CONFIGS = Path(__file__).parents[2] / "configs" / "gpt"
BIG = str(CONFIGS / "hybrid_parallel" / "configs_175B_mp8_pp16.yaml")
SMALL = str(CONFIGS / "quickstart_gpt2.yaml")
# Its dp_degree and global batch follow from the number of processes.
EIGHT = str(CONFIGS / "hybrid_parallel" / "configs_1.3B_dp8.yaml")
DP8 = "dp8 x pp1 x sharding1 x mp1"
DP1 = "dp1 x pp1 x sharding1 x mp1"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command_line(), list(arguments))


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


def test_plan_auto_and_the_run_agree_on_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every shipped file, on as many devices as it needs and on twice as many."""
    monkeypatch.chdir(tmp_path)
    # The same few layouts for both: it is the batch that is looked at.
    fixed = ["Distributed.virtual_pp_degree=1", "Distributed.sharding.sharding_stage=1"]
    fixed += ["Model.sequence_parallel=False", "Model.recompute_granularity=full"]
    fix = ["--fix", "v=1,stage=1,sp=false,recompute=full"]
    for file in sorted(CONFIGS.rglob("*.yaml")):
        needed = max(8, read_constraints(read_config(file)).fewest_ranks)
        for world in (needed, 2 * needed):
            cluster = f"{world // 8}x8xB200"
            result = run("plan", "-c", str(file), "--cluster", cluster, *fix, "--json")
            planned = json.loads(result.stdout)
            chosen = choose(read_config(file, fixed), world, cluster).config
            batch = planned["global_batch_size"]
            assert batch == chosen.Data.batch_size.global_batch_size, (file, world)
            try:
                trained = load_config(file, world_size=world)
            except ConfigError:  # a batch that one rank of the file's own layout cannot have
                continue
            assert batch == trained.Data.batch_size.global_batch_size, (file, world)
            assert planned["own"] is not None, (file, world, planned["own_problem"])


def test_emitted_batch_is_the_runs(tmp_path: Path) -> None:
    out = tmp_path / "out.yaml"
    result = run("plan", "-c", EIGHT, "--cluster", "8xH100", "--emit", str(out))
    assert "global batch 64 x 1024 tokens" in result.stdout and "\nfile " in result.stdout
    assert load_config(out, world_size=8).Data.batch_size.global_batch_size == 64


def test_emitted_layout_is_not_chosen_again(tmp_path: Path) -> None:
    out = tmp_path / "out.yaml"
    words = ["-o", "Distributed.auto=True", "-o", "Distributed.pp_degree=2"]
    words += ["-o", "Distributed.pp_layers=[1,3]", "--fix", "pp=4"]
    result = run("plan", "-c", SMALL, *words, "--cluster", "4xA100", "--emit", str(out))
    assert result.exit_code == 0, result.output
    config = load_config(out, world_size=4)
    assert config.Distributed.pp_degree == 4
    assert not config.Distributed.auto and config.Distributed.pp_layers is None


def test_dry_run_of_a_number_of_ranks() -> None:
    words = ["plan", "--dry-run", "-c", EIGHT, "-o", "Model.num_layers=1"]
    result = run(*words, "--world", "8", "--rank", "7")
    assert result.stdout.startswith(f"rank 7 of 8, layout {DP8}")
    result = run(*words)
    assert result.stdout.startswith("rank 0 of 1")
    assert "1 is assumed" in result.stderr


def test_layout_of_another_cluster_says_why_it_has_no_row() -> None:
    result = run("plan", "-c", BIG, "--cluster", "8x8xH100", "--top", "1")
    assert "it needs 128 ranks or a multiple of 128, and there are 64" in result.stdout


def test_one_device_is_spoken_of_as_one() -> None:
    text = run("plan", "-c", SMALL, "--cluster", "A100").stdout
    assert "= 1 device, global batch" in text and "; 1 way to cut the ranks" in text


def test_slow_number_formats_and_rates_below_ten_are_told(tmp_path: Path) -> None:
    slow = describe_cluster(1, None, "cpu")[0]
    device = slow.device.model_copy(update={"peak_tflops": slow.device.peak_tflops_fp32 / 50})
    save_cluster(slow.model_copy(update={"device": device}), tmp_path / "slow.yaml", "")
    file, cluster = (
        str(CONFIGS / "single" / "configs_345m_single_card.yaml"),
        tmp_path / "slow.yaml",
    )
    text = run("plan", "-c", file, "--cluster", str(cluster)).stdout
    assert "products in float32 are 50 times as fast as in float16 on this processor" in text
    (best,) = [line for line in text.splitlines() if line.startswith("1 ")]
    rate = re.search(r" ±\S+ +(\S+) ", best)
    assert rate is not None and 0 < float(rate[1]) < 10, best
    assert "has not been measured on a GPU" not in text
    quick = run("plan", "-c", file, "--cluster", "A100").stdout
    assert "products in float32" not in quick and "has not been measured on a GPU" in quick


def test_a800_has_the_links_of_its_own() -> None:
    a800, a100 = (parse_cluster(name).device for name in ("A800", "A100"))
    assert a800.name == "A800-80G" and a800.intra_gbps < a100.intra_gbps


def test_doctor_and_calibrate_do_not_overwrite_unasked(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("device: A100\n")
    for words in (["doctor"], ["plan", "-c", SMALL, "--cluster", "A100", "--calibrate", "x"]):
        result = run(*words, "--out", str(file))
        assert isinstance(result.exception, UserError)
        assert "exists and would be overwritten" in str(result.exception)
    assert file.read_text() == "device: A100\n"


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
    assert result.stdout.count("met  ") >= 16
    # None that ran out of memory is said to fit; one row says too little to be judged.
    assert "6 of 6 are not said to fit (all)" in result.stdout
    assert result.stdout.count("out of memory, not judged:") == 1


def _write_run(
    directory: Path, seconds: list[float], world: int = 1, batch: int = 16, layout: str = DP1
) -> Path:
    """Records of a run as `fourfold train` writes them, as far as they are read back."""
    facts = RunFacts(layout=layout, world_size=world, peak_flops=None, peak_source="n/a")
    lines = [{"kind": "run"} | asdict(facts)]
    lines += [
        {
            "kind": "train",
            "step": i + 1,
            "batch_seconds": s,
            "global_batch_size": batch,
            "peak_rss_bytes": 10**9,
        }
        for i, s in enumerate(seconds)
    ]
    file = directory / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def _calibrated(file: Path, cluster: str, config: str = SMALL) -> Calibration:
    return calibrate(Path(config), [], parse_cluster(cluster), read_run(file.parent))


def test_calibration_moves_the_cluster_to_the_run(tmp_path: Path) -> None:
    run = _write_run(tmp_path, [9.0, 3.0, 0.5, 0.5, 0.5, 0.51, 0.5, 0.49, 0.5, 0.5])
    result = _calibrated(run, "A100-40G")
    again = plan_of(load_config(SMALL), result.cluster)
    assert again.own is not None and again.own.seconds == pytest.approx(0.5, rel=0.02)
    assert result.cluster.device.band < parse_cluster("A100-40G").device.band


def test_calibration_is_of_the_processes_and_the_batch_of_the_run(tmp_path: Path) -> None:
    run = _write_run(tmp_path, [0.5] * 10, world=8, batch=64, layout=DP8)
    result = _calibrated(run, "8xH100", EIGHT)
    assert result.cluster.world == 8 and "10 steps of 8 process(es)" in result.lines[0]
    again = plan_of(load_config(EIGHT, world_size=8), result.cluster)
    assert again.own is not None and again.own.seconds == pytest.approx(0.5, rel=0.02)


def test_calibration_refuses_another_run_than_the_files(tmp_path: Path) -> None:
    run = _write_run(tmp_path, [0.5] * 10, world=8, batch=32, layout=DP8)
    with pytest.raises(UserError, match=r"0 timed steps with a global batch of 64 \(.*: 32\)"):
        _calibrated(run, "8xH100", EIGHT)
    run = _write_run(tmp_path, [0.5] * 10, world=8, batch=64, layout=DP8.replace("dp8", "dp4"))
    with pytest.raises(UserError, match="had the layout dp4"):
        _calibrated(run, "8xH100", EIGHT)


def test_calibration_with_a_very_uneven_run_writes_a_cluster_that_loads(tmp_path: Path) -> None:
    result = _calibrated(_write_run(tmp_path, [0.1, 0.1, 0.1, 2.0, 0.1, 0.1, 3.0, 0.1]), "V100-32G")
    save_cluster(result.cluster, tmp_path / "new.yaml", "Calibrated.")
    assert load_cluster(tmp_path / "new.yaml").device.band == 1.0


def test_calibration_reads_runs_of_earlier_versions(tmp_path: Path) -> None:
    """They did not record their layout, and the number of ranks is that of the rates."""
    file = _write_run(tmp_path, [1.0] * 10, world=2)
    steps = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    lines = [json.dumps(step | {"ips_total": 200.0, "ips": 100.0}) + "\n" for step in steps]
    file.write_text("".join(lines))
    record = read_run(tmp_path)
    assert (record.world, record.layout, len(record.times)) == (2, None, 10)


def test_calibration_flags_an_impossible_rate(tmp_path: Path) -> None:
    lines = _calibrated(_write_run(tmp_path, [1e-4] * 10), "V100-32G").lines
    assert any("of the peak" in line for line in lines)


def test_calibration_needs_steps(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="2 timed steps"):
        _calibrated(_write_run(tmp_path, [1.0, 1.0]), "V100-32G")
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="no timed steps"):
        read_run(tmp_path)


@pytest.mark.slow
def test_doctor_writes_a_cluster_that_plans(tmp_path: Path) -> None:
    out = tmp_path / "cluster.yaml"
    result = run("doctor", "--seconds", "0.05", "--out", str(out), "--directory", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "products in fp32" in result.stdout
    assert yaml.safe_load(out.read_text())["measured_on"].startswith(platform.node())
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
