"""Convolutions of channels-last maps by register tiles, for one thread of a CPU with AVX2.

    y[n, h, w, o]  = sum over i, j, c of  weight[o, i, j, c] x[n, h + i - r, w + j - r, c]
    dw[o, i, j, c] = sum over n, h, w of  g[n, h, w, o] x[n, h + i - r, w + j - r, c]

for maps x [N, H, W, C] and y, g [N, H, W, O] and a k x k kernel, r = (k - 1) / 2.

`weight_gradient` is the part of a training step PyTorch is slowest at. For one shift (i, j) it is a matrix product over
pixels with small sides, O x C, at which PyTorch's library reaches 50-70% of a square product's speed. Here a tile of
6 x 16 numbers of dw stays in twelve registers while the pixels of a few rows, small enough for the first-level cache,
pass by; a pixel costs two loads, six broadcasts and twelve fused multiply-adds, and the speed is that of a square
product.

`convolve` computes y, at the speed of PyTorch's library, which is good here. Its use is that it can be called from
compiled loops, image by image, so that what comes before and after it stays in the cache: see `lcs.model.residual`.

The inner loops are written in LLVM's vector instructions, because compilers do not keep such a tile in registers by
themselves. The order of summation is fixed: the same input gives the same bits.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch import Tensor

from lcs.jit import njit
from lcs.model import fused
from lcs.model.vectors import AVX2, LANES, WIDTH, Vectors

CACHE = 24 * 1024  # bytes of both maps that pass by at a time, of a first-level cache of 32 kB


# ---- the inner loops ------------------------------------------------------------------------------


def _gradient_tile(outputs: int):
    """An intrinsic that adds what a block of pixels contributes to `outputs` x WIDTH numbers of dw."""

    @intrinsic
    def add_tile(context, x, g, dw, rows, columns, x_pixel, g_pixel, row_pixels, dw_output):
        """Addresses of x, g and dw; rows and columns of the block; bytes from pixel to pixel in x and g; pixels from
        row to row; bytes from output to output in dw."""
        return types.void(*(types.int64,) * 9), _generate

    def _generate(target, builder: ir.IRBuilder, signature, args):
        x, g, dw, rows, columns, x_pixel, g_pixel, row_pixels, dw_output = args
        v = Vectors(builder)
        tile = v.tile(outputs)
        with cgutils.for_range(builder, rows) as outer:
            first = builder.mul(outer.index, row_pixels)
            x_row, g_row = v.at(x, first, x_pixel), v.at(g, first, g_pixel)
            with cgutils.for_range(builder, columns) as inner:
                g_at = v.at(g_row, inner.index, g_pixel)
                v.add_outer_product(tile, [v.at(g_at, o, 4) for o in range(outputs)], v.at(x_row, inner.index, x_pixel))
        for o, row in enumerate(tile):
            for n, part in enumerate(row):
                out = v.at(v.at(dw, o, dw_output), n, 4 * LANES)
                v.store(builder.fadd(v.load(out), builder.load(part)), out)
        return target.get_dummy_value()

    return add_tile


def _forward_tile(pixels: int):
    """An intrinsic for WIDTH outputs of `pixels` pixels: y = keep y + the sum over `rows` rows of the kernel.

    In a map with a margin of zeros the k pixels under a row of the kernel lie side by side: a row is one run of k C
    numbers.
    """

    @intrinsic
    def set_tile(context, x, x_offsets, weight, y, y_offsets, rows, run, x_row, keep):
        """Addresses of x, of the pixels' offsets in it (bytes, int64), of the packed weight, of y and its offsets; rows
        of the kernel; numbers in a run; bytes from row to row of x; how much of y is kept (none: y may hold anything).
        """
        return types.void(*(types.int64,) * 8, types.float32), _generate

    def _generate(target, builder: ir.IRBuilder, signature, args):
        x, x_offsets, weight, y, y_offsets, rows, run, x_row, keep = args
        builder.function.attributes.add("noinline")  # compiled once, not again at every place `convolve` is called from
        v = Vectors(builder)
        inputs, outputs = (
            [builder.add(base, v.load(v.at(offsets, q, 8), v.integer)) for q in range(pixels)]
            for base, offsets in ((x, x_offsets), (y, y_offsets))
        )
        tile, factor = v.tile(pixels), v.broadcast(keep)
        fresh = builder.fcmp_ordered("==", keep, v.number(0.0))
        for out, row in zip(outputs, tile, strict=True):
            for n, part in enumerate(row):
                kept = builder.fmul(factor, v.load(v.at(out, n, 4 * LANES)))
                builder.store(builder.select(fresh, v.zero, kept), part)
        with cgutils.for_range(builder, rows) as outer:
            starts = [v.at(at, outer.index, x_row) for at in inputs]
            weight_row = v.at(weight, builder.mul(outer.index, run), 4 * WIDTH)
            with cgutils.for_range(builder, run) as inner:
                scalars = [v.at(at, inner.index, 4) for at in starts]
                v.add_outer_product(tile, scalars, v.at(weight_row, inner.index, 4 * WIDTH))
        for out, row in zip(outputs, tile, strict=True):
            for n, part in enumerate(row):
                v.store(builder.load(part), v.at(out, n, 4 * LANES))
        return target.get_dummy_value()

    return set_tile


_gradient_six, _gradient_four = _gradient_tile(6), _gradient_tile(4)
_forward_six, _forward_four, _forward_one = _forward_tile(6), _forward_tile(4), _forward_tile(1)


@njit(nogil=True)
def convolve(x, x_offsets, x_row, weight, y, y_offsets, keep):
    """y = keep y + weight * x at pixels p: x starts at x + x_offsets[p], y lies at y + y_offsets[p].

    x and y are addresses; offsets in bytes, of the pixel under the kernel's top left corner in a map with margins
    whose rows are x_row bytes apart. weight [O / WIDTH, k, k C, WIDTH], see `pack`; O a multiple of WIDTH.
    """
    blocks, size, run, _ = weight.shape
    pixels = x_offsets.size
    in_sixes = pixels // 6 * 6
    in_tiles = in_sixes + (4 if pixels - in_sixes >= 4 else 0)
    # As much of the weight at a time as the first-level cache holds: all rows of the kernel, or one after another.
    rows = size if size * run * 4 * WIDTH <= CACHE else 1
    x_at, y_at = x_offsets.ctypes.data, y_offsets.ctypes.data
    for block in range(blocks):
        out = y + block * 4 * WIDTH
        for i in range(0, size, rows):
            at = weight.ctypes.data + (block * size + i) * run * 4 * WIDTH
            top, kept = x + i * x_row, keep if i == 0 else np.float32(1)
            for p in range(0, in_sixes, 6):
                _forward_six(top, x_at + 8 * p, at, out, y_at + 8 * p, rows, run, x_row, kept)
            for p in range(in_sixes, in_tiles, 4):
                _forward_four(top, x_at + 8 * p, at, out, y_at + 8 * p, rows, run, x_row, kept)
            for p in range(in_tiles, pixels):
                _forward_one(top, x_at + 8 * p, at, out, y_at + 8 * p, rows, run, x_row, kept)


def pack(weight: Tensor) -> np.ndarray:
    """[O, C, k, k] -> [O / WIDTH, k, k C, WIDTH]: the order in which `convolve` reads it."""
    outputs, channels, size, _ = weight.shape
    rows = weight.detach().permute(0, 2, 3, 1).reshape(outputs // WIDTH, WIDTH, size, size * channels)
    return rows.permute(0, 2, 3, 1).contiguous().numpy()


@njit(nogil=True, cache=True)
def _weight_gradient(x, g, dw, block_rows):
    """x [N, H, W, C], g [N, H, W, O]; adds to dw [O, k, k, C]. C a multiple of WIDTH, O even and at least 4."""
    images, height, width, channels = x.shape
    outputs, size = g.shape[3], dw.shape[1]
    reach = size // 2
    in_fours = (0, 8, 4)[outputs % 6 // 2]  # outputs in tiles of 4; the others are a multiple of 6
    x_pixel, g_pixel, dw_output = channels * 4, outputs * 4, size * size * channels * 4  # bytes
    for n in range(images):
        for top in range(0, height, block_rows):
            for i in range(size):
                first, last = max(top, reach - i), min(top + block_rows, height, height + reach - i)
                if last <= first:
                    continue
                for j in range(size):
                    left = max(0, reach - j)
                    columns = min(width, width + reach - j) - left
                    x_at = x.ctypes.data + ((n * height + first + i - reach) * width + left + j - reach) * x_pixel
                    g_at = g.ctypes.data + ((n * height + first) * width + left) * g_pixel
                    dw_at = dw.ctypes.data + (i * size + j) * x_pixel
                    for c in range(0, x_pixel, 4 * WIDTH):
                        for o in range(0, in_fours, 4):
                            _gradient_four(x_at + c, g_at + 4 * o, dw_at + o * dw_output + c,
                                  last - first, columns, x_pixel, g_pixel, width, dw_output)  # fmt: skip
                        for o in range(in_fours, outputs, 6):
                            _gradient_six(x_at + c, g_at + 4 * o, dw_at + o * dw_output + c,
                                 last - first, columns, x_pixel, g_pixel, width, dw_output)  # fmt: skip


# ---- as a differentiable operation ----------------------------------------------------------------


def weight_gradient(x: Tensor, grad: Tensor, size: int) -> Tensor:
    """x [N, C, H, W], grad [N, O, H, W], both float32 and channels-last -> [O, C, size, size], channels-last"""
    assert all(t.dtype == torch.float32 and t.is_contiguous(memory_format=torch.channels_last) for t in (x, grad))
    channels, outputs, width = x.shape[1], grad.shape[1], x.shape[3]
    dw = x.new_zeros(outputs, size, size, channels)
    block_rows = max(1, CACHE // (4 * width * (channels + outputs)))
    _weight_gradient(x.permute(0, 2, 3, 1).numpy(), grad.permute(0, 2, 3, 1).numpy(), dw.numpy(), block_rows)
    return dw.permute(0, 3, 1, 2)


class _Conv2d(torch.autograd.Function):
    """x [N, C, H, W], weight [O, C, k, k], k odd -> [N, O, H, W]"""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.conv2d(x, weight, padding=weight.shape[-1] // 2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        grad_x, size = None, weight.shape[-1]
        if ctx.needs_input_grad[0]:
            padding = [size // 2] * 2
            grad_x = torch.ops.aten.convolution_backward(
                grad, x, weight, None, [1, 1], padding, [1, 1], False, [0, 0], 1, [True, False, False]
            )[0]
        return grad_x, weight_gradient(x.detach(), grad, size)


def conv2d(x: Tensor, weight: Tensor, training: bool = False) -> Tensor:
    """A convolution that keeps the map's size; in training on one AVX2 thread with the weight gradient above."""
    outputs, channels, height, width = weight.shape
    fits = channels % WIDTH == 0 and outputs % 2 == 0 and outputs >= 4 and height == width and height % 2
    if AVX2 and training and fits and torch.is_grad_enabled() and weight.requires_grad and fused.usable(x, training):
        return _Conv2d.apply(x, weight)
    return F.conv2d(x, weight, padding=(height // 2, width // 2))
