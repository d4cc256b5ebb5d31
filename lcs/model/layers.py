"""Magnitude-preserving layers of EDM2 (Karras et al. 2024, arXiv 2312.02696), written from the paper's equations.

The idea: every layer maps unit-magnitude activations to unit-magnitude activations, so neither activations nor
weights can drift during training. There are no biases and no learned norms; a weight contributes only its
*direction*, because each output row is normalised whenever it is used.

Two things here are for speed and change no value beyond rounding:

* A layer takes a constant `scale` that multiplies its weight. A constant that stands before or after a linear layer
  (the 1/0.596 of MP-SiLU, the weights of MP-sum) is a few kilobytes of arithmetic there instead of a pass over
  the activations.
* In evaluation the normalised, scaled weight is computed once and kept; see `MPConv`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lcs.model import fused
from lcs.model.convolution import conv2d
from lcs.model.fused import EPS

SILU_GAIN = 1 / 0.596  # eq. 81: silu of a unit normal has magnitude 0.596


def normalize(x: Tensor, dim: int | tuple[int, ...] | None = None, gain: float = 1.0) -> Tensor:
    """Magnitude (root mean square) `gain` along `dim`; by default along everything but the first axis."""
    dim = tuple(range(1, x.ndim)) if dim is None else dim
    if torch.compiler.is_compiling():  # the compiler derives it, and joins it with what stands around
        return x * _factor(_norm(x, dim), x, gain).to(x.dtype)
    return _Normalize.apply(x, dim, gain)[0]


class _Normalize(torch.autograd.Function):
    """y = gain x / (eps + |x| / sqrt(n)), with its derivative in closed form: a third of autograd's passes over x."""

    @staticmethod
    def forward(x: Tensor, dim: int | tuple[int, ...], gain: float) -> tuple[Tensor, Tensor]:
        norm = _norm(x, dim)
        return x * _factor(norm, x, gain).to(x.dtype), norm

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        x, ctx.dim, ctx.gain = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, output[1])
        ctx.save_for_forward(x, output[1])

    @staticmethod
    def backward(ctx, grad: Tensor, _):
        return _Normalize.times_jacobian(ctx, grad), None, None

    @staticmethod
    def jvp(ctx, tangent: Tensor, *_):
        return _Normalize.times_jacobian(ctx, tangent), None

    @staticmethod
    def times_jacobian(ctx, v: Tensor) -> Tensor:
        """v J = J v (J is symmetric) = factor v - slope <x, v> x, where slope = -d factor / d(|x|^2 / 2)"""
        x, norm = ctx.saved_tensors
        if torch.is_grad_enabled():  # a derivative of the derivative is wanted: the norm must depend on x
            norm = _norm(x, ctx.dim)
        factor = _factor(norm, x, ctx.gain)
        slope = factor.square() * (_root(norm, x) / ctx.gain) / norm.clamp_min(1e-12)
        along = (v * x).sum(ctx.dim, keepdim=True, dtype=norm.dtype) * -slope
        return torch.addcmul(v * factor.to(x.dtype), x, along.to(x.dtype))


