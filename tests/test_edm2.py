"""The EDM2 network against the paper's numbers and against a slow transcription of its equations."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lcs.errors import LcsError
from lcs.experiments import Network
from lcs.model.edm2 import EDM2, Block, name_table
from lcs.model.layers import MPConv, MPFourier, mp_cat, mp_silu, mp_sum, normalize, normalize_weights_, resample

SMALL = Network(channels=16, channel_mult=(1, 2), num_blocks=1, attn_resolutions=(8,), channels_per_head=8)


def awake(model: nn.Module, seed: int = 0) -> nn.Module:
    """Gains start at zero, which would hide most of the network: set them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("gain"):
                p.fill_(0.5 + torch.rand([], generator=generator).item())
    return model


def rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


# --- structure ------------------------------------------------------------------------------------------------


def test_xs_has_the_original_parameters_and_shapes():
    with torch.device("meta"):
        model = EDM2(Network(), 64, 3, 1000)
    assert sum(p.numel() for p in model.parameters()) == 124_710_949
    names = name_table(model)
    # Facts of edm2-img64-xs, spelled out by hand.
    assert names["unet.emb_fourier.freqs"] == (128,)
    assert names["unet.emb_noise.weight"] == (512, 128)
    assert names["unet.emb_label.weight"] == (512, 1000)
    assert names["unet.enc.64x64_conv.weight"] == (128, 4, 3, 3)
    assert names["unet.enc.32x32_down.conv_res0.weight"] == (128, 128, 3, 3)
    assert names["unet.enc.32x32_block0.conv_skip.weight"] == (256, 128, 1, 1)
    assert names["unet.enc.16x16_block2.attn_qkv.weight"] == (3 * 384, 384, 1, 1)
    assert names["unet.dec.8x8_in0.attn_proj.weight"] == (512, 512, 1, 1)
    assert names["unet.dec.16x16_block0.conv_res0.weight"] == (384, 512 + 384, 3, 3)
    assert names["unet.dec.64x64_block3.conv_res0.weight"] == (128, 256, 3, 3)
    assert names["unet.out_conv.weight"] == (3, 128, 3, 3)
    assert names["unet.out_gain"] == names["unet.dec.8x8_in1.emb_gain"] == ()
    assert names["logvar_linear.weight"] == (1, 128)
    assert "unet.dec.8x8_in1.attn_qkv.weight" not in names
    assert "unet.enc.32x32_down.conv_skip.weight" not in names
    encoder = [n for n in dict(model.unet.enc.named_children())]
    assert encoder[:6] == ["64x64_conv", "64x64_block0", "64x64_block1", "64x64_block2", "32x32_down", "32x32_block0"]
    decoder = [n for n in dict(model.unet.dec.named_children())]
    assert decoder[:7] == ["8x8_in0", "8x8_in1", "8x8_block0", "8x8_block1", "8x8_block2", "8x8_block3", "16x16_up"]


def test_sizes_that_cannot_work_are_refused():
    with pytest.raises(LcsError, match="10-pixel input cannot be halved 2 times"):
        EDM2(Network(16, (1, 1, 1), 1, (), 16), 10)
    with pytest.raises(LcsError, match="unshuffle 4 does not divide the 10-pixel"):
        EDM2(Network(16, (1,), 1, (), 16, unshuffle=4), 10)
    with pytest.raises(LcsError, match="labels have width 5; this model takes 3"):
        EDM2(SMALL, 8, 3, 3)(torch.zeros(1, 3, 8, 8), 1.0, torch.zeros(1, 5))


# --- the same function as the equations -------------------------------------------------------------------------


def reference_weight(w):  # eq. 47
    rows = w.flatten(1)
    rows = rows / (1e-4 + rows.norm(dim=1, keepdim=True) / math.sqrt(rows.shape[1]))
    return rows.view_as(w) / math.sqrt(rows.shape[1])


