"""The training loop, `Engine.fit()`. It does not know how the model is parallelised."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Literal

from fourfold import heartbeat, storage
from fourfold.checkpoint import RankGroup
from fourfold.comm_timer import excluded
from fourfold.config import Config
from fourfold.data import Batch
from fourfold.engine import resuming, saving
from fourfold.engine.banner import describe
from fourfold.engine.findings import PreflightFinding
from fourfold.engine.lock import Claim
from fourfold.engine.memory_copies import MemoryCopies, remove_copies
from fourfold.engine.monitoring import Monitoring, Prediction
from fourfold.engine.preflight import preflight
from fourfold.engine.remote_run import RemoteRun
from fourfold.engine.run_data import RunData
from fourfold.engine.spikes import Spikes
from fourfold.engine.updates import Asked, StepResult, updates_of
from fourfold.errors import DataError, UserError
from fourfold.metrics import Meter, Sinks, StepOutcome, plot_losses
from fourfold.optim import LossScale, Optimizer, build_schedule
from fourfold.parallel import Runner
from fourfold.parallel.precision import (
    slow_attention_notice,
    slow_dtype_notice,
    unmet_list_entries,
)
from fourfold.parallel.recompute import needless_offload_notice
from fourfold.signals import SaveRequest, StopRequest


class Engine:
    """A run: model, data, optimizer and the directory they are saved to."""

    def __init__(
        self,
        config: Config,
        data: RunData,
        runner: Runner,
        optimizer: Optimizer,
        claim: Claim | None = None,
        prediction: Prediction | None = None,
        open_foreign: resuming.OpenForeign | None = None,
    ) -> None:
        """From the parts `build_engine` made; nothing is opened, built or connected here."""
        self.config = config
        self.data = data
        self.runner = runner
        self.optimizer = optimizer
        self.claim = claim
        self.prediction = prediction
        self.open_foreign = open_foreign
        self.mesh, self.device = runner.mesh, runner.device
        self.layout = runner.mesh.layout
        self.ranks = RankGroup.of(runner.mesh, config.Distributed.timeout_seconds)
        if claim is not None:
            self.ranks = replace(self.ranks, may_commit=claim.check)
        self.batch_schedule = config.batch_schedule
        # Of one at an address, what stands for it here.
        self.output_dir = storage.local_path(config.Engine.save_load.output_dir)
        self.remote = RemoteRun.of(self.output_dir, self.mesh.rank)
        self.save_request = SaveRequest(self.output_dir, watches_file=self.mesh.rank == 0)
        self.schedule = build_schedule(config)
        self.loss_scale = (
            LossScale(config.Engine.mix_precision.scale_loss)
            if runner.precision.scales_loss
            else None
        )
        self.updates = updates_of(runner, optimizer)
        self.guard = NonFiniteGuard(config.Engine.max_skipped_steps)
        self.step = 0
        self.saves = saving.Saves(config.Engine.save_load.max_failed_saves)
        watched = config.Engine.spikes.action != "none"
        self.spikes = Spikes(self, config.Engine.spikes) if watched else None
        self.copies: MemoryCopies | None = None
        self.notices = [*config.notices, *data.notices]

    # -- the loop ---------------------------------------------------------------------------

    def fit(self, *, save: bool = True) -> bool:
        """Train from the current step to `max_steps`, then test; returns whether a signal ended it
        before.

        Without `save` it leaves no checkpoint and no picture: the run is only a measurement.
        """
        with ExitStack() as closing:
            # Closed in the reverse order; one that fails does not keep the others from it.
            if self.claim is not None:
                closing.callback(self.claim.release)
            closing.callback(self.data.close)
            if self.remote is not None:
                self.mesh.on_all_ranks(self.remote.open)
            if save and self.mesh.rank == 0:
                self.notices += self.data.keep_tokenizer(self.output_dir)
            heartbeat.beat(self.step, "resume")
            if save:
                self._open_copies()
            self.resume()
            if save:
                self.notices += saving.check_room(self)
            if self.copies is not None:
                self.notices += self.copies.check_room()
                self.copies.begin(self.copies.origin)
            found = self._preflight()
            watch = self._open_instruments(closing)
            for finding in found:
                watch.sinks.notice(f"preflight: {finding.text}", level="WARNING")
                fields = asdict(finding)
                del fields["text"]  # said already
                watch.sinks.event("preflight", **fields)
            listening = StopRequest(self.output_dir, watches_file=self.mesh.rank == 0)
            with listening as stop, saving.finishing(self):
                if self.spikes is not None:
                    self._watch_spikes(self.spikes, watch, stop, save)
                if self.copies is not None and self.copies.origin is not None:
                    # What is left of the one the run began from may be there only once.
                    self.copies.copy(watch.sinks)
                reason = self._train(watch, stop, save)
                watch.compare(self.step)
                if reason is None:
                    with watch.meter.timed("evaluate", self.step):
                        self.evaluate(watch.sinks, "test", self.config.Engine.test_iters, stop)
                    watch.sinks.notice("The training process is complete.")
                if self.copies is not None:
                    self.copies.close(watch.sinks)
                if self.mesh.rank == 0 and save:
                    self._draw(watch.sinks)
                if self.remote is not None and (problem := self.remote.close()):
                    watch.sinks.notice(problem, level="WARNING")
        # Not after a failure: that would wait for the lost.
        self.mesh.close()
        # Who sends a signal may start the run again; a STOP file is a person's, and final.
        unfinished = self.step < self.config.Engine.max_steps
        stopped = unfinished and reason is not None and reason.startswith("SIG")
        heartbeat.beat(self.step, heartbeat.STOPPED if stopped else heartbeat.FINISHED)
        return stopped

    def _open_copies(self) -> None:
        if self.config.Engine.save_load.memory_copy_steps:
            self.copies = MemoryCopies(self)
        elif self.mesh.rank == 0 or os.environ.get("LOCAL_RANK") == "0":
            self.notices += remove_copies(self.output_dir)

    def _preflight(self) -> list[PreflightFinding]:
        """What is wrong with the ranks, links and disks of this run; the same on all ranks."""
        form = self.config.Engine.preflight
        if self.mesh.size == 1 or form == "none":
            return []
        return preflight(self.mesh, self.device, self.output_dir, form).findings

    def resume(self) -> None:
        """Continue from the run's own last checkpoint, or start from the one it names, if any."""
        restored = resuming.resume(self)
        if restored is not None:
            self.take(restored)

    def take(self, restored: resuming.Restored) -> None:
        """Continue with a state that the tensors were filled from."""
        self.step = restored.step
        self.guard.skipped = restored.skipped_updates
        if self.loss_scale is not None and restored.loss_scale is not None:
            self.loss_scale = restored.loss_scale
        if self.spikes is not None:
            self.spikes.restore(restored.spikes)
        if not restored.is_weights_only:
            self.saves.last_good = restored.path
        self.notices += restored.notices

    def _watch_spikes(
        self, spikes: Spikes, watch: Monitoring, stop: StopRequest, save: bool
    ) -> None:
        spikes.watch()
        self.updates.before_update = spikes.look
        if spikes.action == "rewind" and save and self.step == 0:
            # So that there is something to go back to from the first step on.
            saving.save(self, watch.meter, watch.sinks, stop, final=False)

    def change_batch(self, step: int, consumed: int) -> list[str]:
        """Continue after `step` steps that read `consumed` samples with another batch than
        this configuration's would have been; returns what the user should know."""
        before = self.batch_schedule.consumed(step)
        self.config.continue_batches(step, consumed)
        self.batch_schedule = self.config.batch_schedule
        self.schedule = build_schedule(self.config)
        self.mesh.rank_0_first(self.data.change_batches)
        engine, lr = self.config.Engine, self.config.Optimizer.lr
        unit = "steps" if lr.decay_samples is None else "samples"
        return [
            f"the batch changes: {step} steps of the saved run read {consumed:,} samples, which "
            f"would be {before:,} with this configuration. The run continues with sample "
            f"{consumed:,} and batches of {self.batch_schedule.batch_of(step)}, to step "
            f"{engine.max_steps:,}; the learning rate follows {unit}"
        ]

    def _train(self, watch: Monitoring, stop: StopRequest, save: bool) -> str | None:
        """All steps up to the last, or to a stop; returns what stopped it, if anything."""
        engine, meter, sinks = self.config.Engine, watch.meter, watch.sinks
        if self.step >= engine.max_steps:
            sinks.notice(f"step {self.step} reached Engine.max_steps={engine.max_steps}")
        stopping = False
        while self.step < engine.max_steps and not stopping:
            with meter.timed("reader", self.step):
                batch = self.data.loaders["train"].batch(self.step)
            self.step += 1
            last, evaluates, saves, checks = self._due_now(save)
            outcomes, stopping, requested = self._train_step(batch, meter, sinks, stop)
            saves = saves or (save and requested)
            copies = self.copies is not None and _due(self.step, self.copies.every)
            if last or evaluates or saves or copies or checks or stopping or self.guard.gave_up:
                # What follows speaks of this very step.
                rest, asked, _ = self._settle(sinks, of_all=True)
                outcomes, stopping = outcomes + rest, stopping or asked
            watch.end_step(outcomes)
            if (
                self.spikes is not None
                and self.spikes.found
                and self.spikes.answer(watch, stop, save)
            ):
                continue  # from an earlier step
            if self.guard.gave_up:
                saved = saving.save_what_is_left(self, meter, sinks, stop)
                raise self.guard.failure(self.step, saved)
            if checks:
                self.runner.check_replicas(f"step {self.step}")
            if evaluates and not stopping:
                with meter.timed("evaluate", self.step):
                    stopping = self.evaluate(sinks, "eval", engine.eval_iters, stop)
            if saves or (save and stopping):
                saving.save(self, meter, sinks, stop, final=last or stopping)
            if self.copies is not None and copies and not (stopping or saving.is_saved(self)):
                with meter.timed("save", self.step):
                    self.copies.copy(sinks)
        saving.finish(self)
        if not stopping:
            return None
        reason = self.mesh.broadcast_first(stop.reason())
        kept = "; the run is saved" if save else ""
        sinks.notice(f"stopped by {reason} at step {self.step}{kept}")
        return reason

    def advance(self, look: Callable[[Batch, float], None] | None = None) -> StepResult:
        """One step by itself, as `fit` computes it: nothing is logged, evaluated or saved.

        `look` is called between the backward pass and the update with the batch and the loss scale,
        on all ranks.
        """
        batch = self.data.loaders["train"].batch(self.step)
        self.step += 1
        scale = self.updates.scale_of(self.loss_scale)
        share = self.runner.run(batch, self.step, scale)
        if look is not None:
            look(batch, float(scale))
        limits = None if self.spikes is None else self.spikes.limits(self.step)
        rate = self.schedule.lr_at(self.step)
        self.updates.apply(self.step, share, rate, scale, Asked(), limits)
        (result,) = self.updates.results(of_all=True)
        self.guard.admits(result, self.loss_scale)
        if self.spikes is not None:
            self.spikes.take(result)
        return result

    def _due_now(self, save: bool) -> tuple[bool, bool, bool, bool]:
        """Whether the step is the last, and whether it is followed by an evaluation, a save, a
        check."""
        engine = self.config.Engine
        last = self.step == engine.max_steps
        saves = save and (last or _due(self.step, engine.save_load.save_steps))
        return (
            last,
            _due(self.step, engine.eval_freq),
            saves,
            _due(self.step, engine.check_replicas_freq),
        )

    def _train_step(
        self, batch: Batch, meter: Meter, sinks: Sinks, stop: StopRequest
    ) -> tuple[list[StepOutcome], bool, bool]:
        """Forward, backward and, unless something is not finite, the update.

        Returns what has become known: on a CPU of this step, on a GPU of the one before.
        """
        scale = self.updates.scale_of(self.loss_scale)
        limits = None
        if self.spikes is not None:
            self.spikes.begin(self.step, batch)
            limits = self.spikes.limits(self.step)
        with meter.timed("forward_backward", self.step):
            share = self.runner.run(batch, self.step, scale)
        with meter.timed("optimizer", self.step):
            self.saves.before_update()
            if self.saves.pending is not None and self.saves.pending.succeeded:
                self.save_request.committed()
            rate = self.schedule.lr_at(self.step)
            asked = Asked(stop.reason() is not None, self.save_request.asked())
            self.updates.apply(self.step, share, rate, scale, asked, limits)
            return self._settle(sinks)

    def _settle(
        self, sinks: Sinks, *, of_all: bool = False
    ) -> tuple[list[StepOutcome], bool, bool]:
        """Take in the results that are known, or all: their outcomes, and whether any rank was
        asked to stop, or to save."""
        outcomes, stopping, saving_asked = [], False, False
        for result in self.updates.results(of_all=of_all):
            if not self.guard.admits(result, self.loss_scale):
                sinks.event(
                    "skipped_update",
                    step=result.step,
                    loss=result.loss,
                    grad_norm=result.norm,
                    loss_scale=result.loss_scale,
                    sample_ids=self.data.loaders["train"].sample_ids(result.step - 1),
                )
            if self.spikes is not None:
                self.spikes.take(result)
            outcomes.append(self.outcome(result))
            stopping |= result.stops
            saving_asked |= result.saves
        return outcomes, stopping, saving_asked

    @excluded()
    def evaluate(
        self, sinks: Sinks, part: Literal["eval", "test"], iterations: int, stop: StopRequest
    ) -> bool:
        """Mean loss over `iterations` batches; each evaluation of a run reads new ones.

        Returns whether any rank was asked to stop meanwhile; the partial mean is then no result.
        """
        split = "valid" if part == "eval" else "test"
        if not len(self.data.samples.get(split, ())) or iterations == 0:
            return False
        first = 0
        if part == "eval":
            first = (self.step // self.config.Engine.eval_freq - 1) * iterations
        batches, start = range(first, first + iterations), time.perf_counter()
        loss, seconds = self._mean_loss(split, batches, stop), time.perf_counter() - start
        averaged, ema = None, self.optimizer.ema
        if loss is not None and ema is not None:
            self.saves.before_update()  # a save in progress reads the weights where they are
            with ema.in_place():
                self.runner.sync_weights_from_masters()
                averaged = self._mean_loss(split, batches, stop)
            self.runner.sync_weights_from_masters()
        if loss is None or (ema is not None and averaged is None):
            sinks.notice(f"the {part} after step {self.step} was cut short by a stop")
            return True
        sinks.evaluation(
            part,
            step=self.step,
            epoch=self.epoch(self.step),
            batch=iterations - 1,
            loss=loss,
            seconds=seconds,
            batches=iterations,
            ema_loss=averaged,
        )
        return False

    def _mean_loss(self, split: str, batches: range, stop: StopRequest) -> float | None:
        """Over all tokens of these batches; None if a rank was asked to stop meanwhile."""
        total = tokens = 0.0
        for batch in map(self.data.loaders[split].batch, batches):
            heartbeat.alive()
            share = float(self.runner.evaluate(batch))
            loss, stops = self.mesh.all_reduce(share, stop.reason() is not None)
            if stops:
                return None
            total += loss * batch.global_valid_tokens
            tokens += batch.global_valid_tokens
        return total / max(tokens, 1.0)

    def _draw(self, sinks: Sinks) -> None:
        try:
            plot_losses(self.output_dir)
        except (OSError, DataError) as error:
            # The run is over and saved; a full disk need not make it a failure.
            sinks.notice(f"the loss curve was not drawn: {error}", level="WARNING")

    # -- reporting --------------------------------------------------------------------------

    def _open_instruments(self, closing: ExitStack) -> Monitoring:
        """Monitoring; prints everything the run derived before its first step."""
        config, precision = self.config, self.runner.precision
        watch = Monitoring(
            config, self.mesh, self.device, precision, self.step, closing, self.prediction
        )
        lists = config.Engine.mix_precision
        if precision.level:
            self.notices += unmet_list_entries(
                lists.custom_black_list, lists.custom_white_list, precision.level
            )
        dropout = config.Model.attention_probs_dropout_prob
        slow = [
            slow_dtype_notice(precision.dtype, self.device),
            slow_attention_notice(dropout, precision.dtype, self.device),
            needless_offload_notice(config.Model.offload_activations, self.device),
        ]
        self.notices += filter(None, slow)
        if self.mesh.rank == 0:
            # The memory of all ranks is in it, and the others have nowhere to write it to.
            plan = describe(config, self.layout, self.runner, self.data, watch.peak.source)
            predicted = [] if self.prediction is None else [self.prediction.line()]
            placement = self.mesh.placement
            hosts = [] if placement is None else placement.notices
            for line in [*self.notices, *plan, *hosts, *predicted]:
                watch.sinks.notice(line)
            if placement is not None:
                watch.sinks.notice(*placement.warnings, level="WARNING")
        return watch

    def outcome(self, result: StepResult) -> StepOutcome:
        return StepOutcome(
            step=result.step,
            epoch=self.epoch(result.step),
            batch=result.step - 1,
            loss=result.loss,
            # As the originals do: the rate shown is the one the next step will use.
            learning_rate=self.schedule.lr_at(result.step + 1),
            grad_norm=result.norm,
            loss_scale=self.loss_scale.value if self.loss_scale else None,
            skipped=self.guard.skipped,
        )

    def epoch(self, step: int) -> int:
        """How often the run had been through its training split before `step`."""
        seen = self.batch_schedule.consumed(step - 1)
        train = self.data.samples["train"]
        return seen * train.seq_len // max(train.tokens_per_epoch, 1)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


# -- the guard behind every update ----------------------------------------------------------------


@dataclass
class NonFiniteGuard:
    """Counts skipped updates, and stops the run after too many in a row."""

    limit: int
    skipped: int = 0
    consecutive_skips: int = 0

    def admits(self, result: StepResult, scale: LossScale | None) -> bool:
        """True if the update went ahead; otherwise it is counted as skipped."""
        searching = scale is not None and not scale.exhausted and math.isfinite(result.loss)
        if scale is not None:
            scale.update(overflowed=not result.finite)
        if result.finite:
            self.consecutive_skips = 0
            return True
        self.skipped += 1
        # While fp16 is still looking for its loss scale, an overflow is routine.
        if not searching:
            self.consecutive_skips += 1
        return False

    @property
    def gave_up(self) -> bool:
        return self.consecutive_skips >= self.limit

    def failure(self, step: int, saved: str) -> UserError:
        return UserError(
            f"the loss or the gradient was not finite for {self.consecutive_skips} updates in a "
            f"row, up to step {step} (Engine.max_skipped_steps={self.limit}). No such update was "
            f"applied; the weights before them are in {saved}. The samples are listed in "
            "metrics.jsonl: "
            "look at them, lower Optimizer.lr.max_lr, or use a wider Engine.mix_precision.dtype"
        )
