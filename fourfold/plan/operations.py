"""What one rank sends, receives and does together with others in a step, in its order.

The rank is built and takes a training step and an evaluation by the code that trains, in no memory
and with torch's fake process group, as in `dry_run`; here every operation between ranks is written
down. Groups are named by their axis and messages by the place of their other end in the pipeline,
so a trace is that of every rank that runs the same program elsewhere: see `rehearsal`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold.config import Config
from fourfold.data import Batch
from fourfold.engine.updates import Asked, updates_of
from fourfold.mesh import AXES, Mesh, fake_mesh
from fourfold.optim import build_optimizer
from fourfold.parallel import Runner, build_on_meta, build_runner, layout_of
from fourfold.parallel import runner as runner_module

CPU = torch.device("cpu")
WORLD, STAGE, TIED = "all ranks", "the ranks of the stage", "the ends of the pipeline"
# Torch's names of the operations that all members of a group take part in.
COLLECTIVES = {
    "allreduce_": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "allgather_coalesced_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all-to-all",
    "alltoall_base_": "all-to-all",
    "barrier": "barrier",
}
SEND, RECEIVE, WAIT = "send", "receive", "wait"
_ITEM = torch.ops.aten._local_scalar_dense.default


@dataclass(frozen=True)
class Operation:
    """One entry of a trace. A send or receive is only begun by it; its wait comes later."""

    kind: str  # SEND, RECEIVE, WAIT or one of COLLECTIVES
    group: str  # an axis, or WORLD, STAGE, TIED; "pp" for messages
    tensor: str  # what is moved, such as "float32 [4, 512, 768]"
    doing: str  # what the rank was doing
    peer: int = -1  # of a message: the pipeline rank of the other end
    begun: int = -1  # of a wait: the number of the entry it waits for
    # Of an all-to-all of unequal parts: elements to and from each member.
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def is_collective(self) -> bool:
        return self.kind not in (SEND, RECEIVE, WAIT)

    def __str__(self) -> str:
        return f"{self.kind} of {self.tensor} ({self.doing})"


def trace_of(config: Config, rank: int, micro_batches: int) -> list[Operation]:
    """A training step of `micro_batches` and an evaluation of `rank` in the layout of `config`."""
    with in_no_memory(config, rank) as (still, runner, fake):
        # One piece, for a norm of nothing need not be accurate.
        whole = patch.object(runner_module, "NORM_PIECE", sys.maxsize)
        with fake, whole, Recorder(runner.mesh) as recorder, recorder.messages():
            _step(still, runner, micro_batches, recorder)
    return recorder.trace


@contextmanager
def in_no_memory(config: Config, rank: int) -> Iterator[tuple[Config, Runner, FakeTensorMode]]:
    """One rank of the configured layout, built by the real code among ranks that are not there: its
    configuration, without dropout, which neither holds nor sends anything; what runs its batches;
    and the mode to run them in."""
    still = config.model_copy(deep=True)
    still.Model.hidden_dropout_prob = still.Model.attention_probs_dropout_prob = 0.0
    with fake_mesh(layout_of(still), rank) as mesh:
        meta = build_on_meta(still, mesh, CPU)
        # Sharding and slicing need the meta device, memory the fake one, and joining neither.
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            meta.materialize()
        yield still, build_runner(still, mesh, CPU, meta), fake


def _step(config: Config, runner: Runner, micro_batches: int, recorder: Recorder) -> None:
    samples = micro_batches * runner.micro_batch_size
    shape = (samples, config.Data.dataset.max_seq_len)
    tokens = torch.zeros(shape, dtype=torch.int64)
    ids = torch.zeros(shape, dtype=torch.int32)
    masked = config.Data.dataset.reset_attention_mask
    batch = Batch(
        tokens,
        tokens,
        torch.ones(shape),
        tokens,
        np.arange(samples),
        float(tokens.numel() * runner.mesh.layout.data_degree),
        ids if masked else None,
    )
    optimizer = build_optimizer(config, runner)
    updates = updates_of(runner, optimizer)
    with recorder.passes(runner):
        recorder.doing = "forward and backward"
        share = runner.run(batch, 1, 1.0)
        recorder.doing = "update"
        updates.apply(1, share, 1e-4, 1.0, Asked())
        recorder.doing = "evaluation"
        runner.evaluate(batch)


class Recorder(TorchDispatchMode):
    """Writes down every operation between ranks while it is active."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.trace: list[Operation] = []
        self.doing = ""
        self._mesh = mesh
        self._pipeline_ranks: list[int] = []
        # The narrowest name last: with one axis on, its group is all ranks.
        self._names: dict[str, str] = {}
        if mesh.size > 1:
            assert dist.group.WORLD is not None
            self._names[dist.group.WORLD.group_name] = WORLD
        if (stage := mesh.stage_group()) is not None:
            self._names[stage.group_name] = STAGE
        if mesh.tied_embedding_group is not None:
            self._names[mesh.tied_embedding_group.group_name] = TIED
        for axis in AXES:
            if (group := mesh.group(axis)) is not None:
                self._names[group.group_name] = axis
                if axis == "pp":
                    self._pipeline_ranks = dist.get_process_group_ranks(group)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _ITEM:
            return 1.0  # no number is known, and none decides what is sent
        name = func._schema.name.removeprefix("c10d::")
        if name in COLLECTIVES and func.namespace == "c10d":
            group = next(self._names[group.group_name] for group in groups_among(args))
            splits = None
            if name == "alltoall_base_" and args[3]:
                splits = (tuple(args[4]), tuple(args[3]))
            described = _described(args) if splits is None else _described(args).split()[0]
            self._add(COLLECTIVES[name], group, described, splits=splits)
        return func(*args, **(kwargs or {}))

    def _add(self, kind: str, group: str, tensor: str, **more: Any) -> int:
        self.trace.append(Operation(kind, group, tensor, self.doing, **more))
        return len(self.trace) - 1

    def _begin(self, kind: str, tensor: Tensor, peer: int) -> Message:
        place = self._pipeline_ranks.index(peer)
        return Message(self, self._add(kind, "pp", _described([tensor]), peer=place))

    @contextmanager
    def messages(self) -> Iterator[None]:
        """Take the place of torch's functions for messages, which would send nothing anyway: only
        so the moment is seen at which a message is waited for."""

        def isend(
            tensor: Tensor, dst: int | None = None, group: Any = None, tag: int = 0, **to: int
        ) -> Message:
            peer = dst if dst is not None else self._pipeline_ranks[to["group_dst"]]
            return self._begin(SEND, tensor, peer)

        def irecv(
            tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0, **of: int
        ) -> Message:
            peer = src if src is not None else self._pipeline_ranks[of["group_src"]]
            return self._begin(RECEIVE, tensor, peer)

        def batch_isend_irecv(operations: list[dist.P2POp]) -> list[Message]:
            return [one.op(one.tensor, one.peer) for one in operations]

        with ExitStack() as stack:
            for place in (dist, distributed_c10d):  # torch compares the functions of both
                for stand_in in (isend, irecv, batch_isend_irecv):
                    stack.enter_context(patch.object(place, stand_in.__name__, stand_in))
            yield

    @contextmanager
    def passes(self, runner: Runner) -> Iterator[None]:
        """Say of which stage and micro-batch a forward or backward pass is."""
        if runner.pipeline is None:
            yield
            return
        from fourfold.parallel.pipeline import Stage

        def named(words: str, method: Callable[..., Any]) -> Callable[..., Any]:
            def run(stage: Stage, chunk: int, *given: Any, **options: Any) -> Any:
                before = self.doing
                self.doing = f"{words}, stage {stage.stage_index}, micro-batch {chunk}"
                try:
                    return method(stage, chunk, *given, **options)
                finally:
                    self.doing = before

            return run

        with ExitStack() as stack:
            for words in ("forward", "backward", "backward_weight"):
                name = f"{words}_one_chunk"
                method = named(
                    f"{words.replace('_weight', ' of weights')} pass", getattr(Stage, name)
                )
                stack.enter_context(patch.object(Stage, name, method))
            yield


@dataclass(frozen=True)
class Message:
    """What torch gives back for a message that is under way."""

    recorder: Recorder
    number: int

    def wait(self, *timeout: Any) -> bool:
        trace = self.recorder.trace
        begun = trace[self.number]
        self.recorder._add(WAIT, "pp", begun.tensor, peer=begun.peer, begun=self.number)
        return True


def groups_among(given: Any) -> Iterator[dist.ProcessGroup]:
    for value in given:
        if isinstance(value, torch.ScriptObject) and str(value._type()).endswith("ProcessGroup"):
            yield dist.ProcessGroup.unbox(value)


def _described(given: Any) -> str:
    """The first tensor given, or the first of the first list, with how many there are."""
    for value in given:
        if isinstance(value, Tensor):
            return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        if isinstance(value, list) and value:
            first = _described(value)
            if first:
                return first if len(value) == 1 else f"{len(value)} x {first}"
    return ""
