"""Saving and resuming a run: what is written, what is checked when it is read.

Everything random or ordered is a function of the step (data, dropout, learning rate), so what a
checkpoint restores is short: weights, moments, averages, the loss scale, two integers (steps and
samples), and what a mixture whose weights may change has served of each source.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from fourfold import __version__, checkpoint, heartbeat
from fourfold.checkpoint import PendingSave
from fourfold.config import Config
from fourfold.data.tokenizer_check import check_checkpoint_tokenizer
from fourfold.errors import CheckpointError, UserError
from fourfold.metrics import Meter, Sinks
from fourfold.model import ModelShape
from fourfold.optim import LossScale, Optimizer
from fourfold.parallel import Runner
from fourfold.shards import Shard
from fourfold.signals import StopRequest

if TYPE_CHECKING:
    from fourfold.engine.loop import Engine


class ForeignWeights(Protocol):
    """Another program's checkpoint, as the converters open it; the core does not know them."""

    notes: list[str]

    @property
    def shape(self) -> ModelShape: ...
    def tensors(self) -> Iterator[tuple[str, Tensor]]: ...
    def tokenizer_identity(self) -> str | None: ...


OpenForeign = Callable[[Path], AbstractContextManager[ForeignWeights]]

# How long to wait before a save that failed is tried again, and how often.
RETRY_SECONDS = (2.0, 10.0)
PAUSE_SECONDS = 0.1
# For the small files and the directory itself.
OVERHEAD = 1.01


@dataclass
class Saves:
    """The outcome of a run's saves so far; the same on all ranks."""

    most_failed: int  # in a row; 0 is any number
    pending: PendingSave | None = None
    pending_step: int = 0
    failed_in_a_row: int = 0
    last_good: str | None = None

    def before_update(self) -> None:
        """Copy what a save in progress has not written yet: it reads the tensors where they are,
        which only an update changes. Most of the time there is nothing left to copy."""
        if self.pending is not None:
            self.pending.settle()

    def succeeded(self, path: str) -> None:
        self.failed_in_a_row, self.last_good = 0, path

    def told_last_good(self) -> str:
        if self.last_good is None:
            return "this run has no earlier checkpoint"
        return f"the last good checkpoint is {self.last_good}"


# --- saving -----------------------------------------------------------------------------------


def save(
    run: Engine,
    meter: Meter,
    sinks: Sinks | None = None,
    stop: StopRequest | None = None,
    final: bool = True,
) -> str:
    """Save the run's current state, or start to; returns the name of its checkpoint.

    A save that fails is retried. One that keeps failing is reported to `sinks` and the run
    continues; but the final save of a run is written when this returns, or raises.
    """
    sinks = Sinks() if sinks is None else sinks
    with meter.timed("save", run.step):
        finish(run, sinks)
        path = str(run.output_dir / f"step_{run.step}")
        reason = _save_patiently(run, sinks, stop, final)
        if reason is not None:
            _tell_failure(run, sinks, run.step, reason, final)
        elif run.saves.pending is None:
            run.saves.succeeded(path)
        sinks.seal()
    return path


def save_what_is_left(run: Engine, meter: Meter, sinks: Sinks, stop: StopRequest) -> str:
    """Where the weights of a run that aborts are: in a last checkpoint, if it can be written."""
    try:
        return save(run, meter, sinks, stop)
    except CheckpointError as error:
        return f"no checkpoint ({error})"


def finish(run: Engine, sinks: Sinks | None = None) -> None:
    """Wait for the save in progress; none is ever dropped for a later one."""
    pending, run.saves.pending = run.saves.pending, None
    if pending is None:
        return
    step = run.saves.pending_step
    try:
        run.mesh.on_all_ranks(lambda: pending.wait(heartbeat.alive))
    except UserError as error:
        _tell_failure(run, Sinks() if sinks is None else sinks, step, str(error), final=False)
    else:
        run.saves.succeeded(str(run.output_dir / f"step_{step}"))


@contextmanager
def finishing(run: Engine) -> Iterator[None]:
    """Whatever ends a run, except an interrupt, first lets the save in progress finish.

    Other ranks may be elsewhere, so there is no communication with them.
    """
    try:
        yield
    except Exception:
        if run.saves.pending is not None:
            with suppress(Exception):
                run.saves.pending.wait(heartbeat.alive)
        raise


def _save_patiently(run: Engine, sinks: Sinks, stop: StopRequest | None, final: bool) -> str | None:
    """Save, with retries; returns why the last one failed. All ranks make the same attempts."""
    asked_before = stop is not None and stop.reason() is not None
    for pause in (*RETRY_SECONDS, None):
        try:
            _save_once(run, in_background=run.config.Engine.save_load.async_save and not final)
            return None
        except UserError as error:
            reason = str(error)
        if pause is None:
            break
        sinks.notice(f"{reason}. Trying again in {pause:g} s", level="WARNING")
        asked = _pause(pause, None if asked_before else stop)
        # A run that is asked to stop meanwhile comes back for its final save.
        if run.mesh.all_reduce(asked)[0] > 0 and not final:
            break
    return reason


