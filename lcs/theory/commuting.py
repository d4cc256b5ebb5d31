"""Claim 2 of v1: does adding noise commute better with a feature transform when there is more noise?

The claim is d/dt KL(N_t[A#p] || A#N_t[p]) < 0. It is tested here on three transforms:

* a rotation: noise and transform commute, the divergence is zero at all t (the paper says so too);
* a linear map that is not orthogonal, p Gaussian: closed form. At t = 0 both distributions are A#p and the divergence
  is zero, so it must *grow* when noise is added; as t grows, the covariances become t^2 I and t^2 A A^T, and the
  divergence tends to (tr D^-1 - n + log det D) / 2 > 0 with D = A A^T;
* a bend on a line, A(x) = x + b tanh(x), which is a shift far from the origin: here the divergence grows first and
  then falls to zero. High noise helps if the transform looks like an isometry from afar.

So the claim's conclusion depends on the transform, and the inequality cannot hold for all t unless A is an isometry.
The step of the proof that fails is the heat equation for the pushed-forward distribution r = A#N_t[p]. It is
N_t[p] that solves dr/dt = t Laplace r; for linear A its image solves dr/dt = t div(D grad r), and the derivative is

    d/dt KL(q || r) = -t E_q |grad log q/r|^2  +  t E_q [grad log q/r . (D - 1) grad log r]         (q = N_t[A#p])

of which the proof has the first term. In one dimension D is A'^2 and, A being curved, A'' adds a drift.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lcs.theory.features import rotation, stretch
from lcs.theory.mixture import LOG_2PI, gaussian_kl
from lcs.theory.noise import slope

NOISE_LEVELS = tuple(float(t) for t in np.geomspace(0.1, 30.0, 16))


@dataclass(frozen=True)
class Claim2Result:
    names: list[str]  # three transforms
    noise_levels: np.ndarray  # [T]
    kl: np.ndarray  # [3, T]: KL(N_t[A#p] || A#N_t[p])
    slope: np.ndarray  # [3, T]: its derivative by t, complex step
    paper: np.ndarray  # [3, T]: the derivative according to the claim's proof
    corrected: np.ndarray  # [3, T]: with the missing term
    limit: np.ndarray  # [3]: of kl for t to infinity

    @property
    def claim_holds(self) -> list[bool]:
        """Whether the divergence falls at every noise level tested, as the claim says; a rotation's is zero instead."""
        return [bool((s < 0).all()) for s in self.slope]

    @property
    def falls_beyond(self) -> list[float | None]:
        """The noise level from which on the divergence falls; None if it does not fall at the highest one."""
        beyond = []
        for slopes, kl in zip(self.slope, self.kl, strict=True):
            rising = np.flatnonzero(slopes >= 0)
            never = kl.max() < 1e-12 or (len(rising) and rising[-1] == len(slopes) - 1)
            start = rising[-1] + 1 if len(rising) else 0
            beyond.append(None if never else float(self.noise_levels[start]))
        return beyond


def check_claim2(
    noise_levels: Sequence[float] = NOISE_LEVELS, n: int = 4, bend: float = 1.5, seed: int = 0
) -> Claim2Result:
    """Linear transforms in n dimensions of a Gaussian p, and a bend of the given depth on a line."""
    root = np.random.default_rng(seed).standard_normal((n, n)) * 0.5
    covariance = root @ root.T + 0.1 * np.eye(n)
    cases = {
        "rotation": _linear(rotation(n, seed), covariance),
        "linear, not orthogonal": _linear(stretch(n, seed), covariance),
        "bend: x + b tanh(x)": _bend(bend),
    }
    kl, slopes, paper, corrected = np.zeros((4, len(cases), len(noise_levels)))
    for i, (divergence, formulas, _) in enumerate(cases.values()):
        for k, t in enumerate(noise_levels):
            kl[i, k] = np.real(divergence(t))
            slopes[i, k] = slope(divergence, t)
            paper[i, k], corrected[i, k] = formulas(t)
    limit = np.array([case[2] for case in cases.values()])
    return Claim2Result(list(cases), np.asarray(noise_levels), kl, slopes, paper, corrected, limit)


