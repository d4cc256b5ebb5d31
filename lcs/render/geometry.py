"""Ray geometry of the CLEVR world in closed form: sphere, cube, cylinder and the curved ground.

All functions are scalar and compiled by numba, in float64 and without fast-math, so that the same
ray gives the same hit on every machine; scene placement relies on it. They take the packed scene
of `pack_objects` and `pack_camera`. Directions are unit vectors unless said otherwise.
"""

from __future__ import annotations

import math

import numpy as np

from lcs.jit import njit
from lcs.scenes import world
from lcs.scenes.scene import Scene, SceneObject, Vec3, look_at_axes

# Columns of a packed object row.
SHAPE, RADIUS, X, Y, Z, COS, SIN, RED, GREEN, BLUE, METAL, BOUND = range(12)
CUBE, SPHERE, CYLINDER = (world.SHAPES.index(name) for name in ("cube", "sphere", "cylinder"))
_BOUND = {"cube": math.sqrt(3), "sphere": 1.0, "cylinder": math.sqrt(2)}  # bounding sphere / radius
GROUND = -1  # object index of the ground
NOTHING = -2
MISS = 1e30
EPS = 1e-6

_WX, _WY = world.SWEEP_DIRECTION
_START, _RADIUS = world.SWEEP_START, world.SWEEP_RADIUS


def pack_objects(objects: tuple[SceneObject, ...]) -> np.ndarray:
    """Objects as float64 [n, 12]."""
    rows = np.empty((len(objects), 12))
    for row, o in zip(rows, objects, strict=True):
        row[SHAPE] = world.SHAPES.index(o.shape)
        row[RADIUS] = o.radius
        row[X : Z + 1] = o.position
        row[COS], row[SIN] = math.cos(o.rotation), math.sin(o.rotation)
        row[RED : BLUE + 1] = np.array(world.COLORS[o.color]) / 255
        row[METAL] = o.material == "metal"
        row[BOUND] = o.radius * _BOUND[o.shape]
    return rows


def pack_camera(camera: Vec3) -> np.ndarray:
    """Origin, and the axes scaled so that (a, b) in [-1, 1]^2 covers the 4:3 image: float64 [4, 3]."""
    right, up, forward = (np.array(v) for v in look_at_axes(camera))
    half_width = world.SENSOR_WIDTH / world.LENS / 2
    half_height = half_width * world.IMAGE_HEIGHT / world.IMAGE_WIDTH
    return np.stack([np.array(camera), right * half_width, up * half_height, forward])


@njit(cache=True, inline="always", error_model="numpy")
def camera_ray(cam, a, b):
    """Unit direction of the ray through the image at a (right), b (up), both in [-1, 1]."""
    dx = cam[3, 0] + a * cam[1, 0] + b * cam[2, 0]
    dy = cam[3, 1] + a * cam[1, 1] + b * cam[2, 1]
    dz = cam[3, 2] + a * cam[1, 2] + b * cam[2, 2]
    n = 1.0 / math.sqrt(dx * dx + dy * dy + dz * dz)
    return dx * n, dy * n, dz * n


@njit(cache=True, error_model="numpy")
def hit_object(obj, ox, oy, oz, dx, dy, dz):
    """Distance to the first intersection with one object in front of the origin, or MISS."""
    px, py, pz = ox - obj[X], oy - obj[Y], oz - obj[Z]
    b = px * dx + py * dy + pz * dz
    pp = px * px + py * py + pz * pz
    if b * b < pp - obj[BOUND] * obj[BOUND]:
        return MISS  # misses the bounding sphere
    r = obj[RADIUS]
    shape = obj[SHAPE]
    if shape == SPHERE:
        disc = b * b - pp + r * r
        if disc < 0.0:
            return MISS
        root = math.sqrt(disc)
        t = -b - root
        if t > EPS:
            return t
        t = -b + root
        return t if t > EPS else MISS
    if shape == CUBE:
        c, s = obj[COS], obj[SIN]
        qx, qy = c * px + s * py, -s * px + c * py  # rotated by -theta into the cube's frame
        ex, ey = c * dx + s * dy, -s * dx + c * dy
        near, far = -MISS, MISS
        for p, d in ((qx, ex), (qy, ey), (pz, dz)):
            if abs(d) < 1e-12:
                if abs(p) > r:
                    return MISS
            else:
                inv = 1.0 / d
                t1, t2 = (-r - p) * inv, (r - p) * inv
                if t1 > t2:
                    t1, t2 = t2, t1
                near = max(near, t1)
                far = min(far, t2)
        if near > far or far <= EPS:
            return MISS
        return near if near > EPS else far
    # Cylinder: the infinite tube cut by the two caps, as an interval of t.
    near, far = -MISS, MISS
    if abs(dz) < 1e-12:
        if abs(pz) > r:
            return MISS
    else:
        inv = 1.0 / dz
        t1, t2 = (-r - pz) * inv, (r - pz) * inv
        near, far = min(t1, t2), max(t1, t2)
    a = dx * dx + dy * dy
    c2 = px * px + py * py - r * r
    if a < 1e-12:
        if c2 > 0.0:
            return MISS
    else:
        h = px * dx + py * dy
        disc = h * h - a * c2
        if disc < 0.0:
            return MISS
        root = math.sqrt(disc)
        near = max(near, (-h - root) / a)
        far = min(far, (-h + root) / a)
    if near > far or far <= EPS:
        return MISS
    return near if near > EPS else far


