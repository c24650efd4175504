"""The end of a step: what all ranks agree on, the update, and when the host learns of it.

Loss, norm of the gradient and requests to stop or to save are summed over all ranks in one message;
an update with a loss or norm that is not finite is skipped.

`HostUpdates` decides on the host, where the numbers of a CPU are anyway. On a GPU that would empty
its queue in every step: the host would wait for the backward pass, and the GPU then for the host.
So `DeviceUpdates` leaves the decision to the GPU, and reads what came of a step when the next one
has been queued: results are then known one step late, as the results of the step they belong to.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fourfold.optim import DeviceLossScale, LossScale, Optimizer
from fourfold.parallel import Runner


class Asked(NamedTuple):
    """Whether this rank was asked to stop the run, and to save it."""

    stop: bool = False
    save: bool = False


@dataclass(frozen=True)
class SpikeLimits:
    """What the loss and the gradient norm of a step may come to; see `fourfold.engine.spikes`."""

    loss: float = math.inf
    norm: float = math.inf
    usual: float | None = None  # loss

    def exceeded_by(self, loss: float, norm: float) -> bool:
        finite = math.isfinite(loss) and math.isfinite(norm)
        return finite and (loss > self.loss or norm > self.norm)


Look = Callable[["StepResult"], None]

# Numbers of a step's result that are always sent, and groups that layers are joined to at most.
RESULTS, MOST_LAYER_GROUPS = 6, 16


def by_group(groups: Mapping[str, str], norms: Sequence[float]) -> dict[str, float]:
    """The norms of groups of layers by name; `groups` has that of every parameter."""
    return dict(zip(dict.fromkeys(groups.values()), norms, strict=True))


@dataclass(frozen=True)
class StepResult:
    """Of one step, the same on all ranks."""

    step: int
    loss: float
    norm: float  # of the gradient, after unscaling
    loss_scale: float
    stops: bool  # whether any rank was asked to stop
    saves: bool = False  # whether any was asked to save
    held_back: bool = False  # whether its update was, for a spike
    layer_norms: dict[str, float] | None = None  # of the gradient, where they were asked for

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)

    @property
    def applied(self) -> bool:
        """Whether there was an update."""
        return self.finite and not self.held_back


class Updates(Protocol):
    # Called on the host with what a step comes to, where that is known before the update.
    before_update: Look | None

    def scale_of(self, loss_scale: LossScale | None) -> float | Tensor:
        """What to multiply the next step's loss with."""

    def apply(
        self,
        step: int,
        share: Tensor,
        learning_rate: float,
        scale: float | Tensor,
        asked: Asked,
        limits: SpikeLimits | None = None,
        *,
        by_layer: bool = False,
    ) -> None:
        """Update the weights with the gradients of `step`, and clear these.

        `share` is this rank's of the loss; `asked`, what it was asked for. Beyond `limits` there is
        no update. `by_layer` asks for the norms of groups of layers too.
        """

    def results(self, *, of_all: bool = False) -> list[StepResult]:
        """Of the steps that are known by now; `of_all` waits for those that are not."""


def updates_of(runner: Runner, optimizer: Optimizer) -> Updates:
    """On the device of what is updated; offloaded to the host, that is the host's."""
    if all(parameter.is_cuda for parameter in runner.masters.values()):
        return DeviceUpdates(runner, optimizer)
    return HostUpdates(runner, optimizer)


class HostUpdates:
    """Everything is known when the update begins."""

    def __init__(self, runner: Runner, optimizer: Optimizer) -> None:
        self.runner = runner
        self.optimizer = optimizer
        self.groups = runner.table.layer_groups(MOST_LAYER_GROUPS)
        self.known: list[StepResult] = []
        self.before_update: Look | None = None

    def scale_of(self, loss_scale: LossScale | None) -> float | Tensor:
        return loss_scale.value if loss_scale else 1.0

    def apply(
        self,
        step: int,
        share: Tensor,
        learning_rate: float,
        scale: float | Tensor,
        asked: Asked,
        limits: SpikeLimits | None = None,
        *,
        by_layer: bool = False,
    ) -> None:
        scale = float(scale)
        squares, layer_norms = self._squares(by_layer, scale)
        loss, squares, stops, saves = self.runner.mesh.all_reduce(float(share), squares, *asked)
        norm = math.sqrt(squares) / scale
        held_back = limits is not None and limits.exceeded_by(loss, norm)
        result = StepResult(step, loss, norm, scale, stops > 0, saves > 0, held_back, layer_norms)
        if self.before_update is not None:
            self.before_update(result)
        if result.applied:
            self.optimizer.update(learning_rate, norm, scale)
            self.runner.sync_weights_from_masters()
        self.optimizer.zero_grad()
        self.known.append(result)

    def _squares(self, by_layer: bool, scale: float) -> tuple[float, dict[str, float] | None]:
        """This rank's share of the squared norm, and the norms of all ranks by group."""
        if not by_layer:
            return float(self.runner.squared_norm()), None
        squares, shares = self.runner.squared_norms(self.groups)
        # A message of its own: in a longer one the other numbers might be added in another order.
        summed = self.runner.mesh.all_reduce(*shares.tolist())
        norms = [math.sqrt(one) / scale for one in summed]
        return float(squares), by_group(self.groups, norms)

    def results(self, *, of_all: bool = False) -> list[StepResult]:
        known, self.known = self.known, []
        return known


