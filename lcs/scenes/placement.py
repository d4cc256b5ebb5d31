"""Random CLEVR scenes: the original's placement rules, with a seed and with bounded retries.

`random_scene(seed, count)` draws camera and light jitter, then places objects one by one: positions
uniform in a square, at least MIN_GAP apart, at least MIN_MARGIN apart along the camera's left/right
and front/behind, 50 tries each before starting over; the finished scene starts over too unless every
object shows at least 200 pixels at 320x240. All draws come from one PCG64 stream per (seed, count).
"""

from __future__ import annotations

import math

import numpy as np

from lcs.errors import LcsError
from lcs.render.geometry import pack_camera, pack_objects, visible_pixels
from lcs.scenes import world
from lcs.scenes.scene import Scene, SceneObject, Vec3, ground_directions, project

MAX_OBJECTS = 12
MAX_RESTARTS = 2_000


def random_scene(
    seed: int,
    count: int,
    max_restarts: int = MAX_RESTARTS,
    min_margin: float = world.MIN_MARGIN,
    min_gap: float = world.MIN_GAP,
) -> Scene:
    """The scene with `count` objects that belongs to `seed`; the same on any machine.

    The original stops at 10 objects, and its margins leave hardly any room for 12: for crowded scenes, as
    the counter needs them, give smaller ones.
    """
    if not 0 <= count <= MAX_OBJECTS:
        raise LcsError(f"cannot place {count} objects; allowed: 0..{MAX_OBJECTS}")
    if seed < 0:
        raise LcsError(f"a scene seed must not be negative, got {seed}")
    rng = np.random.Generator(np.random.PCG64([seed, count]))
    camera, lights = random_camera_and_lights(rng)
    packed_camera = pack_camera(camera)
    for _ in range(max_restarts):
        objects = _place(rng, camera, count, min_margin, min_gap)
        if objects is not None and _all_visible(packed_camera, objects):
            return Scene(seed, camera, lights, objects)
    raise LcsError(
        f"no valid scene with {count} objects for seed {seed} after {max_restarts} restarts; "
        f"use fewer objects or another seed"
    )


def random_camera_and_lights(rng: np.random.Generator) -> tuple[Vec3, dict[str, Vec3]]:
    camera = _jitter(rng, world.CAMERA, world.CAMERA_JITTER)
    return camera, {name: _jitter(rng, at, world.LIGHT_JITTER) for name, (at, *_) in world.AREA_LIGHTS.items()}


def _jitter(rng: np.random.Generator, position: Vec3, amount: float) -> Vec3:
    return tuple(p + amount * (2 * rng.random() - 1) for p in position)


def _place(
    rng: np.random.Generator, camera: Vec3, count: int, min_margin: float, min_gap: float
) -> tuple[SceneObject, ...] | None:
    """One attempt at `count` objects; None if some object found no place in 50 tries."""
    directions = ground_directions(camera)
    axes = [directions["right"][:2], directions["behind"][:2]]  # left and front are their negatives
    placed: list[SceneObject] = []
    for _ in range(count):
        size = world.SIZE_NAMES[rng.integers(len(world.SIZE_NAMES))]
        radius = world.SIZES[size]
        spot = _free_spot(rng, radius, placed, axes, min_margin, min_gap)
        if spot is None:
            return None
        position = (*spot, radius)
        placed.append(
            SceneObject(
                shape=world.SHAPES[rng.integers(len(world.SHAPES))],
                size=size,
                color=world.COLOR_NAMES[rng.integers(len(world.COLOR_NAMES))],
                material=world.MATERIALS[rng.integers(len(world.MATERIALS))],
                position=position,
                rotation=2 * math.pi * rng.random(),
                pixel=project(camera, position),
            )
        )
    return tuple(placed)


def _free_spot(
    rng: np.random.Generator, radius: float, placed: list[SceneObject], axes, min_margin: float, min_gap: float
) -> tuple[float, float] | None:
    for _ in range(world.MAX_TRIES_PER_OBJECT):
        x, y = (world.PLACEMENT_HALF_WIDTH * (2 * rng.random() - 1) for _ in range(2))
        for other in placed:
            dx, dy = x - other.position[0], y - other.position[1]
            if math.sqrt(dx * dx + dy * dy) - radius - other.radius < min_gap:
                break
            if any(abs(dx * ax + dy * ay) < min_margin for ax, ay in axes):
                break
        else:
            return x, y
    return None


def _all_visible(packed_camera: np.ndarray, objects: tuple[SceneObject, ...]) -> bool:
    rows = pack_objects(objects)
    return all(
        visible_pixels(packed_camera, rows, i, world.IMAGE_WIDTH, world.IMAGE_HEIGHT, world.MIN_VISIBLE_PIXELS)
        >= world.MIN_VISIBLE_PIXELS
        for i in range(len(rows))
    )
