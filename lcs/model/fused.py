"""The element-wise parts of a block as single passes over memory, for one CPU thread.

At `mini` scale a convolution on 32 channels does so little arithmetic per number that reading and writing the
activations takes as long. PyTorch runs "norm, scale, SiLU" or "scale, SiLU" as a pass each; here they are one loop,
forward and backward (`lcs.model.vectors`). All maps are channels-last, seen as [pixels, channels].

Used in training and in inference without gradients (`usable`) on maps whose channels are a multiple of LANES (`whole`);
anything else (GPUs, several threads, half precision, derivatives of a trained model) takes the plain operations of
`edm2.Block`, which compute the same to rounding.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lcs.jit import njit
from lcs.model.vectors import (
    EPS,
    LANES,
    norm_rows,
    norm_silu_back_rows,
    scaled_silu_back_rows,
    scaled_silu_rows,
    silu_back_rows,
    silu_rows,
)

F = np.float32
ONE = F(1)
BLOCK = 64  # pixels worked on twice in a row, while they are in the cache
# Sums may be reordered, so that they vectorise. Fused multiply-adds are left out: loops check at run time whether their
# arrays overlap and fall back to a scalar version, which would round differently depending on addresses.
MATH = {"reassoc", "nsz", "nnan", "ninf"}


def usable(x: Tensor, training: bool, layout: torch.memory_format | None = None) -> bool:
    """Whether the loops below may replace the plain operations on x, a map [B, C, H, W] or a weight.

    Maps and filters must be channels-last unless another `layout` is named.
    """
    layout = layout or (torch.channels_last if x.ndim == 4 else torch.contiguous_format)
    return (
        not torch.compiler.is_compiling()  # first: what follows cannot be traced
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and torch.get_num_threads() == 1
        and (training or not torch.is_grad_enabled())
        and x.is_contiguous(memory_format=layout)
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._functorch.peek_interpreter_stack()
        and not torch._C._len_torch_dispatch_stack()  # somebody counts or traces PyTorch's operations
    )


def whole(*maps: Tensor | None) -> bool:
    """Whether the channels of the maps [B, C, H, W] fill vectors."""
    return all(x is None or x.shape[1] % LANES == 0 for x in maps)


def rows(x: Tensor) -> np.ndarray:
    """[B, C, H, W], channels-last -> a view [B * H * W, C]."""
    return x.detach().permute(0, 2, 3, 1).reshape(-1, x.shape[1]).numpy()


def filters(weight: Tensor) -> np.ndarray:
    """[out, in, h, w], channels-last, or [out, in] -> a view [out, fan_in]; the order within a row does not matter."""
    weight = weight.detach()
    return (weight.permute(0, 2, 3, 1).flatten(1) if weight.ndim == 4 else weight).numpy()


# ---- loops ----------------------------------------------------------------------------------------


@njit(cache=True, nogil=True)
def _norm_silu(x, out, act, factors):
    """Pixel norm, then SiLU of it, for maps [pixels, C]: out = f x, act = silu(out), f kept in factors [pixels]."""
    pixels, channels = x.shape
    ones = np.ones(channels, F)
    for first in range(0, pixels, BLOCK):
        n, at = min(BLOCK, pixels - first), first * channels * 4
        norm_rows(x.ctypes.data + at, out.ctypes.data + at, factors.ctypes.data + first * 4, n, channels)
        silu_rows(out.ctypes.data + at, channels * 4, ones.ctypes.data, act.ctypes.data + at, channels * 4, n, channels)


@njit(cache=True, nogil=True)
def _norm_silu_back(out, factors, grad_out, grad_act, grad_x):
    norm_silu_back_rows(
        out.ctypes.data, factors.ctypes.data, grad_out.ctypes.data, grad_act.ctypes.data, grad_x.ctypes.data, *out.shape
    )


@njit(cache=True, nogil=True)
def _scale_silu(y, scale, out):
    """out = silu(y scale), y and out [pixels, C], scale [B or 1, C] for each image."""
    channels, n = y.shape[1], y.shape[0] // scale.shape[0]
    for b in range(scale.shape[0]):
        at, factors = b * n * channels * 4, scale.ctypes.data + b * channels * 4
        silu_rows(y.ctypes.data + at, channels * 4, factors, out.ctypes.data + at, channels * 4, n, channels)


@njit(cache=True, nogil=True)
def _scale_silu_back(y, scale, grad, grad_y, grad_scale):
    channels, n = y.shape[1], y.shape[0] // scale.shape[0]
    grad_scale[:] = 0
    for b in range(scale.shape[0]):
        at, row = b * n * channels * 4, b * channels * 4
        silu_back_rows(
            y.ctypes.data + at, scale.ctypes.data + row, grad.ctypes.data + at, grad_y.ctypes.data + at,
            grad_scale.ctypes.data + row, n, channels,
        )  # fmt: skip


@njit(cache=True, nogil=True)
def _cat_silu(x, weight, out, act, column):
    """out[:, column:] = weight x, act = silu of that; x [pixels, C], out and act [pixels, C or more]."""
    (pixels, channels), scale, at = x.shape, np.full(x.shape[1], weight, F), column * 4
    scaled_silu_rows(
        x.ctypes.data, channels * 4, scale.ctypes.data, out.ctypes.data + at, act.ctypes.data + at, out.shape[1] * 4,
        pixels, channels,
    )  # fmt: skip


@njit(cache=True, nogil=True)
def _cat_silu_back(out, grad_out, grad_act, weight, grad_x, column):
    (pixels, channels), scale, at = grad_x.shape, np.full(grad_x.shape[1], weight, F), column * 4
    scaled_silu_back_rows(
        out.ctypes.data + at, grad_out.ctypes.data + at, grad_act.ctypes.data + at, out.shape[1] * 4, scale.ctypes.data,
        grad_x.ctypes.data, channels * 4, pixels, channels,
    )  # fmt: skip


@njit(cache=True, fastmath=MATH, nogil=True, error_model="numpy")
def _normalize_rows(x, gain, out, factors):
    """out = f x, f = gain / (eps + |x| / sqrt(n)) per row of n numbers."""
    n = x.shape[1]
    for i in range(x.shape[0]):
        total = F(0)
        for c in range(n):
            total += x[i, c] * x[i, c]
        f = gain / (F(EPS) + np.sqrt(total / F(n)))
        factors[i] = f
        for c in range(n):
            out[i, c] = f * x[i, c]


@njit(cache=True, fastmath=MATH, nogil=True, error_model="numpy")
def _normalize_rows_back(x, gain, factors, grad, grad_x):
    """grad_x = f grad + <x, grad> df/dx, df/dx = -f^2 x / (gain n |x| / sqrt(n))"""
    n = x.shape[1]
    for i in range(x.shape[0]):
        f = factors[i]
        along = F(0)
        for c in range(n):
            along += x[i, c] * grad[i, c]
        along *= f * f / (gain * F(n) * max(gain / f - F(EPS), F(1e-12)))
        for c in range(n):
            grad_x[i, c] = f * grad[i, c] - along * x[i, c]


@njit(cache=True, fastmath=MATH, nogil=True, error_model="numpy")
def _add_clip(y, x, alpha, clip):
    """y = clip(y + alpha x), in place."""
    for i in range(y.shape[0]):
        for c in range(y.shape[1]):
            y[i, c] = min(max(y[i, c] + alpha * x[i, c], -clip), clip)


@njit(cache=True, fastmath=MATH, nogil=True, error_model="numpy")
def _add_clip_back(out, grad, alpha, clip, grad_y, grad_x):
    for i in range(out.shape[0]):
        for c in range(out.shape[1]):
            g = grad[i, c] if abs(out[i, c]) < clip else F(0)
            grad_y[i, c] = g
            grad_x[i, c] = alpha * g


@njit(cache=True, fastmath=MATH, nogil=True, error_model="numpy")
def _unshuffle(x, factor, p, out):
    """x [B, C, H, W] -> out [B, H/p, W/p, C p p + 1] = factor x, p x p pixels as channels, and a channel of ones."""
    images, channels = x.shape[:2]
    for b in range(images):
        f = factor[b % len(factor)]
        for i in range(out.shape[1]):
            for j in range(out.shape[2]):
                k = 0
                for c in range(channels):
                    for di in range(p):
                        for dj in range(p):
                            out[b, i, j, k] = f * x[b, c, i * p + di, j * p + dj]
                            k += 1
                out[b, i, j, k] = ONE


@njit(cache=True, fastmath=MATH, nogil=True, error_model="numpy")
def _shuffle_add(x, f, skip, gain, p, out):
    """out [B, C, H, W] = skip x + gain f, where f [B, H/p, W/p, C p p] holds p x p pixels as channels."""
    images, channels = x.shape[:2]
    for b in range(images):
        s, g = skip[b % len(skip)], gain[b % len(gain)]
        for i in range(f.shape[1]):
            for c in range(channels):
                for di in range(p):
                    row, k = i * p + di, (c * p + di) * p
                    for j in range(f.shape[2]):
                        for dj in range(p):
                            out[b, c, row, j * p + dj] = s * x[b, c, row, j * p + dj] + g * f[b, i, j, k + dj]


# ---- without derivatives --------------------------------------------------------------------------


class _NoContext:
    """Stands for autograd's context where nothing will be differentiated."""

    def save_for_backward(self, *_) -> None: ...

    mark_dirty = save_for_backward


