"""The fast renderer: images and object masks from scenes, on all cores or on a GPU.

Every pixel is first shaded once, through its centre; pixels whose colour or object differs from a
neighbour's are then averaged over a SUBSAMPLES x SUBSAMPLES grid (in linear light), so flat regions
cost one ray and edges are smooth. The mask holds the object seen through the pixel's centre.
Any width and height show the whole 4:3 view of the original, as its 320x240 images do when resized.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lcs.errors import LcsError
from lcs.jit import njit, prange
from lcs.render.geometry import camera_and_objects
from lcs.render.light import FAST, pack_lights, prepare
from lcs.render.tracer import radiance
from lcs.scenes.scene import Scene

SUBSAMPLES = 3
CONTRAST = 0.03  # difference of tone that makes a pixel an edge
CLIP = 4.0  # of a sub-pixel's radiance
MAX_SIZE = 4096


@dataclass(frozen=True)
class PackedScenes:
    """A batch of scenes as arrays; object i of scene s is row `start[s] + i`."""

    start: np.ndarray  # int64 [S + 1]
    cameras: np.ndarray  # float64 [S, 4, 3]
    objects: np.ndarray  # float64 [N, 12]
    lights: np.ndarray  # float64 [S, 3, 16]


def pack(scenes: list[Scene]) -> PackedScenes:
    pairs = [camera_and_objects(scene) for scene in scenes]
    start = np.zeros(len(scenes) + 1, np.int64)
    np.cumsum([len(objects) for _, objects in pairs], out=start[1:])
    return PackedScenes(
        start,
        np.stack([camera for camera, _ in pairs]),
        np.concatenate([objects for _, objects in pairs]),
        np.stack([pack_lights(scene) for scene in scenes]),
    )


# ---- one pixel: shared by the loops below and the GPU kernels of gpu.py -----------------------------


@njit(**FAST)
def to_srgb8(v):
    """Blender's Standard view transform: clip, the sRGB curve, 8 bits."""
    v = min(max(v, 0.0), 1.0)
    v = 12.92 * v if v <= 0.0031308 else 1.055 * v ** (1.0 / 2.4) - 0.055
    return np.uint8(v * 255.0 + 0.5)


@njit(**FAST)
def phase_of(x, y):
    """A 4x4 ordered pattern in [0, 1): neighbouring pixels use different shadow and reflection samples."""
    return ((x & 3) * 5 + (y & 3) * 7 & 15) / 16.0


@njit(**FAST)
def tone_of(r, g, b):
    """Roughly gamma-encoded luminance, to compare neighbours by."""
    return math.sqrt(min(0.3 * r + 0.6 * g + 0.1 * b, 1.0))


@njit(**FAST)
def centre_colour(cam, objs, lights, rings, means, glow, x, y, width, height):
    """Linear RGB through the pixel's centre, and the mask value there (0: no object, i + 1: object i)."""
    a, b = 2 * (x + 0.5) / width - 1, 1 - 2 * (y + 0.5) / height
    red, green, blue, which = radiance(cam, objs, lights, rings, means, glow, a, b, phase_of(x, y))
    return red, green, blue, max(which, -1) + 1


@njit(**FAST)
def is_edge(mask, tone, x, y):
    """Whether the pixel's object or tone differs from one of its eight neighbours."""
    height, width = mask.shape
    for v in range(max(y - 1, 0), min(y + 2, height)):
        for u in range(max(x - 1, 0), min(x + 2, width)):
            if mask[v, u] != mask[y, x] or abs(tone[v, u] - tone[y, x]) > CONTRAST:
                return True
    return False


@njit(**FAST)
def edge_colour(cam, objs, lights, rings, means, glow, x, y, width, height):
    """Mean linear RGB over a grid of sub-pixels; each is clipped so that a highlight does not fill the pixel."""
    red = green = blue = 0.0
    for k in range(SUBSAMPLES * SUBSAMPLES):
        fx, fy = (k % SUBSAMPLES + 0.5) / SUBSAMPLES, (k // SUBSAMPLES + 0.5) / SUBSAMPLES
        a, b = 2 * (x + fx) / width - 1, 1 - 2 * (y + fy) / height
        phase = (phase_of(x, y) * 16 + k * 7) % 16 / 16.0
        r, g, bl, _ = radiance(cam, objs, lights, rings, means, glow, a, b, phase)
        red, green, blue = red + min(r, CLIP), green + min(g, CLIP), blue + min(bl, CLIP)
    scale = 1.0 / (SUBSAMPLES * SUBSAMPLES)
    return red * scale, green * scale, blue * scale


# ---- whole images on the CPU ----------------------------------------------------------------------


@njit(**FAST)
def _render_one(cam, objs, lights, linear, mask):
    """Fills linear [H, W, 3] and mask [H, W]."""
    height, width = mask.shape
    rings, means, glow = prepare(objs, lights)
    tone = np.empty((height, width))
    for y in range(height):
        for x in range(width):
            r, g, b, which = centre_colour(cam, objs, lights, rings, means, glow, x, y, width, height)
            linear[y, x, 0], linear[y, x, 1], linear[y, x, 2] = r, g, b
            mask[y, x], tone[y, x] = which, tone_of(r, g, b)
    for y in range(height):
        for x in range(width):
            if is_edge(mask, tone, x, y):
                r, g, b = edge_colour(cam, objs, lights, rings, means, glow, x, y, width, height)
                linear[y, x, 0], linear[y, x, 1], linear[y, x, 2] = r, g, b


@njit(cache=True, parallel=True)
def _render_batch(start, cameras, objects, lights, images, masks):
    count, height, width = masks.shape
    for s in prange(count):
        linear = np.empty((height, width, 3), np.float32)
        _render_one(cameras[s], objects[start[s] : start[s + 1]], lights[s], linear, masks[s])
        for y in range(height):
            for x in range(width):
                for c in range(3):
                    images[s, y, x, c] = to_srgb8(linear[y, x, c])


def render_linear(scene: Scene, width: int, height: int) -> np.ndarray:
    """Linear RGB before colour management: float32 [H, W, 3]."""
    check_size(width, height)
    packed = pack([scene])
    linear, mask = np.empty((height, width, 3), np.float32), np.empty((height, width), np.uint8)
    _render_one(packed.cameras[0], packed.objects, packed.lights[0], linear, mask)
    return linear


def render(scenes: list[Scene], width: int, height: int) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [S, H, W, 3] in sRGB, masks uint8 [S, H, W] (0: no object, i + 1: object i)."""
    check_size(width, height)
    images = np.empty((len(scenes), height, width, 3), np.uint8)
    masks = np.empty((len(scenes), height, width), np.uint8)
    if scenes:
        packed = pack(scenes)
        _render_batch(packed.start, packed.cameras, packed.objects, packed.lights, images, masks)
    return images, masks


def check_size(width: int, height: int) -> None:
    if not (1 <= width <= MAX_SIZE and 1 <= height <= MAX_SIZE):
        raise LcsError(f"image size {width}x{height} is not possible; allowed: 1..{MAX_SIZE} pixels per side")
