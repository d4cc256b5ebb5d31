"""The weight gradient of convolutions against its definition, and when it must not be used."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lcs.bench.compute import count_flops
from lcs.experiments import Network
from lcs.model import convolution
from lcs.model.convolution import conv2d, weight_gradient
from lcs.model.edm2 import EDM2

pytestmark = pytest.mark.usefixtures("one_thread")


def maps(n, channels, height, width, seed):
    x = torch.randn(n, channels, height, width, generator=torch.Generator().manual_seed(seed))
    return x.contiguous(memory_format=torch.channels_last)


def by_definition(x, g, size):
    """dw[o, c, i, j] = sum of g[n, o, h, w] x[n, c, h + i - r, w + j - r] in float64, shift by shift."""
    x, g, r = x.double().numpy(), g.double().numpy(), size // 2
    height, width = x.shape[2:]
    padded = np.pad(x, ((0, 0), (0, 0), (r, r), (r, r)))
    dw = np.empty((g.shape[1], x.shape[1], size, size))
    for i in range(size):
        for j in range(size):
            dw[:, :, i, j] = np.einsum("nohw,nchw->oc", g, padded[:, :, i : i + height, j : j + width])
    return torch.from_numpy(dw)


@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize("outputs", [4, 6, 8, 10, 12, 32])
def test_is_the_definition(outputs, size):
    x, g = maps(2, 32, 7, 5, 0), maps(2, outputs, 7, 5, 1)
    expected = by_definition(x, g, size)
    assert (weight_gradient(x, g, size) - expected).abs().max() < 3e-6 * expected.abs().max()


@pytest.mark.parametrize("shape", [(1, 16, 1, 1), (3, 48, 2, 9), (2, 64, 32, 32), (5, 16, 10, 10)])
def test_any_size_of_map(shape):
    x, g = maps(*shape, 0), maps(shape[0], 6, *shape[2:], 1)
    expected = by_definition(x, g, 3)
    assert (weight_gradient(x, g, 3) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_rounds_no_worse_than_pytorch_on_many_pixels():
    x, g = maps(32, 32, 32, 32, 0), maps(32, 32, 32, 32, 1)
    weight = torch.zeros(32, 32, 3, 3, requires_grad=True)
    theirs = torch.autograd.grad(F.conv2d(x, weight, padding=1), weight, g)[0]
    exact = by_definition(x, g, 3)
    ours_error, their_error = ((dw - exact).square().mean().sqrt() for dw in (weight_gradient(x, g, 3), theirs))
    assert ours_error < 1.5 * their_error


def test_same_bits_every_time_whatever_surrounds_the_maps():
    x, g = maps(3, 32, 8, 8, 0), maps(3, 12, 8, 8, 1)
    first = weight_gradient(x, g, 3)
    room = torch.full((4, 8, 8, 32), float("nan"))  # a map that begins in the middle of an allocation
    room[1:] = x.permute(0, 2, 3, 1)
    assert torch.equal(weight_gradient(room[1:].permute(0, 3, 1, 2), g, 3), first)


def test_blocks_of_rows_do_not_matter(monkeypatch):
    x, g = maps(2, 16, 9, 4, 0), maps(2, 8, 9, 4, 1)
    expected = by_definition(x, g, 3)
    for size in (1, 4 * 4 * 24 * 2, 10**9):  # one row at a time, two, all
        monkeypatch.setattr(convolution, "CACHE", size)
        assert (weight_gradient(x, g, 3) - expected).abs().max() < 3e-6 * expected.abs().max()


@pytest.mark.parametrize("shape", [(32, 12, 3), (16, 8, 1), (13, 12, 3), (32, 5, 3), (16, 2, 1)])
def test_convolution_and_both_gradients(shape, monkeypatch):
    """Whether or not the shapes fit: the same as PyTorch's convolution."""
    monkeypatch.setattr(convolution, "AVX2", True)
    (channels, outputs, size), results = shape, []
    for function in (lambda x, w: conv2d(x, w, training=True), lambda x, w: F.conv2d(x, w, padding=size // 2)):
        x = maps(2, channels, 6, 6, 0).requires_grad_()
        w = maps(outputs, channels, size, size, 1).requires_grad_()
        y = function(x, w)
        results.append((y, *torch.autograd.grad(y, (x, w), maps(*y.shape, 2))))
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, atol=2e-5, rtol=1e-5)


def used(x, weight, training=True):
    return "_Conv2d" in type(conv2d(x, weight, training).grad_fn).__name__


def test_used_in_training_on_one_thread_only(monkeypatch):
    monkeypatch.setattr(convolution, "AVX2", True)
    x, w = maps(1, 16, 4, 4, 0), maps(4, 16, 3, 3, 1).requires_grad_()
    assert used(x, w)
    assert not used(x, w, training=False)
    assert not used(x.double(), w.double())
    assert not used(x.contiguous(), w)
    torch.set_num_threads(2)
    assert not used(x, w)
    torch.set_num_threads(1)
    monkeypatch.setattr(convolution, "AVX2", False)
    assert not used(x, w)


def test_flops_of_a_step_are_all_counted(monkeypatch):
    """Loops outside PyTorch would not be: while operations are counted, PyTorch's own are used."""
    network = Network(channels=16, channel_mult=(1, 2), num_blocks=1, attn_resolutions=(), channels_per_head=16)
    model = EDM2(network, 8, 3, 4)
    x, labels = torch.randn(2, 3, 8, 8), torch.zeros(2, 4)
    counts = []
    for fast in (True, False):
        monkeypatch.setattr(convolution, "AVX2", fast)
        counts.append(count_flops(lambda: model(x, 1.0, labels).square().mean().backward()))
    assert counts[0] == counts[1] > 0
