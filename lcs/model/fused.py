"""The element-wise parts of a block as single passes over memory, for one CPU thread.

At `mini` scale a convolution on 32 channels does so little arithmetic per number that reading and writing the
activations takes as long. PyTorch runs "norm, scale, SiLU" or "scale, SiLU" as a pass each; here they are one loop
compiled by numba, forward and backward. All maps are channels-last, seen as [pixels, channels].

Used in training and in inference without gradients (`usable`); anything else (GPUs, several threads, half precision,
derivatives of a trained model) takes the plain operations of `edm2.Block`, which compute the same to rounding.

SiLU needs a sigmoid, (1 + tanh(x / 2)) / 2. tanh(u) is u times a ratio of two polynomials in u^2 (our least-squares
fit on |u| < 9, error 6e-8 before float32 rounding): no branch, no call, so the compiler vectorises the loop.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lcs.jit import njit

EPS = 1e-4  # added to every norm
F = np.float32
P0, P1, P2, P3, P4 = F(0.999999983), F(0.133924322), F(0.00350913365), F(2.08319377e-05), F(1.3663397e-08)
Q1, Q2, Q3, Q4 = F(0.467257508), F(0.0259285184), F(0.000330778486), F(7.90293108e-07)
ONE, HALF, TOP = F(1), F(0.5), F(9)
# Sums may be reordered, so that they vectorise. Fused multiply-adds are left out: loops check at run time whether their
# arrays overlap and fall back to a scalar version, which would round differently depending on addresses.
MATH = {"reassoc", "nsz", "nnan", "ninf"}


def usable(x: Tensor, training: bool, layout: torch.memory_format | None = None) -> bool:
    """Whether the loops below may replace the plain operations on x, a map [B, C, H, W] or a weight.

    Maps and filters must be channels-last unless another `layout` is named.
    """
    layout = layout or (torch.channels_last if x.ndim == 4 else torch.contiguous_format)
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and torch.get_num_threads() == 1
        and (training or not torch.is_grad_enabled())
        and x.is_contiguous(memory_format=layout)
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and not torch._C._functorch.peek_interpreter_stack()
        and not torch._C._len_torch_dispatch_stack()  # somebody counts or traces PyTorch's operations
    )


def rows(x: Tensor) -> np.ndarray:
    """[B, C, H, W], channels-last -> a view [B * H * W, C]."""
    return x.detach().permute(0, 2, 3, 1).reshape(-1, x.shape[1]).numpy()


def filters(weight: Tensor) -> np.ndarray:
    """[out, in, h, w], channels-last, or [out, in] -> a view [out, fan_in]; the order within a row does not matter."""
    weight = weight.detach()
    return (weight.permute(0, 2, 3, 1).flatten(1) if weight.ndim == 4 else weight).numpy()


# ---- loops ----------------------------------------------------------------------------------------


@njit(inline="always", error_model="numpy")
def _sigmoid(x):
    u = min(max(x * HALF, -TOP), TOP)
    t = u * u
    p = P0 + t * (P1 + t * (P2 + t * (P3 + t * P4)))
    q = ONE + t * (Q1 + t * (Q2 + t * (Q3 + t * Q4)))
    return HALF + HALF * u * p / q


@njit(cache=True, fastmath=MATH, nogil=True, error_model="numpy")
def _norm_silu(x, out, act, factors):
    """Pixel norm, then SiLU of it: out = f x, act = silu(out), f = 1 / (eps + |x| / sqrt(C)) per pixel."""
    pixels, channels = x.shape
    for i in range(pixels):
        total = F(0)
        for c in range(channels):
            total += x[i, c] * x[i, c]
        f = ONE / (F(EPS) + np.sqrt(total / F(channels)))
        factors[i] = f
        for c in range(channels):
            v = x[i, c] * f
            out[i, c] = v
            act[i, c] = v * _sigmoid(v)


@njit(cache=True, fastmath=MATH, nogil=True, error_model="numpy")
def _norm_silu_back(out, factors, grad_out, grad_act, grad_x):
    """g = grad_out + grad_act silu'(out); grad_x = f (g - <out, g> out s), s = |x| / sqrt(C) f / (C (...)) below."""
    pixels, channels = out.shape
    for i in range(pixels):
        f = factors[i]
        along = F(0)
        for c in range(channels):
            v = out[i, c]
            s = _sigmoid(v)
            g = grad_out[i, c] + grad_act[i, c] * (s * (ONE + v * (ONE - s)))
            grad_x[i, c] = g
            along += v * g
        # d f / d x = -f^2 x / (|x| sqrt(C)); x = out / f, |x| / sqrt(C) = 1 / f - eps
        rms = max(ONE / f - F(EPS), F(1e-12))
        along *= ONE / (f * rms * F(channels))
        for c in range(channels):
            grad_x[i, c] = f * (grad_x[i, c] - along * out[i, c])


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
def _scale_silu(y, scale, out):
    """out = silu(y scale), scale [B or 1, C] for each image."""
    per_image = y.shape[0] // scale.shape[0]
    for b in range(scale.shape[0]):
        for i in range(b * per_image, (b + 1) * per_image):
            for c in range(y.shape[1]):
                v = y[i, c] * scale[b, c]
                out[i, c] = v * _sigmoid(v)


