"""Convolutions whose weight gradient is computed here: the part of a training step PyTorch is slowest at on AVX2.

    dw[o, i, j, c] = sum over images n and pixels (h, w) of  g[n, h, w, o] x[n, h + i - r, w + j - r, c]

for maps that lie channels-last, x [N, H, W, C] and g [N, H, W, O], and a k x k kernel, r = (k - 1) / 2. For one shift
(i, j) this is a matrix product over pixels with small sides, O x C, at which PyTorch's library reaches 50-70% of a
square product's speed. Here a tile of 6 x 16 numbers of dw stays in twelve registers while the pixels of a few rows,
small enough for the first-level cache, pass by; a pixel costs two loads, six broadcasts and twelve fused multiply-adds,
and the speed is that of a square product.

The inner loop is written in LLVM's vector instructions, because compilers do not keep such a tile in registers by
themselves. The order of summation is fixed: the same input gives the same bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch import Tensor

from lcs.jit import njit
from lcs.model import fused

LANES = 8  # float32 numbers in an AVX2 register
VECTORS = 2  # registers side by side in a tile
WIDTH = LANES * VECTORS  # channels of x in a tile
CACHE = 24 * 1024  # bytes of both maps that pass by at a time, of a first-level cache of 32 kB

_features = binding.get_host_cpu_features()
# Processors with wider registers have good kernels of their own in PyTorch's library.
AVX2 = _features.get("avx2", False) and _features.get("fma", False) and not _features.get("avx512f", False)


# ---- the inner loop -------------------------------------------------------------------------------


def _tile_kernel(outputs: int):
    """An intrinsic that adds what a block of pixels contributes to `outputs` x WIDTH numbers of dw."""

    @intrinsic
    def add_tile(context, x, g, dw, rows, columns, x_pixel, g_pixel, row_pixels, dw_output):
        """Addresses of x, g and dw; rows and columns of the block; bytes from pixel to pixel in x and g; pixels from
        row to row; bytes from output to output in dw."""
        return types.void(*(types.int64,) * 9), _generate

    def _generate(target, builder: ir.IRBuilder, signature, args):
        x, g, dw, rows, columns, x_pixel, g_pixel, row_pixels, dw_output = args
        number, index, integer = ir.FloatType(), ir.IntType(32), ir.IntType(64)
        vector = ir.VectorType(number, LANES)
        undefined = ir.Constant(vector, ir.Undefined)
        multiply_add = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{LANES}f32"
        )

        def pointer(address, offset: int, kind):
            return builder.inttoptr(builder.add(address, integer(offset)), ir.PointerType(kind))

        def load(address, offset: int, kind):
            return builder.load(pointer(address, offset, kind), align=4)

        def broadcast(scalar):
            first = builder.insert_element(undefined, scalar, index(0))
            return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(index, LANES), [0] * LANES))

        tile = [[cgutils.alloca_once(builder, vector) for _ in range(VECTORS)] for _ in range(outputs)]  # registers
        for row in tile:
            for part in row:
                builder.store(ir.Constant(vector, [0.0] * LANES), part)
        with cgutils.for_range(builder, rows) as outer:
            first = builder.mul(outer.index, row_pixels)
            x_row = builder.add(x, builder.mul(first, x_pixel))
            g_row = builder.add(g, builder.mul(first, g_pixel))
            with cgutils.for_range(builder, columns) as inner:
                x_at = builder.add(x_row, builder.mul(inner.index, x_pixel))
                g_at = builder.add(g_row, builder.mul(inner.index, g_pixel))
                channels = [load(x_at, 4 * LANES * v, vector) for v in range(VECTORS)]
                for o, row in enumerate(tile):
                    factor = broadcast(load(g_at, 4 * o, number))
                    for part, channel in zip(row, channels, strict=True):
                        builder.store(builder.call(multiply_add, (factor, channel, builder.load(part))), part)
        for o, row in enumerate(tile):
            out = builder.add(dw, builder.mul(dw_output, integer(o)))
            for v, part in enumerate(row):
                total = builder.fadd(load(out, 4 * LANES * v, vector), builder.load(part))
                builder.store(total, pointer(out, 4 * LANES * v, vector), align=4)
        return target.get_dummy_value()

    return add_tile


_six, _four = _tile_kernel(6), _tile_kernel(4)


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
                            _four(x_at + c, g_at + 4 * o, dw_at + o * dw_output + c,
                                  last - first, columns, x_pixel, g_pixel, width, dw_output)  # fmt: skip
                        for o in range(in_fours, outputs, 6):
                            _six(x_at + c, g_at + 4 * o, dw_at + o * dw_output + c,
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
