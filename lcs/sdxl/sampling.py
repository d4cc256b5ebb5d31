"""One denoising loop for all studies: the pipeline's own parts, with a place to look at every step.

`StableDiffusionXLPipeline.__call__` hides x_t and the prediction, which every analysis here needs. This loop calls
the same text encoders, U-Net, Euler scheduler and decoder in the same order, and gives the same images (tested).

The U-Net's output is turned into x0hat, the denoised estimate: with sigma the scheduler's noise level and x the
unscaled sample, x0hat = x - sigma * output for epsilon prediction, and
x0hat = x / (sigma^2 + 1) - output * sigma / sqrt(sigma^2 + 1) for v-prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from diffusers import StableDiffusionXLPipeline
from torch import Tensor

Pipe = StableDiffusionXLPipeline
PREDICTIONS = ("epsilon", "v_prediction")


@dataclass(frozen=True)
class Conditioning:
    """All that the U-Net is told of prompts: C = {text states, pooled embedding, time ids} of the paper."""

    states: Tensor  # [B, T, D]
    pooled: Tensor  # [B, P]
    time_ids: Tensor  # [B, 6]

    def __len__(self) -> int:
        return len(self.states)

    def rows(self, index) -> Conditioning:
        return Conditioning(self.states[index], self.pooled[index], self.time_ids[index])

    def repeat(self, n: int) -> Conditioning:
        """Each row n times in succession."""
        parts = (self.states, self.pooled, self.time_ids)
        return Conditioning(*(p.repeat_interleave(n, 0) for p in parts))


@dataclass(frozen=True)
class Step:
    """One step of a trajectory, before the scheduler moves on."""

    index: int  # 0 is the noisiest
    timestep: Tensor
    sigma: float
    x: Tensor  # x_t [B, C, h, w], unscaled
    x0: Tensor  # the guided x0hat [B, C, h, w]


OnStep = Callable[[Step], None]


def device_of(pipe: Pipe) -> torch.device:
    return torch.device(pipe._execution_device)  # right also under CPU offload


def image_size(pipe: Pipe) -> int:
    return pipe.unet.config.sample_size * pipe.vae_scale_factor


@torch.no_grad()
def encode(pipe: Pipe, prompts: Sequence[str], size: int | None = None) -> Conditioning:
    """Prompts as the pipeline encodes them, "" included."""
    states, _, pooled, _ = pipe.encode_prompt(
        list(prompts), device=device_of(pipe), num_images_per_prompt=1, do_classifier_free_guidance=False
    )
    return Conditioning(states, pooled, _time_ids(pipe, len(prompts), size, states.dtype))


@torch.no_grad()
def unconditional(pipe: Pipe, n: int, size: int | None = None) -> Conditioning:
    """The branch that guidance leads away from: zeros for SDXL, unless its configuration says ''."""
    empty = encode(pipe, [""], size).repeat(n)
    if pipe.config.force_zeros_for_empty_prompt:
        return Conditioning(torch.zeros_like(empty.states), torch.zeros_like(empty.pooled), empty.time_ids)
    return empty


def _time_ids(pipe: Pipe, n: int, size: int | None, dtype: torch.dtype) -> Tensor:
    """Original size, crop corner (0, 0) and target size: the pipeline's defaults."""
    side = size or image_size(pipe)
    return torch.tensor([side, side, 0, 0, side, side], dtype=dtype, device=device_of(pipe)).repeat(n, 1)


def initial_noise(pipe: Pipe, seeds: Sequence[int], size: int | None = None) -> Tensor:
    """Standard normal latents [B, C, h, w], one CPU generator per seed so that they are the same on any device."""
    side = (size or image_size(pipe)) // pipe.vae_scale_factor
    shape = (pipe.unet.config.in_channels, side, side)
    noise = [torch.randn(shape, generator=torch.Generator().manual_seed(int(seed))) for seed in seeds]
    return torch.stack(noise).to(device_of(pipe), pipe.unet.dtype)