class DeviceUpdates:
    """Nothing is waited for but the results of the step before, behind which a step is queued."""

    def __init__(self, runner: Runner, optimizer: Optimizer) -> None:
        self.runner = runner
        self.optimizer = optimizer
        self.loss_scale: DeviceLossScale | None = None
        self.unread: deque[Unread] = deque()
        self.before_update: Look | None = None  # nothing is known here then
        self.groups = runner.table.layer_groups(MOST_LAYER_GROUPS)
        # Two are under way at most; the copy to pinned memory does not make the host wait.
        size = RESULTS + len(set(self.groups.values()))
        self.messages = [torch.empty(size, dtype=torch.float64, pin_memory=True) for _ in range(2)]

    def scale_of(self, loss_scale: LossScale | None) -> float | Tensor:
        if loss_scale is None:
            return 1.0
        if self.loss_scale is None:
            # From here on it has a life of its own on the device; the host's follows a step later.
            self.loss_scale = DeviceLossScale(loss_scale, self.runner.device)
        return self.loss_scale.value

    @torch.no_grad()
    def apply(
        self,
        step: int,
        share: Tensor,
        learning_rate: float,
        scale: float | Tensor,
        asked: Asked,
        limits: SpikeLimits | None = None,
        *,
        by_layer: bool = False,
    ) -> None:
        # Filled, not copied: a copy from the host would be waited for.
        requests = [share.new_full((), float(one), dtype=torch.float64) for one in asked]
        squares, shares = (
            self.runner.squared_norms(self.groups)
            if by_layer
            else (self.runner.squared_norm(), None)
        )
        agreed = torch.stack([share.double(), squares, *requests])
        self.runner.mesh.all_reduce_(agreed)
        if shares is not None:
            self.runner.mesh.all_reduce_(shares)  # see HostUpdates
        loss, squares, stops, saves = agreed.unbind()
        norm = squares.sqrt() / scale
        overflowed = ~(loss.isfinite() & norm.isfinite())
        held_back = torch.zeros_like(overflowed)
        if limits is not None:
            held_back = ((loss > limits.loss) | (norm > limits.norm)) & ~overflowed
        self.optimizer.update(
            learning_rate, norm, scale, found_inf=(overflowed | held_back).float()
        )
        self.runner.sync_weights_from_masters()
        self.optimizer.zero_grad()
        used = scale if isinstance(scale, Tensor) else torch.full_like(loss, scale)
        result = torch.stack([loss, norm, used, stops, saves, held_back.double()])
        self._send(step, result if shares is None else torch.cat([result, shares.sqrt() / scale]))
        if self.loss_scale is not None:
            self.loss_scale.update(overflowed)

    def _send(self, step: int, result: Tensor) -> None:
        message = self.messages[step % 2][: len(result)].copy_(result, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self.unread.append(Unread(step, message, arrived, self.groups))

    def results(self, *, of_all: bool = False) -> list[StepResult]:
        known = []
        while len(self.unread) > (0 if of_all else 1):
            result = self.unread.popleft().read()
            if not result.applied:
                self.optimizer.updates -= 1  # counted before it was known
            known.append(result)
        return known


@dataclass(frozen=True)
class Unread:
    """The result of a step on its way to the host."""

    step: int
    # Loss, norm, loss scale, requests to stop and to save, whether held back; norms by group.
    message: Tensor
    arrived: torch.cuda.Event
    groups: Mapping[str, str]

    def read(self) -> StepResult:
        self.arrived.synchronize()
        loss, norm, scale, stops, saves, held_back, *norms = self.message.tolist()
        layer_norms = by_group(self.groups, norms) if norms else None
        return StepResult(
            self.step, loss, norm, scale, stops > 0, saves > 0, held_back > 0, layer_norms
        )
