"""Radiance along one camera ray: the shading model of the fast renderer.

Lambertian ground, rubber (diffuse, Ashikhmin velvet and a GGX gloss by Fresnel), metal (two GGX lobes). Metal traces
real reflection rays that see the ground and the other objects. The light that arrives is in `light.py`.

Every function is scalar and compiled by numba; the CPU loops over pixels in `fast.py`, the GPU kernels of `gpu.py`
call the same functions. Colours are linear RGB.
"""

from __future__ import annotations

import math

from lcs.jit import njit
from lcs.render.geometry import (
    BLUE,
    EPS,
    GREEN,
    GROUND,
    METAL,
    MISS,
    NOTHING,
    RED,
    camera_ray,
    first_object,
    ground_normal,
    hit_ground,
    hit_object,
    object_normal,
)
from lcs.render.light import (
    FAST,
    GROUND_SELF,
    INV_PI,
    L_HALF,
    L_N,
    L_POS,
    L_POWER,
    L_U,
    L_V,
    irradiance,
    light_sample,
    neighbour_glow,
    ring_light,
)
from lcs.scenes import world

REFLECTIONS = 6  # rays of the rough metal lobe
RUBBER_ALPHA2 = world.RUBBER_GLOSS_ROUGHNESS**4  # GGX alpha = roughness^2
ROUGH_ALPHA = world.METAL_ROUGHNESS[0] ** 2
SHARP_ALPHA2 = 0.05**2  # highlight of the sun in the sharp lobe, widened to about a pixel
VELVET_INV_SIGMA2 = 1.0 / world.RUBBER_VELVET_SIGMA**2


@njit(**FAST)
def ground_radiance(objs, lights, glow, x, y, z, phase):
    nx, ny, nz = ground_normal(x, y, z)
    r, g, b = irradiance(objs, lights, GROUND, x, y, z, nx, ny, nz, phase)
    gr, gg, gb = neighbour_glow(objs, glow, GROUND, x, y, z, nx, ny, nz)
    a = world.GROUND_ALBEDO
    return a * (r + gr + GROUND_SELF), a * (g + gg + GROUND_SELF), a * (b + gb + GROUND_SELF)


@njit(**FAST)
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


@njit(**FAST)
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


@njit(**FAST)
def ring_tinted(obj, mean, nz):
    share = 1.0 - 0.6 * max(0.0, nz)  # upward facing metal mirrors the black world
    return obj[RED] * mean[0] * share, obj[GREEN] * mean[1] * share, obj[BLUE] * mean[2] * share


@njit(**FAST)
def fresnel(cosine, ior):
    """Unpolarised dielectric reflectance."""
    g = math.sqrt(ior * ior - 1.0 + cosine * cosine)
    a = (g - cosine) / (g + cosine)
    b = ((g + cosine) * cosine - 1.0) / ((g - cosine) * cosine + 1.0)
    return 0.5 * a * a * (1.0 + b * b)


@njit(**FAST)
def ggx(alpha2, cos_h, cos_l, cos_v):
    """GGX D * G / (4 cos_v): the BRDF times cos_l, with Smith's separable shadowing."""
    q = cos_h * cos_h * (alpha2 - 1.0) + 1.0
    d = alpha2 / (math.pi * q * q)
    gl = 2.0 * cos_l / (cos_l + math.sqrt(alpha2 + (1.0 - alpha2) * cos_l * cos_l))
    gv = 2.0 * cos_v / (cos_v + math.sqrt(alpha2 + (1.0 - alpha2) * cos_v * cos_v))
    return d * gl * gv / (4.0 * cos_v)


@njit(**FAST)
def velvet(cos_h, cos_hv, cos_l, cos_v):
    """Ashikhmin velvet BRDF times cos_l."""
    sin2 = max(1.0 - cos_h * cos_h, 1e-6)
    d = math.exp(-cos_h * cos_h / sin2 * VELVET_INV_SIGMA2) * VELVET_INV_SIGMA2 * INV_PI / (sin2 * sin2)
    f = 2.0 * cos_h / max(cos_hv, 1e-6)
    return 0.25 * d * min(1.0, min(f * cos_v, f * cos_l)) / max(cos_v, 1e-4)


@njit(**FAST)
def rubber_radiance(objs, lights, rings, means, glow, i, x, y, z, nx, ny, nz, vx, vy, vz, phase):
    """Fresnel mix of a white gloss over diffuse and velvet; (vx, vy, vz) points to the viewer."""
    cos_v = max(nx * vx + ny * vy + nz * vz, 1e-3)
    coat = fresnel(cos_v, world.RUBBER_IOR)
    dr = dg = db = 0.0  # diffuse and velvet, before the colour
    sr = sg = sb = 0.0  # gloss
    matt = 1.0 - world.RUBBER_VELVET
    for k in range(lights.shape[0] + 1):
        lx, ly, lz, cos_l, er, eg, eb = light_sample(objs, lights, k, i, x, y, z, nx, ny, nz, phase)
        if cos_l <= 0.0:
            continue
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


@njit(**FAST)
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


@njit(**FAST)
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
        lx, ly, lz, cos_l, er, eg, eb = light_sample(objs, lights, k, i, x, y, z, nx, ny, nz, phase)
        if cos_l <= 0.0:
            continue
        hx, hy, hz = lx + vx, ly + vy, lz + vz
        cos_h = (hx * nx + hy * ny + hz * nz) / math.sqrt(hx * hx + hy * hy + hz * hz)
        rough = ggx(alpha2, cos_h, cos_l, cos_v)
        fr, fg, fb = fr + er * rough, fg + eg * rough, fb + eb * rough
        if k == lights.shape[0]:  # the mirror ray cannot meet a point sun
            peak = ggx(SHARP_ALPHA2, cos_h, cos_l, cos_v)
            mr, mg, mb = mr + er * peak, mg + eg * peak, mb + eb * peak
    s = world.METAL_MIX
    return (
        objs[i, RED] * (s * mr + (1.0 - s) * fr),
        objs[i, GREEN] * (s * mg + (1.0 - s) * fg),
        objs[i, BLUE] * (s * mb + (1.0 - s) * fb),
    )


@njit(**FAST)
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
