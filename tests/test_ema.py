"""Power-function EMA against brute force."""

import numpy as np
import pytest
import torch

from lcs.errors import LcsError
from lcs.training.ema import (
    PowerEMA,
    gamma_to_std,
    posthoc_weights,
    profile_inner_product,
    reconstruct,
    std_to_gamma,
)


def trajectory(steps: int) -> torch.Tensor:
    """A drifting, noisy path of 5 parameters, [steps, 5]."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(steps, 5, generator=generator, dtype=torch.float64)
    return noise.cumsum(0) * 0.05 + noise * 0.3 + torch.linspace(0, 3, steps, dtype=torch.float64)[:, None]


def direct_average(path: torch.Tensor, std: float) -> torch.Tensor:
    """Weights by the integral of the profile over each step: (s^(g+1) - (s-1)^(g+1)) / t^(g+1)."""
    t = len(path)
    edges = (torch.arange(t + 1, dtype=torch.float64) / t) ** (std_to_gamma(std) + 1)
    return (edges.diff()[:, None] * path).sum(0)


def test_width_and_exponent_convert_both_ways():
    assert std_to_gamma(0.05) == pytest.approx(16.97, abs=0.005)  # the paper's two values
    assert std_to_gamma(0.10) == pytest.approx(6.94, abs=0.005)
    for std in (0.01, 0.05, 0.1, 0.2, 0.28):
        assert gamma_to_std(std_to_gamma(std)) == pytest.approx(std, rel=1e-9)
    # The width is what it says: standard deviation of the profile over its length.
    s = (np.arange(1_000_000) + 0.5) / 1_000_000
    p = s ** std_to_gamma(0.1)
    p /= p.sum()
    assert np.sqrt((p * s**2).sum() - (p * s).sum() ** 2) == pytest.approx(0.1, rel=1e-4)
    for bad in (0, -0.1, 0.3):
        with pytest.raises(LcsError, match="EMA width"):
            std_to_gamma(bad)


def test_running_average_equals_the_closed_form():
    path = trajectory(300)
    params = {"a": torch.zeros(2, dtype=torch.float64), "b": torch.zeros(3, dtype=torch.float64)}
    ema = PowerEMA(params, (0.05, 0.10))
    for row in path:
        ema.update({"a": row[:2], "b": row[2:]})
    assert ema.step == 300
    for std in (0.05, 0.10):
        average = ema.average(std)
        torch.testing.assert_close(torch.cat([average["a"], average["b"]]), direct_average(path, std))
    assert not torch.allclose(ema.average(0.05)["b"], ema.average(0.10)["b"], atol=1e-3)
    with pytest.raises(LcsError, match="not tracked"):
        ema.average(0.2)


def test_state_survives_safetensors(tmp_path):
    from safetensors.torch import load_file, save_file

    path = trajectory(50).float()
    whole, first = (PowerEMA({"w": path[0]}, (0.05, 0.10)) for _ in range(2))
    for row in path:
        whole.update({"w": row})
    for row in path[:20]:
        first.update({"w": row})
    save_file(first.state_dict(), tmp_path / "ema.safetensors")
    second = PowerEMA({"w": torch.zeros(5)}, (0.05, 0.10))
    second.load_state_dict(load_file(tmp_path / "ema.safetensors"), first.step)
    for row in path[20:]:
        second.update({"w": row})
    for std in (0.05, 0.10):
        assert torch.equal(second.average(std)["w"], whole.average(std)["w"])
    with pytest.raises(LcsError, match="lacks 1 tensors"):
        second.load_state_dict({"ema0.w": torch.zeros(5)}, 1)


def test_inner_product_is_the_integral():
    for a, b in [((100, 6.94), (100, 16.97)), ((60, 6.94), (100, 6.94)), ((100, 2.0), (33, 20.0))]:
        s = (np.arange(2_000_000) + 0.5) / 2_000_000 * 100
        profile = lambda t, g: np.where(s <= t, (g + 1) * s**g / t ** (g + 1), 0)  # noqa: B023, E731
        integral = (profile(*a) * profile(*b)).sum() * 100 / 2_000_000
        assert profile_inner_product(a, b) == pytest.approx(integral, rel=1e-4)


def test_posthoc_of_a_tracked_width_is_that_snapshot():
    snapshots = [(t, std) for t in (40, 80, 120) for std in (0.05, 0.10)]
    weights = posthoc_weights(snapshots, 120, 0.10)
    np.testing.assert_allclose(weights, [0, 0, 0, 0, 0, 1], atol=1e-6)


@pytest.mark.parametrize("std", [0.07, 0.09, 0.13])
def test_posthoc_reconstruction_matches_direct_tracking(std):
    steps, every = 800, 50
    path = trajectory(steps)
    ema = PowerEMA({"w": path[0]}, (0.05, 0.10))
    snapshots, kinds = [], []
    for step, row in enumerate(path, 1):
        ema.update({"w": row})
        if step % every == 0:
            for tracked in ema.stds:
                snapshots.append({"w": ema.average(tracked)["w"].clone()})
                kinds.append((step, tracked))
    for target in (800, 400):
        weights = posthoc_weights(kinds, target, std)
        assert sum(weights) == pytest.approx(1, abs=0.01)
        got, want = reconstruct(iter(snapshots), weights)["w"], direct_average(path[:target], std)
        nearest = min((direct_average(path[:target], s) - want).abs().max().item() for s in (0.05, 0.10))
        error = (got - want).abs().max().item()
        assert error < 0.01
        assert error < nearest / 4  # far better than taking the nearest tracked width
