"""95% intervals by resampling (percentile bootstrap): the statistic of units drawn with replacement, many times."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

DRAWS = 500
LEVELS = (0.025, 0.975)


def resamples(groups: int | Sequence, draws: int = DRAWS, seed: int = 0) -> np.ndarray:
    """[draws, N] indices of N units, drawn with replacement; of `groups` labels, within units of the same label."""
    labels = np.zeros(groups, int) if isinstance(groups, int) else np.unique(groups, return_inverse=True)[1]
    random, picked = np.random.default_rng(seed), np.empty((draws, len(labels)), int)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        picked[:, members] = members[random.integers(0, len(members), (draws, len(members)))]
    return picked


def quantiles(values: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of drawn values; those that are not numbers (a correlation of constants) are left out."""
    values = np.asarray(values, float)
    values = values[~np.isnan(values)]
    if not len(values):
        return float("nan"), float("nan")
    low, high = np.quantile(values, LEVELS)
    return float(low), float(high)


def interval(
    statistic: Callable[[np.ndarray], float], groups: int | Sequence, draws: int = DRAWS, seed: int = 0
) -> tuple[float, float]:
    """The 95% interval of statistic(indices of the drawn units)."""
    return quantiles([statistic(picked) for picked in resamples(groups, draws, seed)])


def mean_of_pairs(matrix: np.ndarray, chosen: np.ndarray, labels: Sequence | None = None, same: bool = True) -> float:
    """Mean of matrix [N, N] over pairs of different units among the chosen; of `labels`, pairs of equal (`same`) or of
    different ones only. NaN if there is no such pair."""
    units = np.arange(len(matrix))[chosen]
    pairs = units[:, None] != units
    if labels is not None:
        kinds = np.asarray(labels)[units]
        pairs &= (kinds[:, None] == kinds) == same
    return float(matrix[np.ix_(units, units)][pairs].mean()) if pairs.any() else float("nan")
