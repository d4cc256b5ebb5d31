"""Locality: maps over the noise schedule (fig 2) and their sizes (fig 10)."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from safetensors.numpy import load_file, save_file

from artifact.context import Context, code_hash
from artifact.plots import COLORS, GRAY, new_figure, outline_square
from artifact.steps import Checkpoint, Step
from lcs.bootstrap import interval, quantiles
from lcs.data.files import atomic_write, content_hash
from lcs.experiments import TEST_LOCATIONS, get_run
from lcs.locality import LocalityTrace, conditional_locality, default_probes, trace_locality
from lcs.training.batches import to_rgb

SOURCES = ("locality.py", "bootstrap.py", "sampling.py", "conditioning.py", "diffusion/samplers.py", "model/*.py",
           "experiments.py", "rng.py", "weights.py")  # fmt: skip
MAPPED = ("grid-all", "grid-single", "list-all", "grid-single-local", "list-all-local")
LOCATIONS = 4  # asked for: one more than trained on, as in the paper
SHOWN_LOCATION = 2  # whose pixel the maps show: the one at the lower left, as in v2
SHOWN_LEVELS = 6
AREA_DRAWS = 200  # resamples of the seeds, for intervals of the 90% squares
HIGH_NOISE, LOW_NOISE = 5.0, 0.2  # sigma above and below
SECONDS = "seconds"  # of the measurement, stored with it


def mapped(scale: str) -> list[Checkpoint]:
    return [Checkpoint(get_run(name, 3, scale)) for name in MAPPED]


def trace_settings(context: Context) -> tuple[tuple, tuple[int, ...], tuple[int, ...]]:
    """Conditions, seeds, and the steps of the trajectory at which locality is measured."""
    effort, first = context.effort, context.settings.seed
    record = sorted({round(i) for i in np.linspace(0, effort.steps - 1, effort.locality_levels)})
    return TEST_LOCATIONS[:LOCATIONS], tuple(range(first, first + effort.locality_seeds)), tuple(record)


def trace_file(context: Context, checkpoint: Checkpoint) -> Path:
    """Where the trace of a checkpoint is kept, by the hash of all it depends on."""
    what = [checkpoint.key, context.settings.sha256(checkpoint), code_hash(SOURCES), context.effort.steps,
            context.settings.device]  # fmt: skip
    name = f"{checkpoint.run.name}-{checkpoint.stage}-{content_hash([*what, *trace_settings(context)])}"
    return context.settings.out / "traces" / f"{name}.safetensors"


def seconds_of_trace(context: Context, checkpoint: Checkpoint) -> float:
    """About how many seconds a trace takes on one core."""
    _, seeds, record = trace_settings(context)
    return len(seeds) * len(record) * (0.9 if checkpoint.run.experiment.local else 0.4)


def trace(context: Context, checkpoint: Checkpoint) -> LocalityTrace:
    """The locality of a checkpoint along its trajectories, measured once for all steps that show it."""
    run, file = checkpoint.run, trace_file(context, checkpoint)
    conditions, seeds, record = trace_settings(context)
    if not file.exists():
        context.say(f"{run.name} ({checkpoint.stage}): {len(record)} noise levels")
        start = time.monotonic()
        found = trace_locality(run, context.model(checkpoint), conditions, seeds, context.effort.steps, record,
                               area_draws=AREA_DRAWS)  # fmt: skip
        arrays = {k: np.ascontiguousarray(v) for k, v in vars(found).items() if isinstance(v, np.ndarray)}
        arrays[SECONDS] = np.array([time.monotonic() - start])
        with atomic_write(file) as temporary:
            save_file(arrays, temporary)
    arrays = load_file(file)
    context.shares(file, float(arrays.pop(SECONDS)[0]))
    return LocalityTrace(run.name, conditions, default_probes(conditions), seeds, record, **arrays)


def fig2(context: Context) -> dict:
    numbers = {}
    traces = []
    for checkpoint in context.checkpoints:
        t = trace(context, checkpoint)
        traces.append((checkpoint, t))
        numbers[checkpoint.run.name] = numbers_of(t)
    for at, name in ((SHOWN_LOCATION, "conditioned"), (-1, "unconditioned")):
        place = "the third asked location, lower left" if at >= 0 else "the image centre, where nothing was asked for"
        context.figure(f"fig2-{name}", draw_maps(traces, at), CAPTION_2.format(name, place))
    context.figure("influence", draw_influence(traces), CAPTION_INFLUENCE)
    context.figure("fig10", draw_metrics(traces), CAPTION_10)
    rows = [{"experiment": name, "conditional locality": f"{n['conditional_locality']:.2f}",
             "95% interval": f"{n['low']:.2f}-{n['high']:.2f}", "seeds": n["seeds"],
             "90% square, high noise": _share(n, "high"), "90% square, low noise": _share(n, "low"),
             "at the centre, high noise": _share(n["centre"], "high")}
            for name, n in numbers.items()]  # fmt: skip
    context.table("locality", rows, "Conditional locality: the share of its own condition in what moves a conditioned "
                  "pixel (1: only its own; 1/4: all alike). Squares as shares of the image, at conditioned pixels, and "
                  "at the centre, where nothing was asked for; high noise: sigma above 5, low noise: sigma below 0.2. "
                  "Intervals: bootstrap over seeds.")  # fmt: skip
    return numbers


CAPTION_2 = (
    "Which pixels of the noisy image the denoised {} pixel depends on (eq. 9, mean over seeds), from high noise to "
    "low; log scale, each map from its own largest value down to a thousandth of it, so compare shapes, not "
    "brightness. The cross marks the pixel ({}), the square holds 90% of the squared gradient; circles are the four "
    "asked locations, filled by the influence of each condition on that pixel (eq. 10; white: the largest of this "
    "model on any pixel, the same in both figures). Row above: the denoised image of the first seed at that noise "
    "level."
)
CAPTION_INFLUENCE = (
    "Influence of each of the four conditions (eq. 10) on the pixel at each location: columns are conditions, rows are "
    "pixels (the last one at the centre, where nothing was asked for), mean over seeds, integrated over log "
    "noise, on one scale for all models (1: the largest of them). A local conditional score has only the diagonal."
)
CAPTION_10 = (
    "Over the noise schedule: area of the 90% square, energy of the gradient, and how much a pixel is moved by its own "
    "condition and by the others. Solid: conditioned pixels (mean of four); dashed: the centre, where nothing was "
    "asked for."
)


def _share(numbers: dict, noise: str) -> str:
    share = numbers[f"area_{noise}"]
    if share is None:
        return "not measured"
    low, high = numbers[f"area_{noise}_interval"]
    return f"{share:.1%} ({low:.1%}-{high:.1%})"


def numbers_of(t: LocalityTrace) -> dict:
    """Conditional locality with its interval over seeds; how large the 90% squares are and how much gradient there is,
    at conditioned pixels; squares at the centre too."""
    low, high = interval(lambda seeds: _locality_of_seeds(t, seeds), len(t.seeds))
    conditioned = [p for p, probe in enumerate(t.probes) if probe.condition is not None]
    energies = t.energies[:, conditioned].mean(axis=1)  # [T]
    return {"conditional_locality": conditional_locality(t), "low": low, "high": high, **areas_of(t, conditioned),
            "centre": areas_of(t, [len(t.probes) - 1]),
            "energy_high": _mean(energies[t.sigmas > HIGH_NOISE]),
            "energy_low": _mean(energies[t.sigmas < LOW_NOISE])}  # fmt: skip


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


def areas_of(t: LocalityTrace, probes: list[int]) -> dict:
    """The 90% squares as shares of the image, mean over the probes: at every noise level, and at high, low and
    intermediate noise (there the largest) with 95% intervals over seeds; None where no level was measured."""
    size = t.maps.shape[-1] ** 2
    share, draws = t.areas[:, probes].mean(axis=1) / size, t.area_draws[:, :, probes].mean(axis=2) / size  # [T], [R, T]
    high, low = t.sigmas > HIGH_NOISE, t.sigmas < LOW_NOISE
    found: dict = {"seeds": len(t.seeds), "sigmas": t.sigmas.tolist(), "area": share.tolist()}
    for name, levels, reduce in (("high", high, np.mean), ("low", low, np.mean), ("between", ~high & ~low, np.max)):
        found[f"area_{name}"] = float(reduce(share[levels])) if levels.any() else None
        found[f"area_{name}_interval"] = quantiles(reduce(draws[:, levels], axis=1)) if levels.any() else None
    return found


def _locality_of_seeds(t: LocalityTrace, chosen: np.ndarray) -> float:
    return conditional_locality(LocalityTrace(**{**t.__dict__, "influence": t.influence[:, chosen]}))


# ---- drawing --------------------------------------------------------------------------------------


def draw_maps(traces: list[tuple[Checkpoint, LocalityTrace]], at: int) -> Figure:
    """Two rows per model: denoised image, gradient map; columns are noise levels."""
    levels = min(SHOWN_LEVELS, len(traces[0][1].sigmas))
    figure = new_figure(1.45 * levels + 1.2, 2.75 * len(traces) + 0.3)
    grid = figure.subplots(2 * len(traces), levels, squeeze=False)
    for r, (checkpoint, t) in enumerate(traces):
        probe = at % len(t.probes)
        columns = np.linspace(0, len(t.sigmas) - 1, levels).round().astype(int)
        total = t.influence.sum(axis=1)  # [T, K, P]
        strongest, total = max(total.max(), 1e-12), total[:, :, probe]  # one scale of shades for a model
        for c, level in enumerate(columns):
            clean, axes = grid[2 * r, c], grid[2 * r + 1, c]
            clean.imshow(_picture(checkpoint, t, level))
            floor = max(t.maps[level, probe].max() * 1e-3, 1e-12)
            axes.imshow(np.log10(np.maximum(t.maps[level, probe], floor)), cmap="magma")
            row, column = t.probes[probe].pixel(t.maps.shape[-1])
            outline_square(axes, (row, column), t.sides[level, probe], "cyan")
            size = t.maps.shape[-1]
            for k, (x, y) in enumerate(t.conditions):
                shade = float(total[level, k] / strongest)
                axes.plot(x * size - 0.5, y * size - 0.5, "o", ms=6, mec="white", mew=0.8, mfc=(1, 1, 1, shade))
            axes.plot(column, row, "+", color="cyan", ms=7, mew=1.4)
            axes.set(xlim=(-0.5, size - 0.5), ylim=(size - 0.5, -0.5))
            if r == 0:
                clean.set_title(f"$\\sigma$ = {t.sigmas[level]:.3g}", fontsize=9)
            for a in (clean, axes):
                a.set_xticks([]), a.set_yticks([])
        grid[2 * r, 0].set_ylabel(checkpoint.run.name, fontsize=9)
        grid[2 * r + 1, 0].set_ylabel("gradient", fontsize=8, color=GRAY)
    return figure


def _picture(checkpoint: Checkpoint, t: LocalityTrace, level: int) -> np.ndarray:
    import torch

    return to_rgb(torch.from_numpy(t.x0hat[level : level + 1]), checkpoint.run)[0]


def draw_influence(traces: list[tuple[Checkpoint, LocalityTrace]]) -> Figure:
    figure = new_figure(2.5 * len(traces), 3.0)
    panels = figure.subplots(1, len(traces), squeeze=False)[0]
    totals = [np.trapezoid(t.influence.mean(axis=1), -np.log(t.sigmas), axis=0).T for _, t in traces]  # each [P, K]
    strongest = max(1e-12, *(total.max() for total in totals))  # one scale for all models
    for axes, (checkpoint, t), total in zip(panels, traces, totals, strict=True):
        axes.imshow(total / strongest, cmap="viridis", vmin=0, vmax=1)
        for (p, k), value in np.ndenumerate(total / strongest):
            axes.text(
                k, p, f"{value:.2f}", ha="center", va="center", fontsize=7, color="white" if value < 0.6 else "black"
            )
        axes.set_xticks(range(total.shape[1]), [str(k + 1) for k in range(total.shape[1])])
        axes.set_yticks(range(total.shape[0]), [str(k + 1) for k in range(total.shape[0] - 1)] + ["centre"])
        axes.set_title(f"{checkpoint.run.name}\nlocality {conditional_locality(t):.2f}", fontsize=9)
        axes.set_xlabel("condition")
    panels[0].set_ylabel("pixel at location")
    return figure


def draw_metrics(traces: list[tuple[Checkpoint, LocalityTrace]]) -> Figure:
    figure = new_figure(12.5, 3.4)
    area, energy, own, others = figure.subplots(1, 4)
    for checkpoint, t in traces:
        color = COLORS[checkpoint.run.experiment.name]
        conditioned = [p for p, probe in enumerate(t.probes) if probe.condition is not None]
        size = t.maps.shape[-1] ** 2
        for axes, values in ((area, t.areas / size), (energy, t.energies)):
            axes.plot(t.sigmas, values[:, conditioned].mean(axis=1), "o-", ms=3, color=color, label=checkpoint.run.name)
            axes.plot(t.sigmas, values[:, -1], "--", lw=1, color=color)
        influence = t.influence.mean(axis=1)  # [T, K, P]
        mine = np.mean([influence[:, k, k] for k in conditioned], axis=0)
        rest = np.mean([influence[:, j, k] for k in conditioned for j in range(influence.shape[1]) if j != k], axis=0)
        own.plot(t.sigmas, mine, "o-", ms=3, color=color)
        others.plot(t.sigmas, rest, "o-", ms=3, color=color)
    top = max(own.get_ylim()[1], others.get_ylim()[1])
    own.set_ylim(0, top), others.set_ylim(0, top)
    for axes, title, label in (
        (area, "90% square", "share of the image"), (energy, "gradient energy", "sum of squares"),
        (own, "a pixel's own condition", "influence"), (others, "another condition (mean)", "influence"),
    ):  # fmt: skip
        axes.set(xscale="log", xlabel="noise level $\\sigma$", title=title, ylabel=label)
        axes.invert_xaxis()
    energy.set_yscale("log")
    area.plot([], [], "--", lw=1, color=GRAY, label="at the centre")
    area.legend(frameon=False, fontsize=7.5)
    return figure


STEPS = [
    Step("fig2", "locality maps and metrics over the noise schedule", "v1 Fig 2, 10; v2 Fig 2", fig2, mapped, 1,
         cost=20, traced=True, sources=SOURCES, also=("fig10",),
         makes=("fig2-conditioned", "fig2-unconditioned", "influence", "fig10", "locality")),
]  # fmt: skip
