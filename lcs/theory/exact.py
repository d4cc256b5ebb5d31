"""Lemma 1 (v1 and v2): a distribution is a conditional projective composition exactly if its score is local.

Forward, the local score of Definition 1 equals the true score at every noise level, to rounding. Backward, a score
that is not local has a price. Writing C for the composition that the local score belongs to, Claim 1 integrated over
all noise gives

    KL(p || C) = integral over t > 0 of  t * E |true score - local score|^2  dt,

because noise turns both into the same Gaussian. If the score is local at (almost) every noise level the integral
is zero, so p = C: that is the converse, and the integrand shows at which noise levels a distribution fails it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lcs.theory.composition import (
    NONE,
    Conditions,
    Family,
    any_object,
    every_object,
    factorised_composition,
    local_conditional_score,
    projective_composition,
    shadows,
    shared_light,
    tied_background,
)
from lcs.theory.mixture import gaussian_kl

NOISE_LEVELS = tuple(float(t) for t in np.geomspace(0.01, 30.0, 15))
SAMPLES = 400


@dataclass(frozen=True)
class Lemma1Result:
    """Differences between local and true score on samples of p^t, over all subsets J of conditions."""

    names: list[str]  # F families
    noise_levels: np.ndarray  # [T]
    largest: np.ndarray  # [F, T]: max over J, samples and pixels of |local - true|, over the RMS of the true score
    mean_square: np.ndarray  # [F, T]: max over J of E |local - true|^2 over E |true|^2


def check_lemma1(noise_levels: Sequence[float] = NOISE_LEVELS, samples: int = SAMPLES, seed: int = 0) -> Lemma1Result:
    """Local against true score for the composition and for three families that are none."""
    families = [every_object(), any_object(), shared_light(0.1), shadows(0.4)]
    largest, mean_square = np.zeros((2, len(families), len(noise_levels)))
    for f, family in enumerate(families):
        for i, t in enumerate(noise_levels):
            for active in family.subsets:
                difference, true = score_difference(family, active, t, samples, seed)
                scale = np.sqrt(np.mean(true**2))
                largest[f, i] = max(largest[f, i], np.abs(difference).max() / scale)
                mean_square[f, i] = max(mean_square[f, i], np.mean(difference**2) / scale**2)
    return Lemma1Result([f.name for f in families], np.asarray(noise_levels), largest, mean_square)


def score_difference(
    family: Family, active: Conditions, t: float, samples: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Local minus true score, and the true score, at samples of p^t(x | c_J). -> [S, n] each"""
    noisy = family.conditional(active).noised(t)
    x = noisy.sample(samples, np.random.default_rng(seed))
    true = noisy.score(x)
    return local_conditional_score(family, active, t, x) - true, true


@dataclass(frozen=True)
class Dependencies:
    """What the true score at each pixel depends on, with all conditions active."""

    name: str
    noise_level: float
    pixels: np.ndarray  # [n, n]: E |d score_i / d x_j|, divided by the row's largest
    conditions: np.ndarray  # [n, K]: E |score_i(c_J) - score_i(c_J without k)|, divided by the largest of all


def dependencies(family: Family, t: float = 0.6, samples: int = SAMPLES, seed: int = 0) -> Dependencies:
    noisy = family.conditional(family.all).noised(t)
    x = noisy.sample(samples, np.random.default_rng(seed))
    jacobian = np.abs(noisy.score_jacobian(x)).mean(axis=0)
    score = noisy.score(x)
    without = [family.conditional(family.all - {k}).noised(t).score(x) for k in range(len(family.blocks))]
    influence = np.stack([np.abs(score - w).mean(axis=0) for w in without], axis=1)
    return Dependencies(
        family.name, t, jacobian / jacobian.max(axis=1, keepdims=True), influence / max(influence.max(), 1e-300)
    )


@dataclass(frozen=True)
class ConverseResult:
    """Gaussians with correlation rho between two sets of pixels: score violation and divergence, in closed form."""

    correlations: np.ndarray  # [R]
    noise_levels: np.ndarray  # [T]
    violation: np.ndarray  # [R, T]: E |true - local|^2
    kl: np.ndarray  # [R]: KL(p || composition)
    integral: np.ndarray  # [R]: of t * violation over t, which should equal kl


