"""Pairing points with points: the Hungarian method with a tolerance."""

from __future__ import annotations

import numpy as np
from scipy.optimize import linear_sum_assignment

from lcs.errors import LcsError
from lcs.experiments import GRID


def pairs_within(asked: np.ndarray, drawn: np.ndarray, tolerance_cells: float) -> tuple[np.ndarray, np.ndarray]:
    """Pairs (index into asked, index into drawn), each point used at most once and no pair further apart than
    the tolerance: as many pairs as possible, and among those the smallest total distance.

    asked [K, 2] and drawn [n, 2] are (x, y) as fractions of the image; a cell is 1/16 of the image.
    """
    asked, drawn = np.asarray(asked, np.float64).reshape(-1, 2), np.asarray(drawn, np.float64).reshape(-1, 2)
    if not tolerance_cells > 0:
        raise LcsError(f"the tolerance must be positive, got {tolerance_cells} cells")
    if not len(asked) or not len(drawn):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    distance = np.linalg.norm(asked[:, None] - drawn[None], axis=2) * GRID  # [K, n] in cells
    allowed = distance <= tolerance_cells
    # One forbidden pair costs more than all allowed ones together, so the number of allowed pairs comes first.
    forbidden = tolerance_cells * (min(len(asked), len(drawn)) + 1)
    rows, cols = linear_sum_assignment(np.where(allowed, distance, forbidden))
    kept = allowed[rows, cols]
    return rows[kept], cols[kept]
