"""Counter-based random numbers: sample i of a run draws the same values in any batch on any number of processes."""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: np.ndarray) -> np.ndarray:
    """The splitmix64 finaliser, a bijection on 64-bit integers with good avalanche."""
    with np.errstate(over="ignore"):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def hashed_seeds(seed: int, stream: int, index: np.ndarray) -> np.ndarray:
    """One 63-bit seed per sample index; `stream` keeps different uses of the same index apart."""
    with np.errstate(over="ignore"):
        key = _mix(np.uint64(seed) * _GOLDEN + np.uint64(stream) + np.uint64(1))
        return (_mix(_mix(np.asarray(index).astype(np.uint64) * _GOLDEN + key) ^ key) >> np.uint64(1)).astype(np.int64)


def hashed_uniform(seed: int, stream: int, index: np.ndarray, width: int) -> np.ndarray:
    """Uniform numbers in [0, 1), float64 [len(index), width]: row i depends on index[i] alone."""
    rows = hashed_seeds(seed, stream, index).astype(np.uint64)[:, None]
    with np.errstate(over="ignore"):
        bits = _mix(rows + np.arange(1, width + 1, dtype=np.uint64)[None] * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
