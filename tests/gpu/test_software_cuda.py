"""The commands on CUDA devices in software: the numbers of the CPU, in every layout.

What runs is all that a GPU would run but its kernels and nccl (`helpers.software_cuda`): devices
are chosen, groups made, batches pinned and copied, updates decided on the device and told a step
late, checkpoints copied to the host. It needs a C++ compiler.
"""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.cuda_stand_in import NAME
from helpers.forked import fourfold
from helpers.layout_runs import Runs, different, losses, records, tensors
from helpers.layout_table import CASES, Case, micro, recompute
from helpers.native import library
from helpers.software_cuda import command
from helpers.tiny_text_run import make_run, sentences

pytestmark = pytest.mark.slow

GPU = "Global.device=gpu"
STEPS = "Engine.max_steps=5"
OFFLOAD = "Model.offload_activations=True"
LAYOUTS = [
    *(Case(layout) for layout in ("dp1", "dp2", "dp4", "mp2", "mp2 sp", "sh2", "sh2 stage2")),
    *(Case(layout) for layout in ("sh2 stage3", "sh2 stage3 offload", "dp2 sh2 stage3", "pp2")),
    *(Case(f"pp2 {schedule}") for schedule in ("gpipe", "interleaved", "bfs", "izb", "zbv")),
    *(Case(layout) for layout in ("pp2 dualpipe", "pp2 mp2 sp", "pp2 sh2 stage2", "dp2 mp2")),
    *(Case(layout) for layout in ("sh2 stage3 mp2 sp", "pp2 sh2 stage3 mp2 sp")),
    Case("dp2", extras=("Fused.tensor_fusion=True",)),
    Case("sh2 stage3 mp2", extras=recompute("full")),
    Case("sh2 stage3", extras=recompute("full"), dtype="bfloat16", level="O1"),
    Case("sh2 stage3 mp2 sp", ("Model.hidden_size=256",), extras=(*micro(4), OFFLOAD)),
    *(case for case in CASES if case.settings and case.world == 2),
    *(case for case in CASES if case.level and case.world < 8),
]


class Devices:
    """`fourfold` with GPUs in software, and without."""

    def __init__(self, folder: Path) -> None:
        self.runs = Runs(folder)
        self.run = partial(
            command,
            (library("software_cuda"), library("software_nccl", "torch", "torch_python")),
            log=folder / "console",
        )

    def train(self, case: Case, name: str, *more: str, code: int = 0) -> Path:
        settings = (*case.shared(), *case.extras, STEPS, *more)
        if "Optimizer.name=Muon" in case.settings:
            settings += ("Optimizer.muon.ns_dtype=float32",)  # as on the CPU
        words = self.runs.command(case.layout, name, *settings, GPU)
        assert self.run(words) == code, self.said
        return self.runs.folder / name

    def train_on_cpu(self, case: Case, name: str, *more: str, code: int = 0) -> Path:
        """One process, by the promise of the layouts."""
        words = self.runs.command("dp1", name, *case.shared(), STEPS, *more)
        done = fourfold(*words)
        assert done.returncode == code, done.stdout + done.stderr
        return self.runs.folder / name

    @property
    def said(self) -> str:
        return (self.runs.folder / "console").read_text()


@pytest.fixture
def devices(tmp_path: Path) -> Devices:
    return Devices(tmp_path)


@pytest.mark.parametrize("case", LAYOUTS, ids=lambda case: case.name)
def test_a_layout_has_the_numbers_of_the_cpu(devices: Devices, case: Case) -> None:
    gpu, cpu = devices.train(case, "gpu"), devices.train_on_cpu(case, "cpu")
    assert "on cuda:0" in devices.said and "H100" in devices.said
    closely, roughly = case.tolerances
    assert losses(gpu) == pytest.approx(losses(cpu), rel=closely)
    assert distance(gpu / "step_5", cpu / "step_5") < roughly


def distance(one: Path, other: Path) -> float:
    """Of all tensors of two checkpoints, relative."""
    ours, theirs = tensors(one), tensors(other)
    assert ours.keys() == theirs.keys()
    apart = sum(float((ours[name] - theirs[name]).double().square().sum()) for name in ours)
    return math.sqrt(apart / sum(float(each.double().square().sum()) for each in theirs.values()))


def test_checkpoints_go_both_ways(devices: Devices) -> None:
    case = Case("pp2 sh2 stage2")
    gpu, cpu = devices.train(case, "gpu"), devices.train_on_cpu(case, "cpu")
    there = devices.train(case, "there", f"Engine.save_load.ckpt_dir={cpu / 'step_2'}")
    back = devices.train_on_cpu(case, "back", f"Engine.save_load.ckpt_dir={gpu / 'step_2'}")
    for resumed in (there, back):
        told = {record["step"]: record["loss"] for record in records(resumed)}
        assert sorted(told) == [3, 4, 5]
        assert [*told.values()] == pytest.approx(losses(cpu)[2:], rel=1e-5)