def reference_conv(x, w):
    w = reference_weight(w)
    return x @ w.T if w.ndim == 2 else F.conv2d(x, w, padding=w.shape[-1] // 2)


def reference_sum(a, b, t):  # eq. 88
    return ((1 - t) * a + t * b) / math.sqrt((1 - t) ** 2 + t**2)


def reference_block(x, emb, sd, decoder, mode, heads):
    silu = lambda v: v * torch.sigmoid(v) / 0.596  # noqa: E731  eq. 81
    if mode == "down":
        x = (x[:, :, ::2, ::2] + x[:, :, 1::2, ::2] + x[:, :, ::2, 1::2] + x[:, :, 1::2, 1::2]) / 4
    if mode == "up":
        x = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
    skip = sd.get("conv_skip.weight")
    if not decoder:
        x = x if skip is None else reference_conv(x, skip)
        x = x / (1e-4 + x.square().mean(1, keepdim=True).sqrt())
    y = reference_conv(silu(x), sd["conv_res0.weight"])
    y = y * (reference_conv(emb, sd["emb_linear.weight"]) * sd["emb_gain"] + 1)[:, :, None, None]
    y = reference_conv(silu(y), sd["conv_res1.weight"])
    if decoder and skip is not None:
        x = reference_conv(x, skip)
    x = reference_sum(x, y, 0.3)
    if heads:
        b, c, h, w = x.shape
        qkv = reference_conv(x, sd["attn_qkv.weight"]).reshape(b, heads, c // heads, 3, h * w)
        qkv = qkv / (1e-4 + qkv.square().mean(2, keepdim=True).sqrt())
        q, k, v = qkv.unbind(3)
        attention = torch.einsum("bhcq,bhck->bhqk", q, k / math.sqrt(c // heads)).softmax(dim=3)
        y = torch.einsum("bhqk,bhck->bhcq", attention, v).reshape(b, c, h, w)
        x = reference_sum(x, reference_conv(y, sd["attn_proj.weight"]), 0.3)
    return x.clamp(-256, 256)


def reference_denoiser(model, x, sigma, labels):
    sd = model.state_dict()
    sub = lambda prefix: {k[len(prefix) + 1 :]: v for k, v in sd.items() if k.startswith(prefix + ".")}  # noqa: E731
    s = sigma[:, None, None, None]
    norm = (s**2 + model.sigma_data**2).sqrt()
    fourier = math.sqrt(2) * torch.cos(
        sigma.log()[:, None] / 4 * sd["unet.emb_fourier.freqs"] + sd["unet.emb_fourier.phases"]
    )
    emb = reference_conv(fourier, sd["unet.emb_noise.weight"])
    if model.label_dim:
        label = reference_conv(labels * math.sqrt(model.label_dim), sd["unet.emb_label.weight"])
        emb = reference_sum(emb, label, 0.5)
    emb = emb * torch.sigmoid(emb) / 0.596
    p = model.network.unshuffle
    h = F.pixel_unshuffle(x / norm, p)
    h = torch.cat([h, torch.ones_like(h[:, :1])], dim=1)
    skips = []
    for name, module in model.unet.enc.items():
        prefix = f"unet.enc.{name}"
        if isinstance(module, Block):
            mode = "down" if name.endswith("down") else "keep"
            h = reference_block(h, emb, sub(prefix), False, mode, module.heads)
        else:
            h = reference_conv(h, sd[f"{prefix}.weight"])
        skips.append(h)
    for name, module in model.unet.dec.items():
        if "block" in name:
            other = skips.pop()
            na, nb = h.shape[1], other.shape[1]
            scale = math.sqrt((na + nb) / 0.5) / 2  # eq. 103 with t = 0.5
            h = torch.cat([h * scale / math.sqrt(na), other * scale / math.sqrt(nb)], dim=1)
        mode = "up" if name.endswith("up") else "keep"
        h = reference_block(h, emb, sub(f"unet.dec.{name}"), True, mode, module.heads)
    f = F.pixel_shuffle(reference_conv(h, sd["unet.out_conv.weight"]) * sd["unet.out_gain"], p)
    sdata = model.sigma_data
    return sdata**2 / norm**2 * x + s * sdata / norm * f


@pytest.mark.parametrize(("unshuffle", "labels"), [(1, 5), (2, 0)])
@pytest.mark.parametrize("training", [True, False])
def test_network_equals_its_equations(unshuffle, labels, training):
    torch.manual_seed(1)
    network = Network(16, (1, 2, 3), 2, (8, 4), 8, unshuffle)
    model = awake(EDM2(network, 16, 3, labels)).double().train(training)
    x, sigma = torch.randn(2, 3, 16, 16).double() * 3, torch.tensor([0.3, 7.0]).double()
    label = torch.randn(2, labels).double() if labels else None
    with torch.set_grad_enabled(training):
        got = model(x, sigma, label)
    want = reference_denoiser(model, x, sigma, label)
    assert rms(want - x * (0.25 / (sigma**2 + 0.25))[:, None, None, None]) > 0.1  # more than the skip path
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_preconditioning_limits():
    model = EDM2(SMALL, 8, 3, 0)  # out_gain 0: only the skip path
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(model(x, 0.5), x * 0.5)  # sigma = sigma_data: c_skip = 1/2
    torch.testing.assert_close(model(x, torch.tensor([1e-4, 1e4])), torch.stack([x[0], 0 * x[1]]), atol=1e-6, rtol=1e-6)


def test_one_sigma_for_all_and_missing_labels():
    model = awake(EDM2(SMALL, 8, 3, 4)).eval()
    x = torch.randn(3, 3, 8, 8)
    full = model(x, torch.full((3,), 2.0), torch.zeros(3, 4))
    torch.testing.assert_close(model(x, 2.0), full, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(model(x, 2.0, torch.ones(3, 4)), full, atol=1e-2)


@pytest.mark.parametrize("unshuffle", [1, 2])
def test_centre_equals_the_crop_of_everything(unshuffle):
    torch.manual_seed(0)
    model = awake(EDM2(Network(16, (1, 2), 1, (), 8, unshuffle), 20, 3, 4)).eval()
    x, labels = torch.randn(2, 3, 20, 20), torch.randn(2, 4)
    for centre in (2, 4, 6, 8, 16, 20):
        at = (20 - centre) // 2
        want = model(x, 1.0, labels)[:, :, at : at + centre, at : at + centre]
        torch.testing.assert_close(model(x, 1.0, labels, centre=centre), want, atol=1e-5, rtol=1e-5)
    assert model.unet.windows(4 // unshuffle)  # the short way was indeed taken
    assert not model.unet.windows(None)


# --- magnitudes ----------------------------------------------------------------------------------------------------


def test_layers_preserve_magnitude():
    torch.manual_seed(0)
    x = torch.randn(16, 64, 16, 16)
    assert rms(mp_silu(x)) == pytest.approx(1, abs=0.01)
    assert rms(mp_sum(x, torch.randn_like(x), 0.3)) == pytest.approx(1, abs=0.01)
    both = mp_cat(x, torch.randn(16, 16, 16, 16), 0.5)
    assert rms(both) == pytest.approx(1, abs=0.01)
    assert rms(both[:, :64]) * 2 == pytest.approx(
        rms(both[:, 64:]), rel=0.02
    )  # same total contribution, 4x the channels
    assert rms(MPFourier(256)(torch.randn(64))) == pytest.approx(1, abs=0.05)
    assert rms(normalize(x * torch.rand(16, 1, 16, 16), dim=1)) == pytest.approx(1, abs=0.01)
    inner = MPConv(64, 32, (3, 3))(x)[:, :, 1:-1, 1:-1]  # away from the zero padding
    assert rms(inner) == pytest.approx(1, abs=0.05)
    assert rms(MPConv(64, 500)(torch.randn(200, 64))) == pytest.approx(1, abs=0.05)
    torch.testing.assert_close(resample(resample(x, "up"), "down"), x)


def test_network_preserves_magnitude_at_initialisation():
    torch.manual_seed(0)
    model = EDM2(Network(32, (1, 2, 2), 2, (8,), 32), 32, 3, 10)
    seen = {}
    for name, module in model.unet.named_modules():
        if isinstance(module, Block):
            module.register_forward_hook(lambda m, i, o, name=name: seen.__setitem__(name, rms(o)))
    x = torch.cat([torch.randn(4, 3, 32, 32), torch.ones(4, 1, 32, 32)], 1)
    model.unet(x, torch.randn(4), F.one_hot(torch.arange(4), 10).float())
    assert len(seen) == len(model.unet.enc) + len(model.unet.dec) - 1
    for name, value in seen.items():
        assert 0.6 < value < 1.4, (name, value)
    raw = model.unet.out_conv(torch.randn(4, 32, 32, 32))
    assert rms(raw) == pytest.approx(1, abs=0.1)


def test_forced_normalisation_keeps_the_function():
    torch.manual_seed(0)
    model = awake(EDM2(SMALL, 8, 3, 4)).double()
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, MPConv):
                layer.weight.mul_(7.0)
    x, labels = torch.randn(2, 3, 8, 8).double(), torch.randn(2, 4).double()
    before = model(x, 1.0, labels)
    normalize_weights_(model)
    # Equal up to the eps in the norm, which is relative to 7 before and to 1 after.
    torch.testing.assert_close(model(x, 1.0, labels), before, rtol=0, atol=0.01)
    for layer in model.modules():
        if isinstance(layer, MPConv):
            magnitude = layer.weight.flatten(1).square().mean(1).sqrt()
            torch.testing.assert_close(magnitude, torch.ones_like(magnitude), atol=2e-4, rtol=0)


def test_normalize_gradient():
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    for dim in (1, None):
        assert torch.autograd.gradcheck(lambda v: normalize(v, dim, 1.7), x, check_forward_ad=True)  # noqa: B023
        assert torch.autograd.gradgradcheck(lambda v: normalize(v, dim, 1.7), x)  # noqa: B023
    zero = torch.zeros(1, 3, 2, 2, requires_grad=True)
    normalize(zero, 1).sum().backward()
    assert torch.isfinite(zero.grad).all()


# --- evaluation ----------------------------------------------------------------------------------------------------


def test_evaluation_changes_nothing_and_equals_training_mode():
    torch.manual_seed(0)
    model = awake(EDM2(SMALL, 16, 3, 4))
    x, labels = torch.randn(2, 3, 16, 16), torch.randn(2, 4)
    trained = model(x, 2.0, labels).detach()
    before = copy.deepcopy(model.state_dict())
    model.eval()
    with torch.no_grad():
        first, second = model(x, 2.0, labels), model(x, 2.0, labels)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert torch.equal(first, second)  # and no input of the first was overwritten
    torch.testing.assert_close(first, trained, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model(x, 2.0, labels), trained, atol=1e-5, rtol=1e-5)  # with gradients


def test_training_forward_leaves_stored_weights_alone():
    model = awake(EDM2(SMALL, 8, 3, 0))
    before = copy.deepcopy(model.state_dict())
    model(torch.randn(1, 3, 8, 8), 1.0).sum().backward()
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_cached_weights_follow_every_change():
    torch.manual_seed(0)
    layer = MPConv(8, 8, (3, 3)).eval().requires_grad_(False)
    x = torch.randn(1, 8, 4, 4)

    def fresh() -> torch.Tensor:
        return reference_conv(x.to(layer.weight.dtype), layer.weight)

    def check() -> None:
        torch.testing.assert_close(layer(x.to(layer.weight.dtype)), fresh(), atol=1e-5, rtol=1e-5)

    check()
    assert layer.used_weight() is layer.used_weight()  # it is cached at all
    layer.load_state_dict({"weight": torch.randn(8, 8, 3, 3)})
    check()
    layer.load_state_dict({"weight": torch.randn(8, 8, 3, 3)}, assign=True)
    layer.requires_grad_(False)
    check()
    layer.weight[0].mul_(-1)
    check()
    layer.weight = nn.Parameter(torch.randn(8, 8, 3, 3), requires_grad=False)
    check()
    layer.double()
    check()
    assert layer.used_weight().dtype == torch.float64
    layer.train()
    assert layer._cache is None
    layer.eval()
    check()
    torch.testing.assert_close(layer(x.double(), scale=3.0), 3 * fresh())  # another scale is another weight
    twin = copy.deepcopy(layer)
    twin.weight.neg_()
    torch.testing.assert_close(twin(x.double()), -fresh())
    check()


def test_cache_made_in_inference_mode_serves_autograd():
    layer = MPConv(4, 4, (3, 3)).eval().requires_grad_(False)
    with torch.inference_mode():
        layer(torch.randn(1, 4, 4, 4))
    x = torch.randn(1, 4, 4, 4, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.abs().sum() > 0


def test_gradients_reach_weights_in_evaluation_mode():
    layer = MPConv(4, 4).eval()
    with torch.no_grad():
        layer(torch.randn(2, 4))
    layer(torch.randn(2, 4))[0, 0].backward()
    assert layer.weight.grad.abs().sum() > 0
