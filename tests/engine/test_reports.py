"""What a run tells: the documents' lines, the derived plan, pictures and traces."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
from helpers.tiny_run import Configure

from fourfold.engine import build_engine
from fourfold.metrics import read_jsonl
from fourfold.metrics.prometheus import MetricsPort

# The optimizer of seed 002, whose max_lr lies below its min_lr.
DOCUMENT = [
    "Optimizer.lr.decay_steps=360000",
    "Optimizer.lr.warmup_rate=0.01",
    "Optimizer.lr.max_lr=1.0e-5",
    "Optimizer.lr.min_lr=5.0e-5",
]


def test_the_log_shows_the_documents_learning_rates(
    configure: Configure, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configure("run", *DOCUMENT, "Engine.max_steps=9")
    assert any("max_lr" in notice and "min_lr" in notice for notice in config.notices)
    build_engine(config).fit()
    lines = capsys.readouterr().out
    shown = dict(re.findall(r"global step (\d+), .* learning rate: (\S+)", lines))
    assert (shown["1"], shown["2"], shown["9"]) == ("5.55556e-09", "8.33333e-09", "2.77778e-08")


def test_the_plan_is_shown_before_the_first_step(
    configure: Configure, capsys: pytest.CaptureFixture[str]
) -> None:
    build_engine(configure("run", "Engine.max_steps=1")).fit()
    before, _, _ = capsys.readouterr().out.partition("global step 1")
    assert "layout: dp1 x pp1 x sharding1 x mp1 on cpu, float32" in before
    assert "8 samples x 16 tokens = 128 tokens a step, in 2 micro-batch(es) of 4" in before
    assert "58,752 parameters" in before
    assert "120 documents" in before


def test_a_run_leaves_records_picture_events_and_trace(
    configure: Configure, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    build_engine(
        configure(
            "run",
            "Engine.max_steps=4",
            "Engine.tensorboard=True",
            "Global.peak_tflops=0.001",
            "Profiler.enable=True",
            "Profiler.scheduler=[1,3]",
            f"Profiler.profiler_log={trace}",
        )
    ).fit()
    run = tmp_path / "run"
    assert (run / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((run / "tensorboard").glob("events*"))
    events = json.loads(next(trace.glob("*.json")).read_text())["traceEvents"]
    assert any("forward_backward" in str(event.get("name")) for event in events)
    train = [record for record in read_jsonl(run / "metrics.jsonl") if record["kind"] == "train"]
    assert [record["step"] for record in train] == [1, 2, 3, 4]
    last = train[-1]
    assert last["tokens"] == 4 * 128 and last["mfu"] > 0 and last["grad_norm"] > 0
    assert last["ips_total"] == pytest.approx(128 / last["batch_seconds"])
    assert last["seconds"].keys() >= {"reader", "forward_backward", "optimizer"}


def test_empty_splits_and_no_evaluation_are_legal(configure: Configure, tmp_path: Path) -> None:
    build_engine(configure("all", "Data.dataset.split='1,0,0'", "Engine.max_steps=4")).fit()
    build_engine(configure("none", "Engine.eval_freq=0", "Engine.test_iters=0")).fit()
    for name in ("all", "none"):
        kinds = {record["kind"] for record in read_jsonl(tmp_path / name / "metrics.jsonl")}
        assert not kinds & {"eval", "test"}


def test_a_run_serves_its_metrics(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replies: list[str] = []
    end_step = MetricsPort.end_step

    def ask(port: MetricsPort, step: int, loss: float, tokens: int) -> None:
        end_step(port, step, loss, tokens)
        replies.append(httpx.get(f"{port.url}/metrics").text)
        assert httpx.get(f"{port.url}/healthz").status_code == 200

    monkeypatch.setattr(MetricsPort, "end_step", ask)
    build_engine(configure("run", "Engine.max_steps=4", "Engine.metrics_port=0")).fit()
    assert "metrics are served at http://127.0.0.1:" in capsys.readouterr().out
    assert "fourfold_steps_total 1.0\n" in replies[0]
    # Step 3 was evaluated before the fourth was asked about.
    assert 'fourfold_evaluation_loss{split="eval"}' in replies[3]
