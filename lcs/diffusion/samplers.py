"""Samplers: plain functions that integrate the probability-flow ODE from noise to image.

    dx / d sigma = (x - x0hat(x, sigma)) / sigma

A sampler takes `denoise(x, sigma) -> x0hat` (sigma a float, the same for the whole batch), a starting point
`x` [B, C, H, W] and decreasing noise levels `sigmas` [steps + 1] that end in 0. After each step it calls
`callback(step, x, sigma, x0hat)` with the state *before* the step and the denoiser's output there: live previews and
locality probes hang on it. `initial_noise` draws one starting point per image seed, so a batch equals its images one
by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Denoiser = Callable[[Tensor, float], Tensor]
Callback = Callable[[int, Tensor, float, Tensor], None]


def sigma_schedule(steps: int, sigma_min: float = 0.002, sigma_max: float = 80.0, rho: float = 7.0) -> list[float]:
    """EDM's noise levels: sigma^(1/rho) falls linearly from sigma_max to sigma_min in `steps` values, then 0."""
    top, bottom = sigma_max ** (1 / rho), sigma_min ** (1 / rho)
    last = max(steps - 1, 1)
    return [(top + i / last * (bottom - top)) ** rho for i in range(steps)] + [0.0]


def initial_noise(seeds: Sequence[int], shape: Sequence[int], sigma_max: float = 80.0) -> Tensor:
    """Normal noise of standard deviation sigma_max, one generator per image. -> [len(seeds), *shape]"""
    noise = [torch.randn(*shape, generator=torch.Generator().manual_seed(int(seed))) for seed in seeds]
    return torch.stack(noise) * sigma_max


def heun(denoise: Denoiser, x: Tensor, sigmas: Sequence[float], callback: Callback | None = None) -> Tensor:
    """Deterministic second-order sampler of EDM (Karras et al. 2022, algorithm 1): 2 * steps - 1 denoiser calls."""
    for i, (s, s_next) in enumerate(_pairs(sigmas)):
        x0hat = denoise(x, s)
        slope = (x - x0hat) / s
        x_next = x + (s_next - s) * slope  # Euler
        if s_next > 0:  # trapezoid
            slope_next = (x_next - denoise(x_next, s_next)) / s_next
            x_next = x + (s_next - s) / 2 * (slope + slope_next)
        if callback is not None:
            callback(i, x, s, x0hat)
        x = x_next
    return x


def dpmpp_2m(denoise: Denoiser, x: Tensor, sigmas: Sequence[float], callback: Callback | None = None) -> Tensor:
    """Second-order multistep sampler (DPM-Solver++ 2M, Lu et al. 2022): one denoiser call per step.

    With l = -ln(sigma) the ODE's linear part is solved exactly, which leaves an integral of x0hat alone:

        x(l + h) = e^-h x(l) + e^-(l+h) * integral of e^t x0hat(t) dt from l to l + h

    x0hat is replaced by its value in the middle of the step, extrapolated from the current and the previous one:

        x(l + h) = e^-h x + (1 - e^-h) (x0hat + h/2 * slope)

    Integrating the extrapolated line exactly has the same order, but follows it further: on Gaussian mixtures it
    was worse the fewer the steps, and so were third order and Adams-Bashforth in sigma.
    """
    previous: tuple[Tensor, float] | None = None  # x0hat and length of the previous step
    for i, (s, s_next) in enumerate(_pairs(sigmas)):
        x0hat = denoise(x, s)
        if s_next == 0:  # h is infinite: what remains is x0hat itself
            x_next = x0hat
        else:
            h = math.log(s / s_next)
            middle = x0hat if previous is None else x0hat + (x0hat - previous[0]) * (h / 2 / previous[1])
            x_next = torch.lerp(middle, x, math.exp(-h))
            previous = (x0hat, h)
        if callback is not None:
            callback(i, x, s, x0hat)
        x = x_next
    return x


def _pairs(sigmas: Sequence[float]) -> list[tuple[float, float]]:
    levels = [float(s) for s in sigmas]
    return list(zip(levels[:-1], levels[1:], strict=True))
