"""Fig 9: what each conditioner tells the model about the same scenes."""

from __future__ import annotations

from artifact.context import Context
from artifact.plots import new_figure, show
from artifact.steps import Step
from lcs.conditioning import CONDITIONERS
from lcs.render.fast import render
from lcs.scenes.placement import random_scene

SCENES = ((1, 11), (2, 12), (3, 13), (3, 16))  # (objects, seed)


def fig9(context: Context) -> dict:
    shown = list(CONDITIONERS.values())
    figure = new_figure(1.6 * (len(shown) + 1), 1.65 * len(SCENES) + 0.3)
    grid = figure.subplots(len(SCENES), len(shown) + 1)
    for r, (count, seed) in enumerate(SCENES):
        scene = random_scene(seed, count)
        show(grid[r, 0], render([scene], 128, 128)[0][0], "scene" if r == 0 else "")
        for axes, conditioner in zip(grid[r, 1:], shown, strict=True):
            label = conditioner.encode(scene, context.settings.seed, seed)
            show(axes, conditioner.picture(label), conditioner.name if r == 0 else "")
    context.figure(
        "fig9", figure,
        "The same scenes and what each conditioner says of them. Grids mark the cells of labelled objects; the list "
        "has a "
        "row per slot: presence (red), then x and y as bars; the colour conditioner counts objects of each colour.",
    )  # fmt: skip
    return {}


STEPS = [Step("fig9", "examples of conditioning", "v1 Fig 9", fig9, cost=5, makes=("fig9",),
              sources=("conditioning.py", "render/*.py", "scenes/*.py"))]  # fmt: skip
