"""Definitions 1 and 2: a conditional distribution, its local conditional score, its projective composition.

A `Family` is p(x | c_J) for every set J of active conditions, with the disjoint pixel sets M_j that the conditions are
meant to control. The examples are one-dimensional pictures of 12 pixels: three places where an object can be (three
pixels each), and three background pixels between them. Condition j asks for an object at place j, which has one of
two looks.

* `every_object` draws an object at *every* place asked for: a conditional projective composition (CPC).
* `any_object` draws one object at *any* of the places asked for. It is the same for up to one condition, which is all
  that Experiment 2 of the paper is trained on, and differs beyond.
* `shared_light` is `every_object` with one random brightness for the whole picture: pixels are coupled.
* `shadows` is `every_object` where an object darkens the next place: conditions reach beyond their pixels.
* `tied_background` satisfies Definition 2 to the letter, but its unconditional distribution is coupled.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lcs.errors import LcsError
from lcs.theory.mixture import Mixture, gaussian, mix, product

Conditions = frozenset[int]
NONE: Conditions = frozenset()


@dataclass(frozen=True)
class Family:
    """p(x | c_J), x in R^n, with the sets M_j (`blocks`) of conditions j = 0, 1, ..."""

    name: str
    size: int  # n
    blocks: tuple[tuple[int, ...], ...]
    conditional: Callable[[Conditions], Mixture]

    @property
    def background(self) -> tuple[int, ...]:
        """M_b: the pixels that no condition controls."""
        controlled = {i for block in self.blocks for i in block}
        return tuple(i for i in range(self.size) if i not in controlled)

    @property
    def subsets(self) -> list[Conditions]:
        """Every J."""
        every = range(len(self.blocks))
        return [frozenset(c) for k in range(len(self.blocks) + 1) for c in itertools.combinations(every, k)]

    @property
    def all(self) -> Conditions:
        return frozenset(range(len(self.blocks)))


def local_conditional_score(family: Family, active: Conditions, t: float, x: np.ndarray) -> np.ndarray:
    """Definition 1 (eq. 1) with the subsets of Lemma 1. x [S, n] -> [S, n]

    A pixel of M_j looks at M_j alone and is told of c_j alone: N_i = M_j, L_i(J) = {j} if j in J, else nothing. A
    background pixel looks at M_b and is told nothing.
    """
    score = np.empty_like(x)
    for j, block in enumerate(family.blocks):
        told = family.conditional(active & {j})
        score[:, block] = told.marginal(block).noised(t).score(x[:, block])
    if family.background:
        score[:, family.background] = (
            family.conditional(NONE).marginal(family.background).noised(t).score(x[:, family.background])
        )
    return score


def projective_composition(family: Family, active: Conditions) -> Mixture:
    """Definition 2 (eq. 2): p(x_{M_J^c} | nothing) * product over j in J of p(x_{M_j} | c_j)."""
    controlled = {i for j in active for i in family.blocks[j]}
    rest = tuple(i for i in range(family.size) if i not in controlled)
    parts = [(family.blocks[j], family.conditional(frozenset({j})).marginal(family.blocks[j])) for j in sorted(active)]
    if rest:
        parts.append((rest, family.conditional(NONE).marginal(rest)))
    return product(parts)


def factorised_composition(family: Family, active: Conditions) -> Mixture:
    """C*_J of the proofs of Lemmas 1 and 2: as eq. 2, and also independent across the M_j of inactive conditions."""
    parts = [(block, family.conditional(active & {j}).marginal(block)) for j, block in enumerate(family.blocks)]
    if family.background:
        parts.append((family.background, family.conditional(NONE).marginal(family.background)))
    return product(parts)


# ---- the examples ---------------------------------------------------------------------------------------------------

SIZE = 12
BLOCKS = ((0, 1, 2), (4, 5, 6), (8, 9, 10))
BACKGROUND = (3, 7, 11)


def _smooth(variance: float, share: float, n: int = 3) -> np.ndarray:
    """Covariance of n pixels that have `share` of their variance in common."""
    return variance * ((1 - share) * np.eye(n) + share * np.ones((n, n)))


def _object(j: int) -> Mixture:
    """An object at place j: flat or hollow."""
    flat = gaussian([1.6 + 0.2 * j] * 3, _smooth(0.10, 0.6))
    hollow = gaussian([2.2, 0.6, 2.2], _smooth(0.15, 0.3))
    return mix([flat, hollow], [0.6, 0.4])


_EMPTY = gaussian([0.0] * 3, _smooth(0.20, 0.4))
_GROUND = gaussian([-0.5] * 3, _smooth(0.20, 0.7))


def _composed(active: Conditions) -> Mixture:
    if not active <= frozenset(range(len(BLOCKS))):
        raise LcsError(f"unknown condition in {sorted(active)}; there are {len(BLOCKS)}, numbered from 0")
    parts = [(block, _object(j) if j in active else _EMPTY) for j, block in enumerate(BLOCKS)]
    return product([*parts, (BACKGROUND, _GROUND)])


def every_object() -> Family:
    return Family("every object", SIZE, BLOCKS, _composed)


def any_object() -> Family:
    def conditional(active: Conditions) -> Mixture:
        return mix([_composed(frozenset({j})) for j in sorted(active)]) if active else _composed(NONE)

    return Family("any object", SIZE, BLOCKS, conditional)


def shared_light(variance: float) -> Family:
    """`variance` of the common brightness; 0 is `every_object`."""

    def conditional(active: Conditions) -> Mixture:
        p = _composed(active)
        return Mixture(p.weights, p.means, p.covariances + variance * np.ones((SIZE, SIZE)))

    return Family("shared light", SIZE, BLOCKS, conditional)


def shadows(depth: float) -> Family:
    """An object darkens the place to its right (the last one the first) by `depth`; 0 is `every_object`."""

    def conditional(active: Conditions) -> Mixture:
        shift = np.zeros(SIZE)
        for j in active:
            shift[list(BLOCKS[(j + 1) % len(BLOCKS)])] -= depth
        p = _composed(active)
        return Mixture(p.weights, p.means + shift, p.covariances)

    return Family("shadows", SIZE, BLOCKS, conditional)


def tied_background(variance: float) -> Family:
    """Literally a CPC: what is *not* controlled follows one unconditional distribution with a common brightness."""

    def conditional(active: Conditions) -> Mixture:
        p = _composed(NONE)
        coupled = Mixture(p.weights, p.means, p.covariances + variance * np.ones((SIZE, SIZE)))
        controlled = {i for j in active for i in BLOCKS[j]}
        rest = tuple(i for i in range(SIZE) if i not in controlled)
        return product([(BLOCKS[j], _object(j)) for j in sorted(active)] + [(rest, coupled.marginal(rest))])

    return Family("tied background", SIZE, BLOCKS, conditional)
