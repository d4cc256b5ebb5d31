"""The autoencoder of mini-sdxl, and the training set as its latents.

Trained on 32x32 crops around objects, where most of the detail is, and at the end on whole images, because group
normalisation sees different statistics there. The loss is squared error (objects weigh more than background) and
L1 of edges (instead of a GAN), plus a small KL to keep latents smooth. Then the latents are fixed and the decoder
alone goes on. Nothing here is random except through (seed, step): a resumed run repeats an uninterrupted one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from safetensors import safe_open
from safetensors.numpy import save_file
from torch import Tensor
from tqdm import tqdm

from lcs.data.files import atomic_write, map_safetensors
from lcs.errors import LcsError
from lcs.scenes.table import SceneTable, concatenate
from lcs.sdxl.build import MiniSettings, build_vae
from lcs.sdxl.fit import fit
from lcs.sdxl.views import StyledViews

KL_WEIGHT = 2e-5
EDGE_WEIGHT = 0.1
OBJECT_WEIGHT = 20.0
LATENT_NOISE = 0.05
CROP = 32
WHOLE = 0.15  # share of samples trained on whole images, at the end
STATE = "vae-state.safetensors"
DECODER_STATE = "decoder-state.safetensors"
LATENTS = "latents.safetensors"
CHUNK = 256


# ---- training the autoencoder -----------------------------------------------------------------------


def to_tensor(images: np.ndarray) -> Tensor:
    """uint8 [B, H, W, 3] -> float32 [B, 3, H, W] in [-1, 1]."""
    return torch.from_numpy(np.ascontiguousarray(images)).permute(0, 3, 1, 2).float() / 127.5 - 1


def to_images(x: Tensor) -> np.ndarray:
    """float [B, 3, H, W] in [-1, 1] -> uint8 [B, H, W, 3]."""
    return ((x.float().clamp(-1, 1) + 1) * 127.5 + 0.5).to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()


def _crops(images: np.ndarray, table: SceneTable, rng: np.random.Generator) -> np.ndarray:
    """One crop per image with an object in it, at multiples of 4 pixels as the latent grid is."""
    size = images.shape[1]
    out = np.empty((len(images), CROP, CROP, 3), np.uint8)
    for row, image in enumerate(images):
        x, y = table.locations[row, rng.integers(table.counts[row])] * size
        left, top = (int(np.clip(v - CROP / 2 + rng.uniform(-8, 8), 0, size - CROP)) // 4 * 4 for v in (x, y))
        out[row] = image[top : top + CROP, left : left + CROP]
    return out


def vae_loss(vae: AutoencoderKL, x: Tensor, noise: Tensor) -> Tensor:
    """Squared error, weighted towards objects, + EDGE_WEIGHT * L1 of neighbour differences
    + KL_WEIGHT * KL(q(z|x) || N(0, 1)) per latent.

    Nine tenths of an image are background, and L1 there is content with gray objects. The weight of a pixel is
    1 + OBJECT_WEIGHT * |its largest difference to the image's median colour|.
    """
    q = vae.encode(x).latent_dist
    y = vae.decode(q.mean + q.std * noise).sample
    error = y - x
    background = x.flatten(2).median(-1).values[:, :, None, None]
    weight = 1 + OBJECT_WEIGHT * (x - background).abs().amax(1, keepdim=True)
    edges = error.diff(dim=2).abs().mean() + error.diff(dim=3).abs().mean()
    kl = 0.5 * (q.mean.square() + q.var - 1 - q.logvar).mean()
    return (weight * error.square()).mean() + EDGE_WEIGHT * edges + KL_WEIGHT * kl


def train_vae(
    scenes: StyledViews, settings: MiniSettings, folder: Path, checkpoint_seconds: float = 60.0, progress: bool = True
) -> AutoencoderKL:
    """Trains, or goes on from FOLDER/vae-state.safetensors; the finished autoencoder is returned."""
    torch.manual_seed(settings.seed)
    vae = build_vae(settings).to(memory_format=torch.channels_last)

    def loss_at(step: int, steps: int) -> Tensor:
        rng = np.random.default_rng([settings.seed, 2, step])
        whole = step >= (1 - WHOLE) * steps
        batch = max(1, settings.vae_batch // 2) if whole else settings.vae_batch
        images, table = scenes.fetch(rng.integers(len(scenes), size=batch))
        x = to_tensor(images if whole else _crops(images, table, rng))
        latent = x.shape[2] // 2 ** (len(settings.vae_channels) - 1)
        generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
        noise = torch.randn(batch, settings.latent_channels, latent, latent, generator=generator)
        return vae_loss(vae, x.contiguous(memory_format=torch.channels_last), noise)

    steps = -(-settings.vae_samples // settings.vae_batch)
    fit(vae, loss_at, steps, settings.vae_lr, Path(folder) / STATE, "autoencoder", checkpoint_seconds, progress)
    return vae.eval().requires_grad_(False)


# ---- latents ----------------------------------------------------------------------------------------


@torch.no_grad()
def encode_scenes(
    vae: AutoencoderKL,
    scenes: StyledViews,
    path: Path,
    progress: bool = True,
    between: Callable[[], None] | None = None,
) -> None:
    """Latent means of all scenes as fp16, their tables and styles, in one file; kept if it is there already."""
    encoder = _fingerprint(vae)
    if Path(path).exists():
        with safe_open(path, framework="np") as handle:
            of = (handle.metadata() or {}).get("encoder", encoder)  # earlier versions did not say
        if of != encoder:
            raise LcsError(f"{path} was made by another autoencoder; remove it, or choose an empty folder")
        return
    latents, tables = [], []
    rows = np.arange(len(scenes))
    for at in tqdm(range(0, len(rows), CHUNK), disable=not progress, desc="encoding", mininterval=5):
        images, table = scenes.fetch(rows[at : at + CHUNK])
        x = to_tensor(images).contiguous(memory_format=torch.channels_last)
        latents.append(vae.encode(x).latent_dist.mean.contiguous().half().numpy())
        tables.append(table)
        if between is not None:
            between()
    with atomic_write(path) as temporary:
        save_file(
            {"latents": np.concatenate(latents), "styles": scenes.styles, **concatenate(tables).columns()}, temporary,
            metadata={"encoder": encoder},
        )  # fmt: skip


def _fingerprint(vae: AutoencoderKL) -> str:
    """sha256 of the encoder's weights: latents belong to one encoder."""
    digest = hashlib.sha256()
    for name, tensor in sorted(vae.state_dict().items()):
        if name.startswith(("encoder.", "quant_conv.")):
            digest.update(tensor.detach().float().contiguous().numpy().tobytes())
    return digest.hexdigest()


