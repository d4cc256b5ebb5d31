"""The fused loops against the plain operations: values, gradients, and when they must not be used."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lcs.experiments import Network
from lcs.model import fused
from lcs.model.edm2 import EDM2, Block
from lcs.model.layers import mp_cat, mp_cat_weights, normalize

NETWORK = Network(channels=16, channel_mult=(1, 2, 3), num_blocks=1, attn_resolutions=(4,), channels_per_head=16)


pytestmark = pytest.mark.usefixtures("one_thread")


def maps(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator) * 3
    return x.contiguous(memory_format=torch.channels_last).requires_grad_()


def check(fast, plain, inputs, atol=3e-6):
    """Same outputs and, for random cotangents, same gradients."""
    results = []
    for function in (fast, plain):
        copies = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in inputs]
        outputs = function(*copies)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        generator = torch.Generator().manual_seed(9)
        loss = sum((o * torch.randn(o.shape, generator=generator)).sum() for o in outputs)
        results.append((outputs, torch.autograd.grad(loss, copies)))
    for a, b in zip(results[0][0] + results[0][1], results[1][0] + results[1][1], strict=True):
        assert torch.allclose(a, b, atol=atol, rtol=3e-5), (a - b).abs().max()


def test_sigmoid_is_accurate_everywhere():
    x = np.linspace(-300, 300, 200_001, dtype=np.float32)
    x = x[:200_000]
    out = np.empty((len(x) // 8, 8), np.float32)
    fused._scale_silu(x.reshape(-1, 8), np.ones((1, 8), np.float32), out)
    out = out.reshape(-1, 1)
    exact = x.astype(np.float64) / (1 + np.exp(-np.clip(x.astype(np.float64), -500, 500)))
    assert np.abs(out[:, 0] - exact).max() < 3e-5  # at |x| = 300: rounding of x itself
    near = np.abs(x) < 10
    assert np.abs(out[:, 0] - exact)[near].max() < 3e-6


@pytest.mark.parametrize("shape", [(5, 7), (6, 4, 3, 3), (3, 9, 1, 1)])
def test_normalize_rows(shape):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 2
    w = (w.contiguous(memory_format=torch.channels_last) if w.ndim == 4 else w).requires_grad_()
    check(lambda x: fused.NormalizeRows.apply(x, 0.37), lambda x: normalize(x, gain=0.37), [w])
    tiny = torch.full(shape, 1e-6)  # far below eps: the gradient must not explode
    tiny = (tiny.contiguous(memory_format=torch.channels_last) if tiny.ndim == 4 else tiny).requires_grad_()
    check(lambda x: fused.NormalizeRows.apply(x, 1.0), normalize, [tiny], atol=0.2)


@pytest.mark.parametrize("channels", [8, 24, 96])
def test_norm_silu(channels):
    def plain(x):
        out = normalize(x, dim=1)
        return out, F.silu(out)

    check(fused.NormSilu.apply, plain, [maps(2, channels, 5, 7)])


@pytest.mark.parametrize("scales", [1, 3])
def test_scale_silu(scales):
    c = torch.rand(scales, 24) + 0.5
    check(
        fused.ScaleSilu.apply, lambda y, c: F.silu(y * c[:, :, None, None]), [maps(3, 24, 4, 4), c.requires_grad_()],
        atol=3e-5,  # a sum over 16 to 48 pixels
    )  # fmt: skip


def test_cat_silu():
    wa, wb = mp_cat_weights(8, 24, 0.5)

    def plain(a, b):
        out = mp_cat(a, b, 0.5)
        return out, F.silu(out)

    check(lambda a, b: fused.CatSilu.apply(a, b, wa, wb), plain, [maps(2, 8, 6, 6), maps(2, 24, 6, 6, seed=1)])


def test_add_clip():
    def fast(y, x):
        return fused.AddClip.apply(y * 1, x, 0.7, 4.0)  # a leaf may not be overwritten

    def plain(y, x):
        return F.hardtanh(y + 0.7 * x, -4.0, 4.0)

    inputs = [maps(2, 10, 5, 5), maps(2, 10, 5, 5, seed=1)]
    assert (plain(*inputs).abs() == 4).any()  # clipping happens
    check(fast, plain, inputs)


@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("per_image", [True, False])
def test_space_to_depth_and_back_with_the_preconditioning(p, per_image):
    torch.manual_seed(0)
    x, a, b = torch.randn(3, 2, 8, 12), *torch.rand(2, 3 if per_image else 1)
    h = fused.unshuffle(x, a, p)
    assert torch.equal(h[:, :-1], F.pixel_unshuffle(x * a[:, None, None, None], p))
    assert (h[:, -1] == 1).all()
    assert h.is_contiguous(memory_format=torch.channels_last)
    f = torch.randn(3, 2 * p * p, 8 // p, 12 // p).contiguous(memory_format=torch.channels_last)
    expected = a[:, None, None, None] * x + b[:, None, None, None] * F.pixel_shuffle(f, p)
    assert torch.allclose(fused.shuffle_add(x, f, a, b, p), expected, atol=1e-6)


def awake(model):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        model.unet.out_gain.fill_(1.0)
        for module in model.modules():
            if isinstance(module, Block):
                module.emb_gain.copy_(torch.rand([], generator=generator))
    return model


def test_a_network_trains_and_samples_the_same(monkeypatch):
    torch.manual_seed(0)
    model = awake(EDM2(NETWORK, 16, 3, 10)).to(memory_format=torch.channels_last)
    x, sigma, labels = torch.randn(4, 3, 16, 16), torch.tensor([0.1, 0.5, 2.0, 30.0]), torch.eye(10)[:4]
    calls = []
    plain_apply = fused.NormSilu.apply
    monkeypatch.setattr(fused.NormSilu, "apply", lambda x: calls.append(1) or plain_apply(x))

    def gradients():
        model.train().zero_grad()
        loss = (model(x, sigma, labels) * torch.linspace(-1, 1, x.numel()).view_as(x)).sum()
        loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    def sampled():
        with torch.no_grad():
            return model.eval()(x, sigma, labels)

    fast = gradients(), sampled()
    assert calls  # the loops were really used
    monkeypatch.setattr(fused, "usable", lambda *_: False)
    plain = gradients(), sampled()
    for a, b in zip(fast[0], plain[0], strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=2e-4 * b.abs().max().item() + 1e-6)
    assert torch.allclose(fast[1], plain[1], atol=1e-4)


def test_widths_that_fill_no_vectors_take_the_plain_operations():
    torch.manual_seed(0)
    block, x, emb = Block(12, 12, 8, False), maps(2, 12, 4, 4).detach(), torch.randn(2, 8)
    assert not fused.whole(x)
    y = block(x, emb)  # on one thread, in training
    torch.set_num_threads(2)
    assert torch.allclose(block(x, emb), y, atol=1e-6)


def test_where_the_loops_are_not_used():
    x = maps(2, 8, 4, 4).detach()
    assert fused.usable(x, training=True)
    assert not fused.usable(x, training=False)  # gradients of a trained model: plain operations
    with torch.no_grad():
        assert fused.usable(x, training=False)
        assert not fused.usable(x.double(), training=False)
        assert not fused.usable(x.contiguous(), training=False)
        torch.set_num_threads(2)
        assert not fused.usable(x, training=False)


def test_results_do_not_depend_on_addresses():
    """Bit for bit the same, wherever the memory lies: loops have scalar versions for arrays that might overlap."""
    x, b, c = maps(2, 32, 16, 16).detach(), maps(2, 64, 16, 16, seed=1).detach(), torch.rand(2, 32)
    first, held = None, []
    for i in range(20):
        held.append(torch.empty(1 + 977 * i))  # moves the next allocations
        a, skip = (v.clone(memory_format=torch.preserve_format) for v in (x, b))
        results = [*fused.NormSilu.apply(a), fused.ScaleSilu.apply(a, c), *fused.CatSilu.apply(a, skip, 1.1, 0.9)]
        results.append(fused.AddClip.apply(a.clone(memory_format=torch.preserve_format), a, 0.7, 4.0))
        first = first or results
        assert all(torch.equal(one, two) for one, two in zip(first, results, strict=True))
