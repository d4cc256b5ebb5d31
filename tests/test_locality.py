"""Locality measurements against known Jacobians, finite differences, the plain loop and hand-made maps."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import tiny_run
from torch import nn

from lcs.bench.locality import bench_locality, gradient_maps_loop, with_live_gains
from lcs.conditioning import get_conditioner
from lcs.diffusion.samplers import heun, initial_noise, sigma_schedule
from lcs.errors import LcsError
from lcs.experiments import GRID, TEST_LOCATIONS, Network, get_scale
from lcs.locality import (
    LocalityTrace,
    Probe,
    conditional_influence,
    conditional_locality,
    default_probes,
    gradient_maps,
    smallest_square,
    trace_locality,
)
from lcs.model.build import build_model
from lcs.model.edm2 import EDM2
from lcs.model.local import LocalEDM2

SMALL = Network(channels=8, channel_mult=(1, 2), num_blocks=1, attn_resolutions=(), channels_per_head=8)


def edm2(network: Network = SMALL, resolution: int = 32, label_dim: int = GRID**2) -> EDM2:
    torch.manual_seed(0)
    return with_live_gains(EDM2(network, resolution, 3, label_dim))


def local(kind: str = "grid", k: int = 2, resolution: int = 32) -> LocalEDM2:
    torch.manual_seed(0)
    return with_live_gains(LocalEDM2(SMALL, resolution, kind, k, list_slots=4))


def points(n: int, resolution: int = 32, label_dim: int = GRID**2) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, 3, resolution, resolution, generator=g)
    labels = (torch.rand(n, label_dim, generator=g) < 0.02).float() if label_dim else None
    return x, torch.linspace(0.1, 3.0, n), labels


class Linear(nn.Module):
    """x0hat[c, y, x] = sigma * sum of J[c, y, x, d, i, j] x[d, i, j] + sum of W[l, c, y, x] label[l]"""

    def __init__(self, size: int = 5, labels: int = 3):
        super().__init__()
        g = torch.Generator().manual_seed(2)
        self.jacobian = nn.Parameter(torch.randn(3, size, size, 3, size, size, generator=g))
        self.effect = nn.Parameter(torch.randn(labels, 3, size, size, generator=g))

    def forward(self, x, sigma, labels=None):
        out = torch.einsum("cyxdij,ndij->ncyx", self.jacobian, x) * sigma[:, None, None, None]
        return out if labels is None else out + torch.einsum("nl,lcyx->ncyx", labels, self.effect)


# ---- eq. 9 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 2, 16])
def test_linear_denoiser_has_its_own_jacobian(chunk):
    model, pixels = Linear(), [(0, 0), (2, 3), (4, 4)]
    x, sigma, _ = points(3, 5, 0)
    maps = gradient_maps(model, x, sigma, None, pixels, chunk)
    for n in range(3):
        for p, (row, column) in enumerate(pixels):
            want = sum(model.jacobian[c, row, column, c].abs() for c in range(3)) * sigma[n]  # same channel in and out
            torch.testing.assert_close(maps[n, p], want.detach())


def test_absolute_values_are_taken_per_sample():
    class Signed(nn.Module):  # gradient +1 on one image, -1 on the other
        def forward(self, x, sigma, labels=None):
            return x * sigma[:, None, None, None]

    maps = gradient_maps(Signed(), torch.randn(2, 3, 4, 4), torch.tensor([1.0, -1.0]), None, [(1, 2)])
    assert maps.mean(dim=0)[0, 1, 2] == 3
    assert maps.sum() == 6


def test_finite_differences():
    model = edm2(replace(SMALL, attn_resolutions=(4,), unshuffle=2), resolution=16).double()
    x, sigma, labels = points(1, 16)
    x, sigma, labels = x.double(), sigma.double() + 0.5, labels.double()
    row, column, h = 5, 14, 1e-5
    (got,) = gradient_maps(model, x, sigma, labels, [(row, column)])[0]
    want = torch.zeros(16, 16, dtype=torch.double)
    for c in range(3):
        shift = torch.eye(256, dtype=torch.double).view(256, 1, 16, 16) * h
        ahead, behind = x.repeat(256, 1, 1, 1), x.repeat(256, 1, 1, 1)
        ahead[:, c : c + 1] += shift
        behind[:, c : c + 1] -= shift
        with torch.no_grad():
            change = model(ahead, sigma, labels.expand(256, -1)) - model(behind, sigma, labels.expand(256, -1))
        want += (change[:, c, row, column] / (2 * h)).abs().view(16, 16)
    assert want.max() > 0.1
    torch.testing.assert_close(got, want, atol=1e-7, rtol=1e-6)


NETWORKS = {
    "small": SMALL,
    "like mini": Network(8, (1, 1, 2, 3), 1, (8,), 8, 2),
    "like edm2-xs": Network(8, (1, 2, 3, 4), 3, (8, 4), 8),
    "attention at full resolution": Network(8, (1, 2), 1, (32,), 8),
    "one level": Network(8, (1,), 1, (), 8),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_equals_the_plain_loop(name):
    model = edm2(NETWORKS[name])
    x, sigma, labels = points(2)
    pixels = [(0, 0), (31, 31), (13, 31), (16, 15)]
    if name == "small":  # more than are done at once
        pixels += [(7, 8), (20, 3), (9, 26), (30, 1), (0, 17)]
    got = gradient_maps(model, x, sigma, labels, pixels)
    want = gradient_maps_loop(model, x, sigma, labels, pixels)
    assert want.max() > 0.1
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_unconditional_model_and_missing_labels():
    model = edm2(label_dim=0)
    x, sigma, _ = points(2)
    got = gradient_maps(model, x, sigma, None, [(3, 30)])
    torch.testing.assert_close(
        got, gradient_maps_loop(model, x, sigma, torch.zeros(2, 0), [(3, 30)]), atol=1e-5, rtol=0
    )
    model, none = edm2(), gradient_maps(edm2(), x, sigma, None, [(3, 30)])
    torch.testing.assert_close(gradient_maps(model, x, sigma, torch.zeros(2, 256), [(3, 30)]), none)


def test_called_without_gradients_and_leaves_the_input_alone():
    model, (x, sigma, labels) = edm2(), points(2)
    before = x.clone()
    with torch.no_grad():
        maps = gradient_maps(model, x, sigma, labels, [(3, 3)])
    assert torch.equal(x, before)
    assert not x.requires_grad
    assert not maps.requires_grad
    torch.testing.assert_close(maps, gradient_maps(model, x, sigma, labels, [(3, 3)], chunk=1), atol=1e-6, rtol=0)


# ---- the local model ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "width"), [("grid", 256), ("list", 12)])
def test_local_model_is_exactly_zero_outside_its_patch(kind, width):
    model, (x, sigma, labels) = local(kind), points(1, 32, width)
    pixels = [(10, 21), (0, 31), (31, 2)]  # m = 2: cells (5, 10), (0, 15), (15, 1)
    maps = gradient_maps(model, x, sigma, labels, pixels)
    want = gradient_maps_loop(model, x, sigma, labels, pixels)  # through all 256 patches
    torch.testing.assert_close(maps, want, atol=1e-5, rtol=0)
    for p, (row, column) in enumerate(pixels):
        inside = torch.zeros(32, 32, dtype=torch.bool)
        top, left = (row // 2 - 2) * 2, (column // 2 - 2) * 2
        inside[max(top, 0) : top + 10, max(left, 0) : left + 10] = True
        assert (maps[0, p][~inside] == 0).all()
        assert (maps[0, p][inside] > 0).float().mean() > 0.9


def test_local_model_with_patches_as_large_as_the_image():
    model, (x, sigma, labels) = local(k=8, resolution=16), points(2, 16)
    got = gradient_maps(model, x, sigma, labels, [(0, 9)])
    torch.testing.assert_close(got, gradient_maps_loop(model, x, sigma, labels, [(0, 9)]), atol=1e-5, rtol=0)


# ---- eq. 10 ---------------------------------------------------------------------------------------------------------


def test_influence_of_a_linear_denoiser():
    model, (x, sigma, _) = Linear(), points(2, 5, 0)
    label = torch.tensor([1.0, 2.0, 1.0])
    without = torch.tensor([[0.0, 2.0, 1.0], [1.0, 1.0, 1.0], [1.0, 2.0, 0.0]])
    pixels = [(1, 4), (3, 0)]
    for chunk in (1, 3, 16):
        influence = conditional_influence(model, x, sigma, label, without, pixels, chunk)
        assert influence.shape == (2, 3, 2)
        for k in range(3):
            for p, (row, column) in enumerate(pixels):
                want = model.effect[k, :, row, column].norm().expand(2).detach()
                torch.testing.assert_close(influence[:, k, p], want, atol=1e-4, rtol=0)


def test_influence_on_networks_by_the_definition():
    conditioner = get_conditioner("grid-all")
    label = torch.from_numpy(conditioner.encode_conditions(TEST_LOCATIONS[:4]))
    without = torch.from_numpy(conditioner.leave_one_out(TEST_LOCATIONS[:4]))
    pixels = [probe.pixel(32) for probe in default_probes(TEST_LOCATIONS[:4])]
    x, sigma, _ = points(2)
    for model in (edm2(), local()):
        got = conditional_influence(model, x, sigma, label, without, pixels)
        with torch.no_grad():
            full = model(x, sigma, label.expand(2, -1))
            for k in range(4):
                change = full - model(x, sigma, without[k].expand(2, -1))
                want = torch.stack([change[:, :, row, column].norm(dim=1) for row, column in pixels], dim=1)
                torch.testing.assert_close(got[:, k], want, atol=1e-5, rtol=0)
    seen = torch.eye(4, 5, dtype=torch.bool)  # by the local model: its own condition and nothing else
    seen[0, 4] = True  # location 0 is two cells from the centre
    assert (got[:, seen] > 0).all()
    assert (got[:, ~seen] == 0).all()


# ---- the smallest square --------------------------------------------------------------------------------------------


def test_squares_by_hand():
    point = np.zeros((9, 9))
    point[4, 4] = -2
    assert smallest_square(point, (4, 4)) == (1, 1)
    assert smallest_square(point, (4, 6)) == (5, 25)  # centred elsewhere: radius 2 to reach it, columns 4..8
    assert smallest_square(point, (0, 0)) == (9, 25)  # radius 4, of which rows and columns 0..4 lie in the image
    flat = np.ones((10, 10))
    assert smallest_square(flat, (5, 5)) == (11, 100)  # radius 4 holds 81 of 100
    assert smallest_square(flat, (5, 5), share=0.81) == (9, 81)
    assert smallest_square(flat, (0, 0)) == (19, 100)
    ring = np.full((5, 5), 1.0)  # squared: 16 outer pixels 16, 8 inner 8, centre 100
    ring[2, 2] = 10
    assert smallest_square(ring, (2, 2), 0.8) == (1, 1)
    assert smallest_square(ring, (2, 2), 0.85) == (3, 9)
    assert smallest_square(ring, (2, 2), 0.9) == (5, 25)
    assert smallest_square(np.zeros((4, 4)), (1, 1)) == (0, 0)


def test_squares_by_search():
    rng = np.random.default_rng(0)
    for _ in range(30):
        gradient = rng.standard_normal((13, 13)) ** 5
        row, column = rng.integers(0, 13, 2)
        side, area = smallest_square(gradient, (row, column))
        for r in range(13):
            part = gradient[max(row - r, 0) : row + r + 1, max(column - r, 0) : column + r + 1]
            if (part**2).sum() >= 0.9 * (gradient**2).sum():
                break
        assert (side, area) == (2 * r + 1, part.size)


# ---- over a trajectory ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traced():
    run = replace(tiny_run("grid-all"), objects=3)
    torch.manual_seed(0)
    model = with_live_gains(build_model(run))
    return run, model, trace_locality(run, model, seeds=(3, 4), steps=6, record=[5, 0, 3])


def test_trace_is_what_the_parts_give(traced):
    _, model, trace = traced
    conditioner = get_conditioner("grid-all")
    label = torch.from_numpy(conditioner.encode_conditions(TEST_LOCATIONS[:4]))
    seen = {}
    denoise = lambda x, sigma: model(x, sigma, label.expand(len(x), -1))  # noqa: E731
    with torch.no_grad():
        heun(
            denoise,
            initial_noise((3, 4), (3, 32, 32)),
            sigma_schedule(6),
            lambda step, x, s, x0hat: seen.update({step: (x, s, x0hat)}),
        )
    pixels = [probe.pixel(32) for probe in trace.probes]
    assert pixels == [(20, 20), (8, 20), (20, 8), (11, 11), (16, 16)]
    assert trace.steps == (0, 3, 5)
    for t, step in enumerate(trace.steps):
        x, s, x0hat = seen[step]
        assert trace.sigmas[t] == pytest.approx(s)
        torch.testing.assert_close(torch.from_numpy(trace.x0hat[t]), x0hat[0], atol=1e-5, rtol=0)
        sigma, labels = torch.full((2,), s), label.expand(2, -1)
        maps = gradient_maps_loop(model, x, sigma, labels, pixels).mean(dim=0)
        torch.testing.assert_close(torch.from_numpy(trace.maps[t]), maps, atol=1e-5, rtol=0)
        without = torch.from_numpy(conditioner.leave_one_out(TEST_LOCATIONS[:4]))
        influence = conditional_influence(model, x, sigma, label, without, pixels)
        torch.testing.assert_close(torch.from_numpy(trace.influence[t]), influence, atol=1e-5, rtol=0)
    assert trace.energies[1, 2] == pytest.approx((trace.maps[1, 2].astype(float) ** 2).sum())
    assert (trace.sides[1, 2], trace.areas[1, 2]) == smallest_square(trace.maps[1, 2], pixels[2])


def test_trace_goes_into_json(traced):
    _, _, trace = traced
    data = json.loads(json.dumps(trace.as_dict()))
    assert data["run"] == "grid-all-m3"
    assert data["probes"][4] == {"name": "centre", "location": [0.5, 0.5], "condition": None}
    assert np.shape(data["influence"]) == (3, 2, 4, 5)
    assert "maps" not in data
    assert np.shape(trace.as_dict(pictures=True)["maps"]) == (3, 5, 32, 32)


def test_local_list_color_and_unconditional_models_can_be_traced():
    for name, conditions, probes in (
        ("grid-single-local", 4, 5),
        ("list-all", 4, 5),
        ("color", 4, 3),
        ("cifar10", 0, 3),
    ):
        run = tiny_run(name)
        torch.manual_seed(0)
        model = with_live_gains(build_model(run))
        trace = trace_locality(run, model, seeds=(0,), steps=2, record=[0, 1])
        assert trace.influence.shape == (2, 1, conditions, probes)
        assert np.isfinite(trace.maps).all()
        if name == "grid-single-local":
            assert conditional_locality(trace) == 1
            assert trace.areas.max() <= 100  # the patch: 5 cells of 2 pixels
            assert trace.sides.max() <= 11  # centred on a pixel, the square may stick out of the patch by one


def hand_made(influence: np.ndarray, sigmas=(10.0, 1.0)) -> LocalityTrace:
    t, _, k, p = influence.shape
    probes = tuple(Probe(str(i), (0.5, 0.5), i if i < k else None) for i in range(p))
    empty = np.zeros((t, p))
    maps = np.zeros((t, p, 2, 2))
    return LocalityTrace(
        "toy",
        ((0.5, 0.5),) * k,
        probes,
        (0,),
        tuple(range(t)),
        np.array(sigmas),
        maps,
        *[empty] * 3,
        influence,
        maps,
        np.zeros((0, t, p)),
    )


def test_conditional_locality_by_hand():
    only_own = np.zeros((2, 1, 2, 3))
    only_own[:, :, 0, 0] = only_own[:, :, 1, 1] = 0.7
    assert conditional_locality(hand_made(only_own)) == 1
    assert conditional_locality(hand_made(np.ones((2, 1, 2, 3)))) == 0.5
    deaf = only_own.copy()
    deaf[:, :, 1, 1] = 0
    assert conditional_locality(hand_made(deaf)) == 0.5  # one probe listens to its own, the other to nothing
    assert conditional_locality(hand_made(only_own[:, :, ::-1])) == 0
    # Three levels, unevenly spaced in log noise: trapezoids of width 2 and 1.
    uneven = np.zeros((3, 1, 2, 1))
    uneven[:, 0, 0, 0], uneven[:, 0, 1, 0] = (1, 0, 3), (0, 2, 0)
    want = (1 + 1.5) / (1 + 1.5 + 2 + 1)
    assert conditional_locality(hand_made(uneven, np.exp([3.0, 1.0, 0.0]))) == pytest.approx(want)


# ---- wrong use and speed --------------------------------------------------------------------------------------------


def test_wrong_use_is_refused(traced):
    run, model, _ = traced
    x, sigma, labels = points(1)
    with pytest.raises(LcsError, match=r"pixel \(row 3, column 32\) lies outside the image of 32 x 32"):
        gradient_maps(model, x, sigma, labels, [(3, 32)])
    with pytest.raises(LcsError, match="chunks of 0"):
        gradient_maps(model, x, sigma, labels, [(3, 3)], chunk=0)
    with pytest.raises(LcsError, match="at least one pixel"):
        gradient_maps(model, x, sigma, labels, [])
    with pytest.raises(LcsError, match=r"share of 1\.5"):
        smallest_square(np.ones((3, 3)), (1, 1), 1.5)
    with pytest.raises(LcsError, match="not finite"):
        smallest_square(np.full((3, 3), np.nan), (1, 1))
    with pytest.raises(LcsError, match=r"steps \[2, 9\] cannot be recorded; allowed: 0\.\.3"):
        trace_locality(run, model, steps=4, record=[9, 2])
    with pytest.raises(LcsError, match="at least one seed"):
        trace_locality(run, model, seeds=())
    with pytest.raises(LcsError, match=r"location \(1\.5, 0\.5\) lies outside"):
        Probe("far", (1.5, 0.5)).pixel(32)
    with pytest.raises(LcsError, match="probe 'a' names condition 4; there are 4"):
        trace_locality(run, model, probes=[Probe("a", (0.5, 0.5), 4)])
    with pytest.raises(LcsError, match="cifar10-m2 is unconditional"):
        trace_locality(tiny_run("cifar10"), model, conditions=[(0.5, 0.5)])
    with pytest.raises(LcsError, match="two conditions; the trace of toy has 1 and 1"):
        conditional_locality(hand_made(np.ones((2, 1, 1, 1))))


def test_much_faster_than_the_loop():
    """The requirement is 3x at mini scale (`bench_locality`); here, in a second or two, only a sanity bound."""
    result = bench_locality(get_scale("mini"), levels=4, batch=1, repetitions=1)
    assert result["max_abs_difference"] < 1e-5
    assert result["local_max_abs_difference"] < 1e-5
    assert result["speedup"] > 2
    assert result["local_speedup"] > 10