def load_latents(path: Path) -> tuple[np.ndarray, np.ndarray, SceneTable]:
    """Latents fp16 [N, C, h, w] (mapped), styles [N], scenes."""
    tensors = map_safetensors(path)
    latents, styles = tensors.pop("latents"), np.array(tensors.pop("styles"))
    return latents, styles, SceneTable(**{name: np.array(column) for name, column in tensors.items()})


def set_latent_statistics(vae: AutoencoderKL, latents: np.ndarray, scale: float) -> None:
    """Each channel gets mean 0 and standard deviation `scale`: the pipeline reads these from the autoencoder's
    configuration when it decodes."""
    sample = np.asarray(latents[:: max(1, len(latents) // 4096)], np.float32)
    vae.register_to_config(
        latents_mean=[float(v) for v in sample.mean((0, 2, 3))],
        latents_std=[float(v) for v in sample.std((0, 2, 3))],
        scaling_factor=scale,
    )


def as_the_unet_sees(vae: AutoencoderKL, z: Tensor) -> Tensor:
    """Latents of the encoder [B, C, h, w] with the mean and spread of `set_latent_statistics`."""
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
    return (z - mean) / std * vae.config.scaling_factor


def train_decoder(
    vae: AutoencoderKL, scenes: StyledViews, latents: np.ndarray, settings: MiniSettings, folder: Path,
    checkpoint_seconds: float = 60.0, progress: bool = True,
) -> None:  # fmt: skip
    """Goes on with the decoder alone, on whole images, while the latents stay as they are.

    The weight now saturates, so that gray objects on gray ground count as much as yellow ones, and a little noise
    on the latents (5% of their spread) prepares for samples that are not exactly on the encoder's manifold.
    """
    torch.manual_seed(settings.seed)
    parts = torch.nn.ModuleDict({"decoder": vae.decoder, "post": vae.post_quant_conv}).train().requires_grad_(True)
    batch = max(1, settings.vae_batch // 2)
    spread = torch.tensor(vae.config.latents_std).view(1, -1, 1, 1)

    def loss_at(step: int, _steps: int) -> Tensor:
        rng = np.random.default_rng([settings.seed, 4, step])
        rows = rng.integers(len(scenes), size=batch)
        x = to_tensor(scenes.fetch(rows)[0]).contiguous(memory_format=torch.channels_last)
        z = torch.from_numpy(np.asarray(latents[rows], np.float32))
        generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
        z = z + LATENT_NOISE * spread * torch.randn(z.shape, generator=generator)
        error = vae.decode(z.contiguous(memory_format=torch.channels_last)).sample - x
        background = x.flatten(2).median(-1).values[:, :, None, None]
        weight = 1 + OBJECT_WEIGHT * ((x - background).abs().amax(1, keepdim=True) / 0.25).clamp(max=1)
        edges = error.diff(dim=2).abs().mean() + error.diff(dim=3).abs().mean()
        return (weight * error.square()).mean() + EDGE_WEIGHT * edges

    steps = -(-settings.decoder_samples // batch)
    path = Path(folder) / DECODER_STATE
    fit(parts, loss_at, steps, settings.decoder_lr, path, "decoder", checkpoint_seconds, progress)
    parts.eval().requires_grad_(False)


@torch.no_grad()
def reconstruct(vae: AutoencoderKL, images: np.ndarray, chunk: int = 64) -> np.ndarray:
    """uint8 -> uint8 through the latent mean."""
    parts = [vae.decode(vae.encode(to_tensor(images[a : a + chunk])).latent_dist.mean).sample
             for a in range(0, len(images), chunk)]  # fmt: skip
    return to_images(torch.cat(parts))


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """Mean over images of 10 log10(255^2 / mean squared error), in dB."""
    error = (a.astype(np.float64) - b.astype(np.float64)) ** 2
    return float((10 * np.log10(255**2 / error.reshape(len(a), -1).mean(1).clip(1e-10))).mean())
