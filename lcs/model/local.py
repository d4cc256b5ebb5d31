"""The local patch model: a denoiser that sees nothing beyond (2k+1) x (2k+1) cells of the image (section E.3 of v1).

The image is divided into G x G cells of m = resolution / G pixels. To denoise cell (i, j) -- row i, column j -- the
model looks at the patch of (2k+1) m pixels centred on it, is told which conditioners lie in the patch and where in
the image the patch is (so it is local but not translation equivariant), and only the centre cell of its output is
kept.

Definitions that the paper leaves open:

* Beyond the image a patch is zero, in the noisy image and hence in training in both image and noise
  (`extract_patches` does it for either). Conditioner cells beyond the image are zero.
* The centre enters as two numbers, row and column scaled to [-1, 1], at the end of the label vector.
* List conditioning: slots (present, x, y); the entries inside the patch, moved to the first slots, with x and y as
  fractions of the patch; the other slots are zero. An entry is inside if its cell is.
* k >= G / 2: the patch is as large as the image. There is then one patch, the image itself, with the label of
  the whole image and centre (0, 0), and the local model *is* the plain model on that label.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lcs.errors import LcsError
from lcs.experiments import GRID, Network
from lcs.model.edm2 import EDM2

CHUNK_PIXELS = 2**17  # pixels per forward pass: all 256 patches of 20 x 20 at once, 80 of 40 x 40


def is_whole(k: int) -> bool:
    """True if a patch of radius k covers the image from any cell we take it from, i.e. locality is off."""
    return k >= GRID // 2


def patch_size(resolution: int, k: int) -> int:
    """Side of a patch in pixels."""
    if resolution % GRID:
        raise LcsError(f"resolution {resolution} is not a multiple of the {GRID}-cell grid")
    return resolution if is_whole(k) else (2 * k + 1) * (resolution // GRID)


def all_cells(batch: int, k: int) -> Tensor:
    """Every cell in reading order, for each image. -> [batch, G*G, 2]; [batch, 1, 2] if the patch is the image."""
    if is_whole(k):
        return torch.zeros(batch, 1, 2, dtype=torch.long)
    return torch.cartesian_prod(torch.arange(GRID), torch.arange(GRID)).expand(batch, -1, -1)


def patch_windows(images: Tensor, k: int) -> Tensor:
    """All patches as a view of the zero-padded image: [B, C, H, W] -> [B, G, G, C, P, P]."""
    m = images.shape[-1] // GRID
    padded = F.pad(images, (k * m,) * 4)
    p = (2 * k + 1) * m
    return padded.unfold(2, p, m).unfold(3, p, m).permute(0, 2, 3, 1, 4, 5)


def extract_patches(images: Tensor, cells: Tensor, k: int) -> Tensor:
    """Patches around chosen cells. images [B, C, H, W], cells [B, n, 2] -> [B*n, C, P, P]"""
    if is_whole(k):
        return images.repeat_interleave(cells.shape[1], dim=0)
    rows = torch.arange(len(images), device=images.device)[:, None]  # [B, 1], broadcast with [B, n]
    i, j = cells.to(images.device).unbind(-1)
    return patch_windows(images, k)[rows, i, j].flatten(0, 1)


def grid_patch_labels(labels: Tensor, cells: Tensor, k: int) -> Tensor:
    """Sub-grid of counts and the centre. labels [B, G*G], cells [B, n, 2] -> [B*n, (2k+1)^2 + 2]"""
    if is_whole(k):
        counts = labels.repeat_interleave(cells.shape[1], dim=0)
    else:  # the label is an image of one pixel per cell
        counts = extract_patches(labels.view(-1, 1, GRID, GRID), cells, k).flatten(1)
    return torch.cat([counts, _centres(cells, k, labels)], dim=1)


def list_patch_labels(labels: Tensor, cells: Tensor, k: int) -> Tensor:
    """Entries inside the patch and the centre. labels [B, S*3], cells [B, n, 2] -> [B*n, S*3 + 2]"""
    slots = labels.repeat_interleave(cells.shape[1], dim=0).unflatten(1, (-1, 3))  # [N, S, 3]
    if not is_whole(k):
        present, xy = slots[..., 0], slots[..., 1:]
        corner = (cells.to(labels.device).flatten(0, 1) - k).flip(-1)[:, None]  # [N, 1, 2] as (column, row)
        offset = _cell_of(xy) - corner
        inside = (present > 0) & (offset >= 0).all(-1) & (offset <= 2 * k).all(-1)  # [N, S]
        xy = (xy * GRID - corner) / (2 * k + 1)
        slots = torch.cat([present[..., None], xy], dim=-1) * inside[..., None]
        order = torch.argsort((~inside).int(), dim=1, stable=True)  # entries inside first, in their order
        slots = slots.gather(1, order[..., None].expand_as(slots))
    return torch.cat([slots.flatten(1), _centres(cells, k, labels)], dim=1)


def _cell_of(xy: Tensor) -> Tensor:
    """Cell index of image fractions; the far edge belongs to the last cell."""
    return (xy * GRID).floor().clamp(0, GRID - 1)


def _centres(cells: Tensor, k: int, like: Tensor) -> Tensor:  # [B, n, 2] -> [B*n, 2]
    centres = cells.flatten(0, 1).to(like) * (2 / (GRID - 1)) - 1
    return torch.zeros_like(centres) if is_whole(k) else centres


class LocalEDM2(nn.Module):
    """`forward` denoises whole images like `EDM2`; `denoiser` is the network on patches, which is what is trained.

    kind "grid": labels are [B, G*G] counts; kind "list": [B, slots*3].
    """

    def __init__(
        self,
        network: Network,
        resolution: int,
        kind: str,
        k: int = 2,
        list_slots: int = 12,
        in_channels: int = 3,
        sigma_data: float = 0.5,
    ) -> None:
        super().__init__()
        if kind not in ("grid", "list"):
            raise LcsError(f"the local model takes grid or list conditioning, not {kind!r}")
        if k < 0:
            raise LcsError(f"local radius {k} is negative")
        self.kind, self.k, self.resolution, self.sigma_data = kind, k, resolution, sigma_data
        self.label_dim = GRID**2 if kind == "grid" else 3 * list_slots
        cells = GRID**2 if is_whole(k) else (2 * k + 1) ** 2
        width = (cells if kind == "grid" else 3 * list_slots) + 2
        self.denoiser = EDM2(network, patch_size(resolution, k), in_channels, width, sigma_data)

    def patch_labels(self, labels: Tensor, cells: Tensor) -> Tensor:
        """Labels of whole images [B, label_dim], cells [B, n, 2] -> labels of the patches [B*n, width]"""
        if labels.shape[-1] != self.label_dim:
            raise LcsError(f"labels have width {labels.shape[-1]}; this model takes {self.label_dim}")
        function = grid_patch_labels if self.kind == "grid" else list_patch_labels
        return function(labels, cells, self.k)

    def choose_patches(self, labels: Tensor, u: Tensor) -> Tensor:
        """Cells to train on: per image one patch that contains an active conditioner, then one that contains none.

        u [B, 2], uniform in [0, 1), says which of the fitting cells. If none fits (an empty label, a crowded
        image), any cell will do. -> [B, 2, 2]; [B, 1, 2] if the patch is the whole image.
        """
        if is_whole(self.k):
            return all_cells(len(labels), self.k)
        seen = (
            F.max_pool2d(self._active(labels), 2 * self.k + 1, stride=1, padding=self.k).flatten(1).bool()
        )  # [B, G*G]
        fits = torch.stack([seen, ~seen], dim=1)  # [B, 2, G*G]: positive, negative
        fits |= ~fits.any(dim=2, keepdim=True)
        rank = fits.cumsum(dim=2)  # 1, 2, ... at the fitting cells
        wanted = (u.to(rank.device) * rank[..., -1]).long() + 1  # [B, 2]
        chosen = (rank < wanted[..., None]).sum(dim=2)
        return torch.stack([chosen // GRID, chosen % GRID], dim=-1)

    def _active(self, labels: Tensor) -> Tensor:
        """1 where a cell holds a conditioner. -> [B, 1, G, G]"""
        if self.kind == "grid":
            return (labels > 0).float().view(-1, 1, GRID, GRID)
        slots = labels.unflatten(1, (-1, 3))
        column, row = _cell_of(slots[..., 1:]).long().unbind(-1)
        active = torch.zeros(len(labels), GRID * GRID, device=labels.device)
        active.scatter_reduce_(1, row * GRID + column, (slots[..., 0] > 0).float(), "amax")
        return active.view(-1, 1, GRID, GRID)

    def patch_batch(
        self, images: Tensor, labels: Tensor, noise: Tensor, cells: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What the loss of the patches at `cells` needs: (images, labels, noise), each with first axis B*n."""
        return (
            extract_patches(images, cells, self.k),
            self.patch_labels(labels, cells),
            extract_patches(noise, cells, self.k),
        )

    def forward(self, x: Tensor, sigma: Tensor | float, labels: Tensor | None = None) -> Tensor:
        """x [B, C, H, W], sigma [B] or one for all, labels [B, label_dim] or None (all zero) -> x0hat like x."""
        if labels is None:
            labels = x.new_zeros(1, self.label_dim)
        b, n_cells = len(x), 1 if is_whole(self.k) else GRID**2
        cells = all_cells(b, self.k)
        patch_labels = self.patch_labels(labels.expand(b, -1), cells)  # [B*n, width]
        if is_whole(self.k):
            return self.denoiser(x, sigma, patch_labels)
        sigma = torch.as_tensor(sigma, dtype=x.dtype, device=x.device).reshape(-1)

        # All patches of all images are one long batch, cut into chunks. The view is gathered chunk by chunk.
        windows = patch_windows(x, self.k)
        m, p = windows.shape[-1] // (2 * self.k + 1), windows.shape[-1]
        chunk = max(1, CHUNK_PIXELS // p**2)
        image = torch.arange(b).repeat_interleave(n_cells)
        i, j = cells.flatten(0, 1).unbind(-1)
        centres = []  # of [chunk, C, m, m]
        for at in range(0, b * n_cells, chunk):
            part = slice(at, at + chunk)
            patches = windows[image[part], i[part], j[part]]  # [chunk, C, P, P]
            s = sigma if len(sigma) == 1 else sigma[image[part]]
            centres.append(self.denoiser(patches, s, patch_labels[part], centre=m))
        out = torch.cat(centres).view(b, GRID, GRID, x.shape[1], m, m)
        return out.permute(0, 3, 1, 4, 2, 5).reshape_as(x)
