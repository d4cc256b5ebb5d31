"""The CLEVR world in numbers: everything a renderer needs that is the same in every scene.

Facts of the original generator (facebookresearch/clevr-dataset-gen) are marked (C). The original
ships its ground and materials as .blend files; where we rebuild those from primitives the numbers
are ours and marked (O). Only the standard library is used here: Blender's Python imports this too.
"""

from __future__ import annotations

import math

# ---- image (C) ----------------------------------------------------------------------------------
IMAGE_WIDTH, IMAGE_HEIGHT = 320, 240
MIN_VISIBLE_PIXELS = 200  # per object, at 320x240

# ---- camera (C): looks at the origin, z up -------------------------------------------------------
CAMERA = (7.4811, -6.5076, 5.3437)
LENS, SENSOR_WIDTH = 35.0, 32.0
CAMERA_JITTER = 0.5
LIGHT_JITTER = 1.0

# ---- lights (C): square area lights that look at the origin, and a sun ---------------------------
# name: (position, side length, power in watts, linear RGB)
AREA_LIGHTS = {
    "key": ((6.4467, -2.9052, 4.2584), 0.5, 78.54, (1.0, 0.932, 0.817)),
    "fill": ((-4.6711, -4.0136, 3.0112), 0.5, 23.56, (0.762, 0.818, 1.0)),
    "back": ((-1.1685, 2.646, 5.8157), 1.0, 39.27, (1.0, 1.0, 1.0)),
}
SUN_STRENGTH = 0.45
SUN_ROTATION = (0.236, 0.417, 0.097)  # XYZ Euler angles; the sun shines along its local -z

# ---- objects (C) ---------------------------------------------------------------------------------
SHAPES = ("cube", "sphere", "cylinder")
SIZES = {"large": 0.7, "small": 0.35}
MATERIALS = ("rubber", "metal")
COLORS = {  # 8-bit values used as linear RGB
    "gray": (87, 87, 87),
    "red": (173, 35, 35),
    "blue": (42, 75, 215),
    "green": (29, 105, 20),
    "brown": (129, 74, 25),
    "purple": (129, 38, 192),
    "cyan": (41, 208, 208),
    "yellow": (255, 238, 51),
}
COLOR_NAMES = tuple(COLORS)
SIZE_NAMES = tuple(SIZES)

# ---- placement (C) -------------------------------------------------------------------------------
PLACEMENT_HALF_WIDTH = 3.0
MIN_GAP = 0.25  # between the objects' radii
MIN_MARGIN = 0.4  # along left/right and front/behind
MAX_TRIES_PER_OBJECT = 50

# ---- ground (O): a floor that curves up behind the objects ---------------------------------------
# u is the horizontal distance from the origin away from the (unjittered) camera. The floor z = 0 is
# flat up to u = SWEEP_START, then a quarter circle of radius SWEEP_RADIUS, then a vertical wall.
_norm = math.hypot(CAMERA[0], CAMERA[1])
SWEEP_DIRECTION = (-CAMERA[0] / _norm, -CAMERA[1] / _norm)
SWEEP_START = 7.0
SWEEP_RADIUS = 8.0
GROUND_ALBEDO = 0.8  # Cycles' surface without a material

# ---- materials -----------------------------------------------------------------------------------
METAL_ROUGHNESS = (0.447, 0.1)  # (C) two GGX lobes ...
METAL_MIX = 0.6  # (C) ... of which the second has this share
RUBBER_IOR = 1.25  # (O) Fresnel weight of the gloss coat
RUBBER_GLOSS_ROUGHNESS = 0.35  # (O)
RUBBER_VELVET = 0.12  # (O) share of Ashikhmin velvet in the base
RUBBER_VELVET_SIGMA = 0.6  # (O)

# ---- quality of the original (C) -----------------------------------------------------------------
CYCLES_SAMPLES = 512
BLUR_GLOSSY = 2.0
