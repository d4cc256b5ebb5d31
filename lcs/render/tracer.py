"""Radiance along one camera ray: the shading model of the fast renderer.

Direct light is exact up to sampling: area lights as squares (soft shadows from stratified shadow
rays), a sun, Lambertian ground and rubber, GGX gloss and metal, Ashikhmin velvet. Metal traces real
reflection rays that see the ground and the other objects. Only multiply scattered diffuse light is
approximated: every object knows the radiance of the ground around its foot (`ground_ring`) and sends
its own mean radiance (`glow`) to its neighbours by the form factor of a sphere.

Every function is scalar and compiled by numba; the CPU loops over pixels in `fast.py`, the GPU kernel
there calls the same `radiance`. Colours are linear RGB.
"""

from __future__ import annotations

import math

import numpy as np

from lcs.render.geometry import (
    BLUE,
    BOUND,
    EPS,
    GREEN,
    GROUND,
    METAL,
    MISS,
    NOTHING,
    RADIUS,
    RED,
    X,
    Y,
    Z,
    camera_ray,
    first_object,
    ground_normal,
    hit_ground,
    hit_object,
    object_normal,
)
from lcs.render.jit import njit
from lcs.scenes import world
from lcs.scenes.scene import Scene, look_at_axes, sun_direction

# Columns of a packed light row: position, half edges of the square, direction it faces, power * colour.
L_POS, L_U, L_V, L_N, L_POWER, L_HALF = 0, 3, 6, 9, 12, 15

INV_PI = 1.0 / math.pi
RING = 8  # directions around an object's foot
REFLECTIONS = 6  # rays of the rough metal lobe
SHADOW_SIDE = 2  # shadow rays per area light: SHADOW_SIDE^2, stratified
RUBBER_ALPHA2 = world.RUBBER_GLOSS_ROUGHNESS**4  # GGX alpha = roughness^2
ROUGH_ALPHA = world.METAL_ROUGHNESS[0] ** 2
SHARP_ALPHA2 = 0.05**2  # highlight of the sun in the sharp lobe, widened to about a pixel
VELVET_INV_SIGMA2 = 1.0 / world.RUBBER_VELVET_SIGMA**2

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


SUN = np.array([*sun_direction(), world.SUN_STRENGTH])
_SUN_X, _SUN_Y, _SUN_Z, _SUN_E = (float(v) for v in SUN)

_fast = {"cache": True, "fastmath": True, "error_model": "numpy"}


# ---- light that arrives ---------------------------------------------------------------------------


@njit(**_fast)
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


@njit(**_fast)
def sun_visible(objs, skip, x, y, z):
    for i in range(objs.shape[0]):
        if i != skip and hit_object(objs[i], x, y, z, _SUN_X, _SUN_Y, _SUN_Z) < MISS:
            return False
    return True


@njit(**_fast)
def irradiance(objs, lights, skip, x, y, z, nx, ny, nz, phase):
    """Direct irradiance, divided by pi: times the albedo it is the reflected diffuse radiance."""
    r = g = b = 0.0
    for i in range(lights.shape[0]):
        light = lights[i]
        lx, ly, lz = light[L_POS] - x, light[L_POS + 1] - y, light[L_POS + 2] - z
        cos_here = lx * nx + ly * ny + lz * nz
        cos_there = -(lx * light[L_N] + ly * light[L_N + 1] + lz * light[L_N + 2])
        if cos_here <= 0.0 or cos_there <= 0.0:
            continue
        d2 = lx * lx + ly * ly + lz * lz
        # radiance P / (pi A) times area, cosines / d^2 (each cosine still carries a factor d)
        e = cos_here * cos_there / (d2 * d2) * (INV_PI * INV_PI)
        e *= light_visibility(objs, skip, light, x, y, z, phase)
        r += e * light[L_POWER]
        g += e * light[L_POWER + 1]
        b += e * light[L_POWER + 2]
    cos_sun = nx * _SUN_X + ny * _SUN_Y + nz * _SUN_Z
    if cos_sun > 0.0 and sun_visible(objs, skip, x, y, z):
        e = cos_sun * _SUN_E * INV_PI
        r += e
        g += e
        b += e
    return r, g, b


