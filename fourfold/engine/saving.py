"""Saving a run: what is written, how often it is tried, and whether there is room for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fourfold import __version__, checkpoint, heartbeat, storage
from fourfold.checkpoint import PendingSave, Retention
from fourfold.errors import CheckpointError, UserError
from fourfold.metrics import Meter, Sinks
from fourfold.optim import Optimizer
from fourfold.parallel import Runner
from fourfold.shards import Shard
from fourfold.signals import StopRequest

if TYPE_CHECKING:
    from fourfold.engine.loop import Engine


# How long to wait before a save that failed is tried again, and how often.
RETRY_SECONDS = (2.0, 10.0)
PAUSE_SECONDS = 0.1
# What a copy in memory may still take when a run fails, before the supervisor ends this rank.
LAST_COPY_SECONDS = 1.0
# For the small files and the directory itself.
OVERHEAD = 1.01


@dataclass
class Saves:
    """The outcome of a run's saves so far; the same on all ranks."""

    most_failed: int  # in a row; 0 is any number
    pending: PendingSave | None = None
    pending_step: int = 0
    copying: PendingSave | None = None  # to memory (engine/memory_copies.py)
    failed_in_a_row: int = 0
    last_good: str | None = None

    def before_update(self) -> None:
        """Copy what a save in progress has not written yet: it reads the tensors where they are,
        which only an update changes. Most of the time there is nothing left to copy."""
        for save in (self.pending, self.copying):
            if save is not None:
                save.settle()

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
        path = _name(run, run.step)
        run.save_request.take()
        reason = _save_patiently(run, sinks, stop, final)
        if reason is not None:
            _tell_failure(run, sinks, run.step, reason, final)
        elif run.saves.pending is None:
            _succeeded(run, run.step)
        sinks.seal()
        if run.remote is not None:
            run.remote.push_behind()
    return path


def is_saved(run: Engine) -> bool:
    """Whether the current step is on the disk."""
    return run.saves.pending is None and run.saves.last_good == _name(run, run.step)


def _name(run: Engine, step: int) -> str:
    return storage.name_of(run.output_dir / f"step_{step}")


def _succeeded(run: Engine, step: int) -> None:
    run.saves.succeeded(_name(run, step))
    run.save_request.committed()


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
    step, waits = run.saves.pending_step, time.monotonic()
    try:
        run.mesh.on_all_ranks(lambda: pending.wait(heartbeat.alive))
    except UserError as error:
        _tell_failure(run, Sinks() if sinks is None else sinks, step, str(error), final=False)
    else:
        _succeeded(run, step)
        if run.remote is not None and sinks is not None:
            run.remote.tell_wait(sinks, time.monotonic() - waits, _name(run, step))


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
        deadline = time.monotonic() + LAST_COPY_SECONDS
        while run.saves.copying is not None and not run.saves.copying.done:
            if time.monotonic() > deadline:
                break  # it may be waiting for a machine that is gone
            time.sleep(PAUSE_SECONDS / 10)
        raise


def _save_patiently(run: Engine, sinks: Sinks, stop: StopRequest | None, final: bool) -> str | None:
    """Save, with retries; returns why the last one failed. All ranks make the same attempts."""
    asked_before = stop is not None and stop.reason() is not None
    for pause in (*RETRY_SECONDS, None):
        try:
            _save_once(run, final)
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


def _save_once(run: Engine, final: bool) -> None:
    tensors, section = tensors_to_save(run.runner, run.optimizer), run.config.Engine.save_load
    keep = Retention(section.keep_last, section.keep_every_n_steps, section.keep_every_hours)
    given = (run.output_dir, run.step, tensors, state_of(run), keep, run.ranks)
    # To an address always: its files are written when this returns, their upload is not waited for.
    if (section.async_save or run.remote is not None) and not final:
        run.saves.pending = checkpoint.begin_save(*given, in_place=True)
        run.saves.pending_step = run.step
        if not section.async_save:
            run.saves.pending.wait_until_written(heartbeat.alive)
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
    section, step, last = run.config.Engine.save_load, run.step, run.config.Engine.max_steps
    every = section.save_steps if section.save_steps > 0 else last
    to_come = -(-last // every) - step // every
    if step >= last:
        return None, []
    free = checkpoint.free_bytes(run.output_dir)
    if run.remote is not None:
        return checkpoint.staging_problem(run.output_dir, one, free), []
    here, keep = len(checkpoint.candidates(run.output_dir)), section.keep_last
    # A new one is written before the oldest is removed.
    more = min(max(keep + 1 - here, 1) if keep else to_come, to_come)
    return checkpoint.room_problem(run.output_dir, one, free, more, keep)


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
