"""The guard before every update: a loss or gradient that is not finite must not touch weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fourfold.errors import UserError
from fourfold.optim import LossScale


@dataclass
class Guard:
    """Decides whether an update is applied and when enough is enough."""

    limit: int
    skipped: int = 0
    in_a_row: int = 0

    def admits(self, loss: float, norm: float, scale: LossScale | None) -> bool:
        """True if the update may go ahead; otherwise it is counted as skipped."""
        finite = math.isfinite(loss) and math.isfinite(norm)
        searching = scale is not None and not scale.exhausted and math.isfinite(loss)
        if scale is not None:
            scale.update(overflowed=not finite)
        if finite:
            self.in_a_row = 0
            return True
        self.skipped += 1
        # While fp16 is still looking for its loss scale, an overflow is routine.
        if not searching:
            self.in_a_row += 1
        return False

    @property
    def gave_up(self) -> bool:
        return self.in_a_row >= self.limit

    def failure(self, step: int, saved: str) -> UserError:
        return UserError(
            f"the loss or the gradient was not finite for {self.in_a_row} updates in a row, up to "
            f"step {step} (Engine.max_skipped_steps={self.limit}). No such update was applied; "
            f"the weights before them are in {saved}. The samples are listed in metrics.jsonl: "
            "look at them, lower Optimizer.lr.max_lr, or use a wider Engine.mix_precision.dtype"
        )
