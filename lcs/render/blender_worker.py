"""The reference renderer: CLEVR scenes through Blender's Cycles, as a process that answers requests.

Started by `lcs.render.blender` as `python -m lcs.render.blender_worker` with the Python that has the
`bpy` module. One JSON object a line: requests on standard input, answers on standard output.

    request  {"scene": ..., "width", "height", "samples", "denoise", "seed", "mask", "linear", "out"}
    answer   {"ok": true, "seconds": ...}  or  {"ok": false, "error": "..."}

Files written to the directory `out`: `image.png` (8-bit sRGB), `mask.npy` (uint8, 0 = no object,
i + 1 = object i, taken at pixel centres), `linear.npy` (float32 scene-linear RGB); rows top down.

The world is built from primitives with the numbers of `lcs.scenes.world`, or, with
`--clevr-assets DIR`, loaded from the .blend files of the original generator.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import bpy  # before bmesh and mathutils, which it brings along

# isort: split
import bmesh
import mathutils
import numpy as np

from lcs.errors import LcsError
from lcs.scenes import world
from lcs.scenes.scene import Scene, look_at_axes, scene_from_json

# Names used by the original's .blend files, kept for our own primitives.
CAMERA_NAME = "Camera"
LIGHT_NAMES = {"key": "Lamp_Key", "fill": "Lamp_Fill", "back": "Lamp_Back"}
SHAPE_NAMES = {"cube": "SmoothCube_v2", "sphere": "Sphere", "cylinder": "SmoothCylinder"}
MATERIAL_NAMES = {"rubber": "Rubber", "metal": "MyMetal"}

# Extent of the ground in metres, far outside the picture: what is beyond it is black.
GROUND_HALF_WIDTH, GROUND_FRONT, WALL_HEIGHT = 60.0, 60.0, 40.0
SWEEP_SEGMENTS = 128


@dataclass(frozen=True)
class Kit:
    """What scenes are assembled from: one unlinked object a shape, one node group a material."""

    shapes: dict[str, bpy.types.Object]
    materials: dict[str, bpy.types.NodeTree]


# ---- the world from primitives -------------------------------------------------------------------


def build_from_primitives() -> Kit:
    bpy.ops.wm.read_factory_settings(use_empty=True)
    scene = bpy.context.scene
    scene.world = bpy.data.worlds.new("World")
    scene.world.use_nodes = True
    scene.world.node_tree.nodes["Background"].inputs["Strength"].default_value = 0.0

    camera = bpy.data.cameras.new(CAMERA_NAME)
    camera.lens, camera.sensor_width = world.LENS, world.SENSOR_WIDTH
    scene.camera = _add_object(CAMERA_NAME, camera)
    for name, (_, side, power, color) in world.AREA_LIGHTS.items():
        light = bpy.data.lights.new(LIGHT_NAMES[name], "AREA")
        light.shape, light.size, light.energy, light.color = "SQUARE", side, power, color
        _add_object(LIGHT_NAMES[name], light)
    sun = bpy.data.lights.new("Sun", "SUN")
    sun.energy, sun.angle = world.SUN_STRENGTH, 0.0
    _add_object("Sun", sun).rotation_euler = world.SUN_ROTATION
    _add_object("Ground", _ground_mesh())
    return Kit(
        shapes={name: bpy.data.objects.new(SHAPE_NAMES[name], mesh) for name, mesh in _shape_meshes().items()},
        materials={"rubber": _rubber(), "metal": _metal()},
    )


def _add_object(name: str, data) -> bpy.types.Object:
    obj = bpy.data.objects.new(name, data)
    bpy.context.scene.collection.objects.link(obj)
    return obj


def _ground_mesh() -> bpy.types.Mesh:
    """Floor, quarter circle and wall: a profile (u, z) swept sideways, with the exact normals."""
    (du, dv), start, radius = world.SWEEP_DIRECTION, world.SWEEP_START, world.SWEEP_RADIUS
    profile = [(-GROUND_FRONT, 0.0, 0.0)]  # u, z, angle of the normal from vertical
    for k in range(SWEEP_SEGMENTS + 1):
        angle = k / SWEEP_SEGMENTS * math.pi / 2
        profile.append((start + radius * math.sin(angle), radius * (1 - math.cos(angle)), angle))
    profile.append((start + radius, WALL_HEIGHT, math.pi / 2))
    vertices, normals = [], []
    for u, z, angle in profile:
        for side in (-GROUND_HALF_WIDTH, GROUND_HALF_WIDTH):
            vertices.append((u * du - side * dv, u * dv + side * du, z))
            normals.append((-math.sin(angle) * du, -math.sin(angle) * dv, math.cos(angle)))
    quads = [(2 * k, 2 * k + 2, 2 * k + 3, 2 * k + 1) for k in range(len(profile) - 1)]
    mesh = bpy.data.meshes.new("Ground")
    mesh.from_pydata(vertices, [], quads)
    mesh.shade_smooth()
    mesh.normals_split_custom_set_from_vertices(normals)
    return mesh


def _shape_meshes() -> dict[str, bpy.types.Mesh]:
    """Shapes that span +-1 on each axis."""
    cube, sphere, cylinder = bmesh.new(), bmesh.new(), bmesh.new()
    bmesh.ops.create_cube(cube, size=2.0)
    bmesh.ops.create_uvsphere(sphere, u_segments=128, v_segments=64, radius=1.0)
    bmesh.ops.create_cone(cylinder, cap_ends=True, segments=128, radius1=1.0, radius2=1.0, depth=2.0)
    for face in sphere.faces:
        face.smooth = True
    for face in cylinder.faces:
        face.smooth = len(face.verts) == 4
    for edge in cylinder.edges:
        edge.smooth = all(face.smooth for face in edge.link_faces)
    meshes = {}
    for name, shape in (("cube", cube), ("sphere", sphere), ("cylinder", cylinder)):
        meshes[name] = bpy.data.meshes.new(SHAPE_NAMES[name])
        shape.to_mesh(meshes[name])
        shape.free()
    return meshes


def _rubber() -> bpy.types.NodeTree:
    tree, add, color, surface = _shader_group(MATERIAL_NAMES["rubber"])
    diffuse = add("ShaderNodeBsdfDiffuse", Roughness=0.0)
    velvet = add("ShaderNodeBsdfSheen", Roughness=world.RUBBER_VELVET_SIGMA)
    velvet.distribution = "ASHIKHMIN"
    gloss = add("ShaderNodeBsdfAnisotropic", Roughness=world.RUBBER_GLOSS_ROUGHNESS, Color=(1.0, 1.0, 1.0, 1.0))
    gloss.distribution = "GGX"
    fresnel = add("ShaderNodeFresnel", IOR=world.RUBBER_IOR)
    base, coat = add("ShaderNodeMixShader", Fac=world.RUBBER_VELVET), add("ShaderNodeMixShader")
    for source, target in (
        (color, diffuse.inputs["Color"]),
        (color, velvet.inputs["Color"]),
        (diffuse.outputs[0], base.inputs[1]),
        (velvet.outputs[0], base.inputs[2]),
        (fresnel.outputs[0], coat.inputs["Fac"]),
        (base.outputs[0], coat.inputs[1]),
        (gloss.outputs[0], coat.inputs[2]),
        (coat.outputs[0], surface),
    ):
        tree.links.new(source, target)
    return tree


def _metal() -> bpy.types.NodeTree:
    tree, add, color, surface = _shader_group(MATERIAL_NAMES["metal"])
    mix = add("ShaderNodeMixShader", Fac=world.METAL_MIX)
    for slot, roughness in zip((1, 2), world.METAL_ROUGHNESS, strict=True):
        lobe = add("ShaderNodeBsdfAnisotropic", Roughness=roughness)
        lobe.distribution = "GGX"
        tree.links.new(color, lobe.inputs["Color"])
        tree.links.new(lobe.outputs[0], mix.inputs[slot])
    tree.links.new(mix.outputs[0], surface)
    return tree


def _shader_group(name: str):
    """An empty node group Color -> Shader, as the original's: (tree, add node, its input, its output)."""
    tree = bpy.data.node_groups.new(name, "ShaderNodeTree")
    tree.interface.new_socket("Color", in_out="INPUT", socket_type="NodeSocketColor")
    tree.interface.new_socket("Shader", in_out="OUTPUT", socket_type="NodeSocketShader")

    def add(kind: str, **values):
        node = tree.nodes.new(kind)
        for key, value in values.items():
            node.inputs[key].default_value = value
        return node

    return tree, add, add("NodeGroupInput").outputs["Color"], add("NodeGroupOutput").inputs["Shader"]


