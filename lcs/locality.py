"""Locality: which pixels a denoiser looks at, and which condition it listens to (v1 section F, v2 appendix).

The paper's claim is that a model draws more objects than it has ever seen if its score is *local*: at a pixel where an
object was asked for, x0hat should depend on the pixels nearby and on the condition for that object, and on nothing
else. Both can be measured on any trained model, along the path that a sample takes from noise to picture:

* pixel gradient, eq. 9: G(i, j) = mean over the batch of sum over channels of |d x0hat[c, pixel] / d x_t[c, i, j]|.
  Same channel in and out, absolute value per sample. The side of the smallest square around the pixel that holds 90%
  of the sum of G^2 says how local it is; that sum itself (the energy) says how much it depends on pixels at all.
* conditional influence, eq. 10: I_k = |x0hat[pixel] with all conditions - x0hat[pixel] without condition k|, the
  Euclidean norm over channels. Forward passes only.

`trace_locality` measures both at a few pixels over a whole sampling trajectory, by default with the paper's first four
test locations, one more than any model trained on 1-3 objects has seen. `conditional_locality` condenses the
influences into one number per model.

How eq. 9 is computed. A map needs one backward pass per pixel and channel; the plain way repeats the forward pass
each time. Here it is shared, noise levels and images form one batch, and the last decoder blocks, the most expensive
ones, are run on a crop of their inputs (decoder state, encoder skips) for each pixel: an output pixel sees only a few
pixels around it there. Crops stop at the true border of the image, where zero padding is right; at their other borders
it is wrong, but too far away to reach the pixel. The local model needs only the patch of the pixel's own cell;
everything outside is exactly zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lcs.bootstrap import resamples
from lcs.conditioning import check_location, get_conditioner
from lcs.errors import LcsError
from lcs.experiments import GRID, Run
from lcs.model.build import resolution_of
from lcs.model.edm2 import CONCAT_BALANCE, EDM2, UNet
from lcs.model.layers import mp_cat
from lcs.model.local import LocalEDM2, all_cells, extract_patches, is_whole
from lcs.sampling import DEFAULT_STEPS, sample

CHUNK = 16  # images (noise levels x seeds) whose activations are kept at once
PIXELS_AT_ONCE = 8  # pixels whose windows are kept at once
TEST_COUNT = 4  # conditions of the default trace: out of distribution for models trained on 1-3 objects
SHARE = 0.9  # of the squared gradient, that the smallest square holds

Pixel = tuple[int, int]  # row, column
Pixels = Sequence[Pixel]
Box = tuple[int, int, int]  # top, left, side


# ---- eq. 9: pixel gradients -----------------------------------------------------------------------------------------


def gradient_maps(
    model: nn.Module, x: Tensor, sigma: Tensor, labels: Tensor | None, pixels: Pixels, chunk: int = CHUNK
) -> Tensor:
    """Sum over channels of |d x0hat[c, pixel] / d x[c, i, j]|: eq. 9 for each image by itself.

    x [N, C, H, W], sigma [N], labels [N, L] or None -> [N, P, H, W]. The images may have different noise levels.
    `model(x, sigma, labels)` may be any denoiser; EDM2 and LocalEDM2 are fast.
    """
    pixels = _check_pixels(pixels, x)
    windowed = isinstance(model, (EDM2, LocalEDM2))
    part_of = _patch_gradients if _has_patches(model) else _windowed_gradients if windowed else _gradients
    maps = []
    with torch.enable_grad():
        for part in _chunks(len(x), chunk):
            part_labels = None if labels is None else labels[part]
            maps.append(part_of(model, x[part].detach(), sigma[part], part_labels, pixels))
    return torch.cat(maps)


def _gradients(model: nn.Module, x: Tensor, sigma: Tensor, labels: Tensor | None, pixels: Pixels) -> Tensor:
    """Any denoiser: one forward pass, then one backward pass per pixel and channel."""
    x.requires_grad_()
    x0hat = model(x, sigma, labels)
    maps = x.new_zeros(len(x), len(pixels), *x.shape[-2:])
    for k, (row, column) in enumerate(pixels):
        for c in range(x.shape[1]):
            (gradient,) = torch.autograd.grad(x0hat[:, c, row, column].sum(), x, retain_graph=True)
            maps[:, k] += gradient[:, c].abs()
    return maps


def _patch_gradients(model: LocalEDM2, x: Tensor, sigma: Tensor, labels: Tensor | None, pixels: Pixels) -> Tensor:
    """The local model: the patch around the pixel's cell and nothing else."""
    n, p = len(x), len(pixels)
    patches, x0hat, (row, column) = _patch_x0hat(model, x, sigma, labels, pixels)
    inside = torch.zeros(n, p, *patches.shape[-2:], device=x.device, dtype=x.dtype)
    for c in range(x.shape[1]):
        target = x0hat[:, torch.arange(p), c, row, column].sum()
        (gradient,) = torch.autograd.grad(target, patches, retain_graph=True)
        inside += gradient[:, c].abs().unflatten(0, (n, p))
    m, size, height = x.shape[-1] // GRID, patches.shape[-1], x.shape[-1]
    margin = model.k * m  # of zeros around the image, which a patch at the border reaches into
    maps = x.new_zeros(n, p, height + 2 * margin, height + 2 * margin)
    for k, (i, j) in enumerate(pixels):
        top, left = i // m * m, j // m * m
        maps[:, k, top : top + size, left : left + size] = inside[:, k]
    return maps[:, :, margin : margin + height, margin : margin + height]


