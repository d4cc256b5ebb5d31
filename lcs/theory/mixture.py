"""Gaussian mixtures in float64, with everything the theory does to a distribution in closed form.

Adding noise, taking a marginal, mapping linearly and multiplying independent parts turn a mixture into a mixture.
A Gaussian is a mixture of one component.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import logsumexp

from lcs.errors import LcsError

LOG_2PI = float(np.log(2 * np.pi))


@dataclass(frozen=True)
class Mixture:
    weights: np.ndarray  # [K], sum 1
    means: np.ndarray  # [K, n]
    covariances: np.ndarray  # [K, n, n]

    def __post_init__(self) -> None:
        k, n = self.means.shape
        if self.weights.shape != (k,) or self.covariances.shape != (k, n, n):
            raise LcsError(
                f"a mixture of {k} components in {n} dimensions has {self.weights.shape} weights "
                f"and {self.covariances.shape} covariances"
            )
        if (self.weights < 0).any() or abs(self.weights.sum() - 1) > 1e-9:
            raise LcsError(f"mixture weights {self.weights.tolist()} are not a distribution")

    @property
    def dim(self) -> int:
        return self.means.shape[1]

    @property
    def mean(self) -> np.ndarray:
        return self.weights @ self.means

    # ---- operations that stay within mixtures -----------------------------------------------------------------------

    def noised(self, t: float) -> Mixture:
        """N_t[p]: convolution with N(0, t^2 I), the paper's noising operator."""
        return Mixture(self.weights, self.means, self.covariances + t**2 * np.eye(self.dim))

    def marginal(self, index: Sequence[int]) -> Mixture:
        """p(x_N) for a set of coordinates N."""
        index = np.asarray(index, dtype=int)
        return Mixture(self.weights, self.means[:, index], self.covariances[:, index[:, None], index[None, :]])

    def mapped(self, matrix: np.ndarray) -> Mixture:
        """The pushforward A#p by z = A x."""
        return Mixture(self.weights, self.means @ matrix.T, matrix @ self.covariances @ matrix.T)

    # ---- density and score ------------------------------------------------------------------------------------------

    def _components(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """x [S, n] -> responsibilities' logs, not normalised [S, K]; gradients of the components' logs [S, K, n]"""
        delta = self.means[None] - x[:, None]  # [S, K, n]
        inverse = np.linalg.inv(self.covariances)
        gradient = np.einsum("kij,skj->ski", inverse, delta)
        quadratic = np.einsum("ski,ski->sk", delta, gradient)
        log_det = np.linalg.slogdet(self.covariances)[1]
        return np.log(self.weights) - 0.5 * (quadratic + log_det + self.dim * LOG_2PI), gradient

    def log_density(self, x: np.ndarray) -> np.ndarray:  # [S, n] -> [S]
        return logsumexp(self._components(x)[0], axis=1)

    def score(self, x: np.ndarray) -> np.ndarray:
        """Gradient of log p. [S, n] -> [S, n]"""
        logs, gradient = self._components(x)
        share = np.exp(logs - logsumexp(logs, axis=1, keepdims=True))
        return np.einsum("sk,ski->si", share, gradient)

    def score_jacobian(self, x: np.ndarray) -> np.ndarray:
        """d score_i / d x_j. [S, n] -> [S, n, n]"""
        logs, gradient = self._components(x)
        share = np.exp(logs - logsumexp(logs, axis=1, keepdims=True))
        score = np.einsum("sk,ski->si", share, gradient)
        spread = np.einsum("sk,ski,skj->sij", share, gradient, gradient) - np.einsum("si,sj->sij", score, score)
        return spread - np.einsum("sk,kij->sij", share, np.linalg.inv(self.covariances))

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:  # -> [count, n]
        which = rng.choice(len(self.weights), size=count, p=self.weights)
        roots = np.linalg.cholesky(self.covariances)
        return self.means[which] + np.einsum("sij,sj->si", roots[which], rng.standard_normal((count, self.dim)))


def gaussian(mean: Sequence[float], covariance: np.ndarray) -> Mixture:
    return Mixture(np.ones(1), np.asarray(mean, float)[None], np.asarray(covariance, float)[None])


def mix(parts: Sequence[Mixture], weights: Sequence[float] | None = None) -> Mixture:
    """A mixture of mixtures, with equal weights by default."""
    shares = np.full(len(parts), 1 / len(parts)) if weights is None else np.asarray(weights, float)
    return Mixture(
        np.concatenate([w * p.weights for w, p in zip(shares, parts, strict=True)]),
        np.concatenate([p.means for p in parts]),
        np.concatenate([p.covariances for p in parts]),
    )


def product(parts: Sequence[tuple[Sequence[int], Mixture]]) -> Mixture:
    """Independent parts, each on its own coordinates, which together are 0..n-1."""
    covered = sorted(i for index, _ in parts for i in index)
    if covered != list(range(len(covered))):
        raise LcsError(f"the parts of a product must cover 0..n-1 once each; they cover {covered}")
    n = len(covered)
    weights, means, covariances = [], [], []
    for choice in itertools.product(*(range(len(p.weights)) for _, p in parts)):
        mean, covariance, weight = np.zeros(n), np.zeros((n, n)), 1.0
        for (index, part), k in zip(parts, choice, strict=True):
            mean[list(index)] = part.means[k]
            covariance[np.ix_(index, index)] = part.covariances[k]
            weight *= part.weights[k]
        weights.append(weight), means.append(mean), covariances.append(covariance)
    return Mixture(np.array(weights), np.array(means), np.array(covariances))


# ---- divergences ----------------------------------------------------------------------------------------------------


def gaussian_kl(mean_q: np.ndarray, cov_q: np.ndarray, mean_r: np.ndarray, cov_r: np.ndarray) -> complex | float:
    """KL(q || r) of two Gaussians. Analytic in its arguments: complex input gives complex-step derivatives."""
    delta = mean_r - mean_q
    ratio = np.linalg.solve(cov_r, cov_q)
    sign, log_abs = np.linalg.slogdet(ratio)
    log_det = log_abs + np.log(sign) if np.iscomplexobj(ratio) else log_abs
    return 0.5 * (np.trace(ratio) - len(delta) - log_det + delta @ np.linalg.solve(cov_r, delta))


def log_density_1d(x: np.ndarray, weights: np.ndarray, means: np.ndarray, variances: np.ndarray) -> np.ndarray:
    """log of a one-dimensional mixture on a grid; analytic in the variances, like `gaussian_kl`."""
    logs = np.log(weights) - 0.5 * ((x[:, None] - means) ** 2 / variances + np.log(variances) + LOG_2PI)
    top = logs.real.max(axis=1, keepdims=True)
    return (top + np.log(np.exp(logs - top).sum(axis=1, keepdims=True)))[:, 0]


def line(means: np.ndarray, deviation: float, points: int = 1201) -> np.ndarray:
    """A grid that holds all mass of a one-dimensional mixture: 12 standard deviations beyond its means."""
    return np.linspace(np.min(means) - 12 * deviation, np.max(means) + 12 * deviation, points)


def integral(values: np.ndarray, x: np.ndarray) -> complex | float:
    """Equidistant sum: for smooth functions that vanish at both ends its error falls exponentially."""
    return values.sum() * (x[1] - x[0])
