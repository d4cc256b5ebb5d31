"""The residual branch of a block without gradients, a few images at a time: what lies between stays in the cache.

    encoder:  x = norm(skip(x))       y = silu(x)
    decoder:  y = silu([wa a, wb b])  x = skip([wa a, wb b])
              out = clip(wx x + conv1(silu(c conv0(y))))

Run layer by layer on a batch, each of these writes maps of several megabytes to memory and reads them again. The maps
of one image fit into the second-level cache, more or less. The layers are those of `edm2.Block`, which remains the
definition; results are the same to rounding, and an image's do not depend on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lcs.jit import njit
from lcs.model.convolution import convolve, pack
from lcs.model.fused import ONE, F
from lcs.model.vectors import AVX2, WIDTH, norm_rows, silu_rows

CACHE = 160 * 1024  # bytes of a map with its margin that are worked on at a time
SIZE, MARGIN = 3, 1  # of the branch's kernels, and of zeros around a map

# ---- loops ----------------------------------------------------------------------------------------


@njit(nogil=True)
def _offsets(images, height, width, margin, channels):
    """Bytes from a map's start to each pixel's place, the map having `margin` more pixels on each side."""
    offsets, n = np.empty(images * height * width, np.int64), 0
    for b in range(images):
        for h in range(height):
            for w in range(width):
                offsets[n] = ((b * (height + 2 * margin) + h) * (width + 2 * margin) + w) * channels * 4
                n += 1
    return offsets


@njit(nogil=True)
def _silu_inside(x, x_offsets, x_pixel, scale, channels, width, out, out_offsets, out_pixel):
    """out = silu(scale x), row by row: x and out are addresses, pixel p lies at x_offsets[p] and out_offsets[p] bytes
    from there, scale [images or 1, channels]."""
    per_image = x_offsets.size // scale.shape[0]
    for p in range(0, x_offsets.size, width):
        factors = scale.ctypes.data + p // per_image * channels * 4
        silu_rows(x + x_offsets[p], x_pixel, factors, out + out_offsets[p], out_pixel, width, channels)


@njit(nogil=True, cache=True)
def _branch(a, b, wa, wb, decoder, scale, conv0, conv1, skip_a, skip_b, wx, clip, out, height, width, group):
    """a, b and out [N H W, channels] (b of no channels: not there), scale [B or 1, O]; weights as `pack` orders them,
    skips of no blocks: not there."""
    (inputs_a, inputs_b), outputs, pixels = (a.shape[1], b.shape[1]), out.shape[1], height * width
    channels = inputs_a + inputs_b if decoder else outputs
    images, with_margin = out.shape[0] // pixels, group * (height + SIZE - 1) * (width + SIZE - 1)
    y0, y1 = np.zeros(with_margin * channels, F), np.zeros(with_margin * outputs, F)
    under0, under1 = _offsets(group, height, width, MARGIN, channels), _offsets(group, height, width, MARGIN, outputs)
    corner = MARGIN * (width + SIZE - 1) + MARGIN  # pixels from the place under a kernel's corner to the pixel itself
    inside0, inside1 = under0 + corner * channels * 4, under1 + corner * outputs * 4
    plain_a, plain_b = _offsets(group, height, width, 0, inputs_a), _offsets(group, height, width, 0, inputs_b)
    plain = _offsets(group, height, width, 0, outputs)
    scale_a, scale_b, ones = np.full((1, inputs_a), wa, F), np.full((1, inputs_b), wb, F), np.ones((1, outputs), F)
    factors = np.empty(group * pixels, F)
    row0, row1 = (width + SIZE - 1) * channels * 4, (width + SIZE - 1) * outputs * 4
    for image in range(0, images, group):
        here = min(group, images - image)
        n, first = here * pixels, image * pixels
        at0, at1, main = y0.ctypes.data, y1.ctypes.data, out.ctypes.data + first * outputs * 4
        at_a, at_b = a.ctypes.data + first * inputs_a * 4, b.ctypes.data + first * inputs_b * 4
        if skip_a.shape[0]:
            convolve(at_a, plain_a[:n], 0, skip_a, main, plain[:n], F(0))
        if skip_b.shape[0]:
            convolve(at_b, plain_b[:n], 0, skip_b, main, plain[:n], ONE)
        if decoder:
            if not skip_a.shape[0]:
                out[first : first + n] = a[first : first + n]
            _silu_inside(at_a, plain_a[:n], inputs_a * 4, scale_a, inputs_a, width, at0, inside0, channels * 4)
            if inputs_b:
                to = at0 + inputs_a * 4
                _silu_inside(at_b, plain_b[:n], inputs_b * 4, scale_b, inputs_b, width, to, inside0, channels * 4)
        else:
            norm_rows(main if skip_a.shape[0] else at_a, main, factors.ctypes.data, n, outputs)
            _silu_inside(main, plain[:n], outputs * 4, ones, outputs, width, at0, inside0, outputs * 4)
        convolve(at0, under0[:n], row0, conv0, at1, inside1[:n], F(0))
        c = scale[image : image + here] if scale.shape[0] > 1 else scale
        _silu_inside(at1, inside1[:n], outputs * 4, c, outputs, width, at1, inside1, outputs * 4)
        convolve(at1, under1[:n], row1, conv1, main, plain[:n], wx)
        for p in range(first, first + n):
            for o in range(outputs):
                out[p, o] = min(max(out[p, o], -clip), clip)


# ---- as a layer -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Branch:
    """The weights of a block's branch in the order of the loops.

    conv0 [O, C, 3, 3], conv1 [O, O, 3, 3], skip [O, C, 1, 1] or None, with all constants of the layers in them. In a
    decoder, a of `split` channels and b enter as [wa a, wb b]; wx multiplies the main path.
    """

    conv0: np.ndarray
    conv1: np.ndarray
    skips: tuple[np.ndarray, np.ndarray]
    decoder: bool
    balance: tuple[float, float]
    wx: float

    @classmethod
    def pack(
        cls, conv0: Tensor, conv1: Tensor, skip: Tensor | None, decoder: bool, split: int, balance: tuple, wx: float
    ) -> Branch:
        none = np.zeros((0, 1, 1, WIDTH), F)
        if skip is None:
            skips = none, none
        elif decoder:
            skips = pack(skip[:, :split] * balance[0]), pack(skip[:, split:] * balance[1])
            skips = skips[0], skips[1] if split < skip.shape[1] else none
        else:
            skips = pack(skip), none
        return cls(pack(conv0), pack(conv1), skips, decoder, balance, wx)

    def __call__(self, a: Tensor, b: Tensor | None, scale: Tensor, clip: float) -> Tensor:
        """a, b [N, C, H, W] channels-last, scale [N or 1, O] -> [N, O, H, W] channels-last"""
        n, _, height, width = a.shape
        outputs = self.conv1.shape[0] * WIDTH
        out = torch.empty(n, height, width, outputs)
        b = a[:, :0] if b is None else b
        maps = (t.permute(0, 2, 3, 1).reshape(n * height * width, t.shape[1]).numpy() for t in (a, b))
        wide = (height + SIZE - 1) * (width + SIZE - 1) * 4 * (self.conv0.shape[2] // SIZE)  # bytes of an image
        _branch(
            *maps, F(self.balance[0]), F(self.balance[1]), self.decoder, scale.contiguous().numpy(),
            self.conv0, self.conv1, *self.skips, F(self.wx), F(clip),
            out.view(-1, outputs).numpy(), height, width, min(n, max(1, CACHE // wide)),
        )  # fmt: skip
        return out.permute(0, 3, 1, 2)


def fits(outputs: int) -> bool:
    return AVX2 and outputs % WIDTH == 0
