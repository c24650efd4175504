"""Pipeline parallelism: torch's schedules over the parts of the model on this rank.

Every rank calls `step` with the same arguments; the first stage takes the tokens, the last one the
labels. The loss is computed inside the last stage, already divided, so nothing is scaled
afterwards. Evaluation has its own loop, which works for every schedule: two of torch's cannot run
forward only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _PipelineSchedule,
    get_schedule_class,
)

from fourfold import heartbeat
from fourfold.comm_timer import comm_times
from fourfold.config import Config
from fourfold.mesh import Mesh
from fourfold.model.gpt import GPT
from fourfold.parallel.fsdp import Sharding
from fourfold.parallel.precision import Precision
from fourfold.parallel.stages import Work, count_stages, forward_rounds, stages_of_rank

Arguments = dict[str, Any]


class Stage(PipelineStage):
    """A stage that reduces its gradients as its sharding stage requires.

    Torch's own keeps whole gradients and weights until the last micro-batch, which is sharding
    stage 1. Here, at stages 2 and 3, each backward pass reduces, and at 3 it frees the weights.
    """

    sharding: Sharding | None = None
    dropout_seeds: Sequence[int] = ()  # of the micro-batches under way
    busy_seconds = 0.0

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: Arguments | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        # A number, where the other arguments are tensors: sharding would move those to the GPU, and
        # the host, which seeds the generators, would wait for it to come back.
        seed = {"dropout_seed": self.dropout_seeds[fwd_chunk_id]}
        with self._computing():
            return super().forward_one_chunk(
                fwd_chunk_id, args, {**(kwargs or {}), **seed}, save_forward_output
            )

    def backward_one_chunk(self, *given: Any, **named: Any) -> None:
        with self._computing():
            super().backward_one_chunk(*given, **named)

    def backward_weight_one_chunk(self, *given: Any, **named: Any) -> None:
        with self._computing():
            super().backward_weight_one_chunk(*given, **named)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.busy_seconds += time.perf_counter() - start
        heartbeat.alive()

    def _reduces_at_once(self) -> bool:
        return self.sharding is not None and self.sharding.stage > 1

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if backward_type != "full" or not self._reduces_at_once():
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        assert self.sharding is not None
        self.sharding.before_backward(self.submod, last_backward)
        gradients = stage_backward(
            bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"]
        )
        return gradients, None

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if not self._reduces_at_once():
            # Counted as communication by those who reduce, so it is not the bubble's.
            with self._computing():
                super().perform_reduce_grad(grad_scale_factor)


class Pipeline:
    """The stages of this rank, and the schedule that runs them."""

    def __init__(
        self,
        parts: dict[int, GPT],
        num_stages: int,
        group: ProcessGroup,
        *,
        schedule: str,
        tokens: Tensor,
        boundary: Tensor,
        sharding: Sharding | None,
    ) -> None:
        """`parts` by stage number; `tokens` and `boundary` are examples of what goes into the
        first stage and from each to the next."""
        self.parts = parts
        self.num_stages = num_stages
        self.group = group
        self.boundary = boundary
        self.sequence_length = tokens.shape[1]
        self.rank_of_stage = self._ranks(schedule)
        self.stages = [self._stage(number, part, tokens) for number, part in parts.items()]
        for stage in self.stages:
            stage.sharding = sharding
        if boundary.is_cuda:
            # Makes nccl's communicator while all ranks are here. Left to a schedule's first batch
            # of messages it is made by those who have one to send, whenever they come to it.
            dist.all_reduce(torch.zeros(1, device=boundary.device), group=group)
        self.schedule_name = schedule
        self.schedules: dict[int, _PipelineSchedule] = {}

    def schedule_of(self, micro_batches: int) -> _PipelineSchedule:
        """Made when first needed: torch lays out every rank's every action, which takes a while."""
        if micro_batches not in self.schedules:
            # One at a time: a batch that grows does not come back to an earlier size.
            self.schedules = {micro_batches: self._lay_out(micro_batches)}
        return self.schedules[micro_batches]

    def _lay_out(self, micro_batches: int) -> _PipelineSchedule:
        kind = get_schedule_class(self.schedule_name)
        is_single = issubclass(kind, PipelineScheduleSingle)
        return kind(
            self.stages[0] if is_single else self.stages,
            n_microbatches=micro_batches,
            loss_fn=lambda loss, _: loss,
            scale_grads=False,
        )

    def _ranks(self, schedule: str) -> list[int]:
        pp = self.group.size()
        owner = {
            stage: rank
            for rank in range(pp)
            for stage in stages_of_rank(rank, pp, schedule, self.num_stages // pp)
        }
        return [owner[stage] for stage in range(self.num_stages)]

    def _stage(self, number: int, part: GPT, tokens: Tensor) -> Stage:
        """Shapes are given, so the ranks need not ask each other for them before the first step."""
        between = torch.empty_like(self.boundary, device="meta", requires_grad=True)
        loss = torch.empty((), device="meta", requires_grad=True)
        return Stage(
            part,
            number,
            self.num_stages,
            self.boundary.device,
            input_args=tokens.to("meta") if part.is_first else between,
            output_args=loss if part.is_last else between,
            group=self.group,
        )

    def step(self, tokens: Tensor, arguments: Arguments, dropout_seeds: list[int]) -> Tensor:
        """Forward and backward of all micro-batches; returns the summed loss, zero if unknown.

        Each argument has a row for every sample, or one for every micro-batch; there is a seed for
        every micro-batch.
        """
        start, busy_before = time.perf_counter(), self._busy_seconds()
        losses: list[Tensor] = []
        inputs = (tokens,) if 0 in self.parts else ()
        target = arguments["labels"] if self.num_stages - 1 in self.parts else None
        for stage in self.stages:
            stage.dropout_seeds = dropout_seeds
        schedule = self.schedule_of(len(dropout_seeds))
        schedule.step(*inputs, target=target, losses=losses, return_outputs=False, **arguments)
        # The time no stage computed in: empty places of the schedule, and transfers.
        busy = self._busy_seconds() - busy_before
        comm_times.bubble += time.perf_counter() - start - busy
        if not losses:
            return torch.zeros((), device=self.boundary.device)
        return torch.stack(losses).sum()

    def _busy_seconds(self) -> float:
        return sum(stage.busy_seconds for stage in self.stages)

    def forward(self, micro_batches: list[tuple[Tensor, Arguments]]) -> list[Tensor]:
        """The last stage's output for each micro-batch; an empty list on the other ranks."""
        sent: list[tuple[dist.Work, Tensor]] = []
        arrived: dict[Work, Arrival] = {}
        outputs: list[Tensor] = []
        for doing in forward_rounds(self.rank_of_stage, len(micro_batches)):
            given: dict[int, Tensor] = {}
            for stage, index in doing:
                if stage in self.parts:
                    tokens, arguments = micro_batches[index]
                    inputs = arrived.pop((stage, index)).take() if stage > 0 else tokens
                    given[stage] = self.parts[stage](inputs, **arguments)
                    heartbeat.alive()
            for stage, index in doing:
                if stage == self.num_stages - 1:
                    outputs += [given[stage]] if stage in given else []
                elif stage in given and stage + 1 in self.parts:
                    arrived[stage + 1, index] = Arrival(given[stage])
                elif stage in given:
                    sent.append(self._send(given[stage], stage + 1))
                elif stage + 1 in self.parts:
                    arrived[stage + 1, index] = self._receive(micro_batches[index][0], stage)
        for work, _ in sent:
            work.wait()
        return outputs

    def _send(self, output: Tensor, to_stage: int) -> tuple[dist.Work, Tensor]:
        message = output.contiguous()
        peer = self.rank_of_stage[to_stage]
        work = dist.isend(message, group=self.group, group_dst=peer)
        assert work is not None
        return work, message

    def _receive(self, tokens: Tensor, from_stage: int) -> Arrival:
        length = tokens.shape[1] * self.boundary.shape[1] // self.sequence_length
        received = self.boundary.new_empty((tokens.shape[0], length, self.boundary.shape[2]))
        peer = self.rank_of_stage[from_stage]
        return Arrival(received, dist.irecv(received, group=self.group, group_src=peer))


@dataclass(frozen=True)
class Arrival:
    """The input of a stage, received or in flight."""

    tensor: Tensor
    on_its_way: dist.Work | None = None

    def take(self) -> Tensor:
        if self.on_its_way is not None:
            self.on_its_way.wait()
        return self.tensor


def build_pipeline(
    config: Config,
    mesh: Mesh,
    parts: dict[int, GPT],
    precision: Precision,
    sharding: Sharding | None,
    device: torch.device,
) -> Pipeline:
    """The pipeline over these parts."""
    group = mesh.group("pp")
    assert group is not None
    batch, length = config.Data.batch_size.micro_batch_size, config.Data.dataset.max_seq_len
    own_length = length // mesh.layout.mp if config.Model.sequence_parallel else length
    dtype = precision.dtype if precision.level == "O2" else torch.get_default_dtype()
    return Pipeline(
        parts,
        count_stages(config),
        group,
        schedule=config.Distributed.pp_schedule,
        tokens=torch.empty((batch, length), dtype=torch.int64, device="meta"),
        boundary=torch.empty(
            (batch, own_length, config.Model.hidden_size), dtype=dtype, device=device
        ),
        sharding=sharding,
    )
