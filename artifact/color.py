"""Fig 5 and 11: colours. Length generalization, and where in the network colours are disentangled."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator

from artifact.context import Context
from artifact.plots import COLORS, new_figure
from artifact.samples import draw_page, draw_rows
from artifact.steps import Checkpoint, Step
from artifact.tables import summary
from lcs.bootstrap import interval, mean_of_pairs
from lcs.experiments import EXPERIMENTS, TEST_COLORS, get_run
from lcs.features import FeatureCosines, condition_cosines

FIG_1_PAGE = "color-m3"  # its page of samples is drawn there


def colored(scale: str) -> list[Checkpoint]:
    return [Checkpoint(get_run("color", m, scale)) for m in EXPERIMENTS["color"].objects]


def fig5(context: Context) -> dict:
    numbers, rows, matrices = {}, [], []
    for checkpoint in context.checkpoints:
        name = checkpoint.run.name
        counts = context.counts(checkpoint)
        rows.append((name, counts))
        context.say(f"{name}: features of {len(TEST_COLORS)} colours")
        seeds = range(context.settings.seed, context.settings.seed + context.effort.feature_samples)
        cosines = condition_cosines(checkpoint.run, context.model(checkpoint), seeds, context.effort.steps)
        matrices.append((name, cosines))
        early = early_encoder(cosines)
        by_layer = cosines.off_diagonal()[0]
        numbers[name] = summary(counts) | {
            "feature_space": float(by_layer[early].mean()), "image": float(by_layer[-1]),
            "most_disentangled": cosines.layers[int(np.argmin(by_layer[:-1]))], "lowest": float(by_layer[:-1].min()),
            "feature_space_interval": over_colors(cosines.cosines[0][early].mean(axis=0)),
            "image_interval": over_colors(cosines.cosines[0, -1]), "sigma": float(cosines.sigmas[0]),
        }  # fmt: skip
    context.figure("fig5-samples", draw_rows(rows, len(TEST_COLORS)), "Colour-conditioned models asked for K different "
                   f"colours, in the order {', '.join(TEST_COLORS)}. Below: colours that were asked for and drawn, and "
                   "extra objects after the plus.")  # fmt: skip
    for name, counts in rows:
        if name == FIG_1_PAGE:
            continue
        context.figure(f"fig5-{name}", draw_page(counts), f"{name}: up to 8 samples (rows) for every K (columns).")
    context.table("fig5-palette", palette_rows(rows), CAPTION_PALETTE)
    context.figure("fig5-feature-space", draw_feature_space(matrices), CAPTION_5)
    for name, cosines in matrices:
        context.figure(f"fig11-{name}", draw_all_layers(cosines), f"{name}: cosines of the mean differences of the 8 "
                       f"colours ({', '.join(TEST_COLORS)}, from the upper left) in every conditioned layer and in the "
                       "image, at the highest noise level, from -1 (blue) to 1 (red). Above each: layer and mean "
                       "off-diagonal cosine.")  # fmt: skip
    return numbers


CAPTION_PALETTE = (
    "Do objects heed each other's colours? Samples that show as many objects as were asked for, and of these the share "
    "with each asked colour once; last, that share if every object took one of the asked colours whatever the others "
    "took, K! / K^K."
)


def palette_rows(counted: list[tuple[str, dict]]) -> list[dict]:
    """Rows for the K of training, where the number of objects is right often enough to look at their colours."""
    table = []
    for name, counts in counted:
        for row in counts["rows"][1 : counts["objects"] + 1]:
            k, in_place = row["k"], np.asarray(row["in_place"])
            right_number = in_place + row["extras"] == k
            each_once = int((in_place[right_number] == k).sum())
            share = f"{each_once / right_number.sum():.0%}" if right_number.any() else ""
            table.append({
                "model": name, "K": k, "samples": len(in_place), "right number": int(right_number.sum()),
                "each colour once": each_once, "share": share,
                "on their own": f"{math.factorial(k) / k**k:.0%}",
            })  # fmt: skip
    return table


CAPTION_5 = (
    "Left of each pair: cosines between mean differences of colours in the paper's feature space, the mean of the "
    "encoder "
    "layers at the two highest resolutions; right: in the denoised image. Bottom: mean off-diagonal cosine by layer, "
    "from "
    "the input to the output, at three noise levels; low is disentangled."
)


def over_colors(matrix: np.ndarray) -> tuple[float, float]:
    """95% interval of the mean off-diagonal cosine: bootstrap over the colours of a matrix [N, N]"""
    return interval(lambda chosen: mean_of_pairs(matrix, chosen), len(matrix))


def early_encoder(cosines: FeatureCosines) -> list[int]:
    """The paper's "feature space": encoder layers at the two highest resolutions."""
    encoder = [i for i, layer in enumerate(cosines.layers) if layer.startswith("enc")]
    highest = sorted({cosines.resolutions[i] for i in encoder})[-2:]
    return [i for i in encoder if cosines.resolutions[i] in highest]


