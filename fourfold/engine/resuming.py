"""Resuming a run: where it continues from, and what is checked when it is read.

Everything random or ordered is a function of the step (data, dropout, learning rate), so what a
checkpoint restores is short: weights, moments, averages, the loss scale, two integers (steps and
samples), and what a mixture whose weights may change has served of each source.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor

from fourfold import checkpoint, heartbeat, storage
from fourfold.config import Config
from fourfold.data.tokenizer_check import check_checkpoint_tokenizer
from fourfold.engine.saving import sync_tied_copy, tensors_to_load
from fourfold.errors import CheckpointError, UserError
from fourfold.model import ModelShape
from fourfold.optim import LossScale
from fourfold.shards import Shard

if TYPE_CHECKING:
    from fourfold.engine.loop import Engine
    from fourfold.engine.memory_copies import MemoryCopies


class ForeignWeights(Protocol):
    """Another program's checkpoint, as the converters open it; the core does not know them."""

    notes: list[str]

    @property
    def shape(self) -> ModelShape: ...
    def tensors(self) -> Iterator[tuple[str, Tensor]]: ...
    def tokenizer_identity(self) -> str | None: ...


OpenForeign = Callable[[Path], AbstractContextManager[ForeignWeights]]


@dataclass(frozen=True)
class Restored:
    """The state a run continues with besides its tensors, which are filled in place."""

    path: str | None  # of the checkpoint; of a copy in memory, that of the one before it, if any
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
    if run.copies is not None and (copied := _from_memory(run, run.copies)) is not None:
        return copied
    chosen = run.mesh.on_all_ranks(lambda: _choose(run) if run.mesh.rank == 0 else None)
    told = run.mesh.broadcast_first(None if chosen is None else json.dumps(asdict(chosen)))
    if told is None:
        return None
    return _restore(run, SavedRun(**json.loads(told)))


def _from_memory(run: Engine, copies: MemoryCopies) -> Restored | None:
    """Fill the run's tensors from copies in memory, if they are newer than its checkpoints."""
    saved = run.mesh.on_all_ranks(
        lambda: _newest_saved(run.config, run.output_dir) if run.mesh.rank == 0 else None
    )
    told = run.mesh.broadcast_first(None if saved is None else json.dumps(saved))
    if told is None:
        return None
    step, newest = json.loads(told)
    notices = copies.recover(step, tensors_to_load(run.runner, run.optimizer))
    if notices is None:
        return None
    # With the same settings it has the same tensors.
    name, has_ema = run.config.Optimizer.name, run.optimizer.ema is not None
    source = SavedRun(str(copies.store.whole), "copy", name, has_ema)
    try:
        restored = _restore(run, source)
    except CheckpointError as error:
        copies.origin = None
        if newest is None:
            raise  # the weights are no longer those that a run begins with
        run.notices.append(f"the copies in memory cannot be used: {error}")
        return None
    finally:
        copies.forget()
    on_disk = "no checkpoint" if newest is None else f"{newest} on the disk"
    notices.append(f"resumed from copies in memory at step {restored.step}, later than {on_disk}")
    return replace(restored, path=newest, notices=[*restored.notices, *notices])


def _newest_saved(config: Config, output_dir: Path) -> tuple[int, str | None] | None:
    """Step and name of the run's newest checkpoint, -1 if it has none; None if it is told to begin
    elsewhere."""
    save_load = config.Engine.save_load
    if save_load.ckpt_dir is not None:
        named = checkpoint.named(save_load.ckpt_dir, output_dir).resolve()
        if named != output_dir.resolve() and named.is_relative_to(output_dir.resolve()):
            return None
    try:
        found = checkpoint.candidates(output_dir)
    except OSError as error:
        raise CheckpointError(f"cannot look for checkpoints: {error}") from error
    if not found:
        return -1, None
    return checkpoint.step_of(found[0]), storage.name_of(found[0])


def restore_from(run: Engine, directory: Path) -> Restored:
    """Fill the run's tensors from this checkpoint of its own, or one before it; a collective."""
    return _restore(run, run.mesh.on_all_ranks(lambda: _describe(directory)))


def _restore(run: Engine, source: SavedRun) -> Restored:
    restored = RESTORE[source.kind](run, source)
    sync_tied_copy(run.runner, run.optimizer)
    if run.optimizer.ema is not None and not source.has_ema:
        run.optimizer.ema.restart()
    run.runner.check_replicas(f"after loading {source.where}")
    return restored


@dataclass(frozen=True)
class SavedRun:
    """The checkpoint that would be resumed, and what its tensors are of."""

    where: str
    # foreign: another program's; copy: in memory, on each machine what its ranks need
    kind: Literal["run", "weights", "foreign", "copy"] = "run"
    optimizer: str = "AdamW"
    has_ema: bool = False


def _choose(run: Engine) -> SavedRun | None:
    try:
        found = _source(run.config, run.output_dir)
        if found is not None and run.open_foreign is not None and _is_foreign(found):
            return SavedRun(storage.name_of(found), "foreign")
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
            return SavedRun(storage.name_of(where), "weights")
        # Before there was a choice, it was AdamW without an average.
        section = (state.get("config") or {}).get("Optimizer") or {}
        has_ema = section.get("ema_decay") is not None
        return SavedRun(storage.name_of(where), "run", section.get("name", "AdamW"), has_ema)
    return SavedRun(storage.name_of(where))


def _continue(run: Engine, source: SavedRun) -> Restored:
    tensors, ignored, notices = _continued_tensors(run, source)
    hashes = run.config.Engine.save_load.verify_hashes
    if source.kind == "copy":
        # Every file was hashed a moment ago, on each machine.
        path = Path(source.where)
        state = checkpoint.load(path, tensors, "", run.ranks, hashes=False, ignored=ignored)
    else:
        path, state = checkpoint.resume(
            source.where, tensors, notices.append, "", run.ranks, hashes, ignored
        )
    step, consumed = int(state["step"]), int(state["consumed_samples"])
    if consumed != run.batch_schedule.consumed(step):
        notices += run.change_batch(step, consumed)
    about_data = run.mesh.rank_0_first(
        lambda: run.data.restore(state, consumed, storage.name_of(path))
    )
    run.batch_schedule = run.config.batch_schedule
    if "optim." not in ignored:
        run.optimizer.restore_updates(int(state["optimizer_updates"]))
    scale = state["loss_scale"]
    named = storage.name_of(path)
    resumed = [] if source.kind == "copy" else [f"resumed from {named} at step {step}"]
    return Restored(
        named,
        [*notices, *resumed, *about_data],
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
        storage.name_of(path),
        run.config.Data.dataset.allow_tokenizer_mismatch,
    )
    notices.append(f"starting at step 0 with the weights of {storage.name_of(path)}")
    return Restored(storage.name_of(path), notices, is_weights_only=True)


def _is_foreign(where: Path) -> bool:
    return where.exists() and not checkpoint.candidates(where)


def check_foreign(config: Config, open_foreign: OpenForeign) -> None:
    """Before anything is built: another program's checkpoint must be of the network described."""
    where = _source(config, storage.local_path(config.Engine.save_load.output_dir))
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


RESTORE = {
    "weights": _take_weights,
    "foreign": _take_foreign,
    "run": _continue,
    "copy": _continue,
}


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
