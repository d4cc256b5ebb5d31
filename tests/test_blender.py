"""The reference renderer against the scene's own geometry and closed-form light."""

import math
import subprocess
import sys

import numpy as np
import pytest

from lcs.errors import LcsError
from lcs.render.blender import PACKAGE, PYTHON_VARIABLE, BlenderRenderer, blender_available, blender_python
from lcs.scenes import world
from lcs.scenes.scene import Scene, SceneObject, look_at_axes, project, sun_direction

pytestmark = pytest.mark.slow
LIGHTS = {name: position for name, (position, *_) in world.AREA_LIGHTS.items()}


@pytest.fixture(scope="module")
def blender():
    reason = blender_available()
    if reason:
        pytest.skip(reason)
    with BlenderRenderer(threads=2) as renderer:
        yield renderer


def thing(shape, x, y, size="large", color="red", material="rubber", rotation=0.3, camera=world.CAMERA):
    position = (x, y, world.SIZES[size])
    return SceneObject(shape, size, color, material, position, rotation, project(camera, position))


def scene_of(*objects, camera=world.CAMERA):
    return Scene(0, camera, LIGHTS, objects)


def pixel_rays(camera, width, height):
    """Unit rays through the pixel centres of a width x height picture of the 4:3 field of view."""
    right, up, forward = (np.array(v) for v in look_at_axes(camera))
    x = ((np.arange(width) + 0.5) / width - 0.5) * world.SENSOR_WIDTH / world.LENS
    y = (0.5 - (np.arange(height) + 0.5) / height) * world.SENSOR_WIDTH / world.LENS * 3 / 4
    rays = forward + x[None, :, None] * right + y[:, None, None] * up
    return rays / np.linalg.norm(rays, axis=-1, keepdims=True)


@pytest.mark.parametrize(("width", "height"), [(320, 240), (512, 288), (256, 384)])
def test_centres_appear_where_the_projection_says(blender, width, height):
    camera = tuple(4 * c for c in world.CAMERA)  # far away, so that objects are a few pixels
    objects = [thing("sphere", x, y, camera=camera) for x, y in ((0, 0), (-7, 5), (6, 7), (8, -6))]
    mask = blender.render(scene_of(*objects, camera=camera), width, height, samples=1).mask
    for index, item in enumerate(objects, start=1):
        rows, columns = np.nonzero(mask == index)
        assert len(rows) > 10
        expected = item.location[0] * width, item.location[1] * height
        assert abs(columns.mean() + 0.5 - expected[0]) < 0.5
        assert abs(rows.mean() + 0.5 - expected[1]) < 0.5


@pytest.mark.parametrize(("width", "height"), [(128, 128), (160, 120)])
def test_mask_is_the_nearest_sphere_at_each_pixel_centre(blender, width, height):
    objects = [thing("sphere", 0, 0), thing("sphere", 1.2, -1.2, size="small"), thing("sphere", -2, 1)]
    mask = blender.render(scene_of(*objects), width, height, samples=1).mask
    rays, nearest = pixel_rays(world.CAMERA, width, height), np.full((height, width), np.inf)
    expected = np.zeros((height, width), np.uint8)
    for index, item in enumerate(objects, start=1):
        offset = np.array(world.CAMERA) - item.position
        b = rays @ offset
        discriminant = b**2 - offset @ offset + item.radius**2
        distance = np.where(discriminant > 0, -b - np.sqrt(np.maximum(discriminant, 0)), np.inf)
        expected[distance < nearest] = index
        nearest = np.minimum(distance, nearest)
    assert set(np.unique(expected)) == {0, 1, 2, 3}
    assert (mask != expected).sum() <= 4  # the mesh is a fine polyhedron, not a sphere


def test_mask_ids_match_the_colours_seen(blender):
    objects = [thing(s, x, y, color=c) for s, x, y, c in (("cube", -2, 1, "red"), ("cylinder", 1.5, 1, "blue"))]
    result = blender.render(scene_of(*objects), 128, 128, samples=16, denoise=True)
    means = [result.image[result.mask == i].mean(axis=0) for i in (1, 2)]
    assert means[0][0] > 1.5 * means[0][2]
    assert means[1][2] > 1.5 * means[1][0]
    assert result.mask.max() == 2


def test_floor_is_as_bright_as_the_lights_make_it(blender):
    result = blender.render(scene_of(), 64, 48, samples=64, linear=True)
    direct = world.SUN_STRENGTH * sun_direction()[2] * np.ones(3)  # irradiance at the origin
    for position, _, power, color in world.AREA_LIGHTS.values():
        distance = math.hypot(*position)  # far larger than the light: a point source that faces the origin
        direct += power / math.pi * (position[2] / distance) / distance**2 * np.array(color)
    floor = result.linear[21:27, 29:35].mean(axis=(0, 1))
    ratio = floor / (world.GROUND_ALBEDO / math.pi * direct)
    assert np.all((ratio > 1.05) & (ratio < 1.2))  # the rest comes by way of floor and sweep
    encoded = np.where(
        result.linear <= 0.0031308, 12.92 * result.linear, 1.055 * np.maximum(result.linear, 1e-9) ** (1 / 2.4) - 0.055
    )
    assert np.abs(result.image - np.clip(encoded, 0, 1) * 255).max() < 1.0