@njit(cache=True, error_model="numpy")
def object_normal(obj, x, y, z):
    """Outward unit normal at a point on an object's surface."""
    px, py, pz = x - obj[X], y - obj[Y], z - obj[Z]
    r = obj[RADIUS]
    if obj[SHAPE] == SPHERE:
        return px / r, py / r, pz / r
    if obj[SHAPE] == CUBE:
        c, s = obj[COS], obj[SIN]
        qx, qy = c * px + s * py, -s * px + c * py
        ax, ay, az = abs(qx), abs(qy), abs(pz)
        if az >= ax and az >= ay:
            return 0.0, 0.0, 1.0 if pz > 0.0 else -1.0
        if ax >= ay:
            sign = 1.0 if qx > 0.0 else -1.0
            return sign * c, sign * s, 0.0
        sign = 1.0 if qy > 0.0 else -1.0
        return -sign * s, sign * c, 0.0
    h = math.sqrt(px * px + py * py)
    if r - abs(pz) < r - h:  # nearer to a cap than to the side
        return 0.0, 0.0, 1.0 if pz > 0.0 else -1.0
    return px / h, py / h, 0.0


@njit(cache=True, error_model="numpy")
def hit_ground(ox, oy, oz, dx, dy, dz):
    """Distance to the floor, the sweep or the wall, whichever the ray meets; MISS if it leaves upwards."""
    u, du = ox * _WX + oy * _WY, dx * _WX + dy * _WY
    if dz < -1e-12:
        t = -oz / dz
        if t > EPS and u + t * du <= _START:
            return t
    # Quarter circle in the (u, z) plane around (START, RADIUS), met from inside: the far root.
    cu, cz = u - _START, oz - _RADIUS
    a = du * du + dz * dz
    if a > 1e-12:
        h = cu * du + cz * dz
        disc = h * h - a * (cu * cu + cz * cz - _RADIUS * _RADIUS)
        if disc >= 0.0:
            t = (-h + math.sqrt(disc)) / a
            if t > EPS and cu + t * du >= 0.0 and cz + t * dz <= 0.0:
                return t
    if du > 1e-12:
        t = (_START + _RADIUS - u) / du
        if t > EPS and oz + t * dz >= _RADIUS:
            return t
    return MISS


@njit(cache=True, error_model="numpy")
def ground_normal(x, y, z):
    """Unit normal of the ground at a point on it, facing the scene."""
    u = x * _WX + y * _WY
    if u <= _START:
        return 0.0, 0.0, 1.0
    if z >= _RADIUS:
        return -_WX, -_WY, 0.0
    nu, nz = (_START - u) / _RADIUS, (_RADIUS - z) / _RADIUS
    return nu * _WX, nu * _WY, nz


@njit(cache=True, error_model="numpy")
def first_object(objs, ox, oy, oz, dx, dy, dz):
    """Distance to and index of the first object hit; (MISS, NOTHING) if there is none."""
    best, which = MISS, NOTHING
    for i in range(objs.shape[0]):
        t = hit_object(objs[i], ox, oy, oz, dx, dy, dz)
        if t < best:
            best, which = t, i
    return best, which


@njit(cache=True, error_model="numpy")
def occluded(objs, skip, ox, oy, oz, dx, dy, dz, limit):
    """Whether any object other than `skip` lies within `limit` along the ray."""
    for i in range(objs.shape[0]):
        if i != skip and hit_object(objs[i], ox, oy, oz, dx, dy, dz) < limit:
            return True
    return False


@njit(cache=True, error_model="numpy")
def visible_pixels(cam, objs, which, width, height, enough):
    """Pixels of object `which` that no other object hides, at pixel centres; stops counting at `enough`."""
    # Screen bounds of the bounding sphere, from its centre and angular size; generous by 15%.
    px, py, pz = objs[which, X] - cam[0, 0], objs[which, Y] - cam[0, 1], objs[which, Z] - cam[0, 2]
    depth = px * cam[3, 0] + py * cam[3, 1] + pz * cam[3, 2]
    w2 = cam[1, 0] ** 2 + cam[1, 1] ** 2 + cam[1, 2] ** 2
    h2 = cam[2, 0] ** 2 + cam[2, 1] ** 2 + cam[2, 2] ** 2
    a = (px * cam[1, 0] + py * cam[1, 1] + pz * cam[1, 2]) / (depth * w2)
    b = (px * cam[2, 0] + py * cam[2, 1] + pz * cam[2, 2]) / (depth * h2)
    size = 1.15 * objs[which, BOUND] / (depth - objs[which, BOUND])
    half_x, half_y = size / math.sqrt(w2) * width / 2, size / math.sqrt(h2) * height / 2
    cx, cy = (a + 1) * width / 2, (1 - b) * height / 2
    x0, x1 = max(0, int(cx - half_x)), min(width, int(cx + half_x) + 2)
    y0, y1 = max(0, int(cy - half_y)), min(height, int(cy + half_y) + 2)
    count = 0
    for y in range(y0, y1):
        for x in range(x0, x1):
            dx, dy, dz = camera_ray(cam, 2 * (x + 0.5) / width - 1, 1 - 2 * (y + 0.5) / height)
            t = hit_object(objs[which], cam[0, 0], cam[0, 1], cam[0, 2], dx, dy, dz)
            if t < MISS and not occluded(objs, which, cam[0, 0], cam[0, 1], cam[0, 2], dx, dy, dz, t):
                count += 1
                if count >= enough:
                    return count
    return count


def camera_and_objects(scene: Scene) -> tuple[np.ndarray, np.ndarray]:
    return pack_camera(scene.camera), pack_objects(scene.objects)
