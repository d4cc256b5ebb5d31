"""What enters a training step: sample i of a run, the same whatever the batch, process or restart.

Sample i picks dataset row `order(i)`; which objects are labelled, which patches are cut, the noise
level and the noise all come from counter-based generators keyed by (run seed, i).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from lcs.conditioning import get_conditioner
from lcs.experiments import Recipe, Run
from lcs.model.local import LocalEDM2
from lcs.rng import hashed_seeds, hashed_uniform

NOISE_STREAM, ORDER_STREAM, PATCH_STREAM = 2, 3, 4


@dataclass(frozen=True)
class Batch:
    images: Tensor  # float32 [B, 3, H, W], standardised; for the local model two patches per sample
    labels: Tensor | None  # float32 [B, L]
    sigma: Tensor  # float32 [B]
    noise: Tensor  # like images


def dataset_rows(seed: int, samples: np.ndarray, length: int) -> np.ndarray:
    """Dataset rows of training samples: every epoch is a new permutation of the dataset."""
    epochs = samples // length
    rows = np.empty(len(samples), np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        rows[here] = _permuted(samples[here] % length, length, int(hashed_seeds(seed, ORDER_STREAM, epoch)))
    return rows


def _permuted(values: np.ndarray, length: int, key: int) -> np.ndarray:
    """A keyed permutation of 0..length-1 without a table: a Feistel network on 2h bits, walked until in range."""
    half = max(1, (int(length - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    result = values.astype(np.int64)
    pending = np.arange(len(result))
    while len(pending):
        left, right = result[pending] >> half, result[pending] & mask
        for round_ in range(4):
            left, right = right, left ^ (hashed_seeds(key, round_, right) & mask)
        result[pending] = (left << half) | right
        pending = pending[result[pending] >= length]
    return result


def standardise(images: np.ndarray, run: Run) -> Tensor:
    """uint8 [B, H, W, 3] -> float32 [B, 3, H, W] with standard deviation about sigma_data."""
    mean = torch.tensor(run.pixel_mean) * 255
    factor = run.scale.sigma_data / (torch.tensor(run.pixel_std) * 255)
    return ((torch.from_numpy(images).float() - mean) * factor).permute(0, 3, 1, 2)


def to_rgb(x: Tensor, run: Run) -> np.ndarray:
    """Inverse of `standardise`, clipped: uint8 [B, H, W, 3]."""
    mean = torch.tensor(run.pixel_mean) * 255
    factor = torch.tensor(run.pixel_std) * 255 / run.scale.sigma_data
    return (x.permute(0, 2, 3, 1).cpu() * factor + mean).round().clamp(0, 255).byte().numpy()


def make_batch(run: Run, model: nn.Module, source, seed: int, samples: np.ndarray, device: torch.device) -> Batch:
    """Training samples `samples` (global indices) of a run."""
    images, table = source.fetch(dataset_rows(seed, samples, len(source)))
    x = standardise(images, run)
    labels = None
    if run.experiment.conditioner != "none":
        conditioner = get_conditioner(run.experiment.conditioner)
        labels = torch.from_numpy(conditioner.encode_table(table, seed, samples))
    sigma, noise = _noise(x.shape[1:], hashed_seeds(seed, NOISE_STREAM, samples), device)
    sigma = noise_levels(run.recipe, samples, sigma)
    x, labels = x.to(device), None if labels is None else labels.to(device)
    if isinstance(model, LocalEDM2):
        cells = model.choose_patches(labels, torch.from_numpy(hashed_uniform(seed, PATCH_STREAM, samples, 2)))
        x, labels, noise = model.patch_batch(x, labels, noise, cells)
        sigma = sigma[:, : cells.shape[1]].flatten()
    else:
        sigma = sigma[:, 0]
    return Batch(x, labels, sigma, noise)


def noise_levels(recipe: Recipe, samples: np.ndarray, normal: Tensor) -> Tensor:
    """sigma [B, n] from unit normal [B, n]: log-normal, at high noise for the first samples of a run that begins so."""
    high = torch.from_numpy(samples < recipe.high_noise_samples).to(normal.device)[:, None]  # [B, 1]
    (high_mean, high_std), mean, std = recipe.high_noise, recipe.p_mean, recipe.p_std
    return torch.where(high, normal * high_std + high_mean, normal * std + mean).exp()


def _noise(shape, seeds: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two unit normals [B, 2] for noise levels (one per patch) and noise [B, *shape], one generator a sample."""
    generator = torch.Generator(device)
    levels = torch.empty(len(seeds), 2, device=device)
    noise = torch.empty(len(seeds), *shape, device=device)
    for i, seed in enumerate(seeds):
        generator.manual_seed(int(seed))
        levels[i].normal_(generator=generator)
        noise[i].normal_(generator=generator)
    return levels, noise
