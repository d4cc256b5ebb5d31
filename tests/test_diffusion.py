"""Samplers on data whose exact denoiser is known, and the loss against finite differences."""

import math

import pytest
import torch

from lcs.diffusion.loss import edm2_loss, loss_weight, sample_sigma
from lcs.diffusion.samplers import dpmpp_2m, heun, initial_noise, sigma_schedule
from lcs.experiments import Network
from lcs.model.edm2 import EDM2

MEAN, STD = 0.3, 0.5


def gaussian(x, sigma):
    """Exact denoiser of N(MEAN, STD^2) per pixel."""
    return MEAN + STD**2 / (STD**2 + sigma**2) * (x - MEAN)


def gaussian_flow(x, sigma, to):
    """Exact solution of the ODE from noise level `sigma` to `to`."""
    return MEAN + (x - MEAN) * math.sqrt((STD**2 + to**2) / (STD**2 + sigma**2))


CENTRES = torch.tensor([[-0.8, -0.5], [0.9, 0.1], [0.0, 0.8]], dtype=torch.float64)
SHARES = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
WIDTH = 0.12


def mixture(x, sigma):
    """Exact denoiser of a mixture of three Gaussians in the plane. x [B, 2, 1, 1]"""
    v = WIDTH**2 + sigma**2
    gap = x.flatten(1)[:, None] - CENTRES.to(x)  # [B, 3, 2]
    posterior = (SHARES.to(x).log() - gap.square().sum(-1) / (2 * v)).softmax(dim=1)[..., None]
    return (posterior * (CENTRES.to(x) + WIDTH**2 / v * gap)).sum(1).view_as(x)


def start(n: int) -> torch.Tensor:
    return initial_noise(range(n), (2, 1, 1)).double()


# --- schedule -------------------------------------------------------------------------------------------------------


def test_schedule_ends_and_matches_diffusers():
    from diffusers import EDMEulerScheduler

    sigmas = sigma_schedule(18, 0.002, 80, 7)
    assert len(sigmas) == 19
    assert sigmas[0] == pytest.approx(80)
    assert sigmas[-2] == pytest.approx(0.002)
    assert sigmas[-1] == 0
    scheduler = EDMEulerScheduler(sigma_min=0.002, sigma_max=80, rho=7, sigma_schedule="karras")
    scheduler.set_timesteps(18)
    torch.testing.assert_close(torch.tensor(sigmas), scheduler.sigmas.float(), rtol=1e-4, atol=1e-6)


# --- samplers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sampler", "steps"), [(heun, 32), (dpmpp_2m, 32)])
def test_gaussian_moments(sampler, steps):
    x = sampler(gaussian, initial_noise(range(4000), (1, 2, 2)).double(), sigma_schedule(steps))
    assert x.mean().item() == pytest.approx(MEAN, abs=0.015)  # 16,000 values: standard error 0.004
    assert x.std().item() == pytest.approx(STD, abs=0.02)


@pytest.mark.parametrize("sampler", [heun, dpmpp_2m])
def test_mixture_moments(sampler):
    x = sampler(mixture, start(4000), sigma_schedule(40)).flatten(1)
    nearest = (x[:, None] - CENTRES).square().sum(-1).argmin(1)
    shares = torch.bincount(nearest, minlength=3) / len(x)
    torch.testing.assert_close(shares, SHARES.float(), atol=0.03, rtol=0)
    for c in range(3):
        cluster = x[nearest == c]
        torch.testing.assert_close(cluster.mean(0), CENTRES[c], atol=0.02, rtol=0)
        assert cluster.std(0).mean().item() == pytest.approx(WIDTH, rel=0.08)


def order(sampler) -> float:
    """Measured order of convergence on the Gaussian, away from the singular end."""
    x = start(8)
    errors = []
    for steps in (40, 80, 160):
        sigmas = sigma_schedule(steps + 1, 0.02, 20, 7)[:-1]
        errors.append((sampler(gaussian, x, sigmas) - gaussian_flow(x, 20, 0.02)).abs().max().item())
    assert errors[-1] > 1e-9  # not yet rounding error
    return math.log2(errors[1] / errors[2])


@pytest.mark.parametrize("sampler", [heun, dpmpp_2m])
def test_second_order(sampler):
    assert order(sampler) == pytest.approx(2, abs=0.2)


def test_multistep_matches_diffusers():
    from diffusers import EDMDPMSolverMultistepScheduler

    steps = 12
    scheduler = EDMDPMSolverMultistepScheduler(
        sigma_min=0.002, sigma_max=80, sigma_data=0.5, rho=7, solver_order=2, algorithm_type="dpmsolver++"
    )
    scheduler.set_timesteps(steps)
    x = start(16).float()
    ours = dpmpp_2m(mixture, x, sigma_schedule(steps))
    for sigma, t in zip(sigma_schedule(steps)[:-1], scheduler.timesteps, strict=True):
        x0hat = mixture(x, sigma)
        c_skip, c_out = 0.25 / (sigma**2 + 0.25), sigma * 0.5 / math.sqrt(sigma**2 + 0.25)
        x = scheduler.step((x0hat - c_skip * x) / c_out, t, x).prev_sample
    torch.testing.assert_close(ours, x, atol=2e-4, rtol=1e-3)