# ---- the world from the original's files ---------------------------------------------------------


def load_clevr_assets(directory: Path) -> Kit:
    """`base_scene.blend`, `shapes/*.blend` and `materials/*.blend` of the original generator."""
    bpy.ops.wm.open_mainfile(filepath=str(_existing(directory / "base_scene.blend")), load_ui=False)
    for name in (CAMERA_NAME, *LIGHT_NAMES.values()):
        if name not in bpy.data.objects:
            raise LcsError(f"{directory / 'base_scene.blend'} has no object {name!r}")
    for obj in bpy.data.objects:
        obj.pass_index = 0  # the masks count only what is placed
    bpy.context.scene.camera = bpy.data.objects[CAMERA_NAME]
    shapes = {
        shape: _append(directory / "shapes" / f"{name}.blend", "objects", name) for shape, name in SHAPE_NAMES.items()
    }
    materials = {
        material: _append(directory / "materials" / f"{name}.blend", "node_groups", name)
        for material, name in MATERIAL_NAMES.items()
    }
    return Kit(shapes, materials)


def _append(path: Path, kind: str, name: str):
    with bpy.data.libraries.load(str(_existing(path)), link=False) as (source, target):
        if name not in getattr(source, kind):
            raise LcsError(f"{path} has no {name!r} among its {kind}")
        setattr(target, kind, [name])
    return getattr(target, kind)[0]


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise LcsError(f"CLEVR asset {path} does not exist")
    return path


