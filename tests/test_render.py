"""The fast renderer against independent truth: brute-force marching, closed forms, radiometry by hand."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lcs.errors import LcsError
from lcs.render import geometry
from lcs.render.fast import render, render_linear
from lcs.render.geometry import MISS, hit_ground, hit_object, object_normal, pack_objects
from lcs.render.light import light_visibility, pack_lights
from lcs.scenes import world
from lcs.scenes.placement import random_scene
from lcs.scenes.scene import Scene, SceneObject, project

RNG = np.random.default_rng(0)


def an_object(shape: str, position=(0.3, -0.2, 0.7), rotation=0.6, material="rubber", color="gray") -> SceneObject:
    return SceneObject(shape, "large", color, material, position, rotation, (0.0, 0.0))


def a_scene(*objects: SceneObject) -> Scene:
    lights = {name: position for name, (position, *_) in world.AREA_LIGHTS.items()}
    return Scene(0, world.CAMERA, lights, objects)


def inside(shape: str, row: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Implicit description of the solids, written independently of the ray code."""
    p = points - row[geometry.X : geometry.Z + 1]
    r = row[geometry.RADIUS]
    if shape == "sphere":
        return (p**2).sum(-1) < r**2
    if shape == "cylinder":
        return ((p[..., :2] ** 2).sum(-1) < r**2) & (np.abs(p[..., 2]) < r)
    c, s = row[geometry.COS], row[geometry.SIN]
    local = np.stack([c * p[..., 0] + s * p[..., 1], c * p[..., 1] - s * p[..., 0], p[..., 2]], -1)
    return (np.abs(local) < r).all(-1)


@pytest.mark.parametrize("shape", world.SHAPES)
def test_hits_agree_with_marching(shape):
    row = pack_objects((an_object(shape),))[0]
    step = 1e-3
    ts = np.arange(0, 16, step)
    hits = 0
    for _ in range(300):
        origin = RNG.normal(size=3) * 3
        target = np.array([0.3, -0.2, 0.7]) + RNG.normal(size=3) * 0.6
        direction = (target - origin) / np.linalg.norm(target - origin)
        if inside(shape, row, origin):
            continue
        along = inside(shape, row, origin + ts[:, None] * direction)
        t = hit_object(row, *origin, *direction)
        if along.any():
            assert t == pytest.approx(ts[along.argmax()], abs=2 * step)
            hits += 1
        else:  # a graze shorter than a step may be missed by marching, never a real crossing
            assert t == MISS or not inside(shape, row, origin + (t + step) * direction)
    assert hits > 80


def test_sphere_and_cube_hits_in_closed_form():
    sphere = pack_objects((an_object("sphere", (0, 0, 0.7), 0),))[0]
    assert hit_object(sphere, 5.0, 0.0, 0.7, -1.0, 0.0, 0.0) == pytest.approx(4.3)
    cube = pack_objects((an_object("cube", (0, 0, 0.7), math.pi / 4),))[0]
    assert hit_object(cube, 5.0, 0.0, 0.7, -1.0, 0.0, 0.0) == pytest.approx(5 - 0.7 * math.sqrt(2))  # meets the edge
    cylinder = pack_objects((an_object("cylinder", (0, 0, 0.7), 0),))[0]
    assert hit_object(cylinder, 0.1, 0.1, 5.0, 0.0, 0.0, -1.0) == pytest.approx(5 - 1.4)  # the cap


@pytest.mark.parametrize("shape", world.SHAPES)
def test_normals_point_out_and_are_perpendicular(shape):
    row = pack_objects((an_object(shape),))[0]
    centre = np.array([0.3, -0.2, 0.7])
    for _ in range(200):
        origin = centre + RNG.normal(size=3) * 3
        direction = centre + RNG.normal(size=3) * 0.3 - origin
        direction /= np.linalg.norm(direction)
        t = hit_object(row, *origin, *direction)
        if t == MISS:
            continue
        point = origin + t * direction
        normal = np.array(object_normal(row, *point))
        assert np.linalg.norm(normal) == pytest.approx(1)
        assert not inside(shape, row, point + 1e-3 * normal)
        assert inside(shape, row, point - 1e-3 * normal)


