"""Scenes: projection by hand, placement rules on thousands of scenes, JSON round trip, clear errors."""

import json
import math

import numpy as np
import pytest

from lcs.errors import LcsError
from lcs.render.fast import render
from lcs.scenes import placement, world
from lcs.scenes.placement import random_scene
from lcs.scenes.scene import (
    Scene,
    ground_directions,
    look_at_axes,
    project,
    read_scenes,
    scene_from_json,
    scene_to_json,
    sun_direction,
    unproject,
    write_scenes,
)

SCENES = [random_scene(seed, count) for count in range(1, 7) for seed in range(400)]


def test_projection_by_hand():
    # A camera on the -y axis at height 0 looks along +y: x right, z up, focal 350 px, centre (160, 120).
    camera = (0.0, -10.0, 0.0)
    assert project(camera, (0.0, 0.0, 0.0)) == pytest.approx((160, 120))
    assert project(camera, (1.0, 0.0, 0.0)) == pytest.approx((160 + 350 / 10, 120))
    assert project(camera, (0.0, 0.0, 2.0)) == pytest.approx((160, 120 - 350 * 2 / 10))
    assert project(camera, (1.0, 10.0, 1.0)) == pytest.approx((160 + 350 / 20, 120 - 350 / 20))
    # The original camera: focal length 35 mm on a 32 mm sensor; the origin is in the middle.
    assert project(world.CAMERA, (0.0, 0.0, 0.0)) == pytest.approx((160, 120))


def test_unproject_inverts_project_and_refuses_the_sky():
    for point in ((0.0, 0.0, 0.7), (2.5, -1.0, 0.35), (-3.0, 2.0, 0.0)):
        pixel = project(world.CAMERA, point)
        assert unproject(world.CAMERA, pixel, point[2]) == pytest.approx(point)
    with pytest.raises(LcsError, match="does not show"):
        unproject(world.CAMERA, (160.0, -500.0), 0.0)


def test_axes_are_orthonormal_and_right_handed():
    right, up, forward = (np.array(v) for v in look_at_axes(world.CAMERA))
    matrix = np.stack([right, up, -forward])
    assert np.allclose(matrix @ matrix.T, np.eye(3), atol=1e-12)
    assert np.linalg.det(matrix) == pytest.approx(1)
    assert right[2] == pytest.approx(0)  # the horizon is level
    assert up[2] > 0


def test_sun_direction_by_rotation_matrices():
    x, y, z = world.SUN_ROTATION
    rx = np.array([[1, 0, 0], [0, math.cos(x), -math.sin(x)], [0, math.sin(x), math.cos(x)]])
    ry = np.array([[math.cos(y), 0, math.sin(y)], [0, 1, 0], [-math.sin(y), 0, math.cos(y)]])
    rz = np.array([[math.cos(z), -math.sin(z), 0], [math.sin(z), math.cos(z), 0], [0, 0, 1]])
    assert np.allclose(sun_direction(), rz @ ry @ rx @ [0, 0, 1])


def test_placement_rules_hold_on_2400_scenes():
    for scene in SCENES:
        directions = ground_directions(scene.camera)
        for i, a in enumerate(scene.objects):
            assert abs(a.position[0]) <= 3
            assert abs(a.position[1]) <= 3
            assert a.position[2] == a.radius
            assert 0 < a.location[0] < 1
            assert 0 < a.location[1] < 1
            for b in scene.objects[:i]:
                delta = np.subtract(a.position, b.position)[:2]
                assert np.hypot(*delta) - a.radius - b.radius >= world.MIN_GAP
                for direction in directions.values():  # the original: 0 < margin < 0.4 is refused
                    margin = float(delta @ np.array(direction[:2]))
                    assert not 0 < margin < world.MIN_MARGIN


def test_every_object_shows_200_pixels():
    # Independent of the early-stopping count inside placement: from the rendered mask of the whole image.
    crowded = [scene for scene in SCENES if len(scene.objects) == 6][:30]
    _, masks = render(crowded, world.IMAGE_WIDTH, world.IMAGE_HEIGHT)
    for scene, mask in zip(crowded, masks, strict=True):
        for i in range(len(scene.objects)):
            assert (mask == i + 1).sum() >= world.MIN_VISIBLE_PIXELS