# ---- one scene -----------------------------------------------------------------------------------


def place(scene: Scene, kit: Kit) -> None:
    """Replace the objects of the previous scene by those of this one; move camera and lights."""
    for obj in [o for o in bpy.data.objects if "lcs_object" in o]:
        bpy.data.objects.remove(obj)
    for material in [m for m in bpy.data.materials if "lcs_material" in m]:
        bpy.data.materials.remove(material)
    _look_at_origin(bpy.data.objects[CAMERA_NAME], scene.camera)
    for name, position in scene.lights.items():
        _look_at_origin(bpy.data.objects[LIGHT_NAMES[name]], position)
    for index, item in enumerate(scene.objects, start=1):
        obj = kit.shapes[item.shape].copy()
        obj["lcs_object"] = index
        obj.pass_index = index
        obj.location = item.position
        obj.rotation_euler[2] = item.rotation
        obj.scale = obj.scale * item.radius
        if not obj.data.materials:
            obj.data.materials.append(None)
        obj.material_slots[0].link = "OBJECT"
        obj.material_slots[0].material = _material(kit.materials[item.material], world.COLORS[item.color])
        bpy.context.scene.collection.objects.link(obj)


def _look_at_origin(obj: bpy.types.Object, position) -> None:
    right, up, forward = look_at_axes(position)
    axes = mathutils.Matrix((right, up, [-v for v in forward])).transposed()  # Blender looks along -z
    obj.matrix_world = mathutils.Matrix.LocRotScale(position, axes.to_quaternion(), obj.scale)


def _material(group: bpy.types.NodeTree, color: tuple[int, int, int]) -> bpy.types.Material:
    material = bpy.data.materials.new(group.name)
    material["lcs_material"] = 1
    material.use_nodes = True
    nodes, links = material.node_tree.nodes, material.node_tree.links
    nodes.clear()
    shader, output = nodes.new("ShaderNodeGroup"), nodes.new("ShaderNodeOutputMaterial")
    shader.node_tree = group
    shader.inputs["Color"].default_value = (*(c / 255 for c in color), 1.0)
    links.new(shader.outputs["Shader"], output.inputs["Surface"])
    return material


def render(scene: Scene, kit: Kit, request: dict, threads: int) -> None:
    out = Path(request["out"])
    place(scene, kit)
    _settings(request, threads)
    bpy.ops.render.render()
    result = bpy.data.images["Render Result"]
    bpy.context.scene.render.image_settings.file_format = "PNG"
    bpy.context.scene.render.image_settings.color_mode = "RGB"
    bpy.context.scene.render.image_settings.color_depth = "8"
    result.save_render(str(out / "image.png"))
    if request["linear"]:
        np.save(out / "linear.npy", _pixels(out / "linear.exr"), allow_pickle=False)
    if request["mask"]:
        _render_object_index()
        index = np.rint(_pixels(out / "mask.exr")[:, :, 0])
        np.save(out / "mask.npy", index.astype(np.uint8), allow_pickle=False)


