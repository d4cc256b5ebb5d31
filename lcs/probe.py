"""Does a model compose? Known in seconds, before anything is sampled: x0hat at high noise against what was asked for.

At a noise level where the noisy image tells nothing, the best x0hat is the mean of all images that fit the label, and
its squared error is the variance of these images, their *spread*. So images are rendered with objects in the cells of
the paper's first K test locations (any colours, shapes and sizes that leave room; CLEVR's own rule that keeps objects
apart in depth is not asked, because the test locations break it), and the model's error on them is compared with

    the spread (nothing more can be known)     and     its own error without the label (nothing was followed):

    unfollowed = (error - spread) / (error without label - spread)

0: it does what it is asked for; 1: as if it had not been asked. Training and recipes can be judged by it hours before
K_max can: it needs no sharp images, and 100 network calls instead of thousands. It says nothing of image quality.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

import numpy as np
import torch
from scipy.optimize import fsolve
from torch import nn

from lcs.conditioning import cell_of, get_conditioner
from lcs.errors import LcsError
from lcs.experiments import GRID, TEST_LOCATIONS, Run
from lcs.render.fast import render
from lcs.scenes import world
from lcs.scenes.placement import random_camera_and_lights
from lcs.scenes.scene import Scene, SceneObject, Vec3, project
from lcs.training.batches import standardise

SIGMA = 30.0
RENDERS = 48  # per K
GAP = 0.1  # between objects, in world units: the original's 0.25 leaves no room for 12 test locations
TRIES = 500
CHUNK = 16


@dataclass(frozen=True)
class ProbeRow:
    k: int
    spread: float
    error: float
    without_label: float

    @property
    def unfollowed(self) -> float:
        return (self.error - self.spread) / (self.without_label - self.spread)

    def to_json(self) -> dict:
        return {**asdict(self), "unfollowed": self.unfollowed}


def scene_at(seed: int, locations: Sequence[tuple[float, float]]) -> Scene:
    """A scene with an object in the grid cell of each location; everything else about it is random."""
    rng = np.random.Generator(np.random.PCG64([seed, len(locations), 4]))
    for _ in range(TRIES):
        camera, lights = random_camera_and_lights(rng)
        objects: list[SceneObject] = []
        for location in locations:
            row, column = cell_of(location)
            x, y = (column + rng.random()) / GRID, (row + rng.random()) / GRID
            placed = _place_at(rng, camera, (x, y), objects)
            if placed is None:
                break
            objects.append(placed)
        else:
            return Scene(seed, camera, lights, tuple(objects))
    raise LcsError(f"no room for objects at {list(locations)} in {TRIES} tries")


def _place_at(
    rng: np.random.Generator, camera: Vec3, point: tuple[float, float], others: Sequence[SceneObject]
) -> SceneObject | None:
    """An object whose centre is seen at `point` of the image, small if a large one has no room; None if neither has."""
    wanted = world.SIZE_NAMES[rng.integers(len(world.SIZE_NAMES))]
    for size in dict.fromkeys((wanted, min(world.SIZES, key=world.SIZES.get))):
        radius = world.SIZES[size]
        x, y = ground_under(camera, point, radius)
        if all(math.dist((x, y), o.position[:2]) - radius - o.radius >= GAP for o in others):
            return SceneObject(
                shape=world.SHAPES[rng.integers(len(world.SHAPES))],
                size=size,
                color=world.COLOR_NAMES[rng.integers(len(world.COLOR_NAMES))],
                material=world.MATERIALS[rng.integers(len(world.MATERIALS))],
                position=(x, y, radius),
                rotation=2 * math.pi * rng.random(),
                pixel=project(camera, (x, y, radius)),
            )
    return None


def ground_under(camera: Vec3, point: tuple[float, float], height: float) -> tuple[float, float]:
    """World (x, y) of what is seen at `point` (fractions of the image) and lies `height` above the ground."""
    target = np.array(point) * (world.IMAGE_WIDTH, world.IMAGE_HEIGHT)
    found, _, ok, message = fsolve(
        lambda v: np.array(project(camera, (v[0], v[1], height))) - target, [0.0, 0.0], full_output=True
    )
    if ok != 1:
        raise LcsError(f"nothing on the ground is seen at {point}: {message}")
    return float(found[0]), float(found[1])


@lru_cache(maxsize=32)
def _renders(k: int, size: int, n: int, seed: int) -> np.ndarray:
    return render([scene_at(seed * 2**20 + i, TEST_LOCATIONS[:k]) for i in range(n)], size, size)[0]


@torch.no_grad()
def probe(
    run: Run, model: nn.Module, ks: Sequence[int] = range(1, 13), renders: int = RENDERS, sigma: float = SIGMA,
    seed: int = 0,
) -> list[ProbeRow]:  # fmt: skip
    """One row per K; for models that are told locations."""
    conditioner = get_conditioner(run.experiment.conditioner)
    if conditioner.test_conditions != TEST_LOCATIONS:
        raise LcsError(f"{run.name} is not told locations: there is nothing to compare with")
    device, rows = next(model.parameters()).device, []
    for k in ks:
        x = standardise(_renders(k, run.scale.resolution, renders, seed), run).to(device)
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(device)
        errors = []
        for asked in (k, 0):
            label = torch.from_numpy(conditioner.test_vector(asked)).to(device).expand(len(x), -1)
            parts = [model((x + sigma * noise)[i : i + CHUNK], sigma, label[i : i + CHUNK]) - x[i : i + CHUNK]
                     for i in range(0, len(x), CHUNK)]  # fmt: skip
            errors.append(torch.cat(parts).square().mean().item())
        rows.append(ProbeRow(k, x.var(dim=0).mean().item(), *errors))
    return rows