def _save_once(run: Engine, in_background: bool) -> None:
    tensors = tensors_to_save(run.runner, run.optimizer)
    keep_last = run.config.Engine.save_load.keep_last
    given = (run.output_dir, run.step, tensors, state_of(run), keep_last, run.ranks)
    if in_background:
        run.saves.pending = checkpoint.begin_save(*given, in_place=True)
        run.saves.pending_step = run.step
    else:
        run.mesh.on_all_ranks(lambda: checkpoint.save(*given))


def _pause(seconds: float, stop: StopRequest | None) -> bool:
    """Wait; returns whether a request to stop cut it short."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        heartbeat.alive()
        time.sleep(PAUSE_SECONDS)
        if stop is not None and stop.reason() is not None:
            return True
    return False


def _tell_failure(run: Engine, sinks: Sinks, step: int, reason: str, final: bool) -> None:
    """Report what failed; raise if the run must not continue."""
    saves, limit = run.saves, run.saves.most_failed
    saves.failed_in_a_row += 1
    if final:
        raise CheckpointError(f"{reason}; {saves.told_last_good()}")
    if limit and saves.failed_in_a_row >= limit:
        raise CheckpointError(
            f"{reason}; {saves.told_last_good()}. The run stops because {limit} saves in a row "
            f"have failed (Engine.save_load.max_failed_saves={limit})"
        )
    sinks.event("failed_save", step=step, reason=reason)
    sinks.notice(
        f"{reason}; {saves.told_last_good()}. The run continues and saves again at the next "
        f"interval; saves that have failed in a row: {saves.failed_in_a_row}, allowed: "
        f"{limit - 1 if limit else 'any number'}",
        level="ERROR",
    )


# --- before the first one ---------------------------------------------------------------------


def check_room(run: Engine) -> list[str]:
    """Compare what the run is going to save with the free space; a collective.

    All ranks write to one file system, so the sum of their parts must fit. Room for one checkpoint,
    but not for all that are to come, is a notice.
    """
    (written,) = run.mesh.all_reduce(bytes_to_save(run.runner, run.optimizer))
    problem, notices = None, list[str]()
    if run.mesh.rank == 0:
        # What cannot be checked now, the first save will report.
        with suppress(OSError):
            problem, notices = _room_problem(run, int(written * OVERHEAD))
    if told := run.mesh.broadcast_first(problem):
        raise UserError(told)
    return notices


def _room_problem(run: Engine, one: int) -> tuple[str | None, list[str]]:
    """Why the run cannot save at all, and notices if it can."""
    section, step = run.config.Engine.save_load, run.step
    every = section.save_steps if section.save_steps > 0 else run.config.Engine.max_steps
    to_come = -(-run.config.Engine.max_steps // every) - step // every
    if step >= run.config.Engine.max_steps:
        return None, []
    free = checkpoint.free_bytes(run.output_dir)
    has = f"{run.output_dir} has {free / 1e9:.3f} GB free"
    if free < one:
        problem = (
            f"a checkpoint of this run takes {one / 1e9:.3f} GB and {has}; make room or set "
            "Engine.save_load.output_dir to a larger disk"
        )
        return problem, []
    here = len(checkpoint.candidates(run.output_dir))
    # A new one is written before the oldest is removed.
    more = max(section.keep_last + 1 - here, 1) if section.keep_last else to_come
    if free >= (needed := min(more, to_come) * one):
        return None, []
    notice = (
        f"{has} and this run is going to need {needed / 1e9:.3f} GB more: "
        f"{min(more, to_come)} checkpoints of {one / 1e9:.3f} GB "
        f"(Engine.save_load.keep_last={section.keep_last}); saves will fail unless there is "
        "more room or fewer are kept"
    )
    return None, [notice]


def state_of(run: Engine) -> dict[str, Any]:
    """What a checkpoint saved now keeps besides tensors."""
    consumed = run.batch_schedule.consumed(run.step)
    return {
        "version": __version__,
        "step": run.step,
        "consumed_samples": consumed,
        "optimizer_updates": run.optimizer.updates,
        "skipped_updates": run.guard.skipped,
        "loss_scale": vars(run.loss_scale) if run.loss_scale else None,
        **run.data.state(consumed),
        **({} if run.spikes is None else {"spikes": run.spikes.state()}),
        "config": run.config.to_dict(),
    }


# --- resuming ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Restored:
    """The state a run continues with besides its tensors, which are filled in place."""

    path: str  # of the checkpoint
    notices: list[str]
    is_weights_only: bool = False  # then everything but the weights begins anew
    step: int = 0
    skipped_updates: int = 0
    loss_scale: LossScale | None = None
    spikes: dict[str, Any] | None = None  # what the detector had seen


def resume(run: Engine) -> Restored | None:
    """Fill the run's tensors from its own last checkpoint or from the one it names, if any.

    Rank 0 decides which: the others may look before or after something changed on the disk.
    """
    checkpoint.check_shared(run.output_dir, run.ranks)
    chosen = run.mesh.on_all_ranks(lambda: _choose(run) if run.mesh.rank == 0 else None)
    told = run.mesh.broadcast_first(None if chosen is None else json.dumps(asdict(chosen)))
    if told is None:
        return None
    return _restore(run, SavedRun(**json.loads(told)))


def restore_from(run: Engine, directory: Path) -> Restored:
    """Fill the run's tensors from this checkpoint of its own, or one before it; a collective."""
    return _restore(run, run.mesh.on_all_ranks(lambda: _describe(directory)))


