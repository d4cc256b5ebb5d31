"""Figures of samples: every experiment for K = 0..12 (fig 1), one-object training (fig 4), grid-all by M (fig 8)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from artifact.context import Context
from artifact.plots import new_figure, picture_grid
from artifact.steps import Checkpoint, Step
from lcs.experiments import EXPERIMENTS, TEST_LOCATIONS, get_run

MOST_K = len(TEST_LOCATIONS)
PAGED = (1, 3)  # objects in training whose pages fig 4 and fig 1 have


def conditioned(scale: str, objects: int = 3) -> list[Checkpoint]:
    """All experiments with conditions, trained on 1..`objects`."""
    return [
        Checkpoint(get_run(e.name, objects, scale))
        for e in EXPERIMENTS.values()
        if objects in e.objects and e.conditioner != "none"
    ]


def fig1(context: Context) -> dict:
    """One row per experiment, K from left to right, and a page of 8 samples per K for each."""
    rows = [(c.run.name, context.counts(c)) for c in context.checkpoints]
    context.figure("fig1", draw_rows(rows, MOST_K), CAPTION_1)
    draw_pages(context, rows)
    return {name: counts["k_max"] for name, counts in rows}


def draw_pages(context: Context, rows: Sequence[tuple[str, dict]]) -> None:
    for name, counts in rows:
        caption = f"{name}: up to 8 samples (rows) for every K (columns). {verdict(counts)}"
        context.figure(name, draw_page(counts), caption)


CAPTION_1 = (
    "One sample (the first noise seed) per experiment and K; dots mark the asked locations. Below each picture: "
    "objects in place, and extra ones after the plus; green where all are in place and no more are extra than training "
    "may have left unlabelled. All models were trained on 1-3 objects; the line marks where training ends. color-m3 is "
    "asked for K colours instead: its numbers count those."
)


def fig4(context: Context) -> dict:
    """Trained on single objects only: the standard model never draws two, the local one does."""
    rows = [(c.run.name, context.counts(c)) for c in context.checkpoints]
    context.figure(
        "fig4", draw_rows(rows, MOST_K),
        "Trained on scenes with one object only. In the paper the standard model always draws one, and the local "
        f"model, which cannot know that there is only one, up to six. Here K_max is {_k_max_of(rows)}. "
        "Green: all in place, nothing extra.",
    )  # fmt: skip
    draw_pages(context, rows)
    return {name: counts["k_max"] for name, counts in rows}


def fig8(context: Context) -> dict:
    rows = [(c.run.name, context.counts(c)) for c in context.checkpoints]
    context.figure(
        "fig8", draw_rows(rows, MOST_K),
        f"grid-all trained on 1..M objects, asked for K. K_max is {_k_max_of(rows)}; in the paper, for M = 1-6: 1, 5, "
        "9, 10, 10, 11.",
    )  # fmt: skip
    draw_pages(context, [(name, counts) for name, counts in rows if counts["objects"] not in PAGED])
    return {name: counts["k_max"] for name, counts in rows}


def _k_max_of(rows: Sequence[tuple[str, dict]]) -> str:
    return ", ".join(f"{counts['k_max']} ({name})" for name, counts in rows)


def draw_rows(rows: Sequence[tuple[str, dict]], most: int) -> Figure:
    """One picture per run and K, with what was counted in it."""
    below = 14  # pixels under a picture for its count
    pictures = [[_first(counts, k) for k in range(most + 1)] for _, counts in rows]
    figure, axes, at = _canvas(pictures, gap=(below, 3), width=0.86)
    for k in range(most + 1):
        axes.text(*at(0, k, 0.5, -0.06), f"K = {k}", ha="center", va="bottom", fontsize=9)
    for r, (name, counts) in enumerate(rows):
        axes.text(*at(r, 0, -0.08, 0.5), name, ha="right", va="center", fontsize=9)
        for row in counts["rows"]:
            k, in_place, extras = row["k"], row["in_place"][0], row["extras"][0]
            if k > most:
                continue
            _mark(axes, at, r, k, k, counts)
            right = in_place == k and extras <= counts["extras_allowed"]
            text, color = f"{in_place} + {extras}" if extras else f"{in_place}", "#1a7f37" if right else "#b3261e"
            axes.text(*at(r, k, 0.5, 1.03), text, ha="center", va="top", fontsize=8, color=color)
        (x, top), (_, bottom) = at(r, counts["objects"] + 1, 0, 0), at(r, counts["objects"] + 1, 0, 1.15)
        axes.plot([x - 2, x - 2], [top, bottom], color="black", lw=1.2)
    return figure


def draw_page(counts: dict) -> Figure:
    """Columns are K, rows are samples."""
    ks = sorted(counts["pictures"])
    shown = max(len(p) for p in counts["pictures"].values())
    pictures = [[counts["pictures"][k][r] for k in ks] for r in range(shown)]
    figure, axes, at = _canvas(pictures, gap=(3, 3), width=0.8)
    for c, k in enumerate(ks):
        axes.text(*at(0, c, 0.5, -0.06), f"K = {k}", ha="center", va="bottom", fontsize=8)
        for r in range(shown):
            _mark(axes, at, r, c, k, counts)
    return figure


def _first(counts: dict, k: int) -> np.ndarray | None:
    return counts["pictures"][k][0] if k in counts["pictures"] else None


def _canvas(pictures: Sequence[Sequence[np.ndarray | None]], gap: tuple[int, int], width: float):
    """All pictures in one image (quicker than an axis each), and `at(row, column, x, y)` -> its coordinates there."""
    size = next(p for row in pictures for p in row if p is not None).shape[0]
    image = picture_grid(pictures, gap)
    inches = width / size
    figure = new_figure(image.shape[1] * inches + 1.4, image.shape[0] * inches + 0.5)
    axes = figure.subplots()
    axes.imshow(image, interpolation="nearest")
    axes.set_axis_off()

    def at(row: int, column: int, x: float, y: float) -> tuple[float, float]:
        return column * (size + gap[1]) + x * size - 0.5, row * (size + gap[0]) + y * size - 0.5

    return figure, axes, at


def _mark(axes, at, row: int, column: int, k: int, counts: dict) -> None:
    """Dots at the asked locations."""
    if counts["experiment"] == "color" or not k:
        return
    points = np.array([at(row, column, x, y) for x, y in TEST_LOCATIONS[:k]])
    axes.plot(points[:, 0], points[:, 1], "o", ms=2.2, mfc="white", mec="black", mew=0.5)


def verdict(counts: dict) -> str:
    share = [f"{row['k']}: {np.mean(row['in_place']):.1f}" for row in counts["rows"] if row["k"]]
    return f"K_max = {counts['label']}. Mean number in place by K: {', '.join(share)}."


STEPS = [
    Step("fig1", "samples of every experiment for K = 0..12", "v1 Fig 1, v2 Fig 1", fig1, conditioned, 1,
         cost=20, counted=True, makes=("fig1", "*-m3")),
    Step("fig4", "trained on one object: standard against local", "v1 Fig 4", fig4,
         lambda scale: [Checkpoint(get_run(name, 1, scale)) for name in ("grid-all", "grid-single-local")], 1,
         cost=6, counted=True, makes=("fig4", "*-m1")),
    Step("fig8", "grid-all trained on 1..M objects", "v1 Fig 8", fig8,
         lambda scale: [Checkpoint(get_run("grid-all", m, scale)) for m in EXPERIMENTS["grid-all"].objects], 1,
         cost=6, counted=True, makes=("fig8", "grid-all-m*")),
]  # fmt: skip
