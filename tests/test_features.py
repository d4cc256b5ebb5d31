"""Feature-space cosines against naive computations."""

import numpy as np
import pytest
import torch
from tiny import SCALE, tiny_run

from lcs.conditioning import get_conditioner
from lcs.errors import LcsError
from lcs.experiments import Run, get_experiment
from lcs.features import captured_means, condition_cosines, cosine_matrix
from lcs.model import residual
from lcs.model.build import build_model
from lcs.model.edm2 import Block


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = build_model(run()).eval().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, Block):
            module.emb_gain.fill_(0.7)
    model.unet.out_gain.fill_(1.0)
    return model


def run() -> Run:
    return Run(get_experiment("color"), 2, SCALE)


def test_cosines_equal_a_naive_loop():
    rng = np.random.default_rng(0)
    vectors = [torch.from_numpy(rng.standard_normal((2, 3, 3))) for _ in range(4)]
    found = cosine_matrix(vectors)
    for i, a in enumerate(vectors):
        for j, b in enumerate(vectors):
            a1, b1 = a.flatten().numpy(), b.flatten().numpy()
            assert found[i, j] == pytest.approx(a1 @ b1 / np.linalg.norm(a1) / np.linalg.norm(b1))


def test_a_condition_without_effect_has_cosine_zero():
    found = cosine_matrix([torch.zeros(3), torch.ones(3)])
    assert found.tolist() == [[1, 0], [0, 1]]


def test_captured_means_are_the_scaled_activations(model):
    """Recomputed by hand for the first block, whose input is the stem's output."""
    x, labels = torch.randn(3, 3, 32, 32), torch.eye(8)[:3]
    seen = {}
    block = model.unet.enc["16x16_block0"]
    handle = block.register_forward_pre_hook(lambda m, inputs: seen.update(x=inputs[0].clone(), emb=inputs[1].clone()))
    with captured_means(model) as means, torch.no_grad():
        model(x, torch.full((3,), 0.8), labels)
    handle.remove()
    h = seen["x"]
    h = h / (1e-4 + h.square().mean(dim=1, keepdim=True).sqrt())
    weight = block.conv_res0.weight
    weight = weight / weight.flatten(1).norm(dim=1)[:, None, None, None]  # eps is far below the tolerance
    y = torch.nn.functional.conv2d(torch.nn.functional.silu(h) / 0.596, weight, padding=1)
    linear = block.emb_linear.weight
    c = seen["emb"] @ (linear / linear.norm(dim=1, keepdim=True)).T * 0.7 + 1
    expected = (y * c[:, :, None, None]).mean(dim=0)
    assert torch.allclose(means["enc.16x16_block0"], expected, atol=2e-3)
    blocks = sum(isinstance(m, Block) for m in model.modules())
    assert len(means) == blocks


def test_capturing_changes_nothing_and_leaves_no_hook(model, monkeypatch):
    monkeypatch.setattr(residual, "AVX2", False)  # layers that are watched are run one by one: so all of them are here
    x, labels = torch.randn(2, 3, 32, 32), torch.eye(8)[:2]
    with torch.no_grad():
        before = model(x, 1.0, labels)
        with captured_means(model):
            inside = model(x, 1.0, labels)
    assert torch.equal(before, inside)
    assert not any(m._forward_hooks for m in model.modules())


def test_a_capture_that_never_ran_is_an_error(model):
    with pytest.raises(LcsError, match="no activations were captured"), captured_means(model):
        pass


def test_cosines_of_a_model(model):
    found = condition_cosines(run(), model, range(3), steps=4, record=[0, 2])
    colors = get_conditioner("color").test_conditions
    assert found.cosines.shape == (2, len(found.layers), len(colors), len(colors))
    assert np.allclose(found.cosines, found.cosines.swapaxes(-1, -2))
    assert np.allclose(found.cosines[..., range(8), range(8)], 1)
    assert found.layers[-1] == "image"
    assert found.sigmas[0] == pytest.approx(80)
    assert found.resolutions[0] == 32  # the first conditioned layer, with the stem's unshuffle undone
    other = [found.cosines[0, 0, i, j] for i in range(8) for j in range(8) if i != j]
    assert found.off_diagonal()[0, 0] == pytest.approx(np.mean(other))


def test_local_models_have_no_features_of_an_image():
    local = tiny_run("grid-single-local")
    with pytest.raises(LcsError, match="patches"):
        condition_cosines(local, build_model(local), range(2))