def test_a_scene_does_not_depend_on_the_one_before(blender):
    one, other = scene_of(thing("cube", 0, 0, material="metal")), scene_of(thing("sphere", 1, 1), thing("cube", -2, 0))
    first, _, again = (blender.render(s, 32, 32, samples=2, seed=5) for s in (one, other, one))
    assert np.array_equal(first.image, again.image)
    assert np.array_equal(first.mask, again.mask)


STAND_INS = """
import sys
from pathlib import Path
import bpy
from lcs.render import blender_worker as worker

out = Path(sys.argv[1])
kit = worker.build_from_primitives()
(out / "shapes").mkdir()
(out / "materials").mkdir()
for shape, name in worker.SHAPE_NAMES.items():  # every shape a sphere: not what primitives would show
    block = bpy.data.objects.new("stand-in", kit.shapes["sphere"].data)
    kit.shapes[shape].name = "taken"
    block.name = name
    bpy.data.libraries.write(str(out / "shapes" / (name + ".blend")), {block})
for material, name in worker.MATERIAL_NAMES.items():  # every material shines in its own colour
    kit.materials[material].name = "taken"
    tree, add, color, surface = worker._shader_group(name)
    emission = add("ShaderNodeEmission")
    tree.links.new(color, emission.inputs["Color"])
    tree.links.new(emission.outputs[0], surface)
    bpy.data.libraries.write(str(out / "materials" / (name + ".blend")), {tree})
for block in (*bpy.data.meshes, *bpy.data.node_groups, *bpy.data.objects):
    block.use_fake_user = False
bpy.ops.wm.save_as_mainfile(filepath=str(out / "base_scene.blend"))
"""


@pytest.fixture(scope="module")
def assets(blender, tmp_path_factory):
    """Small files with the names and contents of the original's, recognisably different in looks."""
    folder = tmp_path_factory.mktemp("assets")
    command = [str(blender_python()), "-c", STAND_INS, str(folder)]
    subprocess.run(command, check=True, capture_output=True, env={"PYTHONPATH": str(PACKAGE.parent)}, timeout=120)
    return folder


def test_clevr_assets_replace_the_primitives(assets):
    objects = [thing("cube", 0, 0, color="cyan"), thing("cylinder", 2, 1, color="brown", material="metal")]
    with BlenderRenderer(clevr_assets=assets, threads=2) as renderer:
        result = renderer.render(scene_of(*objects), 128, 96, samples=4, linear=True)
        again = renderer.render(scene_of(thing("sphere", 0, 0)), 128, 96, samples=4)
    for index, item in enumerate(objects, start=1):
        x, y = int(item.location[0] * 128), int(item.location[1] * 96)
        assert result.mask[y, x] == index
        assert np.allclose(result.linear[y, x] * 255, world.COLORS[item.color], atol=0.5)
    assert np.array_equal(result.mask == 1, again.mask == 1)  # the stand-in for the cube is a sphere


def test_missing_assets_are_named(assets, tmp_path):
    with pytest.raises(LcsError, match="nowhere is not a directory"):
        BlenderRenderer(clevr_assets=tmp_path / "nowhere")
    with pytest.raises(LcsError, match=r"base_scene\.blend does not exist"), BlenderRenderer(clevr_assets=tmp_path):
        pass
    for missing in ("shapes/SmoothCube_v2.blend", "materials/MyMetal.blend"):
        folder = tmp_path / missing.replace("/", "-")
        for file in assets.rglob("*.blend"):
            if str(file.relative_to(assets)) != missing:
                target = folder / file.relative_to(assets)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(file)
        with pytest.raises(LcsError, match=f"{missing} does not exist"), BlenderRenderer(clevr_assets=folder):
            pass


def test_a_dead_worker_is_an_error_not_a_hang(blender):
    with BlenderRenderer(threads=1) as renderer:
        renderer._process.kill()
        with pytest.raises(LcsError, match="exit code -9"):
            renderer.render(scene_of(), 16, 16, samples=1)
    with pytest.raises(LcsError, match="closed"):
        renderer.render(scene_of(), 16, 16, samples=1)


def test_a_slow_worker_is_stopped(blender):
    with BlenderRenderer(threads=1, timeout=0.2) as renderer:
        with pytest.raises(LcsError, match=r"within 0\.2 seconds"):
            renderer.render(scene_of(thing("cube", 0, 0)), 256, 256, samples=512)
        assert renderer._process is None


def test_bad_requests_are_named_before_blender_sees_them(blender):
    with pytest.raises(LcsError, match="samples must be at least 1, got 0"):
        blender.render(scene_of(), 16, 16, samples=0)
    with pytest.raises(LcsError, match="threads must be 0"):
        BlenderRenderer(threads=-1)


def test_absence_is_explained(monkeypatch):
    monkeypatch.setenv(PYTHON_VARIABLE, "/nonexistent/python")
    assert "/nonexistent/python does not exist: run `make blender`" in blender_available()
    with pytest.raises(LcsError, match="make blender"), BlenderRenderer():
        pass
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)
    assert "No module named 'bpy'" in blender_available()