def test_ground_hits_lie_on_the_sweep():
    """The profile z(u): 0, then a quarter circle, then a wall; checked against its implicit equation."""
    start, radius = world.SWEEP_START, world.SWEEP_RADIUS
    kinds = set()
    for _ in range(500):
        origin = np.array([RNG.uniform(-3, 8), RNG.uniform(-8, 3), RNG.uniform(0.5, 6)])
        direction = RNG.normal(size=3)
        direction /= np.linalg.norm(direction)
        t = hit_ground(*origin, *direction)
        if t == MISS:
            continue
        point = origin + t * direction
        u = point[:2] @ np.array(world.SWEEP_DIRECTION)
        if u <= start:
            kinds.add("floor")
            assert point[2] == pytest.approx(0, abs=1e-9)
        elif point[2] < radius:
            kinds.add("sweep")
            assert math.hypot(u - start, point[2] - radius) == pytest.approx(radius)
        else:
            kinds.add("wall")
            assert u == pytest.approx(start + radius)
    assert kinds == {"floor", "sweep", "wall"}


def test_mask_centre_is_the_projected_centre():
    """A sphere's silhouette is an ellipse around (nearly) its projected centre, at any pixel aspect."""
    position = (0.5, -1.0, 0.35)
    scene = a_scene(SceneObject("sphere", "small", "red", "rubber", position, 0.0, (0.0, 0.0)))
    for width, height in ((320, 240), (128, 128), (96, 200)):
        _, masks = render([scene], width, height)
        ys, xs = np.nonzero(masks[0])
        px, py = project(world.CAMERA, position)
        assert (xs + 0.5).mean() == pytest.approx(px * width / 320, abs=0.6)
        assert (ys + 0.5).mean() == pytest.approx(py * height / 240, abs=0.6)


def test_mask_agrees_with_a_painter_that_marches_every_pixel():
    scene = random_scene(31, 4)
    _, masks = render([scene], 40, 30)
    rows = pack_objects(scene.objects)
    cam = geometry.pack_camera(scene.camera)
    for y in range(0, 30, 3):
        for x in range(0, 40, 3):
            direction = np.array(geometry.camera_ray(cam, 2 * (x + 0.5) / 40 - 1, 1 - 2 * (y + 0.5) / 30))
            points = np.array(scene.camera) + np.arange(4, 18, 2e-3)[:, None] * direction
            entry = [inside(o.shape, r, points) for o, r in zip(scene.objects, rows, strict=True)]
            firsts = [e.argmax() if e.any() else 10**9 for e in entry]
            expected = int(np.argmin(firsts)) + 1 if min(firsts) < 10**9 else 0
            assert masks[0, y, x] == expected


def test_floor_radiance_by_hand():
    """Direct light of an empty scene: P/(pi A) times the solid angle integral over each square, and the sun."""
    scene = a_scene()
    linear = render_linear(scene, 65, 65)[32, 32]  # the origin
    expected = np.zeros(3)
    n = 40
    offsets = (np.arange(n) + 0.5) / n - 0.5
    for light, (_, side, power, color) in zip(pack_lights(scene), world.AREA_LIGHTS.values(), strict=True):
        centre, u, v, facing = light[0:3], light[3:6] * 2, light[6:9] * 2, light[9:12]
        points = centre + offsets[:, None, None] * u + offsets[None, :, None] * v  # [n, n, 3]
        d2 = (points**2).sum(-1)
        form = (points[..., 2] * -(points @ facing) / d2**2).mean() * side**2
        expected += power / (math.pi * side**2) * form * np.array(color)
    sun_cosine = math.cos(world.SUN_ROTATION[0]) * math.cos(world.SUN_ROTATION[1])
    expected += world.SUN_STRENGTH * sun_cosine
    expected *= world.GROUND_ALBEDO / math.pi
    # what the renderer adds on top is the light scattered by the ground's own curve: 0 to 20%
    assert (linear > expected * 1.0).all()
    assert (linear < expected * 1.2).all()