def output(pipe: Pipe, x: Tensor, timestep: Tensor, sigma: float, cond: Conditioning) -> Tensor:
    """The U-Net's raw output for unscaled x."""
    scaled = x / (sigma**2 + 1) ** 0.5
    added = {"text_embeds": cond.pooled, "time_ids": cond.time_ids}
    return pipe.unet(scaled, timestep, encoder_hidden_states=cond.states, added_cond_kwargs=added).sample


def x0_of(pipe: Pipe, x: Tensor, sigma: float, out: Tensor) -> Tensor:
    kind, x, out = pipe.scheduler.config.prediction_type, x.float(), out.float()  # fp16 would round small differences
    if kind == "epsilon":
        return x - sigma * out
    return x / (sigma**2 + 1) - out * (sigma / (sigma**2 + 1) ** 0.5)


def denoised(pipe: Pipe, x: Tensor, timestep: Tensor, sigma: float, cond: Conditioning) -> Tensor:
    """x0hat of the conditional model, without guidance: f_theta(x_t, t, c) of the paper."""
    return x0_of(pipe, x, sigma, output(pipe, x, timestep, sigma, cond))


@torch.no_grad()
def sample(
    pipe: Pipe,
    cond: Conditioning,
    noise: Tensor,
    steps: int,
    guidance: float,
    on_step: OnStep | None = None,
    stop_after: int | None = None,
) -> Tensor:
    """Latents at the end of `steps` Euler steps (or x after `stop_after` of them), guided if guidance > 1.

    With guidance the U-Net sees one batch [unconditional, conditional], as in the pipeline: hooks find the
    conditional half at the end.
    """
    scheduler = pipe.scheduler
    scheduler.set_timesteps(steps, device=noise.device)
    x = noise * scheduler.init_noise_sigma
    guided = guidance > 1
    nothing = unconditional(pipe, len(cond), noise.shape[-1] * pipe.vae_scale_factor) if guided else None
    for i, t in enumerate(scheduler.timesteps):
        sigma = float(scheduler.sigmas[i])
        if guided:
            out = output(pipe, torch.cat([x, x]), t, sigma, concat(nothing, cond))
            without, within = out.chunk(2)
            out = without + guidance * (within - without)
        else:
            out = output(pipe, x, t, sigma, cond)
        if on_step is not None:
            on_step(Step(i, t, sigma, x, x0_of(pipe, x, sigma, out)))
        scheduler.scale_model_input(x, t)  # the scheduler insists on it; `output` scales by itself
        x = scheduler.step(out, t, x, return_dict=False)[0]
        if stop_after is not None and i + 1 >= stop_after:
            break
    return x


def concat(a: Conditioning, b: Conditioning) -> Conditioning:
    """Rows of a, then of b; if one has fewer tokens, zeros are appended (they are masked by who adds them)."""
    states = [a.states, b.states]
    longest = max(s.shape[1] for s in states)
    states = [torch.nn.functional.pad(s, (0, 0, 0, longest - s.shape[1])) for s in states]
    return Conditioning(
        torch.cat(states), torch.cat([a.pooled, b.pooled]), torch.cat([a.time_ids, b.time_ids])
    )  # fmt: skip


@torch.no_grad()
def decode(pipe: Pipe, latents: Tensor, chunk: int = 16) -> np.ndarray:
    """uint8 [B, H, W, 3]. SDXL's autoencoder overflows in fp16: it is run in fp32 if its configuration says so."""
    vae = pipe.vae
    upcast = vae.dtype == torch.float16 and vae.config.force_upcast
    if upcast:
        vae.to(torch.float32)
    config = vae.config
    z = latents.to(vae.dtype)
    if getattr(config, "latents_mean", None) is not None and getattr(config, "latents_std", None) is not None:
        mean, std = (
            torch.tensor(v, device=z.device, dtype=z.dtype).view(1, -1, 1, 1)
            for v in (config.latents_mean, config.latents_std)
        )
        z = z * std / config.scaling_factor + mean
    else:
        z = z / config.scaling_factor
    try:
        images = [vae.decode(z[a : a + chunk], return_dict=False)[0].float().cpu() for a in range(0, len(z), chunk)]
    finally:
        if upcast:
            vae.to(torch.float16)
    rgb = (torch.cat(images) / 2 + 0.5).clamp(0, 1)
    return (rgb * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
