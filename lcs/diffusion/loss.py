"""Training objective of EDM2: noise levels and the uncertainty-weighted denoising loss (arXiv 2312.02696).

Pure functions. The caller draws `sigma` and `noise` from its own generator, so a training step is reproducible and
independent of how a batch is split over processes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def sample_sigma(n: int, p_mean: float, p_std: float, generator: torch.Generator | None = None) -> Tensor:
    """n noise levels, log-normal: ln(sigma) ~ N(p_mean, p_std^2). -> [n]"""
    return (torch.randn(n, generator=generator) * p_std + p_mean).exp()


def loss_weight(sigma: Tensor, sigma_data: float) -> Tensor:
    """EDM's lambda(sigma) = 1 / c_out^2: with it the raw network's target has unit variance at every noise level."""
    return (sigma**2 + sigma_data**2) / (sigma * sigma_data) ** 2


def edm2_loss(
    model: nn.Module, images: Tensor, labels: Tensor | None, sigma: Tensor, noise: Tensor, sigma_data: float = 0.5
) -> Tensor:
    """Loss of every sample, averaged over its pixels. -> [B]

    images [B, C, H, W] clean and standardised; labels [B, L] or None; sigma [B]; noise [B, C, H, W] unit normal.

        loss = lambda(sigma) / e^u(sigma) * |x0hat - image|^2 + u(sigma)

    u is the model's learned log-variance of the weighted error at each noise level; at its optimum the first term
    is 1, so every noise level contributes gradients of the same size. The paper *sums* over the pixels of an image
    where this takes the mean: a constant factor, to which Adam is blind if its epsilon follows (`build_optimizer`).
    """
    s = sigma[:, None, None, None]
    x0hat, u = model(torch.addcmul(images, noise, s), sigma, labels, return_logvar=True)
    error = (x0hat - images).square().mean(dim=(1, 2, 3))  # [B]
    u = u.flatten()
    return loss_weight(sigma, sigma_data) * torch.exp(-u) * error + u