def test_shadow_share_is_the_covered_part_of_the_light():
    """A cube whose edge halves the view of a light: the visible share, averaged over phases, is the exact area."""
    scene = a_scene(an_object("cube", (0.0, 0.0, 0.7), 0.0))
    objs = pack_objects(scene.objects)
    for light in pack_lights(scene):
        for _ in range(6):
            point = np.array([*RNG.uniform(-2.5, 2.5, 2), 0.0])
            if inside("cube", objs[0], point + [0, 0, 1e-3]):
                continue
            shares = [light_visibility(objs, geometry.GROUND, light, *point, k / 64) for k in range(64)]
            grid = (np.arange(60) + 0.5) / 60 * 2 - 1
            visible = 0
            for a in grid:
                for b in grid:
                    d = light[0:3] + a * light[3:6] + b * light[6:9] - point
                    length = np.linalg.norm(d)
                    visible += hit_object(objs[0], *point, *(d / length)) >= length
            assert np.mean(shares) == pytest.approx(visible / 3600, abs=0.06)


def test_metal_reflects_its_neighbours():
    """Next to a bright yellow cube, a grey metal sphere turns yellower than alone."""
    sphere = an_object("sphere", (0.0, 0.0, 0.7), 0.0, "metal", "gray")
    cube = an_object("cube", (1.0, -1.4, 0.7), 0.0, "rubber", "yellow")
    images, masks = render([a_scene(sphere), a_scene(sphere, cube)], 128, 96)
    both = (masks[0] == 1) & (masks[1] == 1)
    yellowness = images[..., 0].astype(float) + images[..., 1] - 2.0 * images[..., 2]
    assert yellowness[1][both].max() > yellowness[0][both].max() + 20


def test_edges_are_antialiased_and_resolution_independent():
    """Down-sampling a 4x larger image (in linear light) gives nearly the small image."""
    scene = random_scene(77, 3)
    small = render_linear(scene, 64, 48)
    large = render_linear(scene, 256, 192).reshape(48, 4, 64, 4, 3).mean((1, 3))
    assert np.abs(np.clip(small, 0, 1) - np.clip(large, 0, 1)).mean() < 0.004


def test_batch_equals_one_by_one():
    scenes = [random_scene(s, 1 + s % 4) for s in range(5)]
    images, masks = render(scenes, 48, 48)
    for i, scene in enumerate(scenes):
        image, mask = render([scene], 48, 48)
        assert (image[0] == images[i]).all()
        assert (mask[0] == masks[i]).all()
    assert render([], 48, 48)[0].shape == (0, 48, 48, 3)


@pytest.mark.parametrize("size", [(0, 10), (10, 100_000), (-1, 5)])
def test_bad_sizes(size):
    with pytest.raises(LcsError, match="image size"):
        render([random_scene(0, 1)], *size)


SIMULATED = """
import sys
import numpy as np
from lcs.render.gpu import render_gpu
from lcs.scenes.placement import random_scene
images, masks = render_gpu([random_scene(s, 1 + s) for s in range(3)], 20, 16)
np.save(sys.argv[1], np.concatenate([images, masks[..., None]], -1))
"""


def test_gpu_kernels_agree_with_the_cpu_in_the_simulator(tmp_path):
    """In a process of its own, with plain Python functions: the simulator's arrays are unknown to the compiler."""
    env = os.environ | {"NUMBA_ENABLE_CUDASIM": "1", "NUMBA_DISABLE_JIT": "1"}
    env["PYTHONPATH"] = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", SIMULATED, str(tmp_path / "gpu.npy")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    gpu = np.load(tmp_path / "gpu.npy")
    images, masks = render([random_scene(s, 1 + s) for s in range(3)], 20, 16)
    assert (masks == gpu[..., 3]).all()
    assert masks.any()
    assert np.abs(images.astype(int) - gpu[..., :3].astype(int)).max() <= 1