def test_multistep_against_heun_at_fewer_calls():
    x = start(500)
    truth = heun(mixture, x, sigma_schedule(1000))
    error = lambda y: (y - truth).square().mean().sqrt().item()  # noqa: E731
    full = error(heun(mixture, x, sigma_schedule(32)))  # 63 calls
    for calls in (32, 16):
        multi = error(dpmpp_2m(mixture, x, sigma_schedule(calls)))
        same_budget = error(heun(mixture, x, sigma_schedule((calls + 1) // 2)))
        assert multi < same_budget, calls
        if calls == 32:
            assert multi < 2 * full  # half the calls for about the same error


@pytest.mark.parametrize(("sampler", "calls"), [(heun, 19), (dpmpp_2m, 10)])
def test_callback_and_number_of_calls(sampler, calls):
    seen, made = [], []

    def denoise(x, sigma):
        made.append(sigma)
        return gaussian(x, sigma)

    sigmas = sigma_schedule(10)
    x = start(2)
    sampler(denoise, x, sigmas, lambda step, x, sigma, x0hat: seen.append((step, x.clone(), sigma, x0hat)))
    assert len(made) == calls
    assert [s for s, *_ in seen] == list(range(10))
    assert [sigma for _, _, sigma, _ in seen] == sigmas[:-1]
    torch.testing.assert_close(seen[0][1], x)
    for _, at, sigma, x0hat in seen:
        torch.testing.assert_close(x0hat, gaussian(at, sigma))


@pytest.mark.parametrize("sampler", [heun, dpmpp_2m])
def test_batch_equals_its_images_one_by_one(sampler):
    torch.manual_seed(0)
    model = EDM2(Network(16, (1, 2), 1, (4,), 16), 8, 3, 4).eval().requires_grad_(False)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("gain"):
                p.fill_(0.5)
    labels, seeds, sigmas = torch.eye(4)[:3], [5, 99, 2**40], sigma_schedule(4)

    def sample(seeds, labels):
        return sampler(lambda x, s: model(x, s, labels), initial_noise(seeds, (3, 8, 8)), sigmas)

    batch = sample(seeds, labels)
    for i, seed in enumerate(seeds):
        torch.testing.assert_close(sample([seed], labels[i : i + 1])[0], batch[i], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(batch[0], batch[1], atol=0.1)
    assert torch.equal(initial_noise([99], (3, 8, 8))[0], initial_noise(seeds, (3, 8, 8))[1])


# --- loss -----------------------------------------------------------------------------------------------------------


def test_noise_levels_are_log_normal():
    sigma = sample_sigma(20_000, -0.4, 1.4, torch.Generator().manual_seed(0))
    assert sigma.log().mean().item() == pytest.approx(-0.4, abs=0.04)
    assert sigma.log().std().item() == pytest.approx(1.4, abs=0.04)


class Oracle(torch.nn.Module):
    """Knows the exact denoiser and a given log-variance."""

    sigma_data = STD

    def __init__(self, u: float) -> None:
        super().__init__()
        self.u = u

    def forward(self, x, sigma, labels=None, return_logvar=False):
        s = sigma[:, None, None, None]
        return gaussian(x, s), torch.full_like(s, self.u)


def test_loss_of_the_exact_denoiser():
    """Its error is STD^2 s^2 / (STD^2 + s^2), so the weighted error is 1 at every noise level."""
    torch.manual_seed(0)
    images = MEAN + STD * torch.randn(8, 3, 128, 128)
    sigma = torch.logspace(-2, 2, 8)
    for u in (0.0, 0.7):
        loss = edm2_loss(Oracle(u), images, None, sigma, torch.randn_like(images))
        assert loss.shape == (8,)
        torch.testing.assert_close(loss, torch.full_like(loss, math.exp(-u) + u), atol=0.03, rtol=0)
    torch.testing.assert_close(loss_weight(torch.tensor(STD), STD), torch.tensor(2 / STD**2))


def test_loss_gradient_against_finite_differences():
    torch.manual_seed(0)
    model = EDM2(Network(8, (1, 2), 1, (4,), 8, unshuffle=2), 16, 3, 5).double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("gain"):
                p.fill_(0.6)
    images, noise = torch.randn(3, 3, 16, 16).double(), torch.randn(3, 3, 16, 16).double()
    labels, sigma = torch.randn(3, 5).double(), torch.tensor([0.1, 1.0, 9.0]).double()
    loss = lambda: edm2_loss(model, images, labels, sigma, noise).sum()  # noqa: E731
    loss().backward()
    checked = 0
    for name, p in model.named_parameters():
        direction = torch.randn_like(p)
        h = 1e-6
        with torch.no_grad():
            p.add_(direction, alpha=h)
            up = loss().item()
            p.sub_(direction, alpha=2 * h)
            down = loss().item()
            p.add_(direction, alpha=h)
        slope = (p.grad * direction).sum().item()
        assert slope == pytest.approx((up - down) / (2 * h), rel=1e-4, abs=1e-6), name
        checked += abs(slope) > 1e-4
    assert checked > 30  # the comparison was not of zeros
