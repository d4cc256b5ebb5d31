"""What the figures share: size, type, colours, picture grids."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

matplotlib.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "pdf.fonttype": 42})

# One colour per experiment, the same in every figure: blue family composes, red family does not.
COLORS = {
    "grid-all": "#1b6ca8", "grid-random": "#4aa3df", "grid-drop-one": "#9ccbe8", "grid-single": "#d1495b",
    "list-all": "#e08d3c", "grid-single-local": "#5b8c5a", "list-all-local": "#9dbf6f", "color": "#7b4b94",
    "cifar10": "#6b6b6b",
}  # fmt: skip
GRAY = "#6b6b6b"


def new_figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def show(axes: Axes, image: np.ndarray, title: str = "") -> None:
    axes.imshow(image)
    axes.set_xticks([]), axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set(visible=True, color="#cccccc")
    if title:
        axes.set_title(title, fontsize=8)


def outline_square(axes: Axes, pixel: tuple[int, int], side: int, color: str = "white", **style) -> None:
    """The square of odd `side` centred on pixel (row, column)."""
    row, column = pixel
    axes.add_patch(Rectangle((column - side / 2, row - side / 2), side, side, fill=False, ec=color, lw=1.2, **style))


def picture_grid(rows: Sequence[Sequence[np.ndarray | None]], gap: tuple[int, int]) -> np.ndarray:
    """Rows of equal pictures on white, uint8, `gap` pixels apart (below, right); None leaves a hole."""
    height, width = next(p for row in rows for p in row if p is not None).shape[:2]
    columns = max(len(row) for row in rows)
    canvas = np.full((len(rows) * (height + gap[0]), columns * (width + gap[1]), 3), 255, np.uint8)
    for r, row in enumerate(rows):
        for c, picture in enumerate(row):
            if picture is not None:
                top, left = r * (height + gap[0]), c * (width + gap[1])
                canvas[top : top + height, left : left + width] = picture
    return canvas
