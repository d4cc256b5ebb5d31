"""Trains mini-sdxl: scenes, autoencoder, latents of the training set, text encoders, then these and U-Net together.

OUT/run.json                      settings; only `samples` may change when a run is continued
OUT/scenes/                       the training set, rendered once
OUT/vae-state.safetensors         autoencoder with its optimizer
OUT/latents.safetensors           the training set as latents
OUT/decoder-state.safetensors     decoder, trained further on these latents
OUT/text-state.safetensors        text encoders that have read captions
OUT/state.safetensors             text encoders and U-Net, optimizer, averaged weights
OUT/loss.csv, OUT/loss.png

The objective is v-prediction on SDXL's schedule: with a_t = sqrt(alphabar_t) and s_t = sqrt(1 - alphabar_t),
x_t = a_t x_0 + s_t eps and the U-Net is fitted to v = a_t eps - s_t x_0. Latents have a standard deviation of b = 0.5:
SDXL's schedule ends at sigma = 14.6, where latents of standard deviation 1 still show through the noise where objects
stand and, for large ones, of which shape they are, so that words are not needed there and at the start of sampling
pure noise is taken for a picture. Everything random in step n comes from (seed, n): killed and run again, training
continues as if it had not stopped.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, StableDiffusionXLPipeline
from torch import Tensor
from tqdm import tqdm

from lcs.data.files import read_json, write_json
from lcs.errors import LcsError
from lcs.scenes.table import SceneTable
from lcs.sdxl import autoencoder
from lcs.sdxl.build import Denoiser, MiniSettings, assemble, build_scheduler
from lcs.sdxl.captions import STYLES, random_caption, things_of
from lcs.sdxl.text import train_text
from lcs.sdxl.tokenizer import build_tokenizer
from lcs.sdxl.views import training_views
from lcs.training import checkpoint
from lcs.training.ema import PowerEMA

ZEROED = 0.07  # share of samples with zero embeddings: SDXL's unconditional branch
EMPTY = 0.04  # share with the empty caption
LOG_EVERY = 50  # steps
HIGH = 0.6  # timesteps from this share on are high noise: sigma above 2.3, 4.6 standard deviations of the latents


def learning_rate(settings: MiniSettings, samples: int) -> float:
    """Linear warm-up, constant, then linearly to zero over the last `decay` of the samples."""
    left = (settings.samples - samples) / (settings.decay * settings.samples)
    return settings.lr * min(1.0, (samples + settings.batch) / settings.warmup, max(left, 0.0))


def sample_captions(table: SceneTable, styles: np.ndarray, rng: np.random.Generator) -> tuple[list[str], np.ndarray]:
    """A caption per scene, and float32 [B] that is 0 where the embeddings are to be zeroed."""
    names = ["", *STYLES]
    captions = [random_caption(things_of(table, i), names[styles[i]], rng)[0] for i in range(len(table))]
    draw = rng.random(len(captions))
    captions = ["" if u < EMPTY else c for u, c in zip(draw, captions, strict=True)]
    return captions, (draw < 1 - ZEROED).astype(np.float32)


def noised(x: Tensor, t: Tensor, eps: Tensor, alphas_cumprod: Tensor) -> tuple[Tensor, Tensor]:
    """x_t and the target v; x and eps [B, C, h, w], t int [B]."""
    a = alphas_cumprod[t].sqrt().view(-1, 1, 1, 1)
    s = (1 - alphas_cumprod[t]).sqrt().view(-1, 1, 1, 1)
    return a * x + s * eps, a * eps - s * x


def timesteps(u: np.ndarray, steps: int, high_noise: float) -> np.ndarray:
    """int64 timesteps from uniform u in [0, 1): a share `high_noise` of them from HIGH * steps on, even on either side.

    What the prompt decides (what stands where) is decided at high noise, where the image tells nothing.
    """
    return (np.interp(u, [0, 1 - high_noise, 1], [0, HIGH, 1]) * steps).astype(np.int64)


def loss_weight(t: Tensor, alphas_cumprod: Tensor, scale: float) -> Tensor:
    """[B] -> [B]: makes the squared error of v EDM's loss, in which every noise level counts alike for a network that
    has learned nothing: (sigma^2 + b^2) / (b^2 (1 + sigma^2)), from 1 at low noise to 1 / b^2 at high noise."""
    variance = (1 - alphas_cumprod[t]) / alphas_cumprod[t]  # sigma^2
    return (variance + scale**2) / (scale**2 * (1 + variance))


class MiniTrainer:
    """Text encoders and U-Net with their optimizer and averaged weights; `step(n)` is a function of (state, n)."""

    def __init__(self, settings: MiniSettings, latents: np.ndarray, styles: np.ndarray, table: SceneTable, vae):
        torch.manual_seed(settings.seed)
        self.settings, self.latents, self.styles, self.table = settings, latents, styles, table
        self.tokenizer = build_tokenizer(settings.max_tokens)
        self.model = Denoiser(settings, self.tokenizer).to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.lr, betas=(0.9, 0.99), weight_decay=0.01, fused=True
        )
        self.ema = PowerEMA(dict(self.model.named_parameters()), (settings.ema_std,))
        self.alphas_cumprod = build_scheduler().alphas_cumprod
        self.vae = vae
        self.steps_done = 0

    def batch(self, step: int) -> tuple[Tensor, ...]:
        """x_t, t, v, token ids and the keep mask of one step."""
        s = self.settings
        rng = np.random.default_rng([s.seed, 3, step])
        rows = np.sort(rng.integers(len(self.latents), size=s.batch))
        x = autoencoder.as_the_unet_sees(self.vae, torch.from_numpy(np.asarray(self.latents[rows], np.float32)))
        captions, keep = sample_captions(self.table.rows(rows), self.styles[rows], rng)
        ids = self.tokenizer(
            captions, padding="max_length", max_length=s.max_tokens, truncation=True, return_tensors="pt"
        ).input_ids
        strata = (rng.permutation(s.batch) + rng.random(s.batch)) / s.batch  # one draw in each of B slices
        high_noise = s.high_noise if s.begun + step * s.batch < s.early else s.high_noise_later
        t = torch.from_numpy(timesteps(strata, len(self.alphas_cumprod), high_noise))
        eps = torch.randn(x.shape, generator=torch.Generator().manual_seed(int(rng.integers(2**31))))
        x_t, v = noised(x, t, eps, self.alphas_cumprod)
        return x_t.contiguous(memory_format=torch.channels_last), t, v, ids, torch.from_numpy(keep)

    def step(self) -> Tensor:
        x_t, t, v, ids, keep = self.batch(self.steps_done)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.settings, self.steps_done * self.settings.batch)
        weight = loss_weight(t, self.alphas_cumprod, self.settings.latent_scale)
        loss = (weight * (self.model(x_t, t, ids, keep) - v).square().mean((1, 2, 3))).mean()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.ema.update(dict(self.model.named_parameters()))
        self.steps_done += 1
        return loss.detach()

    def save(self, path: Path) -> None:
        tensors = checkpoint.training_state(self.model, self.optimizer, self.ema.state_dict())
        checkpoint.save_tensors(path, tensors, {"step": self.steps_done})

    def load(self, path: Path) -> None:
        tensors, meta = checkpoint.load_tensors(path)
        ema = checkpoint.restore_training_state(tensors, self.model, self.optimizer)
        self.steps_done = meta["step"]
        self.ema.load_state_dict(ema, self.steps_done)

    def averaged(self) -> Denoiser:
        """A copy of the model with the averaged weights, for use."""
        model = Denoiser(self.settings, self.tokenizer)
        model.load_state_dict({**self.model.state_dict(), **self.ema.average(self.settings.ema_std)})
        return model.eval().requires_grad_(False)


def train_mini(
    out: Path,
    settings: MiniSettings = MiniSettings(),  # noqa: B008
    checkpoint_seconds: float = 120.0,
    stop_after: int | None = None,
    progress: bool = True,
    vae: AutoencoderKL | None = None,
    begin: StableDiffusionXLPipeline | None = None,
):
    """Trains, or continues, and returns the pipeline with averaged weights, and the samples it has seen.

    vae: a finished autoencoder of the same settings, instead of training one. begin: whose text encoders and U-Net to
    go on from, with a new optimizer and rate, instead of random ones; `settings.begun` says what they have seen.
    """
    out = Path(out)
    _same_settings(out, settings)
    scenes = training_views(settings, out, progress)
    finished = vae is not None
    vae = vae if finished else autoencoder.train_vae(scenes, settings, out, progress=progress)
    autoencoder.encode_scenes(vae, scenes, out / autoencoder.LATENTS, progress)
    latents, styles, table = autoencoder.load_latents(out / autoencoder.LATENTS)
    autoencoder.set_latent_statistics(vae, latents, settings.latent_scale)
    if not finished:
        autoencoder.train_decoder(vae, scenes, latents, settings, out, progress=progress)
    trainer = MiniTrainer(settings, latents, styles, table, vae)
    state, log = out / checkpoint.STATE, out / "loss.csv"
    if state.exists():
        trainer.load(state)
    elif begin is not None:
        for name, part in trainer.model.named_children():
            part.load_state_dict(getattr(begin, name).state_dict())
    else:
        train_text(trainer.model, trainer.tokenizer, settings, out, progress)
    checkpoint.truncate_loss_log(log, trainer.steps_done * settings.batch)
    last = -(-min(settings.samples, stop_after or settings.samples) // settings.batch)
    begin = saved = time.monotonic()
    losses: list[Tensor] = []
    total = last * settings.batch
    with tqdm(
        total=total, initial=trainer.steps_done * settings.batch, disable=not progress, desc="mini-sdxl", unit="img",
        mininterval=5,
    ) as bar:  # fmt: skip
        while trainer.steps_done < last:
            losses.append(trainer.step())
            bar.update(settings.batch)
            done = trainer.steps_done * settings.batch
            if trainer.steps_done % LOG_EVERY == 0:
                mean = float(torch.stack(losses).mean())
                if not np.isfinite(mean):
                    raise LcsError(f"the loss is not finite after {done} samples; lower the learning rate")
                rate = learning_rate(settings, done)
                checkpoint.append_loss_log(log, (done, mean, mean, rate, time.monotonic() - begin))
                bar.set_postfix(loss=f"{mean:.4f}", refresh=False)
                losses.clear()
            due = trainer.steps_done == last or time.monotonic() - saved > checkpoint_seconds
            if due and losses and not np.isfinite(float(torch.stack(losses).sum())):
                raise LcsError(f"the loss is not finite after {done} samples; lower the learning rate")
            if due:
                trainer.save(state)
                saved = time.monotonic()
    if progress:
        checkpoint.plot_loss(log, out / "loss.png", "mini-sdxl")
    return assemble(settings, vae, trainer.averaged()), settings.begun + trainer.steps_done * settings.batch


def _same_settings(out: Path, settings: MiniSettings) -> None:
    """A folder belongs to one run; a longer or shorter run of the same kind may continue it until its rate falls."""
    path = out / "run.json"
    if path.exists():
        found = MiniSettings.from_json(read_json(path))
        if replace(found, samples=settings.samples) != settings:
            raise LcsError(f"{out} holds a run with other settings; choose an empty folder")
        state = out / checkpoint.STATE
        seen = checkpoint.load_meta(state)["step"] * settings.batch if state.exists() else 0
        if seen > (1 - settings.decay) * min(found.samples, settings.samples) and found.samples != settings.samples:
            raise LcsError(
                f"{out} has seen {seen} samples and its rate is falling towards {found.samples}; go on with "
                f"--samples {found.samples}, or choose an empty folder"
            )
    write_json(path, settings.to_json())
