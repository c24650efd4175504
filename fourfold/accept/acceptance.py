"""Acceptance of a machine: the sections of `fourfold accept`, each a list of checks.

| section     | what is held against what                                               |
|-------------|--------------------------------------------------------------------------|
| collectives | every group's messages against known answers                             |
| equivalence | layouts against a single process: losses, norms, weights and moments     |
| resuming    | runs that were killed, stopped or damaged against one that was not       |
| speed       | benches against what the plan predicts for the machine as measured       |
| memory      | the most bytes of the same runs against the price                        |

A check that fails is named in the report; what the devices at hand cannot show is listed as not
shown. Speed is there to be read: no check of it can fail.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fourfold import __version__
from fourfold.accept.collectives import check_collectives
from fourfold.accept.layouts import (
    ABOUT,
    BENCH_SIZES,
    BENCHES,
    BFLOAT16,
    BOUNDS,
    LAYOUTS,
    LOW_BOUNDS,
    MOST_RANKS,
    QUICK_BENCHES,
    SECTIONS,
    TrialLayout,
)
from fourfold.accept.report import AcceptanceReport, Check, ReportSection
from fourfold.accept.trials import (
    SAVED_STEP,
    STEPS,
    Finished,
    Ground,
    LiveBytes,
    TrialError,
    Values,
    without_paths,
)
from fourfold.config import Config
from fourfold.cost.memory import memory_of
from fourfold.cost.workload import Workload, spread_of, workload_of
from fourfold.engine import Engine, build_engine
from fourfold.engine.benchmark import measurement
from fourfold.errors import UserError
from fourfold.mesh import AXES, Layout
from fourfold.metrics.peaks import Peak
from fourfold.parallel import layout_of
from fourfold.plan import Candidate, candidate_of
from fourfold.plan.cluster import Cluster, load_cluster
from fourfold.plan.doctor import hardware
from fourfold.plan.machine import load_coefficients
from fourfold.processors import num_processors


class Acceptance:
    """The sections, run one after the other on `world` processes."""

    def __init__(self, ground: Ground, world: int, quick: bool) -> None:
        self.ground = ground
        self.world = world
        self.quick = quick
        self.kind = "cpu" if ground.device == "cpu" else "gpu"
        self.benched: list[tuple[str, Config, Candidate, Finished]] = []

    def run(
        self, names: tuple[str, ...], tell: Callable[[ReportSection], None]
    ) -> AcceptanceReport:
        report = AcceptanceReport(self._machine(), self._options(names))
        for name in names:
            section = ReportSection(name, self._about(name))
            started = time.monotonic()
            for check in getattr(self, name)():
                section.checks.append(check)
            section.seconds = round(time.monotonic() - started, 1)
            report.sections.append(section)
            tell(section)
        left_out = ReportSection("not shown", ABOUT["not shown"], [*self._not_shown(names)])
        report.sections.append(left_out)
        tell(left_out)
        return report

    def _about(self, name: str) -> str:
        if name != "equivalence":
            return ABOUT[name]
        (scalars, tensors), (low_scalars, low_tensors) = BOUNDS[self.kind], LOW_BOUNDS
        return (
            f"{ABOUT[name]} Bounds: {scalars:g} of losses and norms, {tensors:g} of tensors; "
            f"{low_scalars:g} and {low_tensors:g} in bfloat16."
        )

    def _machine(self) -> dict[str, Any]:
        facts: dict[str, Any] = self.ground.ask(1, _devices)[0]
        return {
            "fourfold": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
            "cores": num_processors(),
            **facts,
        }

    def _options(self, names: tuple[str, ...]) -> dict[str, Any]:
        return {"processes": self.world, "quick": self.quick, "sections": list(names)}

    @property
    def layouts(self) -> list[TrialLayout]:
        return [layout for layout in self._fitting if layout.quick or not self.quick]

    @property
    def _fitting(self) -> list[TrialLayout]:
        return [one for one in LAYOUTS if one.world <= self.world and one.is_for(self.kind)]

    # -- collectives --------------------------------------------------------------------------

    def collectives(self) -> Iterator[Check]:
        """Each set of degrees once; the axes of a layout of one process have no group."""
        seen: set[tuple[int, ...]] = set()
        for layout in self.layouts:
            degrees = layout_of(self.ground.config("groups", layout.world, layout.values))
            if degrees.degrees not in seen:
                seen.add(degrees.degrees)
                yield from self._group_checks(degrees)

    def _group_checks(self, layout: Layout) -> Iterator[Check]:
        device = self.ground.device
        try:
            answers = self.ground.ask(layout.world_size, lambda: check_collectives(layout, device))
        except TrialError as error:
            yield Check(f"{layout}", "failed", str(error))
            return
        above = " ".join(f"{axis}{n}" for axis, n in zip(AXES, layout.degrees) if n > 1)
        sound: dict[str, list[str]] = {}
        for rows in zip(*answers, strict=True):
            axis, kind = rows[0]["axis"], rows[0]["kind"]
            wrong = [
                f"rank {rank}: {', '.join(row['wrong'])}"
                for rank, row in enumerate(rows)
                if row["wrong"]
            ]
            if wrong:
                yield Check(f"{above}: {kind} over {axis}", "failed", "; ".join(wrong))
            else:
                sound.setdefault(axis, []).append(kind)
        for axis, kinds in sound.items():
            yield Check(f"{above}: {', '.join(kinds)} over {axis}", "passed")

    # -- equivalence --------------------------------------------------------------------------

    def equivalence(self) -> Iterator[Check]:
        for layout in self.layouts:
            name = layout.file_name
            reference = self._reference(BFLOAT16 if layout.low else {})
            ran = self.ground.run(name, layout.world, layout.values)
            bounds = LOW_BOUNDS if layout.low else BOUNDS[self.kind]
            yield self._compared(layout.name, ran, reference, bounds)

    def _reference(self, values: Values) -> Finished:
        name = "one_process_low" if values else "one_process"
        return self.ground.finished.get(name) or self.ground.run(name, 1, values)

    def _compared(
        self, name: str, ran: Finished, reference: Finished, bounds: tuple[float, float]
    ) -> Check:
        """A run against another, over the steps that it has."""
        for one in (reference, ran):
            if one.code or len(one.steps()) < STEPS:
                who = "" if one is ran else "the single process: "
                return Check(name, "failed", f"{who}{without_paths(one.said) or 'it stopped'}")
        figures = {
            what: _relative(ran.series(key), reference.series(key))
            for what, key in (("losses", "loss"), ("norms", "grad_norm"))
        }
        try:
            figures["tensors"] = self.ground.difference(
                reference.checkpoint(), ran.checkpoint(), low=bounds == LOW_BOUNDS
            )
        except TrialError as error:
            return Check(name, "failed", str(error), dict(figures))
        held = (bounds[0], bounds[0], bounds[1])
        far = [
            f"{what} above {bound:g}"
            for (what, value), bound in zip(figures.items(), held)
            if not value <= bound
        ]
        return Check(name, "failed" if far else "passed", ", ".join(far), dict(figures))

    # -- killed and resumed -------------------------------------------------------------------

    def resuming(self) -> Iterator[Check]:
        fitting = [layout for layout in self._fitting if not layout.low]
        chosen = fitting[-1:] if self.quick else [fitting[-1], *fitting[:1]]
        if not fitting:
            chosen = [TrialLayout("one process", {})]
        for layout in chosen:
            yield from self._resumed(layout)
        other = fitting[0] if fitting else chosen[0]
        yield self._goes_on("under another layout", chosen[0], other)
        if not self.quick:
            yield self._goes_on("in one process", chosen[0], TrialLayout("one process", {}))
            yield self._damaged(chosen[0])

    def _straight(self, layout: TrialLayout) -> Finished:
        name = layout.file_name
        return self.ground.finished.get(name) or self.ground.run(name, layout.world, layout.values)

    def _resumed(self, layout: TrialLayout) -> Iterator[Check]:
        straight, name = self._straight(layout), layout.file_name
        killed = self.ground.run(
            f"{name}_killed", layout.world, layout.values, restarts=1, disturb=_kill_last_rank
        )
        yield self._equal(f"{layout.name}: a rank killed, all restarted", killed, straight)
        if self.quick:
            return
        self.ground.run(f"{name}_stopped", layout.world, layout.values, disturb=_stop)
        again = self.ground.run(f"{name}_stopped", layout.world, layout.values)
        yield self._equal(f"{layout.name}: stopped by SIGTERM, continued", again, straight)

    def _equal(self, name: str, ran: Finished, straight: Finished) -> Check:
        """To the bit on a processor. A GPU's kernels may add in another order every time."""
        bounds = (0.0, 0.0) if self.kind == "cpu" else BOUNDS["gpu"]
        return self._compared(name, ran, straight, bounds)

    def _goes_on(self, how: str, saved: TrialLayout, other: TrialLayout) -> Check:
        straight = self._straight(saved)
        name = f"{saved.name}, continued {how} ({other.name})"
        start = straight.checkpoint(SAVED_STEP)
        values = {**other.values, "Engine.save_load.ckpt_dir": str(start)}
        where = f"{saved.file_name}_then_{other.file_name}"
        ran = self.ground.run(where, other.world, values)
        if ran.code:
            return Check(name, "failed", without_paths(ran.said))
        bound = BOUNDS[self.kind][1]
        far = self.ground.difference(self._reference({}).checkpoint(), ran.checkpoint())
        return Check(name, "passed" if far <= bound else "failed", "", {"tensors": far})

    def _damaged(self, layout: TrialLayout) -> Check:
        """A byte of the last checkpoint is changed; the run goes on from the one before it."""
        straight, name = self._straight(layout), f"{layout.file_name}_damaged"
        broken = self.ground.run(name, layout.world, layout.values)
        file = max(broken.checkpoint().glob("*.safetensors"), key=lambda path: path.stat().st_size)
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        again = self.ground.run(name, layout.world, layout.values)
        return self._equal(f"{layout.name}: last checkpoint damaged, continued", again, straight)

    # -- speed and memory -----------------------------------------------------------------------

    def speed(self) -> Iterator[Check]:
        try:
            cluster = self._measured_cluster()
        except TrialError as error:
            yield Check("fourfold doctor", "failed", str(error))
            return
        for name, values in self._benches():
            yield self._bench(name, values, cluster)

    def _benches(self) -> list[tuple[str, Values]]:
        trials = [(row, TrialLayout(*row)) for row in BENCHES]
        fitting = [row for row, one in trials if one.world <= self.world and one.is_for(self.kind)]
        return [row for row in fitting if row[0] in QUICK_BENCHES or not self.quick]

    def _measured_cluster(self) -> Cluster:
        """In a process of its own, as all that computes."""
        found = self.ground.folder / "cluster.yaml"
        command = [sys.executable, "-m", "fourfold", "doctor", "--nproc", str(self.world)]
        command += ["--seconds", "0.1" if self.quick else "0.3", "--out", str(found)]
        command += ["--directory", str(self.ground.folder), "--force"]
        ran = subprocess.run(command, capture_output=True, text=True)
        if ran.returncode:
            raise TrialError(without_paths(ran.stderr))
        return load_cluster(found)

    def _bench(self, name: str, values: Values, cluster: Cluster) -> Check:
        steps, left_out = (4, 1) if self.quick else (7, 2)
        world = TrialLayout(name, values).world
        settings = {
            **BENCH_SIZES[self.kind],
            **values,
            "Engine.max_steps": steps,
            "Engine.save_load.save_steps": 0,
        }
        folder = f"bench_{TrialLayout(name, values).file_name}"
        config = self.ground.config(folder, world, settings)
        predicted = self._predicted(config, cluster.with_world(world))
        ran = self.ground.run(folder, world, settings)
        if ran.code or len(ran.steps()) <= left_out:
            return Check(name, "failed", without_paths(ran.said) or "it stopped")
        self.benched.append((name, config, predicted, ran))
        told = measurement(config, world, ran.steps(), left_out, Peak(None, "not asked for"))
        return Check(
            name,
            "measured",
            "" if self._in_band(told.median_seconds, predicted) else "outside the plan's band",
            {
                "predicted s": predicted.seconds,
                "measured s": told.median_seconds,
                "predicted / measured": predicted.seconds / told.median_seconds,
                "tokens/s": told.tokens_per_second,
            },
        )

    def _predicted(self, config: Config, cluster: Cluster) -> Candidate:
        workload = self._workload(config)
        return candidate_of(workload, spread_of(config), cluster, load_coefficients())

    def _workload(self, config: Config) -> Workload:
        return workload_of(config, on_cpu=self.kind == "cpu")

    @staticmethod
    def _in_band(seconds: float, predicted: Candidate) -> bool:
        low = predicted.seconds * (1 - predicted.band_below)
        return low <= seconds <= predicted.seconds * (1 + predicted.band)

    def memory(self) -> Iterator[Check]:
        if not self.benched:
            yield Check("no bench ran", "not shown", "the section speed was left out, or failed")
        for name, config, predicted, ran in self.benched:
            yield self._memory_of(name, config, predicted, ran)

    def _memory_of(self, name: str, config: Config, predicted: Candidate, ran: Finished) -> Check:
        """Of rank 0: what the allocator reports, on a processor the live tensors of a step."""
        workload = self._workload(config)
        price = memory_of(workload.network, spread_of(config), workload.software, 0)
        expected = float(price.total) - float(price["reserve"])
        peaks = [record.get("peak_device_bytes") for record in ran.steps()]
        if self.kind == "cpu":
            world = layout_of(config).world_size
            try:
                peaks = [self.ground.ask(world, lambda: _live_bytes(config, world))[0]]
            except TrialError as error:
                return Check(name, "failed", str(error))
        measured = max((int(peak) for peak in peaks if peak), default=0)
        most = expected * (1 + float(predicted.memory_band.above))
        return Check(
            name,
            "passed" if 0 < measured <= most else "failed",
            "" if 0 < measured <= most else "above the upper end of the price",
            {
                "priced MB": expected / 1e6,
                "at most MB": most / 1e6,
                "measured MB": measured / 1e6,
                "priced / measured": expected / measured if measured else None,
            },
        )

    # -- what was left out ----------------------------------------------------------------------

    def _not_shown(self, names: tuple[str, ...]) -> Iterator[Check]:
        if self.kind == "cpu":
            yield Check(
                "GPUs",
                "not shown",
                "no kernel, no NCCL message, no compiled graph and no device memory of a GPU was "
                "used; all of the above is of gloo and the processor",
            )
        larger = [layout.name for layout in LAYOUTS if layout.world > self.world]
        if larger:
            yield Check("layouts of more processes", "not shown", "; ".join(larger))
        skipped = [section for section in SECTIONS if section not in names]
        if skipped:
            yield Check("sections", "not shown", ", ".join(skipped))
        if self.quick:
            yield Check("rows that --quick leaves out", "not shown", "run it without --quick")
        yield Check(
            "several machines", "not shown", "all processes were on one; the network was not used"
        )
        yield Check(
            "long runs", "not shown", f"runs had {STEPS} steps; heat, faults of days and full disks"
        )


