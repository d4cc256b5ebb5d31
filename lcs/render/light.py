"""Light that arrives at a point: area lights with soft shadows, the sun, and light scattered by the scene.

Area lights are squares, sampled by stratified shadow rays; the sun is a point. Multiply scattered diffuse light is
approximated: every object knows the radiance of the ground around its foot (`rings`) and sends its own mean radiance
(`glow`) to its neighbours by the form factor of a sphere. Both are computed once per scene by `prepare`.
"""

from __future__ import annotations

import math

import numpy as np

from lcs.jit import njit
from lcs.render.geometry import BLUE, BOUND, GREEN, GROUND, MISS, RADIUS, RED, X, Y, Z, hit_object
from lcs.scenes import world
from lcs.scenes.scene import Scene, look_at_axes, sun_direction

# Columns of a packed light row: position, half edges of the square, direction it faces, power * colour.
L_POS, L_U, L_V, L_N, L_POWER, L_HALF = 0, 3, 6, 9, 12, 15

INV_PI = 1.0 / math.pi
RING = 8  # directions around an object's foot
SHADOW_SIDE = 2  # shadow rays per area light: SHADOW_SIDE^2, stratified

# Multiply scattered light, as shares of the ring's radiance; fitted to path-traced scenes (`lcs bench render`).
RING_SHARE = 0.95  # towards a surface that faces down or sideways
SKY_SHARE = 0.10  # towards a surface that faces up: light that comes back from the wall
GLOW_SHARE = 1.0  # between objects, and from objects to the ground
GROUND_SELF = 0.03  # ground light reflected by the ground's own curve


def pack_lights(scene: Scene) -> np.ndarray:
    """Area lights as float64 [3, 16]."""
    rows = np.empty((len(world.AREA_LIGHTS), 16))
    for row, (name, (_, side, power, color)) in zip(rows, world.AREA_LIGHTS.items(), strict=True):
        position = scene.lights[name]
        right, up, forward = (np.array(v) for v in look_at_axes(position))
        row[L_POS : L_POS + 3] = position
        row[L_U : L_U + 3] = right * side / 2
        row[L_V : L_V + 3] = up * side / 2
        row[L_N : L_N + 3] = forward
        row[L_POWER : L_POWER + 3] = np.array(color) * power
        row[L_HALF] = side / 2
    return rows


_SUN_X, _SUN_Y, _SUN_Z = sun_direction()
_SUN_E = world.SUN_STRENGTH

FAST = {"cache": True, "fastmath": True, "error_model": "numpy"}