def _patch_x0hat(model: LocalEDM2, x: Tensor, sigma: Tensor, labels: Tensor | None, pixels: Pixels):
    """Patches around the pixels' cells [N*P, C, S, S], x0hat in the cells [N, P, C, m, m], the pixels in their cells"""
    n, m = len(x), x.shape[-1] // GRID
    at = torch.tensor(pixels)  # [P, 2]
    cells = (at // m).expand(n, -1, -1)
    patches = extract_patches(x, cells, model.k).requires_grad_(torch.is_grad_enabled())
    patch_labels = model.patch_labels(_or_zeros(labels, model, x), cells)
    x0hat = model.denoiser(patches, sigma.repeat_interleave(len(pixels)), patch_labels, centre=m)
    return patches, x0hat.unflatten(0, (n, -1)), (at % m).unbind(-1)


def _windowed_gradients(model: nn.Module, x: Tensor, sigma: Tensor, labels: Tensor | None, pixels: Pixels):
    """EDM2: shared trunk, windowed tail (see the top of this file). x [N, C, H, W] -> [N, P, H, W]"""
    if isinstance(model, LocalEDM2):  # with patches as large as the image
        whole = all_cells(len(x), model.k)
        model, labels = model.denoiser, model.patch_labels(_or_zeros(labels, model, x), whole)
    unet, p, n, channels = model.unet, model.network.unshuffle, len(x), x.shape[1]
    s = sigma[:, None, None, None]
    norm = (s**2 + model.sigma_data**2).sqrt()
    c_skip, c_out = (model.sigma_data / norm) ** 2, s * model.sigma_data / norm
    x.requires_grad_()
    emb, trunk = _trunk(unet, F.pixel_unshuffle(x / norm, p), sigma.log() / 4, labels)
    maps = x.new_zeros(n, len(pixels), *x.shape[-2:])
    for group in _chunks(len(pixels), PIXELS_AT_ONCE):
        some = pixels[group]
        boxes = [_window(unet, row // p, column // p, trunk) for row, column in some]
        crops = [torch.cat([_cut(part.detach(), box, unet.resolution) for box in boxes]) for part in trunk]
        crops = [crop.contiguous(memory_format=torch.channels_last).requires_grad_() for crop in crops]  # [P*N, ...]
        f = F.pixel_shuffle(_run_tail(unet, crops, emb.repeat(len(some), 1)), p).unflatten(0, (len(some), n))
        at = [(row - top * p, column - left * p) for (row, column), (top, left, _) in zip(some, boxes, strict=True)]
        for c in range(channels):
            values = torch.stack([f[k, :, c, row, column] for k, (row, column) in enumerate(at)])  # [P, N]
            tail_gradients = torch.autograd.grad((values * c_out.view(n)).sum(), crops, retain_graph=True)
            for k, (row, column) in enumerate(some):
                cotangents = [
                    _uncrop(g[k * n : (k + 1) * n], boxes[k], part, unet.resolution)
                    for g, part in zip(tail_gradients, trunk, strict=True)
                ]
                (gradient,) = torch.autograd.grad(trunk, x, cotangents, retain_graph=True)
                gradient[:, c, row, column] += c_skip.view(n)
                maps[:, group.start + k] += gradient[:, c].abs()
    return maps


def _tail(unet: UNet) -> list[str]:
    """The last decoder blocks at full resolution and without attention: a pixel sees 2 pixels per block around it."""
    names = []
    for name in reversed(list(unet.dec)):
        if not name.startswith(f"{unet.resolution}x") or unet.dec[name].heads:
            break
        names.append(name)
    return names[::-1]


def _trunk(unet: UNet, x: Tensor, c_noise: Tensor, labels: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    """`UNet.forward` up to the tail -> embedding, and the tail's inputs: state, then skips as the encoder made them"""
    with torch.no_grad():
        emb = unet.embed(c_noise, _or_zeros(labels, unet, x))
    x = F.pad(x, (0, 0, 0, 0, 0, 1), value=1.0).contiguous(memory_format=torch.channels_last)
    skips, tail = [], _tail(unet)
    for name, module in unet.enc.items():
        x = module(x) if name.endswith("_conv") else module(x, emb)
        skips.append(x)
    for name, module in unet.dec.items():
        if name in tail:
            break
        x = module(mp_cat(x, skips.pop(), CONCAT_BALANCE) if "_block" in name else x, emb)
    return emb, [x, *skips]


def _run_tail(unet: UNet, inputs: list[Tensor], emb: Tensor) -> Tensor:
    x, *skips = inputs
    for name in _tail(unet):
        x = unet.dec[name](mp_cat(x, skips.pop(), CONCAT_BALANCE) if "_block" in name else x, emb)
    return unet.out_conv(x) * unet.out_gain


def _window(unet: UNet, row: int, column: int, trunk: list[Tensor]) -> Box:
    """The square that a pixel depends on in the tail, moved inside the image."""
    reach = 2 * len(_tail(unet)) + 1  # two 3x3 convolutions per block, and the last one
    step = unet.resolution // trunk[0].shape[-1]  # 2 if the tail starts by doubling the resolution
    side = min(unet.resolution, 2 * reach + 2)
    top, left = (max(0, min(v - reach, unet.resolution - side)) // step * step for v in (row, column))
    return top, left, side


def _cut(part: Tensor, box: Box, resolution: int) -> Tensor:
    """A view of the window of part [N, C, h, w], which may have a lower resolution than the box."""
    f, (top, left, side) = resolution // part.shape[-1], box
    return part[:, :, top // f : (top + side) // f, left // f : (left + side) // f]


def _uncrop(gradient: Tensor, box: Box, like: Tensor, resolution: int) -> Tensor:
    full = torch.zeros_like(like)
    _cut(full, box, resolution).copy_(gradient)
    return full


# ---- eq. 10: conditional influence ----------------------------------------------------------------------------------


@torch.no_grad()
def conditional_influence(
    model: nn.Module, x: Tensor, sigma: Tensor, label: Tensor, without: Tensor, pixels: Pixels, chunk: int = CHUNK
) -> Tensor:
    """|x0hat[pixel] - x0hat[pixel] without condition k|, norm over channels: eq. 10 for each image by itself.

    x [N, C, H, W], sigma [N], label [L] with all conditions, without [K, L] (`leave_one_out`) -> [N, K, P]
    """
    pixels = _check_pixels(pixels, x)
    labels = torch.cat([label[None], without]).to(x)  # [1 + K, L]
    image, row = torch.cartesian_prod(torch.arange(len(x)), torch.arange(len(labels))).unbind(-1)  # all pairs
    values = [
        _values(model, x[image[part]], sigma[image[part]], labels[row[part]], pixels)
        for part in _chunks(len(row), chunk)
    ]
    x0hat = torch.cat(values).unflatten(0, (len(x), -1))  # [N, 1 + K, P, C]
    influence = (x0hat[:, :1] - x0hat[:, 1:]).norm(dim=-1)
    if _has_patches(model):  # a patch that is told the same gives the same, but for rounding that varies in a batch
        cells = (torch.tensor(pixels) // (x.shape[-1] // GRID)).expand(len(labels), -1, -1)
        told = model.patch_labels(labels, cells).unflatten(0, (len(labels), -1))  # [1 + K, P, width]
        influence[:, (told[:1] == told[1:]).all(dim=-1)] = 0
    return influence


def _values(model: nn.Module, x: Tensor, sigma: Tensor, labels: Tensor, pixels: Pixels) -> Tensor:
    """x0hat at the pixels, [N, P, C]"""
    if _has_patches(model):
        _, x0hat, (row, column) = _patch_x0hat(model, x, sigma, labels, pixels)
        return x0hat[:, torch.arange(len(pixels)), :, row, column].transpose(0, 1)
    rows, columns = zip(*pixels, strict=True)
    return model(x, sigma, labels)[:, :, list(rows), list(columns)].transpose(1, 2)


# ---- how large the neighbourhood is ---------------------------------------------------------------------------------


def smallest_square(gradient: np.ndarray, pixel: Pixel, share: float = SHARE) -> tuple[int, int]:
    """Side and area of the smallest square centred on `pixel` that holds `share` of the sum of gradient^2 [H, W].

    The side is 2r + 1 for radius r; the area counts only pixels inside the image. (0, 0) if there is no gradient.
    """
    if not 0 < share <= 1:
        raise LcsError(f"a share of {share} of the gradient is not possible; allowed: above 0, up to 1")
    energy = np.square(gradient, dtype=np.float64)
    if not np.isfinite(energy).all():
        raise LcsError("the gradient map holds values that are not finite")
    rows, columns = (np.abs(np.arange(n) - at) for n, at in zip(energy.shape, pixel, strict=True))
    radius = np.maximum(rows[:, None], columns[None])  # of the smallest centred square that holds (i, j)
    held = np.bincount(radius.ravel(), weights=energy.ravel()).cumsum()
    if held[-1] == 0:
        return 0, 0
    r = int(np.argmax(held >= share * held[-1]))
    return 2 * r + 1, int((radius <= r).sum())


# ---- over a sampling trajectory -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Probe:
    """A pixel that is watched, and the condition that asks for an object there, if one does."""

    name: str
    location: tuple[float, float]  # x, y as fractions of the image
    condition: int | None = None

    def pixel(self, resolution: int) -> Pixel:
        x, y = check_location(self.location)
        return int(y * resolution), int(x * resolution)


def default_probes(conditions: Sequence) -> tuple[Probe, ...]:
    """The conditioned locations and the centre, as in v1 figure 10; without locations, the centre and two others."""
    if conditions and not isinstance(conditions[0], str):
        own = tuple(Probe(f"location {k}", check_location(at), k) for k, at in enumerate(conditions))
        return (*own, Probe("centre", (0.5, 0.5)))
    return Probe("centre", (0.5, 0.5)), Probe("upper left", (0.25, 0.25)), Probe("lower right", (0.7, 0.65))


@dataclass(frozen=True)
class LocalityTrace:
    """T noise levels, B seeds, K conditions, P probes."""

    run: str
    conditions: tuple
    probes: tuple[Probe, ...]
    seeds: tuple[int, ...]
    steps: tuple[int, ...]  # [T] of the sampler
    sigmas: np.ndarray  # [T]
    maps: np.ndarray  # [T, P, H, W], eq. 9: mean over seeds
    sides: np.ndarray  # [T, P] of the square that holds 90%
    areas: np.ndarray  # [T, P]
    energies: np.ndarray  # [T, P]
    influence: np.ndarray  # [T, B, K, P], eq. 10
    x0hat: np.ndarray  # [T, 3, H, W] of the first seed, in model space
    area_draws: np.ndarray  # [R, T, P]: areas for R other sets of seeds, drawn from these with replacement

    def as_dict(self, pictures: bool = False) -> dict:
        """Ready for JSON; without the maps and x0hat unless `pictures`."""
        shown = {k: v for k, v in asdict(self).items() if pictures or k not in ("maps", "x0hat", "area_draws")}
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in shown.items()}


def trace_locality(
    run: Run, model: nn.Module, conditions: Sequence | None = None, seeds: Sequence[int] = (0, 1, 2, 3),
    steps: int = DEFAULT_STEPS, record: Sequence[int] | None = None, probes: Sequence[Probe] | None = None,
    chunk: int = CHUNK, area_draws: int = 0,
) -> LocalityTrace:  # fmt: skip
    """Samples with Heun's method and measures at the states x_t before the steps `record` (by default 12 of them)."""
    conditioner = None if run.experiment.conditioner == "none" else get_conditioner(run.experiment.conditioner)
    if conditions is None:
        conditions = () if conditioner is None else conditioner.test_conditions[:TEST_COUNT]
    if conditions and conditioner is None:
        raise LcsError(f"{run.name} is unconditional; it cannot be given {len(conditions)} conditions")
    record = sorted({round(i) for i in np.linspace(0, steps - 1, 12)} if record is None else set(record))
    if not record or record[0] < 0 or record[-1] >= steps:
        raise LcsError(f"steps {record} cannot be recorded; allowed: 0..{steps - 1}, at least one")
    if not len(seeds):
        raise LcsError("a trace needs at least one seed")
    probes = default_probes(conditions) if probes is None else tuple(probes)
    for probe in probes:
        if probe.condition is not None and not 0 <= probe.condition < len(conditions):
            raise LcsError(f"probe {probe.name!r} names condition {probe.condition}; there are {len(conditions)}")
    device, pixels = next(model.parameters()).device, [p.pixel(resolution_of(run)) for p in probes]
    label = None if conditioner is None else torch.from_numpy(conditioner.encode_conditions(conditions)).to(device)

    states, clean, sigmas = {i: [] for i in record}, {i: [] for i in record}, {}

    def remember(step: int, x: Tensor, sigma: float, x0hat: Tensor) -> None:
        if step in states:
            states[step].append(x), clean[step].append(x0hat)
            sigmas[step] = sigma

    sample(run, model, label, seeds, steps, "heun", remember)
    b, levels = len(seeds), torch.tensor([sigmas[i] for i in record], device=device)
    x = torch.cat([part for i in record for part in states[i]])  # [T*B, 3, H, W]
    sigma = levels.repeat_interleave(b)
    labels = None if label is None else label.expand(len(x), -1)
    by_seed = (
        gradient_maps(model, x, sigma, labels, pixels, chunk).unflatten(0, (-1, b)).cpu().numpy()
    )  # [T, B, P, ...]
    maps = by_seed.mean(axis=1)
    influence = np.zeros((len(record), b, 0, len(pixels)), np.float32)
    if conditions:
        without = torch.from_numpy(conditioner.leave_one_out(conditions)).to(device)
        influence = conditional_influence(model, x, sigma, label, without, pixels, chunk)
        influence = influence.unflatten(0, (-1, b)).cpu().numpy()
    squares = _squares(maps, pixels)
    drawn = [_squares(by_seed[:, picked].mean(axis=1), pixels)[..., 1] for picked in resamples(b, area_draws)]
    return LocalityTrace(
        run.name, tuple(conditions), probes, tuple(map(int, seeds)), tuple(map(int, record)), levels.cpu().numpy(),
        maps, squares[..., 0], squares[..., 1], np.square(maps, dtype=np.float64).sum(axis=(2, 3)), influence,
        x0hat=np.stack([clean[i][0][0].cpu().numpy() for i in record]),
        area_draws=np.reshape(drawn, (-1, *squares.shape[:2])),
    )  # fmt: skip


def _squares(maps: np.ndarray, pixels: Pixels) -> np.ndarray:
    """[T, P, H, W] -> [T, P, 2]: side and area"""
    return np.array([[smallest_square(g, at) for g, at in zip(row, pixels, strict=True)] for row in maps])


def conditional_locality(trace: LocalityTrace) -> float:
    """How much a conditioned pixel listens to its own condition: 1 only to it, 1/K to all K alike, 0 not at all.

    For every probe with a condition, its own influence as a share of the influence of all conditions, both summed over
    seeds and integrated over the logarithm of the noise level; then the mean over these probes. The integral gives
    each noise level the weight that conditions have there, which is at high noise; a probe that no condition moves
    counts as 0. The definition is ours: the paper's own number (v2 figure 2, right) is not in the material we have.
    """
    own = [(p, probe.condition) for p, probe in enumerate(trace.probes) if probe.condition is not None]
    if not own or trace.influence.shape[2] < 2:
        found = f"the trace of {trace.run} has {len(own)} and {trace.influence.shape[2]}"
        raise LcsError(f"conditional locality needs a conditioned probe and two conditions; {found}")
    by_level, level = trace.influence.astype(np.float64).sum(axis=1), -np.log(trace.sigmas.astype(np.float64))
    total = np.trapezoid(by_level, level, axis=0) if len(level) > 1 else by_level[0]  # [K, P]
    shares = [total[k, p] / total[:, p].sum() if total[:, p].sum() > 0 else 0.0 for p, k in own]
    return float(np.mean(shares))


# ---- shared ---------------------------------------------------------------------------------------------------------


def _has_patches(model: nn.Module) -> bool:
    return isinstance(model, LocalEDM2) and not is_whole(model.k)


def _or_zeros(labels: Tensor | None, model: nn.Module, x: Tensor) -> Tensor | None:
    """No label is a label of zeros, for models that take one."""
    return x.new_zeros(len(x), model.label_dim) if labels is None and model.label_dim else labels


def _check_pixels(pixels: Pixels, x: Tensor) -> list[Pixel]:
    height, width = x.shape[-2:]
    for row, column in pixels:
        if not (0 <= row < height and 0 <= column < width):
            raise LcsError(f"pixel (row {row}, column {column}) lies outside the image of {height} x {width}")
    if not pixels:
        raise LcsError("at least one pixel is needed")
    return [(int(row), int(column)) for row, column in pixels]


def _chunks(length: int, size: int) -> list[slice]:
    if size < 1:
        raise LcsError(f"chunks of {size} are not possible; allowed: 1 or more")
    return [slice(at, min(at + size, length)) for at in range(0, length, size)]