@njit(cache=True, fastmath=MATH, nogil=True, error_model="numpy")
def _scale_silu_back(y, scale, grad, grad_y, grad_scale):
    per_image = y.shape[0] // scale.shape[0]
    for b in range(scale.shape[0]):
        grad_scale[b] = 0
        for i in range(b * per_image, (b + 1) * per_image):
            for c in range(y.shape[1]):
                v = y[i, c] * scale[b, c]
                s = _sigmoid(v)
                g = grad[i, c] * (s * (ONE + v * (ONE - s)))
                grad_y[i, c] = g * scale[b, c]
                grad_scale[b, c] += g * y[i, c]


@njit(cache=True, fastmath=MATH, nogil=True, error_model="numpy")
def _cat_silu(a, b, wa, wb, out, act):
    """out = [wa a, wb b] along the channels, act = silu(out)."""
    split = a.shape[1]
    for i in range(a.shape[0]):
        for c in range(split):
            v = wa * a[i, c]
            out[i, c] = v
            act[i, c] = v * _sigmoid(v)
        for c in range(b.shape[1]):
            v = wb * b[i, c]
            out[i, split + c] = v
            act[i, split + c] = v * _sigmoid(v)


@njit(cache=True, fastmath=MATH, nogil=True, error_model="numpy")
def _cat_silu_back(out, grad_out, grad_act, wa, wb, grad_a, grad_b):
    split = grad_a.shape[1]
    for i in range(out.shape[0]):
        for c in range(split):
            v = out[i, c]
            s = _sigmoid(v)
            grad_a[i, c] = wa * (grad_out[i, c] + grad_act[i, c] * (s * (ONE + v * (ONE - s))))
        for c in range(grad_b.shape[1]):
            v = out[i, split + c]
            s = _sigmoid(v)
            grad_b[i, c] = wb * (grad_out[i, split + c] + grad_act[i, split + c] * (s * (ONE + v * (ONE - s))))


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
        _cat_silu(rows(a), rows(b), F(wa), F(wb), rows(out), rows(act))
        ctx.save_for_backward(out)
        ctx.weights, ctx.split = (F(wa), F(wb)), a.shape[1]
        return out, act

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out: Tensor | None, grad_act: Tensor | None):
        (out,) = ctx.saved_tensors
        grad_a, grad_b = _like(out, ctx.split), _like(out, out.shape[1] - ctx.split)
        grads = (rows(_or_zeros(g, out)) for g in (grad_out, grad_act))
        _cat_silu_back(rows(out), *grads, *ctx.weights, rows(grad_a), rows(grad_b))
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
