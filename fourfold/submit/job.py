"""A job: one run on so many machines, with its layout, its time and its saves planned.

Where the cluster is known (`--cluster`, or a run on processors), the planner's step time says how
many steps fit between two saves at the interval that loses least (Young and Daly; the same formula
as `fourfold plan --tokens`), how long the whole run takes, and how long before its end a job must
be told to stop so that the step at hand and a save fit in.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fourfold import storage
from fourfold.config import Config, ConfigSource, read_config
from fourfold.config.auto_constraints import is_auto_requested, read_constraints, without_layout
from fourfold.config.load import validate
from fourfold.config.yaml_nodes import find
from fourfold.errors import ConfigError, UserError
from fourfold.plan.auto import CLUSTER_FILE, GPU_MODELS, describe_cluster
from fourfold.plan.cluster import Cluster, parse_cluster
from fourfold.plan.planner import Candidate, plan
from fourfold.plan.report import Goodput, goodput_of
from fourfold.plan.suggestions import impossible

STOPPED_CODE = 75  # EX_TEMPFAIL of sysexits.h: to be tried again
SAVE_STEPS = "Engine.save_load.save_steps"
HOUR, DAY = 3600, 86400
LONGEST_JOB = DAY  # unless the user asks for more; few partitions allow more
SHORTEST_JOB, SHORTEST_NOTICE = 600, 120
MOST_NODES, MOST_RANKS = 65536, 1024

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", re.ASCII)
_WORD = re.compile(r"[^\s\x00-\x1f'\"\\]{1,200}")
_CLOCK = re.compile(r"(?:(\d{1,4})-)?(\d{1,4}):(\d{1,2})(?::(\d{1,2}))?", re.ASCII)
_UNITS = {"s": 1, "m": 60, "h": HOUR, "d": DAY}


@dataclass(frozen=True)
class JobRequest:
    """A job as the user asked for it; None is left to us."""

    file: Path
    overrides: Sequence[str] = ()
    nodes: int | None = None
    nproc: int | None = None
    cluster: str | None = None
    auto: bool = False
    name: str | None = None
    time: str | None = None
    partition: str | None = None
    image: str | None = None
    sbatch: Sequence[str] = ()
    max_restarts: int = 3
    volume: str | None = None


@dataclass(frozen=True)
class Job:
    """Everything a job file is made of."""

    name: str
    nodes: int
    ranks_per_node: int
    on_gpus: bool
    directory: Path  # the working directory, which all machines share
    output_dir: Path  # absolute; below it everything the run writes
    arguments: tuple[str, ...]  # of `fourfold`: train, -c, -o ...
    max_steps: int
    limit_seconds: int | None  # of one job; None is the scheduler's own
    notice_seconds: int  # between the request to stop and the end: a step and a save, twice
    timeout_seconds: float  # Distributed.timeout_seconds
    max_restarts: int  # in a row without a new checkpoint
    partition: str | None = None
    image: str | None = None
    sbatch: tuple[str, ...] = ()
    volume: str | None = None  # what all machines share, by its name at the scheduler
    device: str | None = None  # the planner's name of the GPU, where it is known
    remarks: tuple[str, ...] = field(default=())  # how it was planned, a line each

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def log_dir(self) -> Path:
        return self.output_dir / "logs"

    @property
    def python(self) -> str:
        """The interpreter of this environment, which the machines of a cluster share."""
        return sys.executable

    def shell_words(self, indent: str = "    ") -> str:
        """The arguments for a shell, one option a line."""
        lines, words = [], list(self.arguments)
        lines.append(shlex.join(words[:1]))
        for at in range(1, len(words), 2):
            lines.append(shlex.join(words[at : at + 2]))
        return f" \\\n{indent}".join(lines)


def clock(seconds: float) -> str:
    """As SLURM writes a time: 1-12:00:00."""
    whole = math.ceil(seconds)
    days, rest = divmod(whole, DAY)
    text = f"{rest // HOUR:02}:{rest % HOUR // 60:02}:{rest % 60:02}"
    return f"{days}-{text}" if days else text


def parse_time(text: str) -> int:
    """Seconds of `1-12:00:00`, `36:00:00`, `90m` or `36h`."""
    if match := _CLOCK.fullmatch(text):
        days, *clock_face = match.groups()
        # As SLURM reads them: D-HH:MM with a day, MM:SS without.
        if clock_face[2] is None and days is None:
            clock_face = ["0", *clock_face[:2]]
        hours, minutes, seconds = (int(number or 0) for number in clock_face)
        total = DAY * int(days or 0) + HOUR * hours + 60 * minutes + seconds
        if minutes < 60 and seconds < 60 and total:
            return total
    elif re.fullmatch(r"0*[1-9]\d{0,5}[smhd]", text, re.ASCII):
        return int(text[:-1]) * _UNITS[text[-1]]
    raise UserError(f"--time {text!r} is not a time such as 24:00:00, 2-00:00:00, 90m or 36h")


def prepare(request: JobRequest) -> Job:
    """Plan the job; raises a `UserError` with all its problems, one a line."""
    problems = [*_bad_words(request)]
    source = read_config(request.file, request.overrides)
    limit = _collect(problems, lambda: None if request.time is None else parse_time(request.time))
    cluster = _collect(
        problems, lambda: None if request.cluster is None else parse_cluster(request.cluster)
    )
    sizes = _collect(problems, lambda: _sizes(request, cluster))
    config = made = None
    if sizes is not None:
        config, made = _collect(
            problems, lambda: _lay_out(request, source, sizes[0] * sizes[1], cluster)
        ) or (None, None)
    elif not (request.auto or is_auto_requested(source)):
        _collect(problems, source.load)
    if config is not None and limit is not None and not problems:
        _collect(problems, lambda: _check_limit(request, limit, made))
    if problems or sizes is None or config is None:
        raise ConfigError(problems)
    return _planned(request, source, config, made, sizes, limit)


@dataclass(frozen=True)
class _Planned:
    """What the planner says of the layout that the job runs."""

    candidate: Candidate
    cluster: Cluster
    origin: str
    goodput: Goodput
    layout: dict[str, Any]  # keys, where the planner has chosen it; else it is the file's

    @property
    def slow_step(self) -> float:
        return self.candidate.seconds * (1 + self.candidate.band)

    @property
    def notice(self) -> int:
        """A step may just have begun; twice, since disks are shared and steps differ."""
        needed = 2 * (self.slow_step + self.goodput.save_seconds)
        return max(SHORTEST_NOTICE, 30 * math.ceil(needed / 30))


def _collect(problems: list[str], work: Any) -> Any:
    """What `work` returns; what it refuses is added to `problems`."""
    try:
        return work()
    except ConfigError as error:
        problems += map(str, error.problems)
    except UserError as error:
        problems.append(str(error))
    return None


def _bad_words(request: JobRequest) -> Iterator[str]:
    """What would be read as something else in a job file."""
    if request.name is not None and not _NAME.fullmatch(request.name):
        yield (
            f"--name {request.name!r} is not a name of at most 63 letters, digits, dots, dashes "
            "and underscores that begins and ends with a letter or digit"
        )
    for option, word in (
        ("--partition", request.partition),
        ("--image", request.image),
        ("--volume", request.volume),
    ):
        if word is not None and (not _WORD.fullmatch(word) or word.startswith("-")):
            yield f"{option} {word!r} is not one word without quotes"
    for word in request.sbatch:
        if not re.fullmatch(r"--?[A-Za-z][^\x00-\x1f]*", word):
            yield f"--sbatch {word!r} is not an option of sbatch such as --account=lab"
    for word in (str(Path.cwd()), *map(str, (request.file, *request.overrides))):
        if set(word) & set("\n\r\0"):
            yield f"{word!r} has a line break in it, which no job file can carry"


def _sizes(request: JobRequest, cluster: Cluster | None) -> tuple[int, int]:
    """Machines, and ranks on each."""
    nodes, nproc = request.nodes, request.nproc
    if cluster is not None and cluster.nodes * cluster.devices_per_node > 1:
        nodes = cluster.nodes if nodes is None else nodes
        nproc = cluster.devices_per_node if nproc is None else nproc
    if nodes is None or nproc is None:
        missing = [name for name, size in (("--nodes", nodes), ("--nproc", nproc)) if size is None]
        raise UserError(
            f"how large is the job? {' and '.join(missing)} missing: machines, and processes on "
            "each; or describe both with --cluster 2x8xA100-80G"
        )
    wrong = [
        f"{option} {number} is not between 1 and {most}"
        for number, option, most in ((nodes, "--nodes", MOST_NODES), (nproc, "--nproc", MOST_RANKS))
        if not 1 <= number <= most
    ]
    if wrong:
        raise ConfigError(wrong)
    return nodes, nproc


def _lay_out(
    request: JobRequest, source: ConfigSource, world: int, cluster: Cluster | None
) -> tuple[Config, _Planned | None]:
    """The configuration as these ranks run it; the layout by the planner where it is left to us."""
    chosen = request.auto or is_auto_requested(source)
    config = None if chosen else source.load(world)
    device = validate(*source.translated())[0].Global.device
    known = request.cluster is not None or CLUSTER_FILE.is_file() or GPU_MODELS.is_dir()
    if not known and device != "cpu":
        if chosen:
            raise UserError(
                "a layout can be chosen for devices that are known: describe them with --cluster "
                "2x8xA100-80G or a cluster.yaml, or leave --auto out"
            )
        return source.load(world), None
    described, origin = describe_cluster(world, request.cluster, device)
    if request.nodes and request.nproc and described.world == request.nodes * request.nproc:
        # As many on a machine as asked for, where fewer machines could hold them.
        sizes = {"nodes": request.nodes, "devices_per_node": request.nproc}
        described = described.model_copy(update=sizes)
    constraints = read_constraints(source)
    batch = constraints.global_batch_of(world)
    free = without_layout(source, batch)
    made = plan(config or free, described, fixed=constraints.fixed if chosen else None)
    best = made.best if chosen else made.own
    if best is None and chosen:
        raise UserError("\n".join(impossible(made)))
    if best is None:
        return source.load(world), None
    layout: dict[str, Any] = {}
    if config is None:
        layout = {**best.settings(), "Distributed.auto": False}
        if not constraints.keeps_pp_layers:
            layout["Distributed.pp_layers"] = None
        config = source.with_values(layout).load(world)
    goodput = goodput_of(made.workload.checkpoint_bytes, described)
    return config, _Planned(best, described, origin, goodput, layout)


def _check_limit(request: JobRequest, limit: int, made: _Planned | None) -> None:
    notice = made.notice if made is not None else SHORTEST_NOTICE
    if limit < 2 * notice:
        raise UserError(
            f"--time {request.time}: a job that is told to stop {notice} s before its end, as a "
            f"step and a save need, trains for less than half of {limit} s; give it more"
        )


def _planned(
    request: JobRequest,
    source: ConfigSource,
    config: Config,
    made: _Planned | None,
    sizes: tuple[int, int],
    limit: int | None,
) -> Job:
    words = ["train", "-c", storage.name_of(request.file)]
    words += [word for text in request.overrides for word in ("-o", text)]
    output_dir = storage.local_path(config.Engine.save_load.output_dir)
    job = Job(
        name=request.name or _name_of(output_dir),
        nodes=sizes[0],
        ranks_per_node=sizes[1],
        on_gpus=config.Global.device != "cpu",
        directory=Path.cwd(),
        output_dir=Path.cwd() / output_dir,
        arguments=tuple(words),
        max_steps=config.Engine.max_steps,
        limit_seconds=limit,
        notice_seconds=SHORTEST_NOTICE,
        timeout_seconds=config.Distributed.timeout_seconds,
        max_restarts=request.max_restarts,
        partition=request.partition,
        image=request.image,
        sbatch=tuple(request.sbatch),
        volume=request.volume,
    )
    return job if made is None else _timed(job, source, config, made)


def _timed(job: Job, source: ConfigSource, config: Config, made: _Planned) -> Job:
    """With the layout, the saves and the time limit that the planner's figures give."""
    best, goodput = made.candidate, made.goodput
    words, remarks = list(job.arguments), []
    written = validate(*source.translated())[0]
    for path, value in made.layout.items():
        if written.setting(path).value != value:
            words += ["-o", f"{path}={'null' if value is None else value}"]
    remarks.append(
        f"Layout {best.layout}, {best.details}; {best.seconds:.3g} s a step expected "
        f"({best.band_text}) on {made.cluster}: {made.origin}."
    )
    whole = job.max_steps * made.slow_step / goodput.share
    limit = job.limit_seconds
    if limit is None:
        needed = max(SHORTEST_JOB, 1.25 * whole + 60 * made.cluster.restart_minutes)
        limit = min(LONGEST_JOB, 300 * math.ceil(needed / 300))
    if not _was_overridden(source, SAVE_STEPS):
        # A job whose notice is lost shall not lose all it did.
        interval = min(goodput.interval_seconds, limit / 4)
        steps = min(_two_digits(interval / best.seconds), job.max_steps)
        words += ["-o", f"{SAVE_STEPS}={steps}"]
        remarks.append(
            f"A save every {steps} steps (the file says {config.Engine.save_load.save_steps}): "
            f"{goodput.text()}."
        )
    remarks.append(f"{job.max_steps} steps need {clock(whole)} or less.")
    return replace(
        job,
        arguments=tuple(words),
        limit_seconds=limit,
        notice_seconds=made.notice,
        device=made.cluster.device.name,
        remarks=tuple(remarks),
    )


def _was_overridden(source: ConfigSource, path: str) -> bool:
    entry = find(source.translated()[0], path)
    return entry is not None and entry.layer > 0


def _two_digits(number: float) -> int:
    """At least 1; 8,374 becomes 8,300."""
    whole = max(1, int(number))
    unit = 10 ** max(0, len(str(whole)) - 2)
    return whole // unit * unit


def _name_of(output_dir: Path) -> str:
    """After the run's directory; one word in any scheduler."""
    word = re.sub(r"[^A-Za-z0-9]+", "-", output_dir.name).strip("-")[:40].strip("-")
    return word.lower() or "fourfold"
