"""Do objects heed each other's colours ("explaining away")? Told in seconds, without sampling.

A model told "one A and one B" can take this as a palette: either object is A or B, whatever the other is. Or as a
count: where one object is seen to be B, the other has to be A. Only the second draws each colour once. So scenes with
two objects are rendered in three colourings, the first letter being object 1:

    AB  what was asked for      BA  the same, the other way round      BB  object 1 changed: not what was asked for

x0hat is worked out from noisy AB and from noisy BB, with the same noise and the same label. Object 2 is B in both; to
a palette nothing has changed about it, a count turns it towards A in BB. With d = BB - BA, what being B instead of A
changes about object 2:

    response = <x0hat(AB) - x0hat(BB), d> / <d, d>

Two who know all of the scene but its colours say how large that can be. By Bayes' rule for the count,

    x0hat = p AB + (1 - p) BA,     p = sigmoid((|x - BA|^2 - |x - AB|^2) / (2 sigma^2))

and for a palette each object is judged by its own evidence alone (its response is not quite 0: objects shade and mirror
each other). On that scale a model has

    heed = (response - palette's) / (count's - palette's):     0 is a palette, 1 a count by somebody who knows the scene

Other values are possible: below 0, seeing B makes B likelier everywhere. A model must guess shapes and places, so 1 is
out of reach, and how far is not known. Noise levels are those at which noisy BB could still be AB or BA: at less noise
the answer to what cannot be is no measure of anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from lcs.bootstrap import interval
from lcs.conditioning import get_conditioner
from lcs.errors import LcsError
from lcs.experiments import TEST_COLORS, Run
from lcs.render.fast import render
from lcs.scenes.placement import random_scene
from lcs.training.batches import standardise

SIGMAS = (6.0, 8.0, 11.0, 15.0, 20.0)  # of images with 64 pixels a side; see above
SCENES = 96
CHUNK = 32
FIRST_SCENE = 2**62  # far beyond the seeds of any dataset

Denoise = Callable[[Tensor, float], Tensor]  # x [N, 3, H, W] of the pairs in their order, sigma -> x0hat


@dataclass(frozen=True)
class Pairs:
    """Scenes with two objects, each in three colourings, and the label that asks for one A and one B."""

    ab: Tensor  # [N, 3, H, W], standardised; object 1 is A, object 2 is B
    ba: Tensor
    bb: Tensor
    labels: Tensor  # [N, 8]


@dataclass(frozen=True)
class HeedRow:
    sigma: float
    response: float  # of the model, mean over scenes
    palette: float  # of those who know the scene, on the same images
    count: float
    heed: float
    interval: tuple[float, float]  # 95%, over scenes

    def to_json(self) -> dict:
        return asdict(self)


def render_pairs(run: Run, n: int = SCENES, seed: int = 0) -> Pairs:
    """Random scenes with two objects; A and B are any two different colours."""
    random = np.random.default_rng([seed, n])
    chosen = [random.choice(TEST_COLORS, 2, replace=False) for _ in range(n)]
    scenes = [random_scene(FIRST_SCENE + seed * 2**20 + i, 2) for i in range(n)]
    conditioner, size = get_conditioner("color"), run.scale.resolution

    def colored(which: str) -> Tensor:
        painted = []
        for scene, colors in zip(scenes, chosen, strict=True):
            names = [str(colors["AB".index(letter)]) for letter in which]
            objects = (replace(o, color=name) for o, name in zip(scene.objects, names, strict=True))
            painted.append(replace(scene, objects=tuple(objects)))
        return standardise(render(painted, size, size)[0], run)

    labels = np.stack([conditioner.encode_conditions([str(c) for c in colors]) for colors in chosen])
    return Pairs(colored("AB"), colored("BA"), colored("BB"), torch.from_numpy(labels))


def _dot(a: Tensor, b: Tensor) -> Tensor:  # [N, ...] -> [N]
    return (a * b).flatten(1).sum(1)


def _probability(a: Tensor, b: Tensor, x: Tensor, sigma: float) -> Tensor:
    """Of image a, if x is a or b with noise added. [N, 3, H, W] each -> [N, 1, 1, 1]"""
    evidence = (_dot(x - b, x - b) - _dot(x - a, x - a)).double() / (2 * sigma**2)
    return torch.sigmoid(evidence).float()[:, None, None, None]


def count(pairs: Pairs, x: Tensor, sigma: float) -> Tensor:
    """x0hat of Bayes' rule: the two objects are A and B, or B and A."""
    p = _probability(pairs.ab, pairs.ba, x, sigma)
    return p * pairs.ab + (1 - p) * pairs.ba


def palette(pairs: Pairs, x: Tensor, sigma: float) -> Tensor:
    """x0hat if either object is A or B by its own evidence: BB, and what A would change about each of them."""
    changes = ((other - pairs.bb) * _probability(other, pairs.bb, x, sigma) for other in (pairs.ab, pairs.ba))
    return pairs.bb + sum(changes)


def responses(denoise: Denoise, pairs: Pairs, sigma: float, seed: int = 0) -> Tensor:  # [N]
    """How far object 2 turns away from B if object 1 is B too; 1: all the way to A."""
    noise = sigma * torch.randn(pairs.ab.shape, generator=torch.Generator().manual_seed(seed))
    change = denoise(pairs.ab + noise, sigma) - denoise(pairs.bb + noise, sigma)
    d = pairs.bb - pairs.ba
    return _dot(change, d) / _dot(d, d)


@torch.no_grad()
def heed(
    run: Run, model: nn.Module, sigmas: Sequence[float] = SIGMAS, scenes: int = SCENES, seed: int = 0
) -> list[HeedRow]:
    """One row per noise level; for models that are told colours."""
    if run.experiment.conditioner != "color":
        raise LcsError(f"{run.name} is not told colours: there is nothing to heed")
    pairs, device = render_pairs(run, scenes, seed), next(model.parameters()).device

    def denoise(x: Tensor, sigma: float) -> Tensor:
        parts = zip(x.split(CHUNK), pairs.labels.split(CHUNK), strict=True)
        return torch.cat([model(part.to(device), sigma, labels.to(device)).cpu() for part, labels in parts])

    def row(sigma: float) -> HeedRow:
        answers = denoise, partial(palette, pairs), partial(count, pairs)
        by_scene = np.stack([responses(f, pairs, sigma, seed).numpy() for f in answers])  # [3, N]

        def share(chosen: np.ndarray) -> float:
            own, least, most = by_scene[:, chosen].mean(axis=1)
            return float((own - least) / (most - least))

        means = by_scene.mean(axis=1).tolist()
        return HeedRow(sigma, *means, share(np.arange(scenes)), interval(share, scenes, seed=seed))

    scale = run.scale.resolution / 64  # twice the pixels show as much at twice the noise
    return [row(sigma * scale) for sigma in sigmas]
