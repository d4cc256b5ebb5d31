"""Fig 12: pixel locality of an unconditional CIFAR-10 model over the noise schedule."""

from __future__ import annotations

import numpy as np

from artifact.context import Context
from artifact.locality import AREA_DRAWS, SOURCES, areas_of
from artifact.plots import new_figure, outline_square
from artifact.steps import Checkpoint, Step
from lcs.experiments import get_run
from lcs.locality import Probe, trace_locality
from lcs.training.batches import to_rgb

PROBES = (Probe("centre", (0.5, 0.5)), Probe("upper left", (0.25, 0.25)), Probe("lower right", (0.7, 0.65)))
SHOWN = 6
CAPTION_12 = (
    "An unconditional model of CIFAR-10: denoised image, gradient map of the centre pixel (log scale) with the square "
    "that holds 90% of its energy, and the size of that square for three pixels. The paper's finding: at high noise a "
    "pixel depends on the whole image, pixel locality is lost."
)


def fig12(context: Context) -> dict:
    import torch

    run, effort = context.checkpoints[0].run, context.effort
    model = context.model(context.checkpoints[0])
    record = sorted({round(i) for i in np.linspace(0, effort.steps - 1, max(effort.locality_levels, SHOWN))})
    seeds = range(context.settings.seed, context.settings.seed + 2 * effort.locality_seeds)
    trace = trace_locality(run, model, (), seeds, effort.steps, record, PROBES, area_draws=AREA_DRAWS)
    share = trace.areas / trace.maps.shape[-1] ** 2
    figure = new_figure(9.5, 5.6)
    grid = figure.subplots(3, SHOWN, height_ratios=[1, 1, 1.1])
    for c, level in enumerate(np.linspace(0, len(record) - 1, SHOWN).round().astype(int)):
        grid[0, c].imshow(to_rgb(torch.from_numpy(trace.x0hat[level : level + 1]), run)[0])
        grid[0, c].set_title(f"$\\sigma$ = {trace.sigmas[level]:.3g}", fontsize=9)
        floor = max(trace.maps[level, 0].max() * 1e-3, 1e-12)
        grid[1, c].imshow(np.log10(np.maximum(trace.maps[level, 0], floor)), cmap="magma")
        outline_square(grid[1, c], PROBES[0].pixel(trace.maps.shape[-1]), trace.sides[level, 0], "cyan")
        for axes in grid[:2, c]:
            axes.set_xticks([]), axes.set_yticks([])
    grid[0, 0].set_ylabel("denoised", fontsize=9)
    grid[1, 0].set_ylabel("gradient", fontsize=9)
    for axes in grid[2]:
        axes.remove()
    curve = figure.add_subplot(grid[0, 0].get_gridspec()[2, :])
    for p, probe in enumerate(PROBES):
        curve.plot(trace.sigmas, share[:, p], "o-", ms=3, label=probe.name)
    curve.set(xscale="log", xlabel="noise level $\\sigma$", ylabel="90% square, share of image", ylim=(0, 1.02))
    curve.invert_xaxis()
    curve.legend(frameon=False, fontsize=8)
    context.figure("fig12", figure, CAPTION_12)
    return areas_of(trace, list(range(len(PROBES))))


STEPS = [Step("fig12", "CIFAR-10: pixel locality over the noise schedule", "v1 Fig 12", fig12,
              lambda scale: [Checkpoint(get_run("cifar10", 0, scale))], 1, cost=10, sources=SOURCES,
              makes=("fig12",))]  # fmt: skip
