"""Saving a run and going on with one: what is written, what is checked when it is read.

Everything random or ordered is a function of the step (data, dropout, learning rate), so what a
checkpoint restores is short: weights, moments, the loss scale, one integer, and what a mixture
whose weights may change has served of each source.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourfold import __version__, checkpoint, heartbeat
from fourfold.config import Config
from fourfold.data.agreement import check_checkpoint_tokenizer
from fourfold.engine import holdings
from fourfold.errors import CheckpointError, UserError
from fourfold.metrics import Meter
from fourfold.optim import LossScale
from fourfold.parallel.drift import check_replicas

if TYPE_CHECKING:
    from fourfold.engine.loop import Engine


def save(run: Engine, meter: Meter) -> str:
    """Write the run as it stands, or begin to; the name of its checkpoint."""
    section = run.config.Engine.save_load
    heartbeat.beat(run.step, "save")
    with meter.timed("save"):
        finish(run)
        tensors = holdings.to_write(run.runner, run.optimizer)
        given = (run.output_dir, run.step, tensors, _state(run), section.keep_last, run.crew)
        if section.async_save:
            run.pending_save = checkpoint.begin_save(*given)
        else:
            run.mesh.together(lambda: checkpoint.save(*given))
    return str(run.output_dir / f"step_{run.step}")


def finish(run: Engine) -> None:
    """Wait for the save under way; none is ever dropped for a later one."""
    if run.pending_save is not None:
        run.mesh.together(run.pending_save.wait)
        run.pending_save = None


def _state(run: Engine) -> dict[str, Any]:
    consumed = run.pace.consumed(run.step)
    return {
        "version": __version__,
        "step": run.step,
        "consumed_samples": consumed,
        "optimizer_updates": run.optimizer.updates,
        "skipped_updates": run.guard.skipped,
        "loss_scale": vars(run.loss_scale) if run.loss_scale else None,
        **run.feeds.state(consumed),
        "config": run.config.to_dict(),
    }


def resume(run: Engine) -> None:
    """Go on with the run's own last checkpoint, or start from the one it names, if there is one.

    Rank 0 decides which: the others may look before or after something changed on the disk.
    """
    found = _source(run.config, run.output_dir) if run.mesh.rank == 0 else None
    weights_only = found is not None and _holds_weights_only(found)
    kind = "weights" if weights_only else "run"
    told = run.mesh.agree(None if run.mesh.rank else f"{kind}:{found or ''}") or ""
    kind, _, where = told.partition(":")
    if not where:
        return
    path = _take_weights(run, where) if kind == "weights" else _go_on(run, where)
    holdings.settle(run.runner, run.optimizer)
    check_replicas(run.runner, f"after loading {path}")


def _go_on(run: Engine, where: str) -> Path:
    tensors = holdings.to_fill(run.runner, run.optimizer)
    path, state = checkpoint.resume(where, tensors, run.notices.append, crew=run.crew)
    consumed = run.pace.consumed(int(state["step"]))
    if state["consumed_samples"] != consumed:
        raise UserError(
            f"{path} was written after {state['consumed_samples']} samples in "
            f"{state['step']} steps, which this configuration reaches after {consumed}; resume "
            "with the global_batch_size and rampup it was trained with"
        )
    about_data = run.feeds.restore(state, int(state["consumed_samples"]), str(path))
    run.step = int(state["step"])
    run.optimizer.restore_updates(int(state["optimizer_updates"]))
    run.guard.skipped = int(state["skipped_updates"])
    if run.loss_scale and state["loss_scale"]:
        run.loss_scale = LossScale(**state["loss_scale"])
    run.notices += [f"resumed from {path} at step {run.step}", *about_data]
    return path


def _take_weights(run: Engine, where: str) -> Path:
    """Step 0 with the weights of a converted checkpoint; moments and data begin anew."""
    tensors = holdings.to_fill(run.runner, run.optimizer)
    weights = {name: piece for name, piece in tensors.items() if name.startswith("model.")}
    path, state = checkpoint.resume(where, weights, run.notices.append, "model.", run.crew)
    run.notices += check_checkpoint_tokenizer(
        state.get("tokenizer"),
        run.feeds.sources,
        str(path),
        run.config.Data.dataset.allow_tokenizer_mismatch,
    )
    run.notices.append(f"starting at step 0 with the weights of {path}")
    return path


def _source(config: Config, output_dir: Path) -> Path | None:
    """Where to resume from, if anywhere.

    A job that is started again with the same arguments goes on with its own checkpoints, even
    where `ckpt_dir` names the run it first came from. A `ckpt_dir` inside the run is obeyed.
    """
    save_load = config.Engine.save_load
    own = output_dir if save_load.auto_resume and checkpoint.candidates(output_dir) else None
    if save_load.ckpt_dir is None:
        return own
    named = checkpoint.named(save_load.ckpt_dir, output_dir)
    inside = named.resolve().is_relative_to(output_dir.resolve())
    return named if inside or own is None else own


def _holds_weights_only(where: Path) -> bool:
    """Whether the checkpoint that would be resumed is one without moments."""
    for directory in checkpoint.candidates(where):
        try:
            return bool(checkpoint.read_state(directory).get("weights_only"))
        except CheckpointError:
            continue  # named to the user when the next one is resumed
    return False
