"""Definition 3 and Lemma 2 of v1 (Definition 3 and Lemma 3 of v2): almost a composition, almost a local score.

The errors of Definition 3 say how far the pixels of M_j can be moved by anything but c_j: by other pixels or by other
conditions, in the worst case. The lemma says that the local score's own distribution, which is the composition C, is
at most the sum of these errors away:

    KL(p(.|c_J) || C_J) <= sum over j in J of eps_j + sum over j not in J of eps~_j + eps_b

The example has one pixel per place, so that every divergence is a one-dimensional integral, exact to rounding: places
j = 0..2 and one background pixel. Condition j raises its pixel by LIFT and, if there are shadows, lowers the next
one. The light is either on or off, for the whole picture:

    p(x | c_J) = average over light = +-strength of N(x; mean(J) + light * (1, 1, 1, 1), variance * I)

Given all other pixels, a pixel is still a mixture of the same two Gaussians, with other weights. KL is convex in the
weights, so its supremum is at one of the two certain lights, which the other pixels approach as they go to +-infinity.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lcs.theory.mixture import LOG_2PI, integral, line, log_density_1d

PLACES = 3
LIFT = 1.0
VARIANCE = 0.25
Set = frozenset[int]


@dataclass(frozen=True)
class Light:
    """The example: how strong the common light and the shadows are. Both zero: an exact composition."""

    strength: float
    shadow: float = 0.0

    def means(self, active: Set) -> np.ndarray:  # -> [4], the background last
        mean = np.zeros(PLACES + 1)
        for j in active:
            mean[j] += LIFT
            mean[(j + 1) % PLACES] -= self.shadow
        return mean

    def pixel(self, i: int, active: Set) -> np.ndarray:
        """The two component means of p(x_i | c_J). -> [2]"""
        return self.means(active)[i] + self.strength * np.array([-1.0, 1.0])


ALL: Set = frozenset(range(PLACES))
SUBSETS = [frozenset(c) for k in range(PLACES + 1) for c in itertools.combinations(range(PLACES), k)]
_HALF = np.array([0.5, 0.5])


def kl_1d(means_q: np.ndarray, means_r: np.ndarray, variance: float) -> float:
    """KL between equal-weight mixtures with one variance. means [A], [B]"""
    x = line(np.concatenate([means_q, means_r]), np.sqrt(variance))
    log_q = log_density_1d(x, np.full(len(means_q), 1 / len(means_q)), means_q, np.full(len(means_q), variance))
    log_r = log_density_1d(x, np.full(len(means_r), 1 / len(means_r)), means_r, np.full(len(means_r), variance))
    return float(integral(np.exp(log_q) * (log_q - log_r), x))


def errors(light: Light, t: float) -> dict[str, np.ndarray]:
    """Definition 3 at noise level t, eqs. 4-6: eps_j [3], eps~_j [3], eps_b [1]; suprema over pixels and over J."""
    variance = VARIANCE + t**2

    def supremum(i: int, sets: list[Set], told: Set) -> float:
        target = light.pixel(i, told)
        vertices = [mean for active in sets for mean in light.pixel(i, active)]
        return max(kl_1d(np.array([mean]), target, variance) for mean in vertices)

    none: Set = frozenset()
    return {
        "eps": np.array([supremum(j, [s for s in SUBSETS if j in s], frozenset({j})) for j in range(PLACES)]),
        "eps_tilde": np.array([supremum(j, [s for s in SUBSETS if j not in s], none) for j in range(PLACES)]),
        "eps_b": np.array([supremum(PLACES, SUBSETS, none)]),
    }


def divergence(light: Light, active: Set, t: float) -> float:
    """KL(p^t(. | c_J) || C_J), exactly.

    E log p needs only the direction (1, 1, 1, 1) along which the two components differ; in the others p is one
    Gaussian. C is a product over pixels, so E log C is a sum of one-dimensional integrals.
    """
    n, variance = PLACES + 1, VARIANCE + t**2
    both = np.full(2, variance)
    centres = light.strength * np.sqrt(n) * np.array([-1.0, 1.0])
    along = line(centres, np.sqrt(variance))
    log_p = log_density_1d(along, _HALF, centres, both)
    total = integral(np.exp(log_p) * log_p, along) - (n - 1) / 2 * (LOG_2PI + 1 + np.log(variance))
    for i in range(n):
        own = light.pixel(i, active)
        told = light.pixel(i, active & {i})
        x = line(np.concatenate([own, told]), np.sqrt(variance))
        density = np.exp(log_density_1d(x, _HALF, own, both))
        total -= integral(density * log_density_1d(x, _HALF, told, both), x)
    return float(total)


@dataclass(frozen=True)
class Lemma2Result:
    """Divergence and bound for all conditions active, and the smallest slack over every J."""

    strengths: np.ndarray  # [S]
    noise_levels: np.ndarray  # [T]
    shadow: float
    kl: np.ndarray  # [S, T]
    terms: np.ndarray  # [S, T, 4]: eps_0, eps_1, eps_2, eps_b, whose sum is the bound
    smallest_slack: np.ndarray  # [S, T]: min over J of bound - kl

    @property
    def bound(self) -> np.ndarray:
        return self.terms.sum(axis=-1)

    @property
    def slack(self) -> np.ndarray:
        return self.bound - self.kl


def check_lemma2(
    strengths: Sequence[float] = (0.0, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0),
    noise_levels: Sequence[float] = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0),
    shadow: float = 0.2,
) -> Lemma2Result:
    shape = (len(strengths), len(noise_levels))
    kl, terms, smallest = np.zeros(shape), np.zeros((*shape, PLACES + 1)), np.zeros(shape)
    for s, strength in enumerate(strengths):
        light = Light(strength, shadow)
        for i, t in enumerate(noise_levels):
            e = errors(light, t)
            terms[s, i] = [*e["eps"], *e["eps_b"]]
            kl[s, i] = divergence(light, ALL, t)
            smallest[s, i] = min(bound_for(e, active) - divergence(light, active, t) for active in SUBSETS)
    return Lemma2Result(np.asarray(strengths), np.asarray(noise_levels), shadow, kl, terms, smallest)


def bound_for(e: dict[str, np.ndarray], active: Set) -> float:
    """The right-hand side of the lemma for one J."""
    return float(sum(e["eps" if j in active else "eps_tilde"][j] for j in range(PLACES)) + e["eps_b"][0])


def gaussian_error(rho: float, radii: np.ndarray) -> np.ndarray:
    """Definition 3 for two pixels of correlation rho, with the supremum only over |other pixel| <= radius. [R] -> [R]

    KL(N(rho y, 1 - rho^2) || N(0, 1)) grows like (rho y)^2 / 2, so over all y it is infinite for any rho but 0.
    """
    return 0.5 * ((rho * np.asarray(radii)) ** 2 - rho**2 - np.log1p(-(rho**2)))