def test_a_resumed_run_equals_the_straight_one(devices: Devices) -> None:
    """To the bit, as the numbers are the CPU's: nothing of a step that was told late is lost."""
    case = Case("dp2", dtype="bfloat16", level="O2")
    straight = devices.train(case, "straight")
    start = f"Engine.save_load.ckpt_dir={straight / 'step_4'}"
    resumed = devices.train(case, "resumed", start)
    assert different(straight / "step_5", resumed / "step_5") == []


def test_bfloat16_is_weights_of_that_type_unless_asked_otherwise(devices: Devices) -> None:
    devices.train(Case("dp2", dtype="bfloat16"), "low")
    assert "bfloat16 weights, fp32 master weights" in devices.said
    devices.train(Case("dp2", dtype="bfloat16", level="O1"), "autocast")
    assert "bfloat16 autocast, fp32 weights" in devices.said


# -- results that are told a step late -------------------------------------------------------------


def told(run: Path) -> list[dict[str, Any]]:
    fields = ("step", "loss_scale", "skipped", "learning_rate", "samples")
    return [{field: record[field] for field in fields} for record in records(run)]


@pytest.mark.parametrize("layout", ["dp1", "pp2 mp2"])
def test_the_loss_scale_of_fp16_is_found_step_by_step(devices: Devices, layout: str) -> None:
    """From far too high a start: every overflow is skipped on the device, and halves the scale."""
    case = Case(layout, dtype="float16", level="O2")
    more = ("Engine.mix_precision.scale_loss=1.0e+9", "Engine.max_steps=14")
    gpu, cpu = devices.train(case, "gpu", *more), devices.train_on_cpu(case, "cpu", *more)
    assert told(gpu) == told(cpu)
    skipped = records(cpu)[-1]["skipped"]
    assert 0 < skipped < 13
    for run in (gpu, cpu):
        events = [event["step"] for event in records(run, "event")]
        assert events == list(range(1, skipped + 1))
    assert losses(gpu) == pytest.approx(losses(cpu), rel=1e-3)


def test_too_many_bad_updates_end_the_run(devices: Devices) -> None:
    """One step later than on a CPU, when the last of them is known, and with the same weights."""
    more = ("Optimizer.lr.max_lr=1.0e+30", "Engine.max_skipped_steps=3", "Engine.max_steps=12")
    more += ("Engine.save_load.save_steps=100",)
    cpu = devices.train_on_cpu(Case("dp1"), "cpu", *more, code=2)
    gpu = devices.train(Case("dp1"), "gpu", *more, code=2)
    steps = {run: [event["step"] for event in records(run, "event")] for run in (cpu, gpu)}
    assert len(steps[cpu]) == 3 and steps[gpu] == [*steps[cpu], steps[cpu][-1] + 1]
    assert "No such update was applied" in devices.said
    assert distance(gpu / f"step_{steps[gpu][-1]}", cpu / f"step_{steps[cpu][-1]}") < 1e-3


def test_logs_come_at_their_steps(devices: Devices) -> None:
    """With evaluations and saves between, and windows of two steps: as on a CPU."""
    more = ("Engine.logging_freq=2", "Engine.eval_freq=3", "Engine.test_iters=1")
    case = Case("dp2")
    gpu, cpu = devices.train(case, "gpu", *more), devices.train_on_cpu(case, "cpu", *more)
    for kind in ("train", "eval", "test"):
        ours, theirs = ([one["step"] for one in records(run, kind)] for run in (gpu, cpu))
        assert ours == theirs, kind
    assert [one["step"] for one in records(gpu)] == [2, 4]


# -- the kit for the first machine ----------------------------------------------------------------


def test_the_acceptance_of_gpus(devices: Devices, tmp_path: Path) -> None:
    """All but speed, for which the doctor starts a process that has no such devices."""
    sections = ("collectives", "equivalence", "resuming")
    words = ["accept", "--quick", "--device", "gpu", "--devices", "2", "--output", str(tmp_path)]
    assert devices.run([*words, "--only", ",".join(sections)]) == 0, devices.said
    report = json.loads((tmp_path / "acceptance.json").read_text())
    assert report["machine"]["device"] == NAME and report["machine"]["gpus"] == 8
    assert [section["title"] for section in report["sections"]] == [*sections, "not shown"]
    assert "GPUs" not in {check["name"] for check in report["sections"][-1]["checks"]}


# -- texts and measures ----------------------------------------------------------------------------


def test_generation_and_evaluation(devices: Devices, tmp_path: Path) -> None:
    run = make_run(tmp_path / "text")
    file = tmp_path / "valid.txt"
    file.write_text("\n".join(sentences(12, seed=9)))
    measure = ["evaluate", "-c", str(run.config), "-o", f"Eval.eval_path={file}"]
    write = ["generate", "-c", str(run.config), "--prompt", "the cat", "-o", "Generation.top_k=5"]
    for words in (measure, write):
        on_cpu = fourfold(*words)
        assert on_cpu.returncode == 0, on_cpu.stderr
        assert devices.run([*words, "-o", GPU]) == 0, devices.said
        assert [line for line in on_cpu.stdout.splitlines() if line.strip()][-1] in devices.said
    spread = [*write, "--nproc", "2", "-o", "Distributed.mp_degree=2", "-o", GPU]
    assert devices.run(spread) == 0, devices.said
    assert on_cpu.stdout.strip() in devices.said