def run(function: type[torch.autograd.Function], *args):
    """`function.apply(*args)`, without autograd's bookkeeping where no gradient is wanted."""
    return function.apply(*args) if torch.is_grad_enabled() else function.forward(_NoContext(), *args)


def unshuffle(x: Tensor, factor: Tensor, p: int) -> Tensor:
    """pixel_unshuffle(factor x, p) with a channel of ones, channels-last; x [B, C, H, W], factor [B or 1]"""
    b, c, h, w = x.shape
    out = torch.empty(b, h // p, w // p, c * p * p + 1)
    _unshuffle(x.detach().numpy(), factor.detach().numpy(), p, out.numpy())
    return out.permute(0, 3, 1, 2)


def shuffle_add(x: Tensor, f: Tensor, skip: Tensor, gain: Tensor, p: int) -> Tensor:
    """skip x + gain pixel_shuffle(f, p); x [B, C, H, W], f channels-last, skip and gain [B or 1]"""
    out = torch.empty_like(x)
    maps = (t.detach().numpy() for t in (x, f.permute(0, 2, 3, 1), skip, gain))
    _shuffle_add(*maps, p, out.numpy())
    return out


# ---- as differentiable operations -----------------------------------------------------------------


def _like(x: Tensor, channels: int | None = None) -> Tensor:
    shape = (x.shape[0], channels or x.shape[1], *x.shape[2:])
    return torch.empty(shape, dtype=x.dtype, memory_format=torch.channels_last)


def _or_zeros(grad: Tensor | None, like: Tensor) -> Tensor:
    grad = torch.zeros_like(like) if grad is None else grad
    return grad.contiguous(memory_format=torch.channels_last)


class NormalizeRows(torch.autograd.Function):
    """weight [out, ...], gain -> gain weight / (eps + magnitude of each row)"""

    @staticmethod
    def forward(ctx, weight: Tensor, gain: float) -> Tensor:
        out, ctx.factors, ctx.gain = torch.empty_like(weight), np.empty(len(weight), np.float32), F(gain)
        _normalize_rows(filters(weight), ctx.gain, filters(out), ctx.factors)
        ctx.save_for_backward(weight)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        layout = torch.channels_last if weight.ndim == 4 else torch.contiguous_format
        grad, grad_weight = grad.contiguous(memory_format=layout), torch.empty_like(weight)
        _normalize_rows_back(filters(weight), ctx.gain, ctx.factors, filters(grad), filters(grad_weight))
        return grad_weight, None


class NormSilu(torch.autograd.Function):
    """x -> (pixel norm of x, SiLU of that)"""

    @staticmethod
    def forward(ctx, x: Tensor) -> tuple[Tensor, Tensor]:
        out, act = _like(x), _like(x)
        factors = np.empty(x.shape[0] * x.shape[2] * x.shape[3], np.float32)
        _norm_silu(rows(x), rows(out), rows(act), factors)
        ctx.save_for_backward(out)
        ctx.factors = factors
        return out, act

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out: Tensor | None, grad_act: Tensor | None) -> Tensor:
        (out,) = ctx.saved_tensors
        grad_x = _like(out)
        grads = (rows(_or_zeros(g, out)) for g in (grad_out, grad_act))
        _norm_silu_back(rows(out), ctx.factors, *grads, rows(grad_x))
        return grad_x


