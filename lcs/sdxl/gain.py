"""How far the denoised image follows a word, over the noise levels: what a loss does not tell.

Two renders of a scene differ in one attribute of its object (its shape, or its colour), and so do their captions. With
z_a and z_b their latents and x_t = z_a + sigma eps,

    gain = sum <x0hat(x_t, a) - x0hat(x_t, b), z_a - z_b> / sum |z_a - z_b|^2

over the scenes. Where the noise hides everything, a model that knows the word's meaning moves as far as the means of
the two kinds of pictures differ (less than 1: rotation, place and light are not said); one that ignores it has 0. At
low noise the picture tells the attribute and 0 is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from lcs.scenes import world
from lcs.scenes.scene import Scene
from lcs.sdxl.autoencoder import as_the_unet_sees, to_tensor
from lcs.sdxl.captions import compose, things_of
from lcs.sdxl.sampling import Pipe, denoised, encode
from lcs.sdxl.views import HELD_OUT_SEED, draw_views, view_scenes

TIMESTEPS = (990, 900, 800, 700, 600, 500, 400, 300, 200, 100)
CHOICES = {"shape": world.SHAPES, "color": world.COLOR_NAMES}


def other(scene: Scene, attribute: str, rng: np.random.Generator) -> Scene:
    """The scene with another shape or colour of its only object."""
    (thing,) = scene.objects
    names = [name for name in CHOICES[attribute] if name != getattr(thing, attribute)]
    return replace(scene, objects=(replace(thing, **{attribute: str(rng.choice(names))}),))


@torch.no_grad()
def latents_and_captions(pipe: Pipe, scenes: Sequence[Scene]) -> tuple[Tensor, list[str]]:
    """Latents [N, C, h, w] as the U-Net sees them, and captions that say everything."""
    images, table = draw_views(scenes, pipe.vae.config.sample_size)
    z = as_the_unet_sees(pipe.vae, pipe.vae.encode(to_tensor(images)).latent_dist.mean)
    return z, [compose(things_of(table, i)) for i in range(len(table))]


@torch.no_grad()
def word_gains(pipe: Pipe, scenes: int = 96, seed: int = 0) -> list[dict]:
    """One row per timestep: sigma in standard deviations of the latents, gains by attribute and size of the object."""
    shown = list(islice(view_scenes(1, HELD_OUT_SEED), scenes))
    rng = np.random.default_rng(seed)
    large = torch.tensor([scene.objects[0].size == "large" for scene in shown])
    z, captions = latents_and_captions(pipe, shown)
    said = encode(pipe, captions)
    others = {}
    for attribute in CHOICES:
        z_other, captions = latents_and_captions(pipe, [other(scene, attribute, rng) for scene in shown])
        others[attribute] = z - z_other, encode(pipe, captions)
    noise = torch.randn(z.shape, generator=torch.Generator().manual_seed(seed))
    rows = []
    for t in TIMESTEPS:
        sigma = float((1 / pipe.scheduler.alphas_cumprod[t] - 1).sqrt())
        x, at = z + sigma * noise, torch.tensor(t)
        x0hat = denoised(pipe, x, at, sigma, said)
        row = {"sigma": sigma / pipe.vae.config.scaling_factor}
        for attribute, (difference, words) in others.items():
            moved = x0hat - denoised(pipe, x, at, sigma, words)
            along, whole = ((a * difference).sum((1, 2, 3)) for a in (moved, difference))  # [N]
            for size, which in (("large", large), ("small", ~large)):
                row[f"{attribute} {size}"] = float(along[which].sum() / whole[which].sum())
        rows.append({name: round(value, 4) for name, value in row.items()})
    return rows