def accept(
    ground: Ground,
    world: int,
    *,
    quick: bool,
    sections: tuple[str, ...],
    tell: Callable[[ReportSection], None],
) -> AcceptanceReport:
    """Run the sections asked for, in their order, on `world` processes."""
    return Acceptance(ground, world, quick).run(sections, tell)


def default_world(ground: Ground) -> int:
    """As many as there are GPUs, on a processor four; never more than are tried."""
    found = int(ground.ask(1, _devices)[0]["gpus"]) if ground.device != "cpu" else 4
    if found == 0:
        raise UserError("there is no GPU that torch can use; leave --device out to run on the CPU")
    return min(found, MOST_RANKS)


def has_gpu(ground: Ground) -> bool:
    return bool(ground.ask(1, _devices)[0]["gpus"])


# -- what ranks do ------------------------------------------------------------------------------


def _devices() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"device": hardware(), "gpus": 0}
    count = torch.cuda.device_count()
    properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "device": ", ".join(dict.fromkeys(one.name for one in properties)),
        "gpus": count,
        "compute_capability": ", ".join(
            dict.fromkeys(f"{one.major}.{one.minor}" for one in properties)
        ),
        "device_memory_gib": round(min(one.total_memory for one in properties) / 2**30, 1),
        "cuda": torch.version.cuda,
        "nccl": nccl,
    }