def _restore(run: Engine, source: SavedRun) -> Restored:
    restore = {"weights": _take_weights, "foreign": _take_foreign, "run": _continue}[source.kind]
    restored = restore(run, source)
    sync_tied_copy(run.runner, run.optimizer)
    if run.optimizer.ema is not None and not source.has_ema:
        run.optimizer.ema.restart()
    run.runner.check_replicas(f"after loading {restored.path}")
    return restored


@dataclass(frozen=True)
class SavedRun:
    """The checkpoint that would be resumed, and what its tensors are of."""

    where: str
    kind: Literal["run", "weights", "foreign"] = "run"  # foreign: another program's
    optimizer: str = "AdamW"
    has_ema: bool = False


def _choose(run: Engine) -> SavedRun | None:
    try:
        found = _source(run.config, run.output_dir)
        if found is not None and run.open_foreign is not None and _is_foreign(found):
            return SavedRun(str(found), "foreign")
        return None if found is None else _describe(found)
    except OSError as error:
        raise CheckpointError(f"cannot look for checkpoints: {error}") from error


def _describe(where: Path) -> SavedRun:
    for directory in checkpoint.candidates(where):
        try:
            state = checkpoint.read_state(directory)
        except CheckpointError:
            continue  # named to the user when the next one is resumed
        if state.get("weights_only"):
            return SavedRun(str(where), "weights")
        # Before there was a choice, it was AdamW without an average.
        section = (state.get("config") or {}).get("Optimizer") or {}
        has_ema = section.get("ema_decay") is not None
        return SavedRun(str(where), "run", section.get("name", "AdamW"), has_ema)
    return SavedRun(str(where))


def _continue(run: Engine, source: SavedRun) -> Restored:
    tensors, ignored, notices = _continued_tensors(run, source)
    hashes = run.config.Engine.save_load.verify_hashes
    path, state = checkpoint.resume(
        source.where, tensors, notices.append, "", run.ranks, hashes, ignored
    )
    step, consumed = int(state["step"]), int(state["consumed_samples"])
    if consumed != run.batch_schedule.consumed(step):
        notices += run.change_batch(step, consumed)
    about_data = run.mesh.rank_0_first(lambda: run.data.restore(state, consumed, str(path)))
    run.batch_schedule = run.config.batch_schedule
    if "optim." not in ignored:
        run.optimizer.restore_updates(int(state["optimizer_updates"]))
    scale = state["loss_scale"]
    return Restored(
        str(path),
        [*notices, f"resumed from {path} at step {step}", *about_data],
        step=step,
        skipped_updates=int(state["skipped_updates"]),
        loss_scale=LossScale(**scale) if scale else None,
        spikes=state.get("spikes"),
    )


def _continued_tensors(
    run: Engine, source: SavedRun
) -> tuple[dict[str, Shard], tuple[str, ...], list[str]]:
    """What to read, what to leave unread (prefixes of names), and what the user should know."""
    tensors, notices = tensors_to_load(run.runner, run.optimizer), list[str]()
    ignored: list[str] = []
    own, average = run.config.Optimizer.name, run.optimizer.ema is not None
    if source.optimizer != own:
        ignored.append("optim.")
        notices.append(
            f"the optimizer's state begins anew: that of {source.where} is {source.optimizer}'s, "
            f"and Optimizer.name={own}"
        )
    if source.has_ema != average:
        ignored.append("ema.")
        notices.append(
            "the average of weights begins with the weights of the checkpoint, which has none"
            if average
            else "the checkpoint's average of weights is left behind: Optimizer.ema_decay is null"
        )
    unread = tuple(ignored)
    wanted = {name: one for name, one in tensors.items() if not name.startswith(unread)}
    return wanted, unread, notices


