"""`fourfold accept`: sound machines are accepted, planted faults named, nothing private told."""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from typer.testing import CliRunner, Result

from fourfold.accept import acceptance
from fourfold.accept.layouts import LAYOUTS
from fourfold.accept.report import AcceptanceReport, Check, ReportSection, page_of
from fourfold.accept.trials import without_paths
from fourfold.cli import command_line, main
from fourfold.engine import Engine, resuming
from fourfold.parallel import Runner
from fourfold.parallel.tensor import VocabularyRows


def accepted(folder: Path, *words: str) -> tuple[Result, dict[str, Any]]:
    asked = ["accept", "--quick", "--device", "cpu", "--nproc", "2", "--output", str(folder)]
    result = CliRunner().invoke(command_line(), [*asked, *words], catch_exceptions=False)
    return result, json.loads((folder / "acceptance.json").read_text())


def only_layout(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [layout for layout in LAYOUTS if layout.name == name]
    assert rows
    monkeypatch.setattr(acceptance, "LAYOUTS", rows)


def test_sound_groups_are_accepted_and_nothing_private_is_told(tmp_path: Path) -> None:
    result, report = accepted(tmp_path / "told", "--only", "collectives")
    assert result.exit_code == 0, result.stdout
    assert report["verdict"].startswith("accepted") and not report["failed"]
    passed = {check["name"] for check in report["sections"][0]["checks"]}
    kinds = "all_reduce, all_gather, reduce_scatter, broadcast, send and receive"
    assert passed == {f"{axis}2: {kinds} over {axis}" for axis in ("dp", "mp", "pp", "sharding")}
    assert any(check["name"] == "GPUs" for check in report["sections"][-1]["checks"])
    for file in ("acceptance.json", "acceptance.html"):
        text = (tmp_path / "told" / file).read_text()
        private = [platform.node(), str(Path.home()), str(tmp_path), str(Path.cwd()), "/tmp"]
        assert not [word for word in private if len(word) > 2 and word in text], file
        words = set(re.findall(r"\w+", text))
        assert getpass.getuser() not in words, file


def test_a_wrong_collective_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole_gather = dist.all_gather_single

    def wrong(output: Tensor, *given: Any, **named: Any) -> Any:
        done = whole_gather(output, *given, **named)
        if output.numel() > 1000:
            output[-1] += 1
        return done

    monkeypatch.setattr(dist, "all_gather_single", wrong)
    only_layout("dp2", monkeypatch)
    result, report = accepted(tmp_path, "--only", "collectives")
    assert result.exit_code == 1
    assert report["failed"] == ["collectives: dp2: all_gather over dp"]
    assert "failed: collectives: dp2: all_gather over dp" in result.stdout
    assert "rank 1: 1000 x float32" in result.stdout


def test_a_changed_loss_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = VocabularyRows.normalize

    def unsound(self: VocabularyRows, *given: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        normalizer, logit, target, here = sound(self, *given)
        return normalizer + 0.0001 * (normalizer - logit), logit, target, here

    monkeypatch.setattr(VocabularyRows, "normalize", unsound)
    only_layout("mp2, sequence parallel", monkeypatch)
    result, report = accepted(tmp_path, "--only", "equivalence")
    assert result.exit_code == 1
    assert report["failed"] == ["equivalence: mp2, sequence parallel"]
    (check,) = report["sections"][0]["checks"]
    assert check["figures"]["losses"] == pytest.approx(1e-4, rel=0.1)
    assert check["detail"] == "losses above 1e-05"


@pytest.mark.slow
def test_a_gradient_that_is_lost_is_named_in_low_precision_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one bias of 64 numbers; by rounding alone single elements are nearly as far off."""
    sound = Runner.squared_norm

    def unsound(self: Runner) -> Tensor:
        found = sound(self)
        gradient = self.masters["layers.2.attn.out.bias"].grad
        assert gradient is not None
        gradient.mul_(0.0 if self.mesh.size > 1 else 1.0)
        return found

    only_layout("mp2, bfloat16", monkeypatch)
    monkeypatch.setattr(acceptance.Acceptance, "layouts", acceptance.LAYOUTS)
    result, report = accepted(tmp_path / "sound", "--only", "equivalence")
    assert result.exit_code == 0, result.stdout
    monkeypatch.setattr(Runner, "squared_norm", unsound)
    result, report = accepted(tmp_path / "unsound", "--only", "equivalence")
    assert report["failed"] == ["equivalence: mp2, bfloat16"]
    assert "tensors above 0.2" in report["sections"][0]["checks"][0]["detail"]


@pytest.mark.slow
def test_a_run_that_resumes_wrongly_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = resuming.resume

    def unsound(run: Engine) -> Any:
        restored = sound(run)
        if os.environ["FOURFOLD_ATTEMPT"] == "1":
            next(iter(run.runner.masters.values())).data.mul_(1.0001)
        return restored

    monkeypatch.setattr(resuming, "resume", unsound)
    only_layout("dp2", monkeypatch)
    result, report = accepted(tmp_path, "--only", "resuming")
    assert result.exit_code == 1
    assert report["failed"] == ["resuming: dp2: a rank killed, all restarted"]


@pytest.mark.slow
def test_the_quick_kit_accepts_this_machine(tmp_path: Path) -> None:
    result, report = accepted(tmp_path)
    assert result.exit_code == 0, result.stdout
    titles = [section["title"] for section in report["sections"]]
    assert titles == ["collectives", "equivalence", "resuming", "speed", "memory", "not shown"]
    assert all(section["checks"] for section in report["sections"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "speeed"], "--only speeed: 'speeed' is not one of collectives, equivalence"),
        (["--device", "tpu"], "--device tpu: choose cpu or gpu"),
        (["--devices", "9"], "--devices"),
    ],
)
def test_bad_options_end_with_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["accept", *words])
    assert end.value.code == 2
    assert said in capsys.readouterr().err


# -- the page -------------------------------------------------------------------------------------


class Balance(HTMLParser):
    """Counts that every tag with an end has one."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("meta", "html"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag != "html":
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_holds_what_was_found_and_no_markup_of_others() -> None:
    rows = [
        Check("mp2", "passed", "", {"losses": 2e-7, "norms": 0.0}),
        Check("a <b> & c", "failed", "losses above 1e-05", {"losses": 0.5}),
    ]
    report = AcceptanceReport({"device": "<X>"}, {"quick": True}, [ReportSection("s", "t", rows)])
    page = Balance()
    page.feed("".join(page_of(report)))
    assert not page.open
    text = " ".join(page.text)
    for shown in ("FAILED: 1 passed, 1 failed", "s: a <b> & c", "<X>", "2.0e-07", "0.5"):
        assert shown in text


def test_errors_lose_their_paths() -> None:
    said = "rank 1 failed:\nRuntimeError: cannot open /home/ann/runs/x.bin: No such file"
    assert without_paths(said) == (
        "rank 1 failed: / RuntimeError: cannot open <path>: No such file"
    )