def test_attributes_and_positions_are_uniform():
    objects = [o for scene in SCENES for o in scene.objects]
    for names, values in (
        (world.SHAPES, [o.shape for o in objects]),
        (world.COLOR_NAMES, [o.color for o in objects]),
        (world.MATERIALS, [o.material for o in objects]),
    ):
        expected = len(objects) / len(names)
        chi2 = sum((values.count(n) - expected) ** 2 / expected for n in names)
        assert chi2 < 30, (names, chi2)  # 7 degrees of freedom at most: p < 1e-4
    single = [scene.objects[0] for scene in SCENES if len(scene.objects) == 1]
    xs = np.array([o.position[0] for o in single])
    assert abs(xs.mean()) < 4 * 3 / math.sqrt(3 * len(xs))  # uniform(-3, 3): variance 3
    assert xs.var() == pytest.approx(3, rel=0.2)
    assert np.array([o.rotation for o in single]).mean() == pytest.approx(math.pi, rel=0.1)


def test_jitter_stays_in_its_box_and_fills_it():
    cameras = np.array([scene.camera for scene in SCENES[:400]]) - world.CAMERA
    assert np.abs(cameras).max() <= world.CAMERA_JITTER
    assert np.abs(cameras).max() > 0.95 * world.CAMERA_JITTER
    for name, (position, *_) in world.AREA_LIGHTS.items():
        offsets = np.array([scene.lights[name] for scene in SCENES[:400]]) - position
        assert 0.95 < np.abs(offsets).max() <= world.LIGHT_JITTER


def test_same_seed_same_scene():
    assert random_scene(5, 3) == random_scene(5, 3)
    assert random_scene(5, 3) != random_scene(6, 3)
    # A frozen example: if this changes, every dataset and every seed in every paper changes.
    scene = random_scene(12345, 2)
    assert [(o.shape, o.size, o.color, o.material) for o in scene.objects] == FROZEN_ATTRIBUTES
    assert scene.objects[0].position == pytest.approx(FROZEN_POSITION, abs=1e-12)


FROZEN_ATTRIBUTES = [("sphere", "large", "yellow", "metal"), ("cylinder", "small", "green", "rubber")]
FROZEN_POSITION = (-1.9715634439672471, -1.84279471262458, 0.7)


def test_json_round_trip(tmp_path):
    write_scenes(tmp_path / "scenes.json", SCENES[:50])
    assert read_scenes(tmp_path / "scenes.json") == SCENES[:50]
    data = scene_to_json(SCENES[0])
    assert set(data["objects"][0]) >= {"shape", "size", "color", "material", "3d_coords", "rotation", "pixel_coords"}
    assert set(data["directions"]) == {"left", "right", "front", "behind"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("camera"), "camera"),
        (lambda d: d["objects"][0].update(color="pink"), "pink"),
        (lambda d: d["objects"][0].update(shape="torus"), "torus"),
        (lambda d: d["objects"][0].update({"3d_coords": [1, 2]}), "3d_coords"),
        (lambda d: d["objects"][0].update({"3d_coords": [1, 2, float("nan")]}), "finite"),
        (lambda d: d.update(lights={"key": [0, 0, 1]}), "fill"),
    ],
)
def test_bad_json_names_the_problem(change, message):
    data = json.loads(json.dumps(scene_to_json(SCENES[0])))
    change(data)
    with pytest.raises(LcsError, match=message):
        scene_from_json(data)


def test_unreadable_files(tmp_path):
    with pytest.raises(LcsError, match="cannot read"):
        read_scenes(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(LcsError, match="not JSON"):
        read_scenes(tmp_path / "bad.json")


def test_retries_are_bounded(monkeypatch):
    monkeypatch.setattr(world, "MIN_VISIBLE_PIXELS", 10**6)  # nothing is ever visible enough
    with pytest.raises(LcsError, match="no valid scene with 2 objects for seed 3 after 20 restarts"):
        random_scene(3, 2, max_restarts=20)


@pytest.mark.parametrize("count", [-1, placement.MAX_OBJECTS + 1])
def test_impossible_counts(count):
    with pytest.raises(LcsError, match=str(count)):
        random_scene(0, count)


def test_empty_scene():
    assert random_scene(0, 0).objects == ()
    assert isinstance(random_scene(0, 0), Scene)