@njit(**_fast)
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


@njit(**_fast)
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


# ---- surfaces -------------------------------------------------------------------------------------


@njit(**_fast)
def ground_radiance(objs, lights, glow, x, y, z, phase):
    nx, ny, nz = ground_normal(x, y, z)
    r, g, b = irradiance(objs, lights, GROUND, x, y, z, nx, ny, nz, phase)
    gr, gg, gb = neighbour_glow(objs, glow, GROUND, x, y, z, nx, ny, nz)
    a = world.GROUND_ALBEDO
    return a * (r + gr + GROUND_SELF), a * (g + gg + GROUND_SELF), a * (b + gb + GROUND_SELF)


@njit(**_fast)
def diffuse_radiance(objs, lights, rings, means, glow, i, x, y, z, nx, ny, nz, phase):
    """A matt surface in the object's colour: direct light, the ground around it, its neighbours."""
    r, g, b = irradiance(objs, lights, i, x, y, z, nx, ny, nz, phase)
    ar, ag, ab = ring_light(rings[i], means[i], nx, ny, nz)
    gr, gg, gb = neighbour_glow(objs, glow, i, x, y, z, nx, ny, nz)
    return (
        objs[i, RED] * (r + ar + gr),
        objs[i, GREEN] * (g + ag + gg),
        objs[i, BLUE] * (b + ab + gb),
    )


@njit(**_fast)
def incoming(objs, lights, rings, means, glow, skip, x, y, z, dx, dy, dz, phase):
    """Radiance that arrives along a reflection ray; a reflected metal is shown by its surroundings' mean."""
    best, which = MISS, GROUND
    for i in range(objs.shape[0]):
        if i != skip:
            t = hit_object(objs[i], x, y, z, dx, dy, dz)
            if t < best:
                best, which = t, i
    if which == GROUND:
        t = hit_ground(x, y, z, dx, dy, dz)
        if t >= MISS:
            return 0.0, 0.0, 0.0
        return ground_radiance(objs, lights, glow, x + t * dx, y + t * dy, z + t * dz, phase)
    hx, hy, hz = x + best * dx, y + best * dy, z + best * dz
    nx, ny, nz = object_normal(objs[which], hx, hy, hz)
    if objs[which, METAL] > 0.0:
        return ring_tinted(objs[which], means[which], nz)
    return diffuse_radiance(objs, lights, rings, means, glow, which, hx, hy, hz, nx, ny, nz, phase)


@njit(**_fast)
def ring_tinted(obj, mean, nz):
    share = 1.0 - 0.6 * max(0.0, nz)  # upward facing metal mirrors the black world
    return obj[RED] * mean[0] * share, obj[GREEN] * mean[1] * share, obj[BLUE] * mean[2] * share


@njit(**_fast)
def fresnel(cosine, ior):
    """Unpolarised dielectric reflectance."""
    g = math.sqrt(ior * ior - 1.0 + cosine * cosine)
    a = (g - cosine) / (g + cosine)
    b = ((g + cosine) * cosine - 1.0) / ((g - cosine) * cosine + 1.0)
    return 0.5 * a * a * (1.0 + b * b)


@njit(**_fast)
def ggx(alpha2, cos_h, cos_l, cos_v):
    """GGX D * G / (4 cos_v): the BRDF times cos_l, with Smith's separable shadowing."""
    q = cos_h * cos_h * (alpha2 - 1.0) + 1.0
    d = alpha2 / (math.pi * q * q)
    gl = 2.0 * cos_l / (cos_l + math.sqrt(alpha2 + (1.0 - alpha2) * cos_l * cos_l))
    gv = 2.0 * cos_v / (cos_v + math.sqrt(alpha2 + (1.0 - alpha2) * cos_v * cos_v))
    return d * gl * gv / (4.0 * cos_v)