def _norm(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    dtype = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else None
    return torch.linalg.vector_norm(x, dim=dim, keepdim=True, dtype=dtype)


def _root(norm: Tensor, x: Tensor) -> float:
    return math.sqrt(norm.numel() / x.numel())  # 1 / sqrt(number of elements per norm)


def _factor(norm: Tensor, x: Tensor, gain: float) -> Tensor:
    return (norm * (_root(norm, x) / gain) + EPS / gain).reciprocal()


def resample(x: Tensor, mode: str) -> Tensor:
    """Halve or double the sides of x [B, C, H, W] with a 2x2 box filter; "keep" returns x."""
    if mode == "keep":
        return x
    if mode == "down":
        return F.avg_pool2d(x, 2)
    return F.interpolate(x, scale_factor=2, mode="nearest")


def mp_silu(x: Tensor) -> Tensor:
    """Magnitude-preserving SiLU, eq. 81."""
    return F.silu(x) * SILU_GAIN


def mp_sum_weights(t: float) -> tuple[float, float]:
    """The two constants of eq. 88: mp_sum(a, b, t) = wa * a + wb * b."""
    norm = math.sqrt((1 - t) ** 2 + t**2)
    return (1 - t) / norm, t / norm


def mp_sum(a: Tensor, b: Tensor, t: float = 0.5) -> Tensor:
    """Magnitude-preserving sum: a lerp from `a` to `b` divided by the magnitude it would have. Eq. 88."""
    wa, wb = mp_sum_weights(t)
    return a * wa + b * wb  # torch.add's alpha is dropped by torch.compile if b is a matrix product (PyTorch 2.13)


def mp_cat_weights(na: int, nb: int, t: float) -> tuple[float, float]:
    """The two constants of eq. 103 for inputs of `na` and `nb` channels."""
    total = math.sqrt((na + nb) / ((1 - t) ** 2 + t**2))
    return total / math.sqrt(na) * (1 - t), total / math.sqrt(nb) * t


def mp_cat(a: Tensor, b: Tensor, t: float = 0.5) -> Tensor:
    """Magnitude-preserving concatenation along the channel axis: b contributes the share t. Eq. 103."""
    wa, wb = mp_cat_weights(a.shape[1], b.shape[1], t)
    if abs(wa - 1) < 1e-9 and abs(wb - 1) < 1e-9:  # equal widths, t = 0.5
        return torch.cat([a, b], dim=1)
    if torch.is_grad_enabled():
        return torch.cat([a * wa, b * wb], dim=1)
    shape = (a.shape[0], a.shape[1] + b.shape[1], *a.shape[2:])
    layout = torch.channels_last if a.ndim == 4 else torch.contiguous_format
    out = torch.empty(shape, dtype=a.dtype, device=a.device, memory_format=layout)
    torch.mul(a, wa, out=out[:, : a.shape[1]])
    torch.mul(b, wb, out=out[:, a.shape[1] :])
    return out


class MPFourier(nn.Module):
    """Random Fourier features sqrt(2) cos(2 pi (f x + p)) of a scalar, frequencies and phases fixed. Eq. 75."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("freqs", 2 * math.pi * torch.randn(channels))  # the factor 2 pi is stored with them
        self.register_buffer("phases", 2 * math.pi * torch.rand(channels))

    def forward(self, x: Tensor) -> Tensor:  # [B] -> [B, channels]
        return torch.cos(torch.outer(x, self.freqs.to(x.dtype)) + self.phases.to(x.dtype)) * math.sqrt(2)


class MPConv(nn.Module):
    """Magnitude-preserving convolution (kernel (h, w)) or linear layer (kernel ()). Eq. 47.

    The weight in use is normalize(w) / sqrt(fan_in), so every output has unit magnitude for independent
    unit-magnitude inputs. The normalisation is part of the computation: autograd projects the gradient onto the
    tangent of the unit sphere. The *stored* weight is normalised by `normalize_weights_` after each optimizer step.

    In evaluation the weight in use is cached on the module as a plain attribute (never in the state dict). The cache
    holds for one parameter object, storage, version and scale, so assignment, loading, `.to()` and in-place
    changes all miss it, and `train()` drops it. (Writing through `weight.data` leaves no trace that PyTorch
    exposes; write under `torch.no_grad()` instead.) While gradients for the weight are wanted, nothing is cached.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.weight = nn.Parameter(torch.randn(out_channels, in_channels, *kernel))
        self._cache: tuple | None = None

    def used_weight(self, scale: float = 1.0) -> Tensor:
        """The normalised weight times scale / sqrt(fan_in), [out, in, *kernel]."""
        w = self.weight
        if self.training or (torch.is_grad_enabled() and w.requires_grad) or torch.compiler.is_compiling():
            return self._scaled(scale)
        key = (w.data_ptr(), w._version, w.dtype, scale)
        if self._cache is None or self._cache[0] is not w or self._cache[1] != key:
            with torch.inference_mode(False), torch.no_grad():
                self._cache = (w, key, self._scaled(scale))
        return self._cache[2]

    def _scaled(self, scale: float) -> Tensor:
        w = self.weight
        if w.ndim == 4:  # the layout of the activations, so that convolutions need not reorder it
            w = w.contiguous(memory_format=torch.channels_last)
        gain = scale / math.sqrt(w[0].numel())
        return fused.NormalizeRows.apply(w, gain) if fused.usable(w, self.training) else normalize(w, gain=gain)

    def forward(self, x: Tensor, scale: float = 1.0, pad: bool = True) -> Tensor:
        """[B, in, H, W] -> [B, out, H, W], or [B, in] -> [B, out]; without `pad` no zeros are added and H, W shrink."""
        w = self.used_weight(scale)
        if w.ndim == 2:
            return F.linear(x, w)
        return conv2d(x, w, self.training) if pad else F.conv2d(x, w)

    def train(self, mode: bool = True) -> MPConv:
        self._cache = None
        return super().train(mode)

    def _apply(self, *args, **kwargs) -> MPConv:  # .to(), .double(), .cuda(), ...
        self._cache = None
        return super()._apply(*args, **kwargs)


@torch.no_grad()
def normalize_weights_(module: nn.Module) -> None:
    """Forced weight normalisation (eq. 66): every MPConv's stored weight gets unit-magnitude rows, in place.

    To be called after the optimizer update. It does not change the function the network computes (the weight is
    normalised in use anyway); it keeps the effective learning rate from decaying as raw weights would grow.
    """
    for layer in module.modules():
        if isinstance(layer, MPConv):
            norm = _norm(layer.weight, tuple(range(1, layer.weight.ndim)))
            layer.weight.mul_(_factor(norm, layer.weight, 1.0).to(layer.weight.dtype))
