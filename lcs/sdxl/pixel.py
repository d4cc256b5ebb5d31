"""Pixel-space locality of an SDXL-class model, measured on its latents (v1 Fig 6, v2 Fig 4).

Pixel gradients. For a latent position (row, column), G_ij = mean over seeds of
sum_c |d x0hat[c, row, column] / d x_t[c, i, j]|: one backward pass per channel and location, all seeds at once.

Word influence. I_k(row, column, t) = ||x0hat(x_t, t, C) - x0hat(x_t, t, C_-k)||_2 over channels, where C_-k is the
prompt encoded again without word k: text states, pooled embedding and time ids together.

Both are measured on the conditional model (no guidance) at the x_t that the guided sampler passes through.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from lcs.errors import LcsError
from lcs.locality import smallest_square
from lcs.sdxl.kept import kept
from lcs.sdxl.sampling import Conditioning, Pipe, Step, decode, denoised, encode, initial_noise, sample
from lcs.sdxl.words import content_words, dominant_words, without


@dataclass(frozen=True)
class PixelStudy:
    """R seeds, S steps, K words, L locations, P probed steps (early, mid, late), latents h x w."""

    prompt: str
    words: tuple[str, ...]  # K labels
    steps: tuple[int, ...]  # S step numbers, from 1
    sigmas: np.ndarray  # [S]
    probed: tuple[int, ...]  # P indices into the S steps
    cells: tuple[tuple[int, int], ...]  # L (row, column)
    images: np.ndarray  # uint8 [R, H, W, 3]
    gradients: np.ndarray  # [P, L, h, w], mean over seeds
    influence: np.ndarray  # [R, S, K, L]
    maps: np.ndarray  # [P, K, h, w], mean over seeds

    def squares(self) -> np.ndarray:
        """[P, L]: share of the image in the smallest square around a location with 90% of its gradient's energy."""
        areas = [
            [smallest_square(g, cell)[1] for g, cell in zip(row, self.cells, strict=True)] for row in self.gradients
        ]
        return np.array(areas, float) / self.gradients[0, 0].size

    def dominant(self, step: int, location: int) -> list[str]:
        mean = self.influence[:, step, :, location].mean(0)
        return dominant_words(dict(zip(self.words, mean.tolist(), strict=True)))

    def profile_similarity(self, seeds: np.ndarray | None = None) -> np.ndarray:
        """[S]: mean over pairs of locations of the cosine between their influences of all words, mean over `seeds`.

        1 says that every location listens to the same words: no conditional locality in pixel space.
        """
        mean = (self.influence if seeds is None else self.influence[seeds]).mean(0)  # [S, K, L]
        unit = mean / np.linalg.norm(mean, axis=1, keepdims=True).clip(1e-12)
        cosines = np.einsum("skl,skm->slm", unit, unit)
        pairs = np.triu_indices(len(self.cells), 1)
        return cosines[:, pairs[0], pairs[1]].mean(-1)


def cell_of(location: tuple[float, float], side: int) -> tuple[int, int]:
    """(x, y) as fractions of the image -> (row, column) of the latent."""
    x, y = location
    if not (0 <= x < 1 and 0 <= y < 1):
        raise LcsError(f"a location is two fractions in [0, 1), got {location}")
    return int(y * side), int(x * side)


@contextmanager
def _little_memory(unet, big: bool):
    """Gradient checkpointing for a large U-Net (it has no dropout, so training mode changes nothing else)."""
    if not big:
        yield
        return
    training = unet.training
    unet.enable_gradient_checkpointing()
    unet.train()
    try:
        yield
    finally:
        unet.disable_gradient_checkpointing()
        unet.train(training)


def gradient_maps(
    pipe: Pipe, x: Tensor, timestep: Tensor, sigma: float, cond: Conditioning, cells: Sequence[tuple[int, int]]
) -> Tensor:
    """[B, L, h, w] on the CPU: the gradient magnitude for every sample and location."""
    with torch.enable_grad(), _little_memory(pipe.unet, x.shape[-1] > 64):
        x = x.detach().requires_grad_(True)
        x0 = denoised(pipe, x, timestep, sigma, cond)
        maps = torch.zeros(len(x), len(cells), *x.shape[2:])
        last = (len(cells) - 1, x.shape[1] - 1)
        for i, (row, column) in enumerate(cells):
            for c in range(x.shape[1]):
                (g,) = torch.autograd.grad(x0[:, c, row, column].sum(), x, retain_graph=(i, c) != last)
                maps[:, i] += g[:, c].abs().float().cpu()
    return maps


