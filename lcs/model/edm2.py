"""The EDM2 U-Net (Karras et al. 2024, arXiv 2312.02696) with EDM preconditioning, in one file.

    x [B, C, H, W], sigma [B], labels [B, L]  ->  x0hat [B, C, H, W]

`EDM2` wraps `UNet` with the preconditioning of EDM (Karras et al. 2022) and the log-variance head of the
uncertainty-weighted loss. `UNet` is made of `Block`s. With the default `Network` at 64 pixels and 1000 labels it
is edm2-img64-xs: the same modules in the same order with the same names and weight shapes, so a state dict of the
original loads with `load_state_dict` as it is (`name_table` lists names and shapes).

The network runs channels-last from stem to output: convolutions are fastest that way on CPUs and tensor cores alike.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lcs.errors import LcsError
from lcs.experiments import Network
from lcs.model import fused, residual
from lcs.model.convolution import conv2d
from lcs.model.layers import (
    SILU_GAIN,
    MPConv,
    MPFourier,
    mp_cat,
    mp_cat_weights,
    mp_sum,
    mp_sum_weights,
    normalize,
    resample,
)

LABEL_BALANCE = 0.5  # MP-sum of noise and label embedding
CONCAT_BALANCE = 0.5  # MP-cat of decoder input and encoder skip
RES_BALANCE = 0.3  # MP-sum of main path and residual branch
ATTN_BALANCE = 0.3  # MP-sum of main path and attention
CLIP = 256.0  # activations are clipped to +-CLIP at the end of a block
LOGVAR_CHANNELS = 128


class Block(nn.Module):
    """Encoder or decoder block: resampling, a residual branch scaled by the embedding, attention."""

    def __init__(
        self, cin: int, cout: int, cemb: int, decoder: bool, mode: str = "keep", channels_per_head: int = 0
    ) -> None:
        super().__init__()
        self.out_channels, self.decoder, self.mode = cout, decoder, mode
        self.heads = max(cout // channels_per_head, 1) if channels_per_head else 0
        if self.heads and cout % self.heads:
            raise LcsError(f"channels_per_head {channels_per_head} makes {self.heads} heads of {cout} channels uneven")
        self.emb_gain = nn.Parameter(torch.zeros([]))
        self.conv_res0 = MPConv(cout if not decoder else cin, cout, (3, 3))
        self.emb_linear = MPConv(cemb, cout)
        self.conv_res1 = MPConv(cout, cout, (3, 3))
        self.conv_skip = MPConv(cin, cout, (1, 1)) if cin != cout else None
        self.attn_qkv = MPConv(cout, cout * 3, (1, 1)) if self.heads else None
        self.attn_proj = MPConv(cout, cout, (1, 1)) if self.heads else None
        self._packed: tuple | None = None  # see _branch

    def forward(self, x: Tensor, emb: Tensor, window: int | None = None, skip: Tensor | None = None) -> Tensor:
        """x [B, cin, H, W], emb [B or 1, cemb] -> [B, cout, H', W']; a `skip` of the encoder is first joined to x.

        With `window`, only the central window x window pixels are used and the convolutions do not pad: the result
        is the central window - 4 pixels of what the block would return.
        """
        x = _crop(resample(x, self.mode), window)
        pad = window is None
        # Element-wise work in single passes: the same values.
        fast = pad and self.out_channels % fused.LANES == 0 and fused.whole(x, skip) and fused.usable(x, self.training)
        if fast and not self.training and not torch.is_grad_enabled() and self._branch_fits(x, skip):
            x = self._branch(x, skip, emb)
            return fused.run(fused.AddClip, *self._attention(x), CLIP) if self.heads else x
        x, act = self._prepare(x, skip if skip is None else _crop(skip, window), fast)

        # Residual branch. The constants of MP-SiLU and MP-sum go into the weights of the following/preceding layer.
        wx, wy = mp_sum_weights(RES_BALANCE)
        y = self.conv_res0(act, scale=SILU_GAIN, pad=pad)
        c = self.emb_linear(emb) * self.emb_gain + 1  # [B or 1, cout]
        y = self._modulated_silu(y, c, fast)
        y = self.conv_res1(y, scale=SILU_GAIN * wy, pad=pad)
        x = _crop(x, None if pad else window - 4)
        if self.decoder and self.conv_skip is not None:
            x, wx = self.conv_skip(x, scale=wx), 1.0
        if self.heads:
            y, x, wx = self._attention(y.add_(x, alpha=wx))
        # y is a fresh output of a convolution, which nobody else needs: add in place.
        if fast and y.is_contiguous(memory_format=torch.channels_last):
            return fused.run(fused.AddClip, y, x, wx, CLIP)
        return F.hardtanh(y.add_(x, alpha=wx), -CLIP, CLIP, inplace=True)

    def _prepare(self, x: Tensor, skip: Tensor | None, fast: bool) -> tuple[Tensor, Tensor]:
        """The main path after concatenation (decoder) or pixel norm (encoder), and SiLU of it."""
        if self.decoder:
            if fast and skip is None:
                return x, fused.run(fused.ScaleSilu, x, x.new_ones(1, x.shape[1]))
            if fast:
                return fused.run(fused.CatSilu, x, skip, *mp_cat_weights(x.shape[1], skip.shape[1], CONCAT_BALANCE))
            x = x if skip is None else mp_cat(x, skip, CONCAT_BALANCE)
            return x, F.silu(x)
        if self.conv_skip is not None:
            x = self.conv_skip(x)
        if fast:
            return fused.run(fused.NormSilu, x)
        x = normalize(x, dim=1)
        return x, F.silu(x)

    @staticmethod
    def _modulated_silu(y: Tensor, c: Tensor, fast: bool) -> Tensor:
        """silu(y c) for y [B, C, H, W], c [B or 1, C]"""
        if fast:
            return fused.run(fused.ScaleSilu, y, c)
        c = c[:, :, None, None]
        return F.silu(y * c) if torch.is_grad_enabled() else F.silu(y.mul_(c), inplace=True)

    def _branch_fits(self, x: Tensor, skip: Tensor | None) -> bool:
        maps = [x] if skip is None else [x, skip]
        watched = any(m._forward_hooks or m._forward_pre_hooks for m in self.children())  # they want to see each layer
        return (
            residual.fits(self.out_channels)
            and not watched
            and all(t.is_contiguous(memory_format=torch.channels_last) for t in maps)
        )

    def _branch(self, x: Tensor, skip: Tensor | None, emb: Tensor) -> Tensor:
        """`forward` before attention, in evaluation, as one compiled loop over the images; weights are packed once."""
        wx, wy = mp_sum_weights(RES_BALANCE)
        c = self.emb_linear(emb) * self.emb_gain + 1
        project = self.conv_skip
        weights = (
            self.conv_res0.used_weight(SILU_GAIN),
            self.conv_res1.used_weight(SILU_GAIN * wy),
            None if project is None else project.used_weight(wx if self.decoder else 1.0),
        )
        if self._packed is None or any(a is not b for a, b in zip(self._packed[0], weights, strict=True)):
            balance = (1.0, 1.0) if skip is None else mp_cat_weights(x.shape[1], skip.shape[1], CONCAT_BALANCE)
            kept = 1.0 if self.decoder and project is not None else wx  # or it is in the projection's weight already
            self._packed = weights, residual.Branch.pack(*weights, self.decoder, x.shape[1], balance, kept)
        return self._packed[1](x, skip, c, float("inf") if self.heads else CLIP)

    def _attention(self, x: Tensor) -> tuple[Tensor, Tensor, float]:
        """The terms of the MP-sum y + wx x of attention y and main path x."""
        wx, wy = mp_sum_weights(ATTN_BALANCE)
        return self.attn_proj(self._attend(x), scale=wy), x, wx

    def _attend(self, x: Tensor) -> Tensor:  # [B, C, H, W] -> [B, C, H, W]
        """Cosine attention: q, k and v are normalised per pixel and head, so scores lie within +-sqrt(C / heads)."""
        b, c, h, w = x.shape
        d = c // self.heads
        # The original stores the rows of qkv in the order (head, channel, q|k|v). Reorder the weight, not the
        # activations: (q|k|v, head, channel) lets q, k and v be slices that are contiguous in the channels.
        weight = self.attn_qkv.used_weight()
        weight = weight.view(self.heads, d, 3, c).permute(2, 0, 1, 3).reshape(3 * c, c, 1, 1)
        y = conv2d(x, weight, self.training).permute(0, 2, 3, 1).reshape(b, h * w, 3, self.heads, d)
        q, k, v = normalize(y, dim=4).permute(2, 0, 3, 1, 4)  # each [B, heads, HW, d]
        if torch.compiler.is_compiling() and x.device.type == "cpu":  # PyTorch's own is slow on small CPU maps
            y = torch.softmax(q @ k.mT / d**0.5, dim=-1).to(v.dtype) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v)  # softmax(q k^T / sqrt(d)) v
        return y.transpose(1, 2).reshape(b, h, w, c).permute(0, 3, 1, 2)  # channels-last again


def _crop(x: Tensor, size: int | None) -> Tensor:  # [B, C, H, W] -> the central [B, C, size, size]
    if size is None or size == x.shape[-1]:
        return x
    at = (x.shape[-1] - size) // 2
    return x[:, :, at : at + size, at : at + size]


def _with_ones(x: Tensor) -> Tensor:  # [B, C, H, W] -> [B, C + 1, H, W], channels-last
    return F.pad(x, (0, 0, 0, 0, 0, 1), value=1.0).contiguous(memory_format=torch.channels_last)


def _per_image(c: Tensor) -> Tensor:  # [B or 1] -> [B or 1, 1, 1, 1]
    return c[:, None, None, None]


class UNet(nn.Module):
    """The raw network F(x, c_noise, labels). Its input has one channel of ones in place of biases."""

    def __init__(self, network: Network, resolution: int, in_channels: int, label_dim: int) -> None:
        super().__init__()
        widths = [network.channels * m for m in network.channel_mult]
        levels = len(widths)
        if resolution % 2 ** (levels - 1):
            raise LcsError(
                f"a {resolution}-pixel input cannot be halved {levels - 1} times "
                f"({levels} levels need a multiple of {2 ** (levels - 1)})"
            )
        cemb = max(widths) if network.channel_mult_emb is None else network.channels * network.channel_mult_emb
        self.label_dim, self.resolution = label_dim, resolution

        self.emb_fourier = MPFourier(widths[0])
        self.emb_noise = MPConv(widths[0], cemb)
        self.emb_label = MPConv(label_dim, cemb) if label_dim else None

        def block(cin: int, cout: int, res: int, decoder: bool, mode: str = "keep", attend: bool = False) -> Block:
            return Block(cin, cout, cemb, decoder, mode, network.channels_per_head if attend else 0)

        self.enc = nn.ModuleDict()
        skips = []  # widths of the encoder outputs, popped by the decoder
        cout = in_channels + 1
        for level, width in enumerate(widths):
            res = resolution >> level
            if level == 0:
                self.enc[f"{res}x{res}_conv"] = MPConv(cout, width, (3, 3))
                cout = width
            else:
                self.enc[f"{res}x{res}_down"] = block(cout, cout, res, False, "down")
            skips.append(cout)
            for i in range(network.num_blocks):
                attend = res in network.attn_resolutions
                self.enc[f"{res}x{res}_block{i}"] = block(cout, width, res, False, attend=attend)
                cout = width
                skips.append(cout)

        self.dec = nn.ModuleDict()
        for level, width in reversed(list(enumerate(widths))):
            res = resolution >> level
            if level == levels - 1:
                self.dec[f"{res}x{res}_in0"] = block(cout, cout, res, True, attend=True)
                self.dec[f"{res}x{res}_in1"] = block(cout, cout, res, True)
            else:
                self.dec[f"{res}x{res}_up"] = block(cout, cout, res, True, "up")
            for i in range(network.num_blocks + 1):
                attend = res in network.attn_resolutions
                self.dec[f"{res}x{res}_block{i}"] = block(cout + skips.pop(), width, res, True, attend=attend)
                cout = width
        self.out_conv = MPConv(cout, in_channels, (3, 3))
        self.out_gain = nn.Parameter(torch.zeros([]))

    def embed(self, c_noise: Tensor, labels: Tensor | None) -> Tensor:  # [B or 1], [B, L] -> [B or 1, cemb]
        emb = self.emb_noise(self.emb_fourier(c_noise))
        if self.emb_label is not None:
            label = self.emb_label(labels, scale=self.label_dim**0.5)  # one-hot rows have magnitude 1/sqrt(L)
            emb = mp_sum(emb, label, LABEL_BALANCE)
        return F.silu(emb) * SILU_GAIN

    def windows(self, centre: int | None) -> dict[str, int]:
        """Input sizes of the last decoder blocks if only the central pixels of the output are wanted.

        The output convolution needs one more pixel on each side than it returns, a block two. Blocks whose input
        would reach beyond the image, where padding matters, are not listed: they run as usual.
        """
        sizes = {}
        size = self.resolution if centre is None else centre + 2
        for name in reversed(list(self.dec)):
            size += 4
            if not name.startswith(f"{self.resolution}x") or size > self.resolution or self.dec[name].heads:
                break
            sizes[name] = size
        return sizes

    def forward(self, x: Tensor, c_noise: Tensor, labels: Tensor | None, centre: int | None = None) -> Tensor:
        """x [B, C + 1, H, W], last channel 1, c_noise [B or 1], labels [B or 1, L] -> [B, C, H, W], or its centre"""
        emb = self.embed(c_noise, labels)
        windows = self.windows(centre)
        skips = []
        for name, module in self.enc.items():
            x = module(x) if name.endswith("_conv") else module(x, emb)
            skips.append(x)
        for name, module in self.dec.items():
            if "_block" in name:
                x = module(x, emb, windows.get(name), skips.pop())
            else:
                x = module(x, emb, windows.get(name))
        if centre is None or centre + 2 > self.resolution:
            return _crop(self.out_conv(x), centre) * self.out_gain
        return self.out_conv(_crop(x, centre + 2), pad=False) * self.out_gain


class EDM2(nn.Module):
    """Denoiser x0hat(x, sigma, labels): EDM's preconditioning around the U-Net, and the log-variance head.

    c_skip = sd^2 / (s^2 + sd^2)    c_out = s sd / sqrt(s^2 + sd^2)
    c_in = 1 / sqrt(s^2 + sd^2)     c_noise = ln(s) / 4

    With `network.unshuffle` = p > 1 the U-Net sees p x p pixels as channels (resolution / p, p^2 as many channels),
    which makes the first level p^2 times smaller; the output is shuffled back.
    """

    def __init__(
        self, network: Network, resolution: int, in_channels: int = 3, label_dim: int = 0, sigma_data: float = 0.5
    ) -> None:
        super().__init__()
        p = network.unshuffle
        if resolution % p:
            raise LcsError(f"unshuffle {p} does not divide the {resolution}-pixel input")
        self.network, self.resolution, self.in_channels = network, resolution, in_channels
        self.label_dim, self.sigma_data = label_dim, sigma_data
        self.unet = UNet(network, resolution // p, in_channels * p * p, label_dim)
        self.logvar_fourier = MPFourier(LOGVAR_CHANNELS)
        self.logvar_linear = MPConv(LOGVAR_CHANNELS, 1)

    def forward(
        self,
        x: Tensor,
        sigma: Tensor | float,
        labels: Tensor | None = None,
        return_logvar: bool = False,
        centre: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x [B, C, H, W], sigma [B] or one for all, labels [B, L] or None (all zero) -> x0hat like x.

        With `return_logvar`, also u(sigma) [B, 1, 1, 1], the learned log-variance of the error at that noise level.
        With `centre`, only the central centre x centre pixels of x0hat, for about half the arithmetic.
        """
        sigma = torch.as_tensor(sigma, dtype=x.dtype, device=x.device).reshape(-1)  # [B] or [1]
        if labels is None and self.label_dim:
            labels = x.new_zeros(1, self.label_dim)
        if labels is not None and self.label_dim and labels.shape[-1] != self.label_dim:
            raise LcsError(f"labels have width {labels.shape[-1]}; this model takes {self.label_dim}")
        norm = (sigma**2 + self.sigma_data**2).sqrt()
        c_in, c_skip, c_out = 1 / norm, (self.sigma_data / norm) ** 2, sigma * self.sigma_data / norm  # each [B or 1]
        c_noise = sigma.log() / 4

        p = self.network.unshuffle
        inner = centre // p if centre is not None and (self.resolution - centre) % (2 * p) == centre % p == 0 else None
        labels = None if labels is None else labels.to(x.dtype)
        if centre is None and fused.usable(x, False, torch.contiguous_format):
            f = self.unet(fused.unshuffle(x, c_in, p), c_noise, labels)
            x0hat = fused.shuffle_add(x, f, c_skip, c_out, p)
        else:
            h = F.pixel_unshuffle(x * _per_image(c_in), p)
            f = self.unet(_with_ones(h), c_noise, labels, inner)
            f = _crop(F.pixel_shuffle(f, p), centre).to(x.dtype)
            x0hat = torch.addcmul(_crop(x, centre) * _per_image(c_skip), f, _per_image(c_out))
        if not return_logvar:
            return x0hat
        return x0hat, self.logvar(sigma)

    def logvar(self, sigma: Tensor) -> Tensor:  # [B] -> [B, 1, 1, 1]
        with torch.autocast(sigma.device.type, enabled=False):  # a scalar of the loss: always at full precision
            return self.logvar_linear(self.logvar_fourier(sigma.log() / 4))[:, :, None, None]


def name_table(model: EDM2) -> dict[str, tuple[int, ...]]:
    """Every entry of the state dict with its shape, in order: the names are the original's own."""
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}