@njit(**_fast)
def velvet(cos_h, cos_hv, cos_l, cos_v):
    """Ashikhmin velvet BRDF times cos_l."""
    sin2 = max(1.0 - cos_h * cos_h, 1e-6)
    d = math.exp(-cos_h * cos_h / sin2 * VELVET_INV_SIGMA2) * VELVET_INV_SIGMA2 * INV_PI / (sin2 * sin2)
    f = 2.0 * cos_h / max(cos_hv, 1e-6)
    return 0.25 * d * min(1.0, min(f * cos_v, f * cos_l)) / max(cos_v, 1e-4)


@njit(**_fast)
def rubber_radiance(objs, lights, rings, means, glow, i, x, y, z, nx, ny, nz, vx, vy, vz, phase):
    """Fresnel mix of a white gloss over diffuse and velvet; (vx, vy, vz) points to the viewer."""
    cos_v = max(nx * vx + ny * vy + nz * vz, 1e-3)
    coat = fresnel(cos_v, world.RUBBER_IOR)
    dr = dg = db = 0.0  # diffuse and velvet, before the colour
    sr = sg = sb = 0.0  # gloss
    matt = 1.0 - world.RUBBER_VELVET
    for k in range(lights.shape[0] + 1):
        if k < lights.shape[0]:
            light = lights[k]
            lx, ly, lz = light[L_POS] - x, light[L_POS + 1] - y, light[L_POS + 2] - z
            d2 = lx * lx + ly * ly + lz * lz
            inv = 1.0 / math.sqrt(d2)
            lx, ly, lz = lx * inv, ly * inv, lz * inv
            cos_l = lx * nx + ly * ny + lz * nz
            cos_there = -(lx * light[L_N] + ly * light[L_N + 1] + lz * light[L_N + 2])
            if cos_l <= 0.0 or cos_there <= 0.0:
                continue
            e = cos_there / d2 * INV_PI * light_visibility(objs, i, light, x, y, z, phase)
            er, eg, eb = e * light[L_POWER], e * light[L_POWER + 1], e * light[L_POWER + 2]
        else:
            lx, ly, lz = _SUN_X, _SUN_Y, _SUN_Z
            cos_l = lx * nx + ly * ny + lz * nz
            if cos_l <= 0.0 or not sun_visible(objs, i, x, y, z):
                continue
            er = eg = eb = _SUN_E
        hx, hy, hz = lx + vx, ly + vy, lz + vz
        inv = 1.0 / math.sqrt(hx * hx + hy * hy + hz * hz)
        cos_h = (hx * nx + hy * ny + hz * nz) * inv
        cos_hv = (hx * vx + hy * vy + hz * vz) * inv
        base = matt * cos_l * INV_PI + world.RUBBER_VELVET * velvet(cos_h, cos_hv, cos_l, cos_v)
        gloss = ggx(RUBBER_ALPHA2, cos_h, cos_l, cos_v)
        dr, dg, db = dr + er * base, dg + eg * base, db + eb * base
        sr, sg, sb = sr + er * gloss, sg + eg * gloss, sb + eb * gloss
    ar, ag, ab = ring_light(rings[i], means[i], nx, ny, nz)
    gr, gg, gb = neighbour_glow(objs, glow, i, x, y, z, nx, ny, nz)
    dr, dg, db = dr + ar + gr, dg + ag + gg, db + ab + gb
    if coat > 0.03:  # reflected surroundings matter only near grazing angles
        two = 2.0 * cos_v
        rx, ry, rz = two * nx - vx, two * ny - vy, two * nz - vz
        cr, cg, cb = incoming(objs, lights, rings, means, glow, i, x, y, z, rx, ry, rz, phase)
        sr, sg, sb = sr + cr, sg + cg, sb + cb
    keep = 1.0 - coat
    return (
        keep * objs[i, RED] * dr + coat * sr,
        keep * objs[i, GREEN] * dg + coat * sg,
        keep * objs[i, BLUE] * db + coat * sb,
    )