def _take_weights(run: Engine, source: SavedRun) -> Restored:
    """Step 0 with the weights of a converted checkpoint; moments and data start afresh."""
    tensors, notices = tensors_to_load(run.runner, run.optimizer), list[str]()
    weights = {name: shard for name, shard in tensors.items() if name.startswith("model.")}
    hashes = run.config.Engine.save_load.verify_hashes
    path, state = checkpoint.resume(
        source.where, weights, notices.append, "model.", run.ranks, hashes
    )
    notices += check_checkpoint_tokenizer(
        state.get("tokenizer"),
        run.data.sources,
        str(path),
        run.config.Data.dataset.allow_tokenizer_mismatch,
    )
    notices.append(f"starting at step 0 with the weights of {path}")
    return Restored(str(path), notices, is_weights_only=True)


def _is_foreign(where: Path) -> bool:
    return where.exists() and not checkpoint.candidates(where)


def check_foreign(config: Config, open_foreign: OpenForeign) -> None:
    """Before anything is built: another program's checkpoint must be of the network described."""
    where = _source(config, Path(config.Engine.save_load.output_dir))
    if where is None or not _is_foreign(where):
        return
    with open_foreign(where) as foreign:
        if other := ModelShape.of(config.Model).other_settings(foreign.shape):
            settings = " ".join(f"-o Model.{setting}" for setting in other)
            raise UserError(
                f"{where} holds another network than the Model section describes; give {settings}"
            )


def _take_foreign(run: Engine, source: SavedRun) -> Restored:
    """Step 0 with the weights of another program's checkpoint."""
    notices = run.mesh.on_all_ranks(lambda: _read_foreign(run, source.where))
    notices.append(f"starting at step 0 with the weights of {source.where}")
    return Restored(source.where, notices, is_weights_only=True)


def _read_foreign(run: Engine, where: str) -> list[str]:
    """Each rank reads all of it, one tensor at a time, and keeps what it holds."""
    assert run.open_foreign is not None
    tensors = tensors_to_load(run.runner, run.optimizer)
    with run.open_foreign(Path(where)) as foreign:
        about_data = check_checkpoint_tokenizer(
            foreign.tokenizer_identity(),
            run.data.sources,
            where,
            run.config.Data.dataset.allow_tokenizer_mismatch,
        )
        for name, tensor in foreign.tensors():
            if shard := tensors.get(f"model.{name}"):
                shard.copy_from(tensor)
            heartbeat.alive()
        return [*foreign.notes, *about_data]


def _source(config: Config, output_dir: Path) -> Path | None:
    """Where to resume from, if anywhere.

    A job that is restarted with the same arguments resumes from its own checkpoints, even if
    `ckpt_dir` names the run it first came from. A `ckpt_dir` inside the run is obeyed.
    """
    save_load = config.Engine.save_load
    own = output_dir if save_load.auto_resume and checkpoint.candidates(output_dir) else None
    if save_load.ckpt_dir is None:
        return own
    named = checkpoint.named(save_load.ckpt_dir, output_dir)
    inside = named.resolve().is_relative_to(output_dir.resolve())
    return named if inside or own is None else own


# -- the tensors of a run, as this rank holds them ------------------------------------------------


def tensors_to_save(runner: Runner, optimizer: Optimizer) -> dict[str, Shard]:
    """What this rank saves: every shard is saved by one of the ranks that hold it."""
    return {name: shard for _, name, shard in _shards(runner, optimizer) if shard.owns_save}


def bytes_to_save(runner: Runner, optimizer: Optimizer) -> int:
    """Bytes of a checkpoint that this rank writes."""
    return sum(shard.local.nbytes for shard in tensors_to_save(runner, optimizer).values())


def tensors_to_load(runner: Runner, optimizer: Optimizer) -> dict[str, Shard]:
    """The tensors of this rank that a load fills."""
    keys = runner.shards_to_load().keys()
    return {name: shard for key, name, shard in _shards(runner, optimizer) if key in keys}


@torch.no_grad()
def sync_tied_copy(runner: Runner, optimizer: Optimizer) -> None:
    """After a load: update what was not filled from what was."""
    for copy, original in runner.tied_copies.items():
        copies = optimizer.moments(copy)
        for moment, values in optimizer.moments(original).items():
            copies[moment].copy_(values)
        if optimizer.ema is not None:
            optimizer.ema.values[copy].copy_(optimizer.ema.values[original])
    runner.after_load()


def _shards(runner: Runner, optimizer: Optimizer) -> Iterator[tuple[str, str, Shard]]:
    """Everything of the run that is a tensor: the key it is held under, its name, and it."""
    for key, shard in runner.shards.items():
        yield key, f"model.{shard.name}", shard
        for moment, values in optimizer.moments(key).items():
            yield key, f"optim.{shard.name}.{moment}", shard.of(values)
        if optimizer.ema is not None:
            yield key, f"ema.{shard.name}", shard.of(optimizer.ema.values[key])
