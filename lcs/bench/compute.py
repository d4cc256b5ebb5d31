"""What share of this machine's matrix-multiply speed the hot paths reach: a training step, sampling, the local model.

Single thread, float32. FLOPs are counted by PyTorch from the shapes (2 per multiply-add; convolutions, matrix products
and attention only), so everything else a path does (activations, norms, optimizer) lowers its share. Times are
processor time, which for one thread on an idle machine is the time that passes; on a machine that others use too
it leaves out the moments when they run. What is left of their influence (clock, caches, memory) only ever slows
things down, so the best of the repetitions is compared with the best of the matrix products timed between them:
like with like. `median_share` is what the median repetition reaches of that same peak.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lcs.diffusion.loss import edm2_loss, sample_sigma
from lcs.diffusion.samplers import heun, initial_noise, sigma_schedule
from lcs.experiments import GRID, Scale
from lcs.model.edm2 import EDM2
from lcs.model.layers import normalize_weights_
from lcs.model.local import LocalEDM2, all_cells, extract_patches
from lcs.training.ema import PowerEMA
from lcs.training.optimizer import build_optimizer

GEMM_SIZE = 1024
WARM_UP = 4  # runs before the first that is timed
HEUN_STEPS = 32  # of a full sample: 63 network calls


@contextmanager
def single_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def gemm_operands() -> Tensor:
    return torch.randn(3, GEMM_SIZE, GEMM_SIZE)  # two factors and room for the product


def gemm_gflops(seconds: float = 0.3, operands: Tensor | None = None) -> float:
    """Speed of a square float32 matrix product, GFLOP/s; best of several, single thread."""
    a, b, out = gemm_operands() if operands is None else operands
    with single_thread(), torch.no_grad():
        torch.mm(a, b, out=out)  # warm up
        best, end = float("inf"), time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.process_time()
            torch.mm(a, b, out=out)
            best = min(best, time.process_time() - start)
    return 2 * GEMM_SIZE**3 / best / 1e9


def count_flops(work: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def measure(work: Callable[[], object], flops: int, items: int, seconds: float) -> dict[str, float]:
    """Run `work` (which handles `items` samples in `flops` operations) for about `seconds`.

    The first runs ask the system for memory, page by page, which later ones find again; they are not timed. The
    matrices of the product stay where they are, so that they do not scatter the memory the work reuses.
    """
    rates, gemms = [], []
    with single_thread():
        for _ in range(WARM_UP):
            work()
        operands = gemm_operands()
        end = time.perf_counter() + seconds
        while len(rates) < 3 or time.perf_counter() < end:
            gemms.append(gemm_gflops(operands=operands))
            start = time.process_time()
            work()
            rates.append(flops / (time.process_time() - start) / 1e9)
    best, peak, median = max(rates), max(gemms), statistics.median(rates)
    return {
        "samples_per_second": best * 1e9 / flops * items,
        "gflops": best,
        "gemm_gflops": peak,
        "share": best / peak,
        "median_gflops": median,
        "median_share": median / peak,
    }


def _images(batch: int, resolution: int) -> Tensor:
    return torch.randn(batch, 3, resolution, resolution) * 0.5


def training_step(scale: Scale, label_dim: int, compiled: bool = False) -> Callable[[], None]:
    """A whole training step: loss, backward, optimizer, normalisation, both EMAs. `compiled`: in bf16, as one graph."""
    torch.manual_seed(0)
    batch = scale.recipe.batch
    model = EDM2(scale.network, scale.resolution, 3, label_dim, scale.sigma_data)
    model.to(memory_format=torch.channels_last)  # as the trainer holds it
    optimizer = build_optimizer(model, scale.recipe)
    ema = PowerEMA(dict(model.named_parameters()), scale.recipe.ema_stds)
    images, labels = _images(batch, scale.resolution), torch.randint(0, 2, (batch, label_dim)).float()
    forward = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model

    def step() -> None:
        sigma = sample_sigma(batch, scale.recipe.p_mean, scale.recipe.p_std)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=compiled):
            losses = edm2_loss(forward, images, labels, sigma, torch.randn_like(images))
        losses.mean().backward()
        optimizer.step()
        normalize_weights_(model)
        ema.update(dict(model.named_parameters()))

    return step


def bench_train(scale: Scale, label_dim: int = GRID**2, seconds: float = 20.0) -> dict[str, float]:
    """A training step in float32 (the optimizer's matrix products count too)."""
    step = training_step(scale, label_dim)
    return measure(step, count_flops(step), scale.recipe.batch, seconds)


def bench_compiled(scale: Scale, label_dim: int = GRID**2, seconds: float = 20.0) -> dict[str, float]:
    """A training step compiled and in bf16 against the plain one in float32, by turns: median processor times."""
    steps = {"plain": training_step(scale, label_dim), "compiled_bf16": training_step(scale, label_dim, True)}
    times: dict[str, list[float]] = {name: [] for name in steps}
    with single_thread():
        for step in steps.values():
            for _ in range(WARM_UP):
                step()
        end = time.perf_counter() + seconds
        while len(times["plain"]) < 3 or time.perf_counter() < end:
            for name, step in steps.items():
                start = time.process_time()
                step()
                times[name].append(time.process_time() - start)
    rates = {f"{name}_samples_per_second": scale.recipe.batch / statistics.median(t) for name, t in times.items()}
    return {
        **rates,
        "speedup": rates["compiled_bf16_samples_per_second"] / rates["plain_samples_per_second"],
        "amx": torch.cpu._is_amx_tile_supported(),
    }


def bench_sample(scale: Scale, label_dim: int = GRID**2, batch: int = 32, seconds: float = 20.0) -> dict[str, float]:
    """Sampling: network calls of Heun's method. `samples_per_second` is for full samples of 32 steps (63 calls)."""
    torch.manual_seed(0)
    model = EDM2(scale.network, scale.resolution, 3, label_dim, scale.sigma_data).eval().requires_grad_(False)
    labels = torch.randint(0, 2, (batch, label_dim)).float()
    noise = initial_noise(range(batch), (3, scale.resolution, scale.resolution))
    steps = 4  # timed: 7 calls at a time

    @torch.no_grad()
    def work() -> None:
        heun(lambda x, sigma: model(x, sigma, labels), noise, sigma_schedule(steps))

    result = measure(work, count_flops(work), batch, seconds)
    result["samples_per_second"] *= (2 * steps - 1) / (2 * HEUN_STEPS - 1)
    return result


@torch.no_grad()
def naive_local(model: LocalEDM2, x: Tensor, sigma: float, labels: Tensor) -> Tensor:
    """The definition of local denoising, one patch per forward pass: what `LocalEDM2.forward` is compared with."""
    cells = all_cells(len(x), model.k)
    patches, patch_labels = extract_patches(x, cells, model.k), model.patch_labels(labels, cells)
    m = x.shape[-1] // GRID
    at = slice(model.k * m, model.k * m + m)
    out = torch.empty_like(x)
    for n, (i, j) in enumerate(cells.flatten(0, 1).tolist()):
        x0hat = model.denoiser(patches[n : n + 1], sigma, patch_labels[n : n + 1])
        out[n // cells.shape[1], :, i * m : (i + 1) * m, j * m : (j + 1) * m] = x0hat[0, :, at, at]
    return out


def bench_local(scale: Scale, kind: str = "grid", seconds: float = 20.0) -> dict[str, float]:
    """One denoiser call of the local model on one image, batched and patch by patch."""
    torch.manual_seed(0)
    model = LocalEDM2(scale.local_network, scale.resolution, kind, scale.local_radius, scale.list_slots)
    model.eval().requires_grad_(False)
    x, labels = _images(1, scale.resolution), torch.zeros(1, model.label_dim)

    @torch.no_grad()
    def batched() -> None:
        model(x, 1.0, labels)

    flops = count_flops(batched)
    result = measure(batched, flops, 1, seconds / 2)
    result["batched_seconds"] = 1 / result["samples_per_second"]
    times = []
    with single_thread():
        for _ in range(3):
            start = time.process_time()
            naive_local(model, x, 1.0, labels)
            times.append(time.process_time() - start)
    result["naive_seconds"] = min(times)
    result["speedup"] = result["naive_seconds"] / result["batched_seconds"]
    return result
