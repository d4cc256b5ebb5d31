"""The fast renderer on a CUDA GPU: two kernels, one thread per pixel, around the functions of `fast.py`.

Nothing is shaded twice in two languages: numba compiles the very functions the CPU uses. The first
kernel shades pixel centres, the second averages the edge pixels and encodes them. Without a GPU the
kernels can be run by numba's simulator (NUMBA_ENABLE_CUDASIM=1), which is how they are tested.
"""

from __future__ import annotations

import numpy as np
from numba import cuda

from lcs.errors import LcsError
from lcs.render.fast import centre_colour, check_size, edge_colour, is_edge, pack, to_srgb8, tone_of
from lcs.render.light import RING, prepare
from lcs.scenes.scene import Scene

THREADS = 128


@cuda.jit
def _shade_centres(start, cameras, objects, lights, rings, means, glow, linear, tone, masks):
    count, height, width = masks.shape
    pixel = cuda.grid(1)
    if pixel >= count * height * width:
        return
    s, y, x = pixel // (height * width), pixel // width % height, pixel % width
    first, last = start[s], start[s + 1]
    r, g, b, which = centre_colour(
        cameras[s], objects[first:last], lights[s], rings[first:last], means[first:last], glow[first:last],
        x, y, width, height,
    )  # fmt: skip
    linear[s, y, x, 0], linear[s, y, x, 1], linear[s, y, x, 2] = r, g, b
    tone[s, y, x], masks[s, y, x] = tone_of(r, g, b), which


@cuda.jit
def _finish_pixels(start, cameras, objects, lights, rings, means, glow, linear, tone, masks, images):
    count, height, width = masks.shape
    pixel = cuda.grid(1)
    if pixel >= count * height * width:
        return
    s, y, x = pixel // (height * width), pixel // width % height, pixel % width
    first, last = start[s], start[s + 1]
    r, g, b = linear[s, y, x, 0], linear[s, y, x, 1], linear[s, y, x, 2]
    if is_edge(masks[s], tone[s], x, y):
        r, g, b = edge_colour(
            cameras[s], objects[first:last], lights[s], rings[first:last], means[first:last], glow[first:last],
            x, y, width, height,
        )  # fmt: skip
    images[s, y, x, 0], images[s, y, x, 1], images[s, y, x, 2] = to_srgb8(r), to_srgb8(g), to_srgb8(b)


def render_gpu(scenes: list[Scene], width: int, height: int) -> tuple[np.ndarray, np.ndarray]:
    """As `fast.render`: images uint8 [S, H, W, 3] and masks uint8 [S, H, W]."""
    check_size(width, height)
    if not cuda.is_available():
        raise LcsError("no CUDA GPU for the renderer; use the CPU one (lcs.render.fast.render)")
    shape = (len(scenes), height, width)
    if not scenes:
        return np.empty((*shape, 3), np.uint8), np.empty(shape, np.uint8)
    packed = pack(scenes)
    rows = len(packed.objects)
    rings, means, glow = np.zeros((rows, RING, 3)), np.zeros((rows, 3)), np.zeros((rows, 3))
    for s, (first, last) in enumerate(zip(packed.start[:-1], packed.start[1:], strict=True)):
        rings[first:last], means[first:last], glow[first:last] = prepare(packed.objects[first:last], packed.lights[s])
    arguments = [
        cuda.to_device(a)
        for a in (packed.start, packed.cameras, packed.objects, packed.lights, rings, means, glow)
    ]  # fmt: skip
    linear, tone = cuda.device_array((*shape, 3), np.float64), cuda.device_array(shape, np.float64)
    masks, images = cuda.device_array(shape, np.uint8), cuda.device_array((*shape, 3), np.uint8)
    blocks = -(-len(scenes) * height * width // THREADS)
    _shade_centres[blocks, THREADS](*arguments, linear, tone, masks)
    _finish_pixels[blocks, THREADS](*arguments, linear, tone, masks, images)
    return images.copy_to_host(), masks.copy_to_host()
