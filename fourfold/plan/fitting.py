"""A small damped Gauss-Newton fit of positive numbers, for the planner's few coefficients.

Numbers are fitted as logarithms, so they stay positive and their units do not matter. A pull
towards the starting values keeps a number that the data says nothing about where it was.
Residuals are logarithms of predicted over measured; large ones are weighted down (Huber), since
published figures hold slips.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fourfold.cost.terms import Floats

Predict = Callable[[Floats], Floats]  # numbers -> residuals


def fit_numbers(
    residuals_of: Predict,
    start: Floats,
    weights: Floats,
    *,
    pull: float = 0.05,
    huber: float = 0.15,
    rounds: int = 60,
) -> Floats:
    """The numbers that make the weighted residuals least; `pull` counts like a row's weight."""
    origin = np.log(start)
    point, damping = origin.copy(), 1e-2
    residuals = residuals_of(np.exp(point))
    cost = _cost(residuals, weights, huber, pull, point - origin)
    for _ in range(rounds):
        slopes = _slopes(residuals_of, point, residuals)
        soft = weights * np.minimum(1.0, huber / np.maximum(np.abs(residuals), 1e-12))
        normal = slopes.T @ (soft[:, None] * slopes) + pull * np.eye(len(point))
        gradient = slopes.T @ (soft * residuals) + pull * (point - origin)
        for _ in range(8):
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient)
            trial = point + np.clip(step, -0.5, 0.5)
            trial_residuals = residuals_of(np.exp(trial))
            trial_cost = _cost(trial_residuals, weights, huber, pull, trial - origin)
            if trial_cost < cost:
                break
            damping *= 4
        else:
            break
        gain, point, residuals, cost = cost - trial_cost, trial, trial_residuals, trial_cost
        damping = max(damping / 3, 1e-6)
        if gain < 1e-7 * cost:
            break
    return np.exp(point)


def _slopes(residuals_of: Predict, point: Floats, residuals: Floats) -> Floats:
    step = 1e-4
    columns = []
    for index in range(len(point)):
        moved = point.copy()
        moved[index] += step
        columns.append((residuals_of(np.exp(moved)) - residuals) / step)
    return np.stack(columns, axis=1)


def _cost(residuals: Floats, weights: Floats, huber: float, pull: float, moved: Floats) -> float:
    size = np.abs(residuals)
    each = np.where(size <= huber, 0.5 * size**2, huber * (size - 0.5 * huber))
    return float(weights @ each + 0.5 * pull * moved @ moved)