@torch.no_grad()
def influence_maps(
    pipe: Pipe, x: Tensor, timestep: Tensor, sigma: float, cond: Conditioning, ablated: Conditioning, chunk: int = 64
) -> Tensor:
    """[B, K, h, w] on the CPU: ||x0hat(C) - x0hat(C_-k)|| over channels; cond has one row, `ablated` K rows."""
    batch, words = len(x), len(ablated)
    full = denoised(pipe, x, timestep, sigma, cond.repeat(batch))  # [B, C, h, w]
    maps = torch.zeros(batch, words, *x.shape[2:])
    pairs = [(b, k) for b in range(batch) for k in range(words)]
    for at in range(0, len(pairs), chunk):
        b, k = (list(v) for v in zip(*pairs[at : at + chunk], strict=True))
        less = denoised(pipe, x[b], timestep, sigma, ablated.rows(k))
        maps[b, k] = (full[b] - less).float().norm(dim=1).cpu()
    return maps


def word_influence_at(
    pipe: Pipe,
    prompt: str,
    locations: Sequence[tuple[float, float]],
    seed: int = 0,
    step: int = 0,
    steps: int = 25,
    guidance: float = 3.0,
) -> tuple[list[str], np.ndarray, np.ndarray]:
    """For the app: words, their influence [K, L] at locations after `step` steps, and their maps [K, h, w]."""
    if not 0 <= step < steps:
        raise LcsError(f"step {step} is not one of 0..{steps - 1}")
    words = content_words(prompt)
    if not words:
        raise LcsError(f"{prompt!r} has no words to remove")
    cond, ablated = encode(pipe, [prompt]), encode(pipe, [without(prompt, w) for w in words])
    seen: list[Step] = []
    sample(pipe, cond, initial_noise(pipe, [seed]), steps, guidance, seen.append, stop_after=step + 1)
    at = seen[-1]
    maps = influence_maps(pipe, at.x, at.timestep, at.sigma, cond, ablated)[0].numpy()
    cells = [cell_of(location, maps.shape[-1]) for location in locations]
    return [w.label for w in words], np.stack([maps[:, r, c] for r, c in cells], 1), maps


def run_pixel_study(
    pipe: Pipe,
    prompt: str,
    locations: Sequence[tuple[float, float]],
    seeds: Sequence[int],
    steps: int,
    guidance: float,
    size: int | None = None,
    every: int = 1,
    batch: int = 8,
    progress: bool = False,
) -> PixelStudy:
    """Gradients at the first, middle and last step; influence of every word at every `every`-th step."""
    words = content_words(prompt)
    if not words:
        raise LcsError(f"{prompt!r} has no words to remove")
    cond = encode(pipe, [prompt], size)
    ablated = encode(pipe, [without(prompt, w) for w in words], size)
    if steps < 3:
        raise LcsError(f"{steps} steps are too few: a first, a middle and a last one are needed")
    probed = (0, (steps - 1) // 2, steps - 1)
    measured = sorted({*range(0, steps, every), *probed})
    side = initial_noise(pipe, [0], size).shape[-1]
    cells = tuple(cell_of(location, side) for location in locations)
    bar = tqdm(total=len(seeds) * len(measured), disable=not progress, desc="pixel space", unit="step")
    parts = []
    for first in range(0, len(seeds), batch):
        chosen = list(seeds[first : first + batch])

        def measure(chosen=chosen) -> dict[str, np.ndarray]:
            """Of some seeds: sums of gradients and maps, influence of each, their images."""
            gradients = np.zeros((len(probed), len(cells), side, side))
            maps = np.zeros((len(probed), len(words), side, side))
            influence = np.zeros((len(chosen), len(measured), len(words), len(cells)))
            sigmas, conds = np.zeros(len(measured)), cond.repeat(len(chosen))

            def look(step: Step) -> None:
                if step.index not in measured:
                    return
                s = measured.index(step.index)
                sigmas[s] = step.sigma
                chunk = 8 * batch if batch > 1 else 2
                now = influence_maps(pipe, step.x, step.timestep, step.sigma, cond, ablated, chunk)
                now = now.numpy()  # [B, K, h, w]
                influence[:, s] = np.stack([now[:, :, r, c] for r, c in cells], -1)
                if step.index in probed:
                    p = probed.index(step.index)
                    maps[p] = now.sum(0)
                    gradients[p] = gradient_maps(pipe, step.x, step.timestep, step.sigma, conds, cells).sum(0).numpy()
                bar.update(len(chosen))

            latents = sample(pipe, conds, initial_noise(pipe, chosen, size), steps, guidance, look)
            return {"sigmas": sigmas, "gradients": gradients, "maps": maps, "influence": influence,
                    "images": decode(pipe, latents)}  # fmt: skip

        parts.append(kept(["pixel", prompt, locations, chosen, steps, guidance, size, every], measure))
        bar.update(min(first + batch, len(seeds)) * len(measured) - bar.n)  # of a part that was there already
    bar.close()
    return PixelStudy(
        prompt, tuple(w.label for w in words), tuple(m + 1 for m in measured), parts[0]["sigmas"],
        tuple(measured.index(p) for p in probed), cells, np.concatenate([part["images"] for part in parts]),
        sum(part["gradients"] for part in parts) / len(seeds), np.concatenate([part["influence"] for part in parts]),
        sum(part["maps"] for part in parts) / len(seeds),
    )  # fmt: skip
