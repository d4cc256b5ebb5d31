"""Images as a diffusion model might draw them: from clean renders to smears of known strength.

Two things happen to a training image, both drawn from one generator:

- *Style*, for the whole image and harmless: slight blur, ragged edges, grain, speckle, missing shadows,
  contrast and colour shifts. It changes no target; the counter must see through it.
- *Damage*, object by object, with a strength s in 0..1: the object fades into the room, is smeared, warped,
  shows another image through it, is stained, or takes on a second colour in places. Its quality becomes
  1 - s. At s = 0.5 it is, by eye, just about still an object. Some objects are removed altogether, which
  leaves their shadow: nothing to count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lcs.counter.data import CounterData
from lcs.scenes.placement import MAX_OBJECTS

DAMAGES = ("fade", "smear", "warp", "double", "stain", "two-tone")
IGNORED_ABOVE = 0.8  # stronger damage: whether this is still an object is nobody's business, the quality is low


@dataclass(frozen=True)
class DegradeSettings:
    styled_images: float = 0.6  # share of images with harmless changes
    damaged_images: float = 0.5  # share of images in which objects may be damaged
    damaged_objects: float = 0.4  # share of objects in them
    removed_objects: float = 0.05  # share of objects in them that are erased
    min_damage: float = 0.0  # strengths are uniform in min_damage..1


@dataclass(frozen=True)
class Degraded:
    images: Tensor  # float32 [B, 3, H, W] in [0, 1]
    strength: Tensor  # float32 [B, 12]: damage of each object
    present: Tensor  # bool [B, 12]: the object is there, however damaged


def degrade(data: CounterData, generator: torch.Generator, settings: DegradeSettings) -> Degraded:
    """Degrades a batch of renders; `data` holds the batch only."""
    images, empty = (
        torch.from_numpy(np.ascontiguousarray(a)).permute(0, 3, 1, 2).float() / 255 for a in (data.images, data.empty)
    )
    masks = torch.from_numpy(data.masks.astype(np.int64))  # [B, H, W]
    counts = torch.from_numpy(data.table.counts.astype(np.int64))
    there = torch.arange(MAX_OBJECTS) < counts[:, None]  # [B, 12]

    def uniform(*shape) -> Tensor:
        return torch.rand(*shape, generator=generator)

    batch = len(images)
    may = (uniform(batch, 1) < settings.damaged_images) & there
    removed = may & (uniform(batch, MAX_OBJECTS) < settings.removed_objects)
    damaged = may & ~removed & (uniform(batch, MAX_OBJECTS) < settings.damaged_objects)
    strength = (settings.min_damage + (1 - settings.min_damage) * uniform(batch, MAX_OBJECTS)) * damaged
    kind = torch.randint(len(DAMAGES), (batch, MAX_OBJECTS), generator=generator)
    shift = int(torch.randint(1, max(batch, 2), (), generator=generator))
    other = images.roll(shift, 0).flip(3)  # what shines through in "double"

    for number, name in enumerate(DAMAGES):
        chosen = torch.where(kind == number, strength, torch.zeros(()))
        if chosen.any():
            images = DAMAGE[name](images, spread(chosen, masks, REACH[name]), empty, other, generator)
    if removed.any():
        images = torch.lerp(images, empty, spread(removed.float(), masks).round())
    if settings.styled_images > 0:
        styled = uniform(batch, 1, 1, 1) < settings.styled_images
        images = torch.where(styled, _style(images, empty, masks, generator), images)
    return Degraded(images.clamp(0, 1), strength, there & ~removed)


def spread(per_object: Tensor, masks: Tensor, reach: int = 2) -> Tensor:
    """Values of objects [B, 12] as a map [B, 1, H, W]: constant on the object, fading out just past `reach` pixels."""
    table = torch.cat([torch.zeros(len(per_object), 1), per_object], 1)  # index 0 is the room
    value = table.gather(1, masks.flatten(1)).view(len(masks), 1, *masks.shape[1:])
    return F.avg_pool2d(F.max_pool2d(value, 2 * reach + 1, 1, reach), 3, 1, 1, count_include_pad=False)


# ---- the damages: (images, strength map, empty room, other images, generator) -> images --------------


def _fade(x: Tensor, s: Tensor, empty: Tensor, other: Tensor, generator) -> Tensor:
    return torch.lerp(x, empty, 0.95 * s**0.7)


def _smear(x: Tensor, s: Tensor, empty: Tensor, other: Tensor, generator) -> Tensor:
    soft, softer = blur(x, 1.5), blur(x, 4.0)
    return torch.where(s < 0.5, torch.lerp(x, soft, (2 * s).clamp(max=1)), torch.lerp(soft, softer, (2 * s - 1)))


def _warp(x: Tensor, s: Tensor, empty: Tensor, other: Tensor, generator) -> Tensor:
    return _displace(x, 4, 3.5 * s, generator)


def _displace(x: Tensor, cell: int, pixels: Tensor, generator) -> Tensor:
    """Moves the content about by smooth random amounts; `pixels` is their size, [B, 1, H, W] or [B, 1, 1, 1]."""
    batch, _, height, width = x.shape
    push = _smooth_noise((batch, 2, height, width), cell, generator) * pixels
    ys, xs = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    grid = torch.stack([(xs + push[:, 0]) * 2 / width - 1, (ys + push[:, 1]) * 2 / height - 1], -1)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)


def _double(x: Tensor, s: Tensor, empty: Tensor, other: Tensor, generator) -> Tensor:
    return torch.lerp(x, other, 0.8 * s)


def _stain(x: Tensor, s: Tensor, empty: Tensor, other: Tensor, generator) -> Tensor:
    return x + _smooth_noise(x.shape, 3, generator) * (0.18 * s)


def _two_tone(x: Tensor, s: Tensor, empty: Tensor, other: Tensor, generator) -> Tensor:
    """A second colour in parts of the object, complete at s = 0.5 (one object still); beyond, stains as well."""
    batch, _, height, width = x.shape
    color = 0.15 + 0.5 * torch.rand(batch, 3, 1, 1, generator=generator)
    part = torch.sigmoid(4 * _smooth_noise((batch, 1, height, width), 5, generator))
    x = torch.lerp(x, color.expand_as(x), part * (1.8 * s).clamp(max=0.9))
    return _stain(x, (2 * s - 1).clamp(min=0), empty, other, generator)


DAMAGE = {
    "fade": _fade, "smear": _smear, "warp": _warp, "double": _double, "stain": _stain, "two-tone": _two_tone,
}  # fmt: skip
REACH = {"fade": 2, "smear": 2, "warp": 2, "double": 2, "stain": 0, "two-tone": 0}  # pixels around the object


# ---- style ----------------------------------------------------------------------------------------


def _style(x: Tensor, empty: Tensor, masks: Tensor, generator: torch.Generator) -> Tensor:
    """Harmless changes; each is applied to half of the images."""
    batch = len(x)

    def some(low: float, high: float, channels: int = 1) -> Tensor:
        """Per image and channel uniform in low..high, or 0 for half of the images."""
        value = low + (high - low) * torch.rand(batch, channels, 1, 1, generator=generator)
        return value * (torch.rand(batch, 1, 1, 1, generator=generator) < 0.5)

    objects = F.avg_pool2d((masks > 0).float()[:, None], 3, 1, 1, count_include_pad=False)  # [B, 1, H, W] in 0..1
    x = torch.lerp(x, empty, some(0.0, 1.0) * (objects == 0))  # shadows and reflections on the floor
    x = _displace(x, 3, some(0.0, 0.8), generator)  # ragged edges
    x = torch.lerp(x, blur(x, 1.0), some(0.0, 1.0))
    x = x + some(0.0, 0.06) * objects * torch.randn(x.shape, generator=generator)  # grain
    x = x + some(0.0, 0.07) * objects * _smooth_noise(x.shape, 3, generator)
    x = x + some(0.0, 0.03) * torch.randn(x.shape, generator=generator)
    x = x + some(0.0, 0.04) * _smooth_noise(x.shape, 2, generator)  # speckle
    x = x + some(0.0, 0.03) * _smooth_noise(x.shape, 16, generator)  # uneven light
    mean = x.mean((1, 2, 3), keepdim=True)
    x = mean + (x - mean) * (1 + some(-0.2, 0.2))
    return x * (1 + some(-0.05, 0.05, 3)) + some(-0.05, 0.05)


def blur(x: Tensor, sigma: float) -> Tensor:
    """Gaussian blur of [B, C, H, W], edges repeated."""
    radius = math.ceil(2.5 * sigma)
    at = torch.arange(-radius, radius + 1, dtype=torch.float32)
    kernel = torch.exp(-(at**2) / (2 * sigma**2))
    kernel = (kernel / kernel.sum()).repeat(x.shape[1], 1, 1, 1)  # [C, 1, 1, width]
    padded = F.pad(x, (radius,) * 4, mode="replicate")
    return F.conv2d(F.conv2d(padded, kernel, groups=x.shape[1]), kernel.transpose(2, 3), groups=x.shape[1])


def _smooth_noise(shape, cell: int, generator: torch.Generator) -> Tensor:
    """Normal noise that varies over about `cell` pixels: [B, C, H, W], standard deviation below 1."""
    batch, channels, height, width = shape
    coarse = torch.randn(batch, channels, -(-height // cell) + 1, -(-width // cell) + 1, generator=generator)
    return F.interpolate(coarse, scale_factor=cell, mode="bilinear")[..., :height, :width]