def check_converse(correlations: Sequence[float] = tuple(np.arange(10) / 10), levels: int = 400) -> ConverseResult:
    """Two sets of two pixels; pixel pairs across the sets have correlation rho times 0.5 or 1.

    Both scores are linear, so E |.|^2 is a trace: with A the covariance of p^t and B that of the composition (A
    without its cross terms), the difference of scores is (B^-1 - A^-1)(x - mean) and x - mean has covariance A.
    """
    log_t = np.linspace(np.log(1e-6), np.log(1e5), levels)
    t = np.exp(log_t)
    violation, kl = np.zeros((len(correlations), levels)), np.zeros(len(correlations))
    for r, rho in enumerate(correlations):
        inner = np.array([[1.0, 0.5], [0.5, 1.0]])
        joint = np.block([[inner, rho * inner], [rho * inner, inner]])
        apart = np.block([[inner, np.zeros((2, 2))], [np.zeros((2, 2)), inner]])
        kl[r] = gaussian_kl(np.zeros(4), joint, np.zeros(4), apart)
        for i, level in enumerate(t):
            a, b = joint + level**2 * np.eye(4), apart + level**2 * np.eye(4)
            gap = np.linalg.inv(b) - np.linalg.inv(a)
            violation[r, i] = np.trace(gap @ a @ gap)
    # integral of t v dt = integral of t^2 v d(ln t); the integrand vanishes at both ends
    integral = (t**2 * violation).sum(axis=1) * (log_t[1] - log_t[0])
    return ConverseResult(np.asarray(correlations), t, violation, kl, integral)


@dataclass(frozen=True)
class BackgroundResult:
    """Families that satisfy Definition 2 to the letter while their unconditional distribution is coupled."""

    couplings: np.ndarray  # [V]: variance of the brightness shared by all uncontrolled pixels
    is_composition: np.ndarray  # [V]: largest |log p(x|c_J) - log eq. 2|: zero, so Definition 2 holds
    lemma_subsets: np.ndarray  # [V]: largest relative score error with the subsets of Lemma 1
    joint_subsets: np.ndarray  # [V]: the same if an uncontrolled pixel looks at all uncontrolled pixels, N_i = M_J^c


def check_background(
    couplings: Sequence[float] = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4), t: float = 0.3, samples: int = SAMPLES, seed: int = 0
) -> BackgroundResult:
    """Lemma 1's proof takes x_{M_j} as independent of the rest if j is not in J; Definition 2 does not say so."""
    is_composition, lemma, joint = np.zeros((3, len(couplings)))
    for v, coupling in enumerate(couplings):
        family = tied_background(coupling)
        for active in family.subsets:
            x = family.conditional(active).noised(t).sample(samples, np.random.default_rng(seed))
            true = family.conditional(active).noised(t).score(x)
            literal, scale = projective_composition(family, active), np.sqrt(np.mean(true**2))
            gap = family.conditional(active).log_density(x) - literal.log_density(x)
            is_composition[v] = max(is_composition[v], np.abs(gap).max())
            local = local_conditional_score(family, active, t, x)
            lemma[v] = max(lemma[v], np.abs(local - true).max() / scale)
            repaired = _score_with_joint_background(family, active, t, x)
            joint[v] = max(joint[v], np.abs(repaired - true).max() / scale)
    return BackgroundResult(np.asarray(couplings), is_composition, lemma, joint)


def _score_with_joint_background(family: Family, active: Conditions, t: float, x: np.ndarray) -> np.ndarray:
    """Lemma 1's subsets for active conditions; every other pixel looks at all of M_J^c: exact for Definition 2."""
    score = local_conditional_score(family, active, t, x)
    rest = [i for i in range(family.size) if not any(i in family.blocks[j] for j in active)]
    score[:, rest] = family.conditional(NONE).marginal(rest).noised(t).score(x[:, rest])
    return score


def is_factorised(family: Family, active: Conditions, samples: int = SAMPLES, seed: int = 0) -> float:
    """Largest |log p(x | c_J) - log C*_J(x)| on samples: zero exactly if p is the composition of the proofs."""
    x = family.conditional(active).sample(samples, np.random.default_rng(seed))
    return float(
        np.abs(family.conditional(active).log_density(x) - factorised_composition(family, active).log_density(x)).max()
    )