def _live_bytes(config: Config, world: int) -> int:
    with LiveBytes() as live:
        engine = build_engine(config, world)
        engine.runner.run(engine.data.loaders["train"].batch(0), step=1)
    engine.data.close()
    engine.mesh.close()
    return live.most


def _kill_last_rank(engine: Engine) -> None:
    """In the first attempt, the last rank is gone in the middle of the last step."""
    if engine.mesh.rank == engine.mesh.size - 1 and os.environ["FOURFOLD_ATTEMPT"] == "0":
        _before_step(engine, STEPS, lambda: os.kill(os.getpid(), signal.SIGKILL))


def _stop(engine: Engine) -> None:
    """Rank 0 is asked to stop after the step in which nothing is saved."""
    if engine.mesh.rank == 0:
        _before_step(engine, SAVED_STEP + 1, lambda: os.kill(os.getpid(), signal.SIGTERM))


def _before_step(engine: Engine, step: int, do: Callable[[], None]) -> None:
    run = engine.runner.run

    def disturbed(*given: Any, **named: Any) -> Any:
        if engine.step == step:
            do()
        return run(*given, **named)

    engine.runner.run = disturbed  # type: ignore[method-assign]


def _relative(values: list[float], expected: list[float]) -> float:
    return max(abs(one - other) / abs(other) for one, other in zip(values, expected, strict=True))
