"""`lcs bench locality`: pixel gradients (v1 eq. 9), `lcs.locality` against the plain loop, in one run.

The loop is what one would write first: for each noise level, pixel and channel a forward pass of the batch and one
backward pass. Both use one thread; processor time, so that other work on the machine counts less; medians of
alternating repetitions.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor, nn

from lcs.bench.compute import single_thread
from lcs.experiments import GRID, TEST_LOCATIONS, Scale
from lcs.locality import TEST_COUNT, default_probes, gradient_maps
from lcs.model.edm2 import EDM2
from lcs.model.local import LocalEDM2


def gradient_maps_loop(model: nn.Module, x: Tensor, sigma: Tensor, labels: Tensor, pixels) -> Tensor:
    """The definition, one gradient at a time; the images of one noise level form a batch. -> [N, P, H, W]"""
    maps = x.new_zeros(len(x), len(pixels), *x.shape[-2:])
    for level in sigma.unique():
        here = sigma == level
        for k, (row, column) in enumerate(pixels):
            for c in range(x.shape[1]):
                part = x[here].requires_grad_()
                x0hat = model(part, sigma[here], labels[here])
                (gradient,) = torch.autograd.grad(x0hat[:, c, row, column].sum(), part)
                maps[here, k] += gradient[:, c].abs()
    return maps


def with_live_gains(model: nn.Module, gain: float = 0.6) -> nn.Module:
    """A model that is not trained passes nothing through its zero-initialised gains; this one does."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gain"):
                parameter.fill_(gain)
    return model.eval().requires_grad_(False)


def bench_locality(scale: Scale, levels: int = 8, batch: int = 2, repetitions: int = 3) -> dict[str, float]:
    """The paper's five probes at `levels` noise levels, `batch` images each; the local model on one image."""
    torch.manual_seed(0)
    size = scale.resolution
    pixels = [probe.pixel(size) for probe in default_probes(TEST_LOCATIONS[:TEST_COUNT])]
    model = with_live_gains(EDM2(scale.network, size, 3, GRID**2, scale.sigma_data))
    result = _compare(model, levels, batch, size, pixels, repetitions)
    local = with_live_gains(LocalEDM2(scale.local_network, size, "grid", scale.local_radius, scale.list_slots))
    small = _compare(local, 1, 1, size, pixels[:1], 1)
    result |= {f"local_{name}": small[name] for name in ("speedup", "max_abs_difference")}
    return result | {"noise_levels": levels, "batch": batch, "pixels": len(pixels)}


def _compare(model: nn.Module, levels: int, batch: int, size: int, pixels, repetitions: int) -> dict[str, float]:
    n = levels * batch
    sigma = torch.logspace(-2, 1.9, levels).repeat_interleave(batch)
    x = torch.randn(n, 3, size, size) * (sigma**2 + 0.25).sqrt()[:, None, None, None]
    labels = (torch.rand(n, model.label_dim) < 4 / GRID**2).float()
    loop_times, batched_times = [], []
    with single_thread():
        gradient_maps(model, x[:1], sigma[:1], labels[:1], pixels[:1])  # warm up
        for _ in range(repetitions):
            start = time.process_time()
            batched = gradient_maps(model, x, sigma, labels, pixels)
            batched_times.append(time.process_time() - start)
            start = time.process_time()
            loop = gradient_maps_loop(model, x, sigma, labels, pixels)
            loop_times.append(time.process_time() - start)
    seconds = {"loop_seconds": statistics.median(loop_times), "batched_seconds": statistics.median(batched_times)}
    return seconds | {
        "speedup": seconds["loop_seconds"] / seconds["batched_seconds"],
        "max_abs_difference": float((loop - batched).abs().max()),
        "largest_gradient": float(loop.max()),
    }