@njit(**_fast)
def mirrored_lights(lights, objs, skip, x, y, z, dx, dy, dz):
    """Radiance of the area light that a mirror ray meets, if any."""
    for k in range(lights.shape[0]):
        light = lights[k]
        facing = -(dx * light[L_N] + dy * light[L_N + 1] + dz * light[L_N + 2])
        if facing <= 0.0:
            continue
        px, py, pz = light[L_POS] - x, light[L_POS + 1] - y, light[L_POS + 2] - z
        t = -(px * light[L_N] + py * light[L_N + 1] + pz * light[L_N + 2]) / facing
        if t <= 0.0:
            continue
        px, py, pz = t * dx - px, t * dy - py, t * dz - pz
        half2 = light[L_HALF] * light[L_HALF]
        a = abs(px * light[L_U] + py * light[L_U + 1] + pz * light[L_U + 2])
        b = abs(px * light[L_V] + py * light[L_V + 1] + pz * light[L_V + 2])
        if a <= half2 and b <= half2:
            for i in range(objs.shape[0]):
                if i != skip and hit_object(objs[i], x, y, z, dx, dy, dz) < t:
                    return 0.0, 0.0, 0.0
            scale = INV_PI / (4.0 * half2)
            return scale * light[L_POWER], scale * light[L_POWER + 1], scale * light[L_POWER + 2]
    return 0.0, 0.0, 0.0


