"""Claim 1 and Lemma 3 of v1: noise brings distributions together, and so makes them more compositional.

Claim 1 gives the speed:

    d/dt KL(N_t[q] || N_t[r]) = -t E_{N_t[q]} |grad log N_t[q] / N_t[r]|^2

The left side is differentiated here by a complex step (f'(t) = Im f(t + ih) / h), which has no cancellation, so the two
sides can agree to rounding.

Lemma 3 applies it to the errors of Definition 3. The paper writes the error of the lemma as sup over y of
KL(N_t[p](x) || N_t[p](x|y)): noise on x alone, y clean, the marginal first. Definition 3 has the conditional first, and
at noise level t all pixels are noisy. Both versions are computed. (If y is noisy too, p^t(x | y_t) is an average of
N_t[p](x | y) over clean y, and convexity of KL gives what the lemma wants.) In the example the suprema are approached
as y goes to infinity and not attained; the lemma's proof needs an almost-maximiser only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lcs.theory.approximate import VARIANCE, Light, errors
from lcs.theory.mixture import gaussian_kl, integral, line, log_density_1d

STEP = 1e-30
NOISE_LEVELS = tuple(float(t) for t in np.geomspace(0.05, 20.0, 25))


def slope(f: Callable[[complex], complex], t: float) -> float:
    """f'(t) by a complex step."""
    return float(np.imag(f(complex(t, STEP))) / STEP)


@dataclass(frozen=True)
class Claim1Result:
    names: list[str]  # pairs of distributions
    noise_levels: np.ndarray  # [T]
    kl: np.ndarray  # [pairs, T]
    slope: np.ndarray  # [pairs, T]: derivative of KL by t
    identity: np.ndarray  # [pairs, T]: the claim's right-hand side


def check_claim1(noise_levels: Sequence[float] = NOISE_LEVELS, seed: int = 0) -> Claim1Result:
    """Two Gaussians in five dimensions, and two mixtures on a line."""
    pairs = {"Gaussians in 5 dimensions": _gaussian_pair(seed), "mixtures on a line": _mixture_pair()}
    kl, slopes, identity = np.zeros((3, len(pairs), len(noise_levels)))
    for i, (divergence, right_hand_side) in enumerate(pairs.values()):
        for k, t in enumerate(noise_levels):
            kl[i, k] = np.real(divergence(t))
            slopes[i, k] = slope(divergence, t)
            identity[i, k] = right_hand_side(t)
    return Claim1Result(list(pairs), np.asarray(noise_levels), kl, slopes, identity)


def _gaussian_pair(seed: int, n: int = 5) -> tuple[Callable, Callable]:
    rng = np.random.default_rng(seed)
    root_q, root_r = rng.standard_normal((2, n, n)) * 0.6
    mean_q, mean_r = rng.standard_normal((2, n)) * 0.7
    cov_q, cov_r, eye = root_q @ root_q.T + 0.1 * np.eye(n), root_r @ root_r.T + 0.1 * np.eye(n), np.eye(n)

    def divergence(t: complex) -> complex:
        return gaussian_kl(mean_q, cov_q + t**2 * eye, mean_r, cov_r + t**2 * eye)

    def right_hand_side(t: float) -> float:
        a, b = np.linalg.inv(cov_q + t**2 * eye), np.linalg.inv(cov_r + t**2 * eye)
        # score difference at x = mean_q + u: (b - a) u + b (mean_q - mean_r), u with covariance a^-1
        gap, shift = b - a, b @ (mean_q - mean_r)
        return -t * (np.trace(gap @ np.linalg.inv(a) @ gap) + shift @ shift)

    return divergence, right_hand_side


_Q = (np.array([0.3, 0.7]), np.array([-1.5, 1.0]), np.array([0.05, 0.2]))  # weights, means, variances
_R = (np.array([0.6, 0.4]), np.array([-1.0, 2.0]), np.array([0.3, 0.1]))


def _mixture_pair() -> tuple[Callable, Callable]:
    def grid(t: complex) -> np.ndarray:
        widest = np.sqrt(max(_Q[2].max(), _R[2].max()) + np.real(t) ** 2)
        return line(np.concatenate([_Q[1], _R[1]]), widest, points=2401)

    def logs(t: complex, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return tuple(log_density_1d(x, weights, means, variances + t**2) for weights, means, variances in (_Q, _R))

    def divergence(t: complex) -> complex:
        x = grid(t)
        log_q, log_r = logs(t, x)
        return integral(np.exp(log_q) * (log_q - log_r), x)

    def right_hand_side(t: float) -> float:
        x = grid(t)
        gap = _score_1d(x, *_Q, t) - _score_1d(x, *_R, t)
        return -t * float(integral(np.exp(logs(t, x)[0]) * gap**2, x))

    return divergence, right_hand_side


def _score_1d(x: np.ndarray, weights: np.ndarray, means: np.ndarray, variances: np.ndarray, t: float) -> np.ndarray:
    variances = variances + t**2
    logs = np.log(weights) - 0.5 * ((x[:, None] - means) ** 2 / variances + np.log(variances))
    share = np.exp(logs - logs.max(axis=1, keepdims=True))
    share /= share.sum(axis=1, keepdims=True)
    return (share * (means - x[:, None]) / variances).sum(axis=1)


@dataclass(frozen=True)
class Lemma3Result:
    """Errors of one pixel of the shared-light example against noise."""

    noise_levels: np.ndarray  # [T]
    neighbours: np.ndarray  # [Y]: probability that the light is on, given the other pixels
    conditional: np.ndarray  # [Y, T]: KL(N_t[p](x) || N_t[p](x|y)) for these other pixels
    supremum: np.ndarray  # [T]: over all y, as in the lemma
    definition: np.ndarray  # [T]: sum of all errors of Definition 3, everything noisy


def check_lemma3(noise_levels: Sequence[float] = NOISE_LEVELS, strength: float = 0.6) -> Lemma3Result:
    light = Light(strength, 0.2)
    means = light.pixel(0, frozenset({0}))
    # The light that y reveals, from undecided to certain; KL is convex in it, so its supremum is at the certain end.
    neighbours = np.array([0.5, 0.7, 0.9, 0.99, 1.0])
    conditional = np.array([[_kl_to_weights(means, w, VARIANCE + t**2) for t in noise_levels] for w in neighbours])
    supremum = np.array(
        [max(_kl_to_weights(means, w, VARIANCE + t**2) for w in np.linspace(0, 1, 21)) for t in noise_levels]
    )
    definition = np.array([sum(e.sum() for e in errors(light, t).values()) for t in noise_levels])
    return Lemma3Result(np.asarray(noise_levels), neighbours, conditional, supremum, definition)


def _kl_to_weights(means: np.ndarray, on: float, variance: float) -> float:
    """KL of the equal mixture from the mixture with weight `on` for the second component."""
    x = line(means, np.sqrt(variance))
    both = np.full(2, variance)
    log_q = log_density_1d(x, np.array([0.5, 0.5]), means, both)
    kept = np.array([1 - on, on]) > 0
    log_r = log_density_1d(x, np.array([1 - on, on])[kept], means[kept], both[kept])
    return float(integral(np.exp(log_q) * (log_q - log_r), x))