@njit(**FAST)
def light_visibility(objs, skip, light, x, y, z, phase):
    """Visible share of an area light's square from a point; `skip` is the (convex) object it lies on."""
    lx, ly, lz = light[L_POS] - x, light[L_POS + 1] - y, light[L_POS + 2] - z
    dist2 = lx * lx + ly * ly + lz * lz
    spread = light[L_HALF] * 1.4143
    blockers = 0
    for i in range(objs.shape[0]):
        if i == skip:
            continue
        # Distance from the object's centre to the segment towards the light's centre.
        px, py, pz = objs[i, X] - x, objs[i, Y] - y, objs[i, Z] - z
        s = (px * lx + py * ly + pz * lz) / dist2
        reach = objs[i, BOUND]
        if s <= 0.0 and px * px + py * py + pz * pz > reach * reach:
            continue
        s = min(max(s, 0.0), 1.0)
        ex, ey, ez = px - s * lx, py - s * ly, pz - s * lz
        reach += spread * s * 1.1
        if ex * ex + ey * ey + ez * ez < reach * reach:
            blockers |= 1 << i
    if blockers == 0:
        return 1.0
    lit = 0
    for k in range(SHADOW_SIDE * SHADOW_SIDE):
        # One point per stratum of the square; `phase` in [0, 1)^2 moves it from pixel to pixel.
        shift = phase + 0.38196601 * k
        shift -= math.floor(shift)
        other = phase * 7.0 + 0.61803399 * k
        other -= math.floor(other)
        a = 2.0 * ((k % SHADOW_SIDE) + shift) / SHADOW_SIDE - 1.0
        b = 2.0 * ((k // SHADOW_SIDE) + other) / SHADOW_SIDE - 1.0
        dx = lx + a * light[L_U] + b * light[L_V]
        dy = ly + a * light[L_U + 1] + b * light[L_V + 1]
        dz = lz + a * light[L_U + 2] + b * light[L_V + 2]
        length = math.sqrt(dx * dx + dy * dy + dz * dz)
        inv = 1.0 / length
        free = True
        for i in range(objs.shape[0]):
            if blockers >> i & 1 and hit_object(objs[i], x, y, z, dx * inv, dy * inv, dz * inv) < length:
                free = False
                break
        lit += free
    return lit / (SHADOW_SIDE * SHADOW_SIDE)


@njit(**FAST)
def sun_visible(objs, skip, x, y, z):
    for i in range(objs.shape[0]):
        if i != skip and hit_object(objs[i], x, y, z, _SUN_X, _SUN_Y, _SUN_Z) < MISS:
            return False
    return True


@njit(**FAST)
def light_sample(objs, lights, k, skip, x, y, z, nx, ny, nz, phase):
    """Light k (the last is the sun) at a surface: unit direction, its cosine, irradiance across the ray in RGB.

    The cosine is 0 if no light arrives.
    """
    if k == lights.shape[0]:
        cos_here = _SUN_X * nx + _SUN_Y * ny + _SUN_Z * nz
        if cos_here <= 0.0 or not sun_visible(objs, skip, x, y, z):
            return 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0
        return _SUN_X, _SUN_Y, _SUN_Z, cos_here, _SUN_E, _SUN_E, _SUN_E
    light = lights[k]
    lx, ly, lz = light[L_POS] - x, light[L_POS + 1] - y, light[L_POS + 2] - z
    cos_here = lx * nx + ly * ny + lz * nz
    cos_there = -(lx * light[L_N] + ly * light[L_N + 1] + lz * light[L_N + 2])
    if cos_here <= 0.0 or cos_there <= 0.0:
        return 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0
    d2 = lx * lx + ly * ly + lz * lz
    inv = 1.0 / math.sqrt(d2)
    # radiance P / (pi A) times the area and the light's cosine over d^2
    e = cos_there * inv / d2 * INV_PI * light_visibility(objs, skip, light, x, y, z, phase)
    return (
        lx * inv, ly * inv, lz * inv, cos_here * inv,
        e * light[L_POWER], e * light[L_POWER + 1], e * light[L_POWER + 2],
    )  # fmt: skip


@njit(**FAST)
def irradiance(objs, lights, skip, x, y, z, nx, ny, nz, phase):
    """Direct irradiance, divided by pi: times the albedo it is the reflected diffuse radiance."""
    r = g = b = 0.0
    for k in range(lights.shape[0] + 1):
        _, _, _, cosine, er, eg, eb = light_sample(objs, lights, k, skip, x, y, z, nx, ny, nz, phase)
        r, g, b = r + cosine * er, g + cosine * eg, b + cosine * eb
    return r * INV_PI, g * INV_PI, b * INV_PI


@njit(**FAST)
def neighbour_glow(objs, glow, skip, x, y, z, nx, ny, nz):
    """Diffuse light from the other objects, each a sphere of radiance `glow` with form factor r^2 cos / d^2."""
    r = g = b = 0.0
    for i in range(objs.shape[0]):
        if i == skip:
            continue
        px, py, pz = objs[i, X] - x, objs[i, Y] - y, objs[i, Z] - z
        cosine = px * nx + py * ny + pz * nz
        if cosine <= 0.0:
            continue
        d2 = px * px + py * py + pz * pz
        radius2 = objs[i, RADIUS] * objs[i, RADIUS]
        share = min(1.0, radius2 * cosine / (d2 * math.sqrt(d2))) * GLOW_SHARE
        r += share * glow[i, 0]
        g += share * glow[i, 1]
        b += share * glow[i, 2]
    return r, g, b


@njit(**FAST)
def ring_light(ring, mean, nx, ny, nz):
    """Diffuse light from the ground around the object's foot, interpolated by the normal's azimuth."""
    turn = math.atan2(ny, nx) * (RING / (2 * math.pi))
    turn += RING * (turn < 0.0)
    i = int(turn) % RING
    f = turn - math.floor(turn)
    j = (i + 1) % RING
    side = math.sqrt(max(0.0, 1.0 - nz * nz))  # how much the azimuth matters
    down = 0.5 * (1.0 - nz) * RING_SHARE
    up = 0.5 * (1.0 + nz) * SKY_SHARE
    r = down * (side * ((1 - f) * ring[i, 0] + f * ring[j, 0]) + (1 - side) * mean[0]) + up * mean[0]
    g = down * (side * ((1 - f) * ring[i, 1] + f * ring[j, 1]) + (1 - side) * mean[1]) + up * mean[1]
    b = down * (side * ((1 - f) * ring[i, 2] + f * ring[j, 2]) + (1 - side) * mean[2]) + up * mean[2]
    return r, g, b


@njit(**FAST)
def prepare(objs, lights):
    """Per object: radiance of the ground around its foot [n, RING, 3], its mean [n, 3], its own glow [n, 3]."""
    n = objs.shape[0]
    rings, means, glow = np.zeros((n, RING, 3)), np.zeros((n, 3)), np.zeros((n, 3))
    for i in range(n):
        for k in range(RING):
            angle = 2 * math.pi * k / RING
            cx, cy = math.cos(angle), math.sin(angle)
            for ring in range(2):  # near and far from the foot
                reach = objs[i, RADIUS] * (1.5 + ring)
                x, y = objs[i, X] + reach * cx, objs[i, Y] + reach * cy
                r, g, b = irradiance(objs, lights, GROUND, x, y, 0.0, 0.0, 0.0, 1.0, 0.5)
                rings[i, k, 0] += 0.5 * world.GROUND_ALBEDO * (r + GROUND_SELF)
                rings[i, k, 1] += 0.5 * world.GROUND_ALBEDO * (g + GROUND_SELF)
                rings[i, k, 2] += 0.5 * world.GROUND_ALBEDO * (b + GROUND_SELF)
            # Light that leaves the object sideways in this direction.
            r, g, b = irradiance(
                objs, lights, i, objs[i, X] + objs[i, RADIUS] * cx, objs[i, Y] + objs[i, RADIUS] * cy, objs[i, Z],
                cx, cy, 0.0, 0.5,
            )  # fmt: skip
            glow[i, 0] += objs[i, RED] * r / RING
            glow[i, 1] += objs[i, GREEN] * g / RING
            glow[i, 2] += objs[i, BLUE] * b / RING
        for c in range(3):
            means[i, c] = rings[i, :, c].mean()
            glow[i, c] += objs[i, RED + c] * means[i, c] * 0.5
    return rings, means, glow