Case = tuple[Callable[[complex], complex], Callable[[float], tuple[float, float]], float]


def _linear(matrix: np.ndarray, covariance: np.ndarray) -> Case:
    """p = N(0, covariance); both distributions are Gaussian with mean zero."""
    n, d = len(matrix), matrix @ matrix.T
    zero, eye = np.zeros(n), np.eye(n)
    image = matrix @ covariance @ matrix.T

    def divergence(t: complex) -> complex:
        return gaussian_kl(zero, image + t**2 * eye, zero, image + t**2 * d)

    def formulas(t: float) -> tuple[float, float]:
        cov_q = image + t**2 * eye
        q, r = np.linalg.inv(cov_q), np.linalg.inv(image + t**2 * d)
        # scores -q u and -r u at u with covariance cov_q
        gap = r - q
        paper = -t * np.trace(gap @ cov_q @ gap)
        return paper, paper - t * np.trace(gap @ (d - eye) @ r @ cov_q)

    return divergence, formulas, float(gaussian_kl(zero, eye, zero, d))


_MEAN, _DEVIATION = 0.5, 0.7  # of p on the line


def _bend(b: float) -> Case:
    """p = N(_MEAN, _DEVIATION^2) on a line and A(x) = x + b tanh(x); integrals over x with z = A(x)."""
    y = np.linspace(_MEAN - 8 * _DEVIATION, _MEAN + 8 * _DEVIATION, 801)
    mass = np.exp(-0.5 * ((y - _MEAN) / _DEVIATION) ** 2)
    mass /= mass.sum()

    def transform(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A, A', A''"""
        h = np.tanh(x)
        return x + b * h, 1 + b * (1 - h**2), -2 * b * h * (1 - h**2)

    image = transform(y)[0]

    def logs(t: complex, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """log N_t[A#p] at A(x), its derivative by z, and log A#N_t[p] at A(x)"""
        z, first, _ = transform(x)
        exponent = -((z[:, None] - image) ** 2) / (2 * t**2) + np.log(mass)  # [X, Y]
        top = exponent.real.max(axis=1, keepdims=True)
        kernel = np.exp(exponent - top)
        total = kernel.sum(axis=1)
        log_q = top[:, 0] + np.log(total) - 0.5 * LOG_2PI - np.log(t)
        score_q = (kernel @ image / total - z) / t**2
        variance = _DEVIATION**2 + t**2
        log_r = -0.5 * ((x - _MEAN) ** 2 / variance + LOG_2PI + np.log(variance)) - np.log(first)
        return log_q, score_q, log_r

    def grid(t: complex) -> tuple[np.ndarray, np.ndarray]:
        """Points x and their widths: equidistant in asinh(x), dense at the bend and wide enough for the noise."""
        reach = np.arcsinh(10 * np.sqrt(_DEVIATION**2 + np.real(t) ** 2) + b)
        u = np.linspace(-reach, reach, 1201)
        return np.sinh(u), np.cosh(u) * (u[1] - u[0])

    def divergence(t: complex) -> complex:
        x, dx = grid(t)
        log_q, _, log_r = logs(t, x)
        return (np.exp(log_q) * (log_q - log_r) * transform(x)[1] * dx).sum()

    def formulas(t: float) -> tuple[float, float]:
        x, dx = grid(t)
        _, first, second = transform(x)
        log_q, score_q, _ = logs(t, x)
        score_r = ((_MEAN - x) / (_DEVIATION**2 + t**2) - second / first) / first
        weight = np.exp(log_q) * first * dx
        gap = score_q - score_r
        paper = -t * float((weight * gap**2).sum())
        return paper, paper + t * float((weight * gap * ((first**2 - 1) * score_r + second)).sum())

    return divergence, formulas, 0.0