def _settings(request: dict, threads: int) -> None:
    """Cycles as the original used it: path tracing without clamping, and no tone mapping."""
    scene, width, height = bpy.context.scene, request["width"], request["height"]
    settings = scene.render
    settings.engine = "CYCLES"
    settings.resolution_x, settings.resolution_y, settings.resolution_percentage = width, height, 100
    settings.use_border = settings.use_compositing = settings.use_sequencer = settings.film_transparent = False
    settings.threads_mode, settings.threads = ("FIXED", threads) if threads else ("AUTO", settings.threads)
    settings.use_persistent_data = False
    settings.dither_intensity = 0.0
    # Every size shows the original's 4:3 field of view; only the pixels change shape.
    scene.camera.data.sensor_fit = "HORIZONTAL"
    stretch = (world.IMAGE_HEIGHT / world.IMAGE_WIDTH) * width / height
    settings.pixel_aspect_x, settings.pixel_aspect_y = max(1.0, 1 / stretch), max(1.0, stretch)
    scene.display_settings.display_device = "sRGB"
    view = scene.view_settings
    view.view_transform, view.look, view.exposure, view.gamma = "Standard", "None", 0.0, 1.0

    bpy.context.view_layer.material_override = None
    cycles = scene.cycles
    cycles.device = "CPU"
    cycles.samples, cycles.seed = request["samples"], request["seed"]
    cycles.use_adaptive_sampling = cycles.use_light_tree = False
    cycles.use_denoising = request["denoise"]
    cycles.denoiser = "OPENIMAGEDENOISE"
    cycles.sample_clamp_direct = cycles.sample_clamp_indirect = 0.0
    cycles.blur_glossy = world.BLUR_GLOSSY
    cycles.max_bounces, cycles.diffuse_bounces, cycles.glossy_bounces = 12, 4, 4
    cycles.pixel_filter_type, cycles.filter_width = "BLACKMAN_HARRIS", 1.5


def _render_object_index() -> None:
    """Second pass: every surface emits its object's index, one ray through each pixel centre."""
    override = bpy.data.materials.get("lcs_index") or bpy.data.materials.new("lcs_index")
    if not override.use_nodes:
        override.use_nodes = True
        nodes, links = override.node_tree.nodes, override.node_tree.links
        nodes.clear()
        info, emission = nodes.new("ShaderNodeObjectInfo"), nodes.new("ShaderNodeEmission")
        links.new(info.outputs["Object Index"], emission.inputs["Strength"])
        links.new(emission.outputs[0], nodes.new("ShaderNodeOutputMaterial").inputs["Surface"])
    bpy.context.view_layer.material_override = override
    cycles = bpy.context.scene.cycles
    cycles.samples, cycles.use_denoising, cycles.max_bounces = 1, False, 0
    cycles.pixel_filter_type, cycles.filter_width = "BOX", 0.01
    bpy.ops.render.render()


def _pixels(path: Path) -> np.ndarray:
    """The last render as scene-linear float32 [H, W, 3], by way of an .exr file."""
    settings = bpy.context.scene.render.image_settings
    settings.file_format, settings.color_mode, settings.color_depth = "OPEN_EXR", "RGB", "32"
    bpy.data.images["Render Result"].save_render(str(path))
    image = bpy.data.images.load(str(path))
    image.colorspace_settings.name = "Non-Color"
    width, height = image.size
    pixels = np.empty(width * height * image.channels, np.float32)
    image.pixels.foreach_get(pixels)
    bpy.data.images.remove(image)
    path.unlink()
    return np.ascontiguousarray(pixels.reshape(height, width, -1)[::-1, :, :3])


# ---- the process ---------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clevr-assets", type=Path)
    parser.add_argument("--threads", type=int, default=0)
    arguments = parser.parse_args()
    # Blender prints on standard output: keep the real one for answers only.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def answer(**fields) -> None:
        answers.write(json.dumps(fields) + "\n")

    try:
        kit = load_clevr_assets(arguments.clevr_assets) if arguments.clevr_assets else build_from_primitives()
    except (LcsError, RuntimeError, OSError) as error:
        answer(ok=False, error=str(error).strip())
        sys.exit(1)
    answer(ok=True, version=bpy.app.version_string)
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        try:
            render(scene_from_json(request["scene"]), kit, request, arguments.threads)
            answer(ok=True, seconds=time.perf_counter() - start)
        except (LcsError, RuntimeError, OSError) as error:
            answer(ok=False, error=str(error).strip())


if __name__ == "__main__":
    main()