def draw_feature_space(matrices: list[tuple[str, FeatureCosines]]) -> Figure:
    figure = new_figure(5.2 * len(matrices), 5.6)
    grid = figure.subplots(2, 2 * len(matrices), height_ratios=[1, 0.9], squeeze=False)
    for i, (name, cosines) in enumerate(matrices):
        feature = cosines.cosines[0][early_encoder(cosines)].mean(axis=0)
        draw_matrix(grid[0, 2 * i], feature, f"{name}\nfeature space")
        shown = draw_matrix(grid[0, 2 * i + 1], cosines.cosines[0, -1], "image")
        for axes in grid[1, 2 * i : 2 * i + 2]:
            axes.remove()
        curve = figure.add_subplot(grid[1, 0].get_gridspec()[1, 2 * i : 2 * i + 2])
        for t, (sigma, style) in enumerate(zip(cosines.sigmas, ("-", "--", ":"), strict=False)):
            curve.plot(
                cosines.off_diagonal()[t],
                style,
                marker="o",
                ms=3,
                color=COLORS["color"],
                label=f"$\\sigma$ = {sigma:.3g}",
            )
        curve.axhline(0, color="#bbbbbb", lw=0.8)
        first_decoder = next(k for k, layer in enumerate(cosines.layers) if layer.startswith("dec"))
        curve.axvline(first_decoder - 0.5, color="#bbbbbb", ls=":", lw=1)
        curve.set(xlabel="layer (encoder | decoder, image)", ylabel="mean off-diagonal cosine", ylim=(-0.3, 1))
        curve.xaxis.set_major_locator(MaxNLocator(integer=True))
        curve.legend(frameon=False, fontsize=8)
    figure.colorbar(shown, ax=grid[0, :].tolist(), label="cosine", fraction=0.03, pad=0.01)
    return figure


def draw_matrix(axes, matrix: np.ndarray, title: str, ticks: bool = True) -> AxesImage:
    """Cosines from -1 (blue) to 1 (red)."""
    image = axes.imshow(matrix, cmap="RdBu_r", vmin=-1, vmax=1)
    axes.set_title(title, fontsize=8)
    if ticks:
        axes.set_xticks(range(len(TEST_COLORS)), TEST_COLORS, rotation=90, fontsize=6.5)
        axes.set_yticks(range(len(TEST_COLORS)), TEST_COLORS, fontsize=6.5)
    else:
        axes.set_xticks([]), axes.set_yticks([])
    return image


def draw_all_layers(cosines: FeatureCosines) -> Figure:
    columns = 7
    lines = -(-len(cosines.layers) // columns)
    figure = new_figure(1.45 * columns, 1.7 * lines)
    grid = figure.subplots(lines, columns, squeeze=False).ravel()
    values = cosines.off_diagonal()[0]
    for axes in grid[len(cosines.layers) :]:
        axes.set_axis_off()
    for axes, layer, matrix, value in zip(grid, cosines.layers, cosines.cosines[0], values, strict=False):
        draw_matrix(axes, matrix, f"{layer}\n{value:.2f}", ticks=False)
    return figure


STEPS = [
    Step("fig5", "colour: length generalization and feature space", "v1 Fig 5, 11", fig5, colored, 1, cost=250,
         counted=True, sources=("features.py", "bootstrap.py"), also=("fig11",), makes=("fig5-*", "fig11-*")),
]  # fmt: skip
