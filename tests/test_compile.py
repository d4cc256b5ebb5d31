"""`lcs train --compile`: the network traced as one graph computes what it computes uncompiled."""

from dataclasses import replace

import pytest
import torch
from accelerate.state import AcceleratorState
from tiny import QUIET, source, state, tiny_run

from lcs.diffusion.loss import edm2_loss
from lcs.experiments import Network
from lcs.model.edm2 import EDM2
from lcs.training.trainer import train

NETWORK = Network(channels=16, channel_mult=(1, 2), num_blocks=1, attn_resolutions=(8,), channels_per_head=16)
pytestmark = pytest.mark.usefixtures("one_thread")


def losses_and_gradients(network, forward):
    """The loss of four images, with every gradient, of `forward`, which is `network` or made from it."""
    generator = torch.Generator().manual_seed(1)
    images, noise = torch.randn(2, 4, 3, 16, 16, generator=generator)
    images[0] = 0  # rows of zeros have a norm without a derivative
    labels, sigma = torch.eye(4), torch.tensor([0.05, 0.5, 3.0, 40.0])
    loss = edm2_loss(forward, images, labels, sigma, noise)
    named = dict(network.named_parameters())
    return loss, dict(zip(named, torch.autograd.grad(loss.sum(), list(named.values())), strict=True))


# aot_eager traces and differentiates, but makes no C++ of it; inductor does, which is what `--compile` runs.
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_with_the_same_loss_and_gradients(backend):
    torch.manual_seed(0)
    network = EDM2(NETWORK, 16, 3, 4).to(memory_format=torch.channels_last).train()
    with torch.no_grad():
        for name, p in network.named_parameters():
            if name.endswith("gain"):  # zero at the start: nothing behind them would get a gradient
                p.fill_(0.3)
    plain, gradients = losses_and_gradients(network, network)
    # fullgraph: a place that cannot be traced is an error.
    compiled = torch.compile(network, backend=backend, fullgraph=True, dynamic=False)
    traced, traced_gradients = losses_and_gradients(network, compiled)
    assert torch.allclose(plain, traced, atol=1e-5, rtol=1e-5)
    for name, gradient in gradients.items():
        assert gradient.isfinite().all(), name
        assert gradient.abs().max() > 0, name
        assert torch.allclose(gradient, traced_gradients[name], atol=1e-4 * gradient.abs().max() + 1e-7), name


@pytest.mark.slow  # a minute of C++ compilation
def test_a_compiled_run_ends_where_an_uncompiled_one_does(straight, tmp_path):
    AcceleratorState._reset_state(reset_partial_state=True)  # accelerate allows one compiler per process
    try:
        train(tiny_run(), source(), tmp_path, settings=replace(QUIET, compile=True))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    one, other = state(straight), state(tmp_path)
    assert one.keys() == other.keys()  # no prefix of the compiler's in the names
    for name, value in one.items():
        # Adam divides by the gradient's size: rounding moves embeddings, which have none while their gain is zero.
        if name.startswith("model.") and value.ndim > 1 and "emb" not in name:
            assert (value - other[name]).norm() < 0.005 * value.norm(), name
