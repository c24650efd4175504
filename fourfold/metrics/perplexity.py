"""Perplexity as it is printed and plotted, here and by FleetX and Megatron."""

from __future__ import annotations

import math

# Beyond it a perplexity is no longer a number worth printing.
MAX_EXPONENT = 20.0


def perplexity(mean_loss: float) -> float:
    """exp of a mean loss in nats; a loss that is not a number stays so."""
    return math.exp(min(mean_loss, MAX_EXPONENT))