@njit(**_fast)
def metal_radiance(objs, lights, rings, means, glow, i, x, y, z, nx, ny, nz, vx, vy, vz, phase):
    """Two GGX lobes: the sharp one as a mirror ray, the rough one as a fan of rays plus light highlights."""
    cos_v = max(nx * vx + ny * vy + nz * vz, 1e-3)
    two = 2.0 * cos_v
    rx, ry, rz = two * nx - vx, two * ny - vy, two * nz - vz
    mr, mg, mb = incoming(objs, lights, rings, means, glow, i, x, y, z, rx, ry, rz, phase)
    hr, hg, hb = mirrored_lights(lights, objs, i, x, y, z, rx, ry, rz)
    mr, mg, mb = mr + hr, mg + hg, mb + hb
    # Rough lobe: half vectors at GGX quantiles around the normal, golden-angle azimuths.
    if abs(nz) < 0.9:
        inv = 1.0 / math.sqrt(nx * nx + ny * ny)
        tx, ty, tz = -ny * inv, nx * inv, 0.0
    else:
        inv = 1.0 / math.sqrt(ny * ny + nz * nz)
        tx, ty, tz = 0.0, -nz * inv, ny * inv
    bx, by, bz = ny * tz - nz * ty, nz * tx - nx * tz, nx * ty - ny * tx
    fr = fg = fb = 0.0
    for k in range(REFLECTIONS):
        u = (k + 0.5) / REFLECTIONS
        tan_h = ROUGH_ALPHA * math.sqrt(u / (1.0 - u))
        azimuth = 2.3999632 * k + 6.2831853 * phase
        a, b = tan_h * math.cos(azimuth), tan_h * math.sin(azimuth)
        hx, hy, hz = nx + a * tx + b * bx, ny + a * ty + b * by, nz + a * tz + b * bz
        dot2 = 2.0 * (hx * vx + hy * vy + hz * vz) / (1.0 + tan_h * tan_h)
        dx, dy, dz = dot2 * hx - vx, dot2 * hy - vy, dot2 * hz - vz
        if dx * nx + dy * ny + dz * nz > 0.0:
            cr, cg, cb = incoming(objs, lights, rings, means, glow, i, x, y, z, dx, dy, dz, phase)
            fr, fg, fb = fr + cr, fg + cg, fb + cb
    fr, fg, fb = fr / REFLECTIONS, fg / REFLECTIONS, fb / REFLECTIONS
    alpha2 = ROUGH_ALPHA * ROUGH_ALPHA
    for k in range(lights.shape[0] + 1):
        sharp = 0.0
        if k < lights.shape[0]:
            light = lights[k]
            lx, ly, lz = light[L_POS] - x, light[L_POS + 1] - y, light[L_POS + 2] - z
            d2 = lx * lx + ly * ly + lz * lz
            inv = 1.0 / math.sqrt(d2)
            lx, ly, lz = lx * inv, ly * inv, lz * inv
            cos_l = lx * nx + ly * ny + lz * nz
            cos_there = -(lx * light[L_N] + ly * light[L_N + 1] + lz * light[L_N + 2])
            if cos_l <= 0.0 or cos_there <= 0.0:
                continue
            e = cos_there / d2 * INV_PI * light_visibility(objs, i, light, x, y, z, phase)
            er, eg, eb = e * light[L_POWER], e * light[L_POWER + 1], e * light[L_POWER + 2]
        else:
            lx, ly, lz = _SUN_X, _SUN_Y, _SUN_Z
            cos_l = lx * nx + ly * ny + lz * nz
            if cos_l <= 0.0 or not sun_visible(objs, i, x, y, z):
                continue
            er = eg = eb = _SUN_E
            sharp = 1.0
        hx, hy, hz = lx + vx, ly + vy, lz + vz
        cos_h = (hx * nx + hy * ny + hz * nz) / math.sqrt(hx * hx + hy * hy + hz * hz)
        rough = ggx(alpha2, cos_h, cos_l, cos_v)
        fr, fg, fb = fr + er * rough, fg + eg * rough, fb + eb * rough
        if sharp > 0.0:
            peak = ggx(SHARP_ALPHA2, cos_h, cos_l, cos_v)
            mr, mg, mb = mr + er * peak, mg + eg * peak, mb + eb * peak
    s = world.METAL_MIX
    return (
        objs[i, RED] * (s * mr + (1.0 - s) * fr),
        objs[i, GREEN] * (s * mg + (1.0 - s) * fg),
        objs[i, BLUE] * (s * mb + (1.0 - s) * fb),
    )


# ---- camera rays and per-scene preparation --------------------------------------------------------


@njit(**_fast)
def radiance(cam, objs, lights, rings, means, glow, a, b, phase):
    """Linear RGB seen at image position (a right, b up, in [-1, 1]) and the object index there."""
    dx, dy, dz = camera_ray(cam, a, b)
    ox, oy, oz = cam[0, 0], cam[0, 1], cam[0, 2]
    t, which = first_object(objs, ox, oy, oz, dx, dy, dz)
    if which == NOTHING:
        t = hit_ground(ox, oy, oz, dx, dy, dz)
        if t >= MISS:
            return 0.0, 0.0, 0.0, NOTHING
        r, g, b = ground_radiance(objs, lights, glow, ox + t * dx, oy + t * dy, oz + t * dz, phase)
        return r, g, b, GROUND
    x, y, z = ox + t * dx, oy + t * dy, oz + t * dz
    nx, ny, nz = object_normal(objs[which], x, y, z)
    x, y, z = x + EPS * nx, y + EPS * ny, z + EPS * nz
    if objs[which, METAL] > 0.0:
        r, g, b = metal_radiance(objs, lights, rings, means, glow, which, x, y, z, nx, ny, nz, -dx, -dy, -dz, phase)
    else:
        r, g, b = rubber_radiance(objs, lights, rings, means, glow, which, x, y, z, nx, ny, nz, -dx, -dy, -dz, phase)
    return r, g, b, which


@njit(**_fast)
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
