"""A block's branch as one loop over the images against the block's own layers."""

import pytest
import torch

from lcs.model import residual
from lcs.model.edm2 import Block

pytestmark = pytest.mark.usefixtures("one_thread")

EMB = 12
BLOCKS = {  # (cin, cout, decoder, mode, channels per head), channels of the encoder's map that is joined
    "encoder": ((16, 16, False, "keep", 0), 0),
    "encoder, wider": ((24, 48, False, "keep", 0), 0),
    "encoder, down": ((32, 32, False, "down", 0), 0),
    "encoder, attention": ((16, 32, False, "keep", 16), 0),
    "decoder": ((32, 32, True, "keep", 0), 0),
    "decoder, up": ((16, 16, True, "up", 0), 0),
    "decoder, joined": ((56, 32, True, "keep", 0), 24),
    "decoder, joined, attention": ((48, 16, True, "keep", 8), 16),
}


@pytest.fixture(autouse=True)
def used(monkeypatch):
    """The loop is slower elsewhere, but correct: it is tested on any processor. Counts its calls."""
    calls, run = [], residual.Branch.__call__
    monkeypatch.setattr(residual, "AVX2", True)
    monkeypatch.setattr(residual.Branch, "__call__", lambda *args: calls.append(1) or run(*args))
    return calls


def channels_last(*shape):
    return torch.randn(shape).contiguous(memory_format=torch.channels_last)


def make(name, height=6, width=10, batch=3):
    torch.manual_seed(0)
    (cin, cout, decoder, mode, heads), joined = BLOCKS[name]
    block = Block(cin, cout, EMB, decoder, mode, heads).eval().requires_grad_(False)
    block.emb_gain.fill_(0.7)
    skip = channels_last(batch, joined, height, width) if joined else None
    return block, channels_last(batch, cin - joined, height, width), torch.randn(batch, EMB), skip


def plain(block, x, emb, skip):
    """With gradients on, an evaluated block takes PyTorch's operations."""
    with torch.enable_grad():
        return block(x.clone(memory_format=torch.preserve_format), emb, skip=skip)


@torch.no_grad()
@pytest.mark.parametrize("name", BLOCKS)
def test_every_kind_of_block(name, used):
    block, *inputs = make(name)
    out = block(*inputs[:2], skip=inputs[2])
    assert used
    expected = plain(block, *inputs)
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert len(used) == 1  # what it is compared with is something else
    assert torch.allclose(out, expected, atol=1e-5, rtol=1e-5), (out - expected).abs().max()


@torch.no_grad()
@pytest.mark.parametrize("size", [(1, 1), (1, 3), (2, 2), (3, 3), (5, 7), (20, 6)])
def test_any_size_of_map(size):
    """Tiles are of six pixels, four and one: 1, 3, 4, 9, 35 and 120 pixels an image."""
    for name in ("encoder, wider", "decoder, joined"):
        block, x, emb, skip = make(name, *size)
        assert torch.allclose(block(x, emb, skip=skip), plain(block, x, emb, skip), atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("cache", [1, 20_000, 10**9])
def test_an_image_does_not_depend_on_the_batch_or_on_how_many_are_worked_on_at_a_time(cache, monkeypatch):
    block, x, emb, skip = make("decoder, joined", batch=5)
    together = block(x, emb[:1], skip=skip)  # one embedding for all
    monkeypatch.setattr(residual, "CACHE", cache)
    for n in range(5):
        assert torch.equal(block(x[n : n + 1], emb[:1], skip=skip[n : n + 1]), together[n : n + 1])
    assert torch.equal(block(x, emb[:1], skip=skip), together)


@torch.no_grad()
def test_activations_are_clipped():
    block, x, emb, skip = make("decoder")
    out = block(x * 300, emb)
    assert out.abs().max() == 256
    assert torch.allclose(out, plain(block, x * 300, emb, skip), atol=1e-2)


@torch.no_grad()
def test_changed_weights_are_seen():
    block, x, emb, skip = make("decoder, joined")
    before = block(x, emb, skip=skip)
    for layer in (block.conv_res0, block.conv_res1, block.conv_skip):
        layer.weight.copy_(torch.randn_like(layer.weight))
        after = block(x, emb, skip=skip)
        assert not torch.allclose(after, before, atol=0.05)
        assert torch.allclose(after, plain(block, x, emb, skip), atol=1e-5, rtol=1e-5)
        before = after


@torch.no_grad()
def test_state_dict_holds_nothing_of_it():
    block, x, emb, _ = make("encoder")
    names, values = list(block.state_dict()), [v.clone() for v in block.state_dict().values()]
    block(x, emb)
    assert list(block.state_dict()) == names
    assert all(torch.equal(a, b) for a, b in zip(block.state_dict().values(), values, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_layer_that_is_watched_is_run(register, used):
    block, x, emb, _ = make("encoder")
    seen = []
    handle = getattr(block.conv_res0, register)(lambda *_: seen.append(1))
    block(x, emb)
    assert (len(seen), len(used)) == (1, 0)
    handle.remove()
    block(x, emb)
    assert (len(seen), len(used)) == (1, 1)


@torch.no_grad()
def test_not_used_where_it_must_not_be(used, monkeypatch):
    block, x, emb, _ = make("encoder")
    block.train()(x, emb)
    block.eval().double()(x.double(), emb.double())
    block.float()
    monkeypatch.setattr(residual, "AVX2", False)
    block(x, emb)
    monkeypatch.setattr(residual, "AVX2", True)
    torch.set_num_threads(2)
    block(x, emb)
    assert not used
    torch.set_num_threads(1)
    block(x, emb)
    assert used