class ScaleSilu(torch.autograd.Function):
    """y [B, C, H, W], scale [B or 1, C] -> silu(y scale)"""

    @staticmethod
    def forward(ctx, y: Tensor, scale: Tensor) -> Tensor:
        out = _like(y)
        _scale_silu(rows(y), scale.detach().contiguous().numpy(), rows(out))
        ctx.save_for_backward(y, scale)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        y, scale = ctx.saved_tensors
        grad_y, grad_scale = _like(y), torch.empty_like(scale, memory_format=torch.contiguous_format)
        args = rows(y), scale.detach().contiguous().numpy(), rows(_or_zeros(grad, y))
        _scale_silu_back(*args, rows(grad_y), grad_scale.numpy())
        return grad_y, grad_scale


class CatSilu(torch.autograd.Function):
    """a, b -> (their weighted concatenation, SiLU of that)"""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, wa: float, wb: float) -> tuple[Tensor, Tensor]:
        channels = a.shape[1] + b.shape[1]
        out, act = _like(a, channels), _like(a, channels)
        _cat_silu(rows(a), F(wa), rows(out), rows(act), 0)
        _cat_silu(rows(b), F(wb), rows(out), rows(act), a.shape[1])
        ctx.save_for_backward(out)
        ctx.weights, ctx.split = (F(wa), F(wb)), a.shape[1]
        return out, act

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out: Tensor | None, grad_act: Tensor | None):
        (out,) = ctx.saved_tensors
        grad_a, grad_b = _like(out, ctx.split), _like(out, out.shape[1] - ctx.split)
        maps = rows(out), *(rows(_or_zeros(g, out)) for g in (grad_out, grad_act))
        _cat_silu_back(*maps, ctx.weights[0], rows(grad_a), 0)
        _cat_silu_back(*maps, ctx.weights[1], rows(grad_b), ctx.split)
        return grad_a, grad_b, None, None


class AddClip(torch.autograd.Function):
    """y, x -> clip(y + alpha x); y is overwritten"""

    @staticmethod
    def forward(ctx, y: Tensor, x: Tensor, alpha: float, clip: float) -> Tensor:
        _add_clip(rows(y), rows(x), F(alpha), F(clip))
        ctx.mark_dirty(y)
        ctx.save_for_backward(y)
        ctx.alpha, ctx.clip = F(alpha), F(clip)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        (out,) = ctx.saved_tensors
        grad_y, grad_x = _like(out), _like(out)
        _add_clip_back(rows(out), rows(_or_zeros(grad, out)), ctx.alpha, ctx.clip, rows(grad_y), rows(grad_x))
        return grad_y, grad_x, None, None
