"""A CLEVR scene: camera, lights and objects, independent of any renderer, as CLEVR-style JSON.

A `Scene` is plain data. Everything that can be computed from it (camera axes, projection) is a
function here; how scenes are drawn at random is in `placement.py`, how they look in `lcs.render`.
Only the standard library is used: Blender's Python imports this module too.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from lcs.errors import LcsError
from lcs.scenes import world

Vec3 = tuple[float, float, float]
FOCAL = world.LENS / world.SENSOR_WIDTH * world.IMAGE_WIDTH  # in pixels


@dataclass(frozen=True)
class SceneObject:
    shape: str
    size: str
    color: str
    material: str
    position: Vec3  # centre; z equals the radius, so the object stands on the floor
    rotation: float  # radians about z
    pixel: tuple[float, float]  # projected centre at 320x240, (x right, y down)

    @property
    def radius(self) -> float:
        return world.SIZES[self.size]

    @property
    def location(self) -> tuple[float, float]:
        """Projected centre as fractions of the image: what the location conditioners see."""
        return self.pixel[0] / world.IMAGE_WIDTH, self.pixel[1] / world.IMAGE_HEIGHT


@dataclass(frozen=True)
class Scene:
    seed: int
    camera: Vec3
    lights: dict[str, Vec3]  # positions of the three area lights
    objects: tuple[SceneObject, ...]


# ---- vectors -------------------------------------------------------------------------------------


def _normalize(v: Vec3) -> Vec3:
    n = math.sqrt(v[0] ** 2 + v[1] ** 2 + v[2] ** 2)
    return v[0] / n, v[1] / n, v[2] / n


def _cross(a: Vec3, b: Vec3) -> Vec3:
    return a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]


def _dot(a: Vec3, b: Vec3) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


def look_at_axes(position: Vec3) -> tuple[Vec3, Vec3, Vec3]:
    """Right, up and forward axes of something at `position` that looks at the origin, z up."""
    forward = _normalize((-position[0], -position[1], -position[2]))
    right = _normalize(_cross(forward, (0.0, 0.0, 1.0)))
    return right, _cross(right, forward), forward


def sun_direction() -> Vec3:
    """Unit vector towards the sun: its local +z after the XYZ Euler rotation."""
    rx, ry, rz = world.SUN_ROTATION
    x, y, z = math.cos(rx) * math.sin(ry), -math.sin(rx), math.cos(rx) * math.cos(ry)  # Ry Rx e_z
    return math.cos(rz) * x - math.sin(rz) * y, math.sin(rz) * x + math.cos(rz) * y, z


def project(camera: Vec3, point: Vec3) -> tuple[float, float]:
    """Pinhole projection of a 3d point to 320x240 pixel coordinates (x right, y down)."""
    right, up, forward = look_at_axes(camera)
    d = (point[0] - camera[0], point[1] - camera[1], point[2] - camera[2])
    depth = _dot(d, forward)
    return (
        world.IMAGE_WIDTH / 2 + FOCAL * _dot(d, right) / depth,
        world.IMAGE_HEIGHT / 2 - FOCAL * _dot(d, up) / depth,
    )


def unproject(camera: Vec3, pixel: tuple[float, float], height: float) -> Vec3:
    """The point at this height above the floor that `project` puts at this pixel."""
    right, up, forward = look_at_axes(camera)
    x, y = (pixel[0] - world.IMAGE_WIDTH / 2) / FOCAL, (world.IMAGE_HEIGHT / 2 - pixel[1]) / FOCAL
    ray = tuple(f + x * r + y * u for f, r, u in zip(forward, right, up, strict=True))
    if ray[2] * (height - camera[2]) <= 0:
        raise LcsError(f"pixel {pixel} does not show anything at height {height}")
    t = (height - camera[2]) / ray[2]
    return camera[0] + t * ray[0], camera[1] + t * ray[1], height


def ground_directions(camera: Vec3) -> dict[str, Vec3]:
    """CLEVR's left/right/front/behind: the camera's axes projected on the floor."""
    right, _, forward = look_at_axes(camera)
    behind = _normalize((forward[0], forward[1], 0.0))
    right = _normalize((right[0], right[1], 0.0))
    negate = lambda v: (-v[0], -v[1], -v[2])  # noqa: E731
    return {"behind": behind, "front": negate(behind), "left": negate(right), "right": right}


# ---- CLEVR-style JSON ----------------------------------------------------------------------------


def scene_to_json(scene: Scene) -> dict:
    """The original's keys, plus `seed`, `camera` and `lights` so that the scene can be rendered again.

    As in the original, `rotation` is written in the unit the generator calls degrees and Blender
    reads as radians; ours stays in radians.
    """
    directions = ground_directions(scene.camera)
    return {
        "seed": scene.seed,
        "camera": list(scene.camera),
        "lights": {name: list(position) for name, position in scene.lights.items()},
        "directions": {name: list(v) for name, v in directions.items()},
        "objects": [
            {
                "shape": o.shape,
                "size": o.size,
                "color": o.color,
                "material": o.material,
                "3d_coords": list(o.position),
                "rotation": o.rotation,
                "pixel_coords": list(o.pixel),
            }
            for o in scene.objects
        ],
    }


def scene_from_json(data: dict) -> Scene:
    """Inverse of `scene_to_json`; raises LcsError that names what is missing or unknown."""
    try:
        camera = _vec3(data["camera"], "camera")
        objects = tuple(
            SceneObject(
                shape=_choice(o["shape"], world.SHAPES, "shape"),
                size=_choice(o["size"], world.SIZES, "size"),
                color=_choice(o["color"], world.COLORS, "color"),
                material=_choice(o["material"], world.MATERIALS, "material"),
                position=_vec3(o["3d_coords"], "3d_coords"),
                rotation=float(o["rotation"]),
                pixel=project(camera, _vec3(o["3d_coords"], "3d_coords")),
            )
            for o in data["objects"]
        )
        lights = {name: _vec3(data["lights"][name], f"light {name}") for name in world.AREA_LIGHTS}
        return Scene(int(data["seed"]), camera, lights, objects)
    except KeyError as missing:
        raise LcsError(f"scene JSON has no {missing}") from None
    except (TypeError, ValueError) as error:
        raise LcsError(f"scene JSON is malformed: {error}") from None


def _choice(value: str, allowed, what: str) -> str:
    if value not in allowed:
        raise LcsError(f"unknown {what} {value!r} in scene JSON; allowed: {', '.join(allowed)}")
    return value


def _vec3(value, what: str) -> Vec3:
    numbers = tuple(float(v) for v in value)
    if len(numbers) != 3 or not all(math.isfinite(v) for v in numbers):
        raise LcsError(f"{what} in scene JSON must be three finite numbers, got {value!r}")
    return numbers


def write_scenes(path: Path, scenes: list[Scene]) -> None:
    payload = {"info": {"format": "CLEVR-style scenes"}, "scenes": [scene_to_json(s) for s in scenes]}
    Path(path).write_text(json.dumps(payload) + "\n")


def read_scenes(path: Path) -> list[Scene]:
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise LcsError(f"cannot read scenes from {path}: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise LcsError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict) or "scenes" not in data:
        raise LcsError(f"{path} has no 'scenes' list")
    return [scene_from_json(s) for s in data["scenes"]]


def scene_summary(scene: Scene) -> str:
    """One line for logs and captions."""
    return ", ".join(f"{o.size} {o.color} {o.material} {o.shape}" for o in scene.objects) or "empty"
