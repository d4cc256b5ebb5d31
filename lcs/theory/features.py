"""Definition 4 and Corollary 1 (v1 and v2), and the mean-difference heuristic (v1 eq. 3, v2 Lemma 2).

A distribution may be a composition not in its pixels x but in features z = A x. Its score in z is then local at every
noise level, if the noise is added to the features: (A#p)^t. A diffusion model adds noise to pixels. If A is orthogonal
that is the same thing and the pixel score is the local feature score pulled back, A^T s(A x); if not, it is not
(`commuting` follows that further).

The example is `every_object` of `composition`, taken as the distribution of the features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lcs.errors import LcsError
from lcs.theory.composition import SIZE, Family, any_object, every_object, local_conditional_score, shared_light
from lcs.theory.exact import NOISE_LEVELS, SAMPLES, is_factorised, score_difference


def rotation(n: int, seed: int = 0) -> np.ndarray:
    """A random orthogonal matrix."""
    q, r = np.linalg.qr(np.random.default_rng(seed).standard_normal((n, n)))
    return q * np.sign(np.diag(r))


def stretch(n: int, seed: int = 0, low: float = 0.5, high: float = 2.0) -> np.ndarray:
    """A random invertible matrix that is not orthogonal: its singular values run from `low` to `high`."""
    if not 0 < low <= high:
        raise LcsError(f"singular values from {low} to {high} do not make an invertible matrix")
    return rotation(n, seed) @ np.diag(np.geomspace(low, high, n)) @ rotation(n, seed + 1)


def in_pixels(family: Family, matrix: np.ndarray) -> Family:
    """Definition 4 read backwards: the pixel distribution whose features z = A x follow `family`."""
    inverse = np.linalg.inv(matrix)
    return Family(
        f"{family.name}, seen in pixels",
        family.size,
        family.blocks,
        lambda active: family.conditional(active).mapped(inverse),
    )


@dataclass(frozen=True)
class Corollary1Result:
    """Relative errors of local scores for one transform; in pixels all conditions are active."""

    transform: str
    noise_levels: np.ndarray  # [T]
    feature: np.ndarray  # [T]: largest |local - true| of A#p over all J, noise added to features (the corollary)
    pixel: np.ndarray  # [T]: root mean square of the same in pixels, where p is no composition
    pulled_back: np.ndarray  # [T]: root mean square of A^T s(A x) - true pixel score, noise added to pixels
    pixel_dependence: np.ndarray  # [n, n]: E |d score_i / d x_j| in pixels, rows divided by their largest
    feature_dependence: np.ndarray  # [n, n]: the same in features


def check_corollary1(
    transform: str, noise_levels: Sequence[float] = NOISE_LEVELS, samples: int = SAMPLES, seed: int = 0
) -> Corollary1Result:
    """transform: "orthogonal" or "not orthogonal"."""
    matrices = {"orthogonal": rotation, "not orthogonal": stretch}
    if transform not in matrices:
        raise LcsError(f"unknown transform {transform!r}; choose from {', '.join(matrices)}")
    matrix = matrices[transform](SIZE, seed)
    pixels = in_pixels(every_object(), matrix)
    features, active = in_pixels(pixels, np.linalg.inv(matrix)), pixels.all  # pushed through A: z = A x
    feature, pixel, pulled = np.zeros((3, len(noise_levels)))
    for i, t in enumerate(noise_levels):
        for some in features.subsets:
            difference, true = score_difference(features, some, t, samples, seed)
            feature[i] = max(feature[i], np.abs(difference).max() / _rms(true))
        difference, true = score_difference(pixels, active, t, samples, seed)
        pixel[i] = _rms(difference) / _rms(true)
        x = pixels.conditional(active).noised(t).sample(samples, np.random.default_rng(seed))
        back = local_conditional_score(features, active, t, x @ matrix.T) @ matrix
        pulled[i] = _rms(back - true) / _rms(true)
    return Corollary1Result(
        transform, np.asarray(noise_levels), feature, pixel, pulled, _dependence(pixels), _dependence(features)
    )


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2)))


def _dependence(family: Family, t: float = 0.3, samples: int = SAMPLES, seed: int = 0) -> np.ndarray:
    noisy = family.conditional(family.all).noised(t)
    jacobian = np.abs(noisy.score_jacobian(noisy.sample(samples, np.random.default_rng(seed)))).mean(axis=0)
    return jacobian / jacobian.max(axis=1, keepdims=True)


@dataclass(frozen=True)
class HeuristicResult:
    """Cosines of the mean differences d_j = mean(c_j) - mean(nothing), eq. 3."""

    names: list[str]
    cosines: np.ndarray  # [F, K, K]
    distance: np.ndarray  # [F]: largest |log p - log C*| over all J: zero for a composition

    @property
    def off_diagonal(self) -> np.ndarray:
        """Largest |cosine| between different conditions. [F]"""
        k = self.cosines.shape[-1]
        return np.abs(self.cosines[:, ~np.eye(k, dtype=bool)]).max(axis=1)


def check_heuristic(seed: int = 0) -> HeuristicResult:
    """Orthogonal mean differences are necessary for a composition, and not sufficient.

    `every_object` is one. `any_object` and `shared_light` have the same means for single conditions and are none.
    In the pixels of a transform that is not orthogonal the differences are not orthogonal either.
    """
    composition = every_object()
    families = [composition, any_object(), shared_light(0.1), in_pixels(composition, stretch(SIZE, seed))]
    cosines = np.stack([mean_difference_cosines(f) for f in families])
    distance = np.array([max(is_factorised(f, active, seed=seed) for active in f.subsets) for f in families])
    return HeuristicResult([f.name for f in families], cosines, distance)


def mean_difference_cosines(family: Family) -> np.ndarray:  # -> [K, K]
    base = family.conditional(frozenset()).mean
    d = np.stack([family.conditional(frozenset({j})).mean - base for j in range(len(family.blocks))])
    d /= np.linalg.norm(d, axis=1, keepdims=True)
    return d @ d.T
