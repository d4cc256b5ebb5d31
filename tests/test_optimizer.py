"""Muon: against the singular value decomposition, and its Adam against torch's."""

import pytest
import torch
from test_training import QUIET, assert_same, state
from tiny import source, tiny_run
from torch import nn

from lcs.errors import LcsError
from lcs.experiments import Recipe
from lcs.model.build import build_model, trained_network
from lcs.training.optimizer import UPDATE, Muon, build_optimizer, inverse_roots
from lcs.training.trainer import TrainSettings, train


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    other = torch.randn_like(matrix[:3, :3])  # iterated beside it
    root = inverse_roots([other[None], matrix[None]])[1][0]
    return matrix @ root if matrix.shape[0] > matrix.shape[1] else root @ matrix


@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (32, 288), (2, 3)])
def test_orthogonalised_has_the_singular_vectors_of_its_argument(shape):
    torch.manual_seed(0)
    matrix = torch.randn(shape, dtype=torch.float64)
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    inner = u.T @ orthogonalised(matrix) @ vt.T  # diagonal if the singular vectors are the same
    assert torch.allclose(inner, inner.diagonal().diag(), atol=1e-9)
    large = s > 0.1 * s.max()
    assert inner.diagonal()[large].min() > 0.6
    assert inner.diagonal().max() < 1.25


def test_orthogonalised_in_single_precision():
    """Iterating the small Gram matrix loses no more than rounding, even if the gradient is nearly of rank 4."""
    torch.manual_seed(0)
    matrix = torch.randn(64, 4, dtype=torch.float64) @ torch.randn(4, 600, dtype=torch.float64)
    matrix += 1e-3 * torch.randn(64, 600, dtype=torch.float64)
    exact = orthogonalised(matrix)
    assert (orthogonalised(matrix.float()) - exact).norm() / exact.norm() < 1e-3


def test_a_first_step_moves_a_convolution_along_its_orthogonal_factor():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(6, 5, 3, 3).contiguous(memory_format=torch.channels_last))
    before, weight.grad = weight.detach().clone(), torch.randn(6, 5, 3, 3)
    optimizer = Muon([weight], [], (0.9, 0.99))
    optimizer.param_groups[0]["lr"] = 0.01
    optimizer.step()
    moved = (before - weight.detach()).flatten(1)
    u, _, vt = torch.linalg.svd(weight.grad.flatten(1), full_matrices=False)
    along = (u.T @ moved @ vt.T).diagonal() / (0.01 * UPDATE * 45**0.5)
    assert ((along > 0.6) & (along < 1.25)).all()
    assert moved.square().mean().sqrt() == pytest.approx(0.01 * UPDATE, rel=0.3)  # the stated size


def test_memory_layout_does_not_matter():
    torch.manual_seed(0)
    start, grads = torch.randn(6, 5, 3, 3), torch.randn(3, 6, 5, 3, 3)
    ends = []
    for layout in (torch.contiguous_format, torch.channels_last):
        weight = nn.Parameter(start.clone(memory_format=layout))
        optimizer = Muon([weight], [], (0.9, 0.99))
        optimizer.param_groups[0]["lr"] = 0.1
        for grad in grads:
            weight.grad = grad.contiguous(memory_format=layout)
            optimizer.step()
        ends.append(weight.detach())
    assert torch.allclose(*ends, atol=1e-5)


def test_its_adam_is_torchs():
    torch.manual_seed(0)
    start, grads = torch.randn(7), torch.randn(5, 7)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = Muon([], [ours], (0.9, 0.99)), torch.optim.Adam([theirs], betas=(0.9, 0.99), eps=1e-8)
    for rate, grad in zip((0.1, 0.2, 0.3, 0.2, 0.1), grads, strict=True):
        for optimizer, parameter in zip(optimizers, (ours, theirs), strict=True):
            optimizer.param_groups[-1]["lr"] = rate
            parameter.grad = grad.clone()
            optimizer.step()
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_labels_and_gains_are_left_to_adam():
    network = trained_network(build_model(tiny_run()))
    optimizer = build_optimizer(network, Recipe(optimizer="muon"))
    names = {id(p): name for name, p in network.named_parameters()}
    muon, adam = ({names[id(p)] for p in group["params"]} for group in optimizer.param_groups)
    assert muon | adam == set(names.values())
    assert "unet.emb_label.weight" in adam
    assert "unet.out_gain" in adam
    assert {"unet.emb_noise.weight", "unet.out_conv.weight"} <= muon


def test_an_unknown_optimizer_is_named():
    with pytest.raises(LcsError, match="unknown optimizer 'sgd'"):
        build_optimizer(nn.Linear(2, 2), Recipe(optimizer="sgd"))


def test_resuming_and_micro_batches(tmp_path):
    """Stopped and resumed: the same to the bit. In micro-batches: the same up to rounding."""
    run = tiny_run(optimizer="muon")
    train(run, source(), tmp_path / "straight", settings=QUIET)
    train(run, source(), tmp_path / "stopped", settings=TrainSettings(cpu=True, progress=False, stop_after_samples=24))
    train(run, source(), tmp_path / "stopped", settings=QUIET)
    assert_same(state(tmp_path / "straight"), state(tmp_path / "stopped"))
    train(run, source(), tmp_path / "micro", settings=TrainSettings(micro_batch=2, cpu=True, progress=False))
    assert_same(state(tmp_path / "straight"), state(tmp_path / "micro"), tolerance=1e-3)
