"""Conditioners: what the model is told about a scene. Changing only this flips the paper's outcome.

- `grid-*`: how many labelled objects have their centre in each cell of a 16x16 grid, flattened. Which
  objects are labelled differs: all, one at random, a random number (at least one), or all but one.
- `list-all`: the locations one after another; slot i holds (1, x, y), or zeros if there is no i-th object.
- `color`: how many objects there are of each of the 8 colours.

Every conditioner is a vector that enters the network through its embedding. At test time conditions
are given directly (`encode_conditions`), and `leave_one_out` removes them one at a time, which is how
conditional locality is measured (v1, eq. 10).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lcs.errors import LcsError
from lcs.experiments import GRID, TEST_COLORS, TEST_LOCATIONS
from lcs.rng import hashed_uniform
from lcs.scenes import world
from lcs.scenes.placement import MAX_OBJECTS
from lcs.scenes.scene import Scene
from lcs.scenes.table import SceneTable, table_of

Location = tuple[float, float]
_LABEL_STREAM = 1  # of lcs.rng: which objects of a sample are labelled
MAX_CELL_COUNT = 255


# ---- conditions given by a person -----------------------------------------------------------------


def check_location(location) -> Location:
    """A pair of fractions of the image, x right and y down."""
    try:
        x, y = (float(v) for v in location)
    except (TypeError, ValueError):
        raise LcsError(f"a location is a pair (x, y), got {location!r}") from None
    if not (0 <= x < 1 and 0 <= y < 1):  # also refuses NaN
        raise LcsError(f"location ({x}, {y}) lies outside the image; x and y must be in [0, 1)")
    return x, y


def check_color(color) -> str:
    if color not in world.COLORS:
        raise LcsError(f"unknown colour {color!r}; choose from {', '.join(TEST_COLORS)}")
    return color


def cell_of(location: Location) -> tuple[int, int]:
    """Row and column of the grid cell that holds a location."""
    x, y = check_location(location)
    return int(y * GRID), int(x * GRID)


# ---- which objects are labelled -------------------------------------------------------------------


def _all(counts: np.ndarray, _u: np.ndarray) -> np.ndarray:
    return counts


def _one(counts: np.ndarray, _u: np.ndarray) -> np.ndarray:
    return np.minimum(counts, 1)


def _random_number(counts: np.ndarray, u: np.ndarray) -> np.ndarray:
    return np.minimum(counts, 1 + (u * counts).astype(np.int64))


def _all_but_one(counts: np.ndarray, _u: np.ndarray) -> np.ndarray:
    return np.maximum(counts - 1, 0)


def labelled(table: SceneTable, how_many, seed: int, index: np.ndarray) -> np.ndarray:
    """Boolean [N, 12]: `how_many(counts, u)` objects per scene, chosen at random per sample index."""
    u = hashed_uniform(seed, _LABEL_STREAM, index, MAX_OBJECTS + 1)
    counts = table.counts.astype(np.int64)
    priority = np.where(np.arange(MAX_OBJECTS) < counts[:, None], u[:, 1:], 2.0)
    rank = np.argsort(np.argsort(priority, axis=1), axis=1)
    return rank < how_many(counts, u[:, 0])[:, None]


# ---- the conditioners -----------------------------------------------------------------------------


class _Conditioner:
    """What all conditioners share; a subclass says how conditions and scene tables become vectors."""

    name: str
    dim: int
    test_conditions: tuple  # the paper's, in order: K conditions are the first K

    def encode_conditions(self, conditions) -> np.ndarray:
        raise NotImplementedError

    def encode_table(self, table: SceneTable, seed: int, index: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def encode(self, scene: Scene, seed: int = 0, index: int = 0) -> np.ndarray:
        """Label vector float32 [dim] of one scene; (seed, index) choose which objects are labelled."""
        return self.encode_table(table_of([scene]), seed, np.array([index]))[0]

    def leave_one_out(self, conditions) -> np.ndarray:
        """Row k is the label vector without condition k: float32 [K, dim].

        In a list the entries after k then move up one slot, as they would in a shorter list. Objects are listed in the
        order they were placed, which is random, so the model has seen a location in any slot.
        """
        conditions = list(conditions)
        rows = [self.encode_conditions(conditions[:k] + conditions[k + 1 :]) for k in range(len(conditions))]
        return np.stack(rows) if rows else np.zeros((0, self.dim), np.float32)

    def test_vector(self, count: int) -> np.ndarray:
        """The paper's first `count` test conditions."""
        if not 0 <= count <= len(self.test_conditions):
            raise LcsError(f"K = {count} is not possible for {self.name}; allowed: 0..{len(self.test_conditions)}")
        return self.encode_conditions(self.test_conditions[:count])


@dataclass(frozen=True)
class GridConditioner(_Conditioner):
    name: str
    how_many: object  # one of the rules above

    dim = GRID * GRID
    test_conditions = TEST_LOCATIONS

    def encode_conditions(self, conditions) -> np.ndarray:
        grid = np.zeros((GRID, GRID), np.float32)
        for location in conditions:
            row, col = cell_of(location)
            grid[row, col] += 1
        if grid.max() > MAX_CELL_COUNT:
            raise LcsError(f"{int(grid.max())} locations in one grid cell; at most {MAX_CELL_COUNT}")
        return grid.reshape(-1)

    def encode_table(self, table: SceneTable, seed: int, index: np.ndarray) -> np.ndarray:
        chosen = labelled(table, self.how_many, seed, index)
        cells = np.clip((table.locations * GRID).astype(np.int64), 0, GRID - 1)  # [N, 12, 2] as (col, row)
        flat = cells[..., 1] * GRID + cells[..., 0]
        grids = np.zeros((len(table), self.dim), np.float32)
        rows, slots = np.nonzero(chosen)
        np.add.at(grids, (rows, flat[rows, slots]), 1)
        return grids

    def picture(self, vector: np.ndarray, size: int = 256) -> np.ndarray:
        """The grid as an image uint8 [size, size, 3]: occupied cells red on white, with grid lines."""
        grid = np.asarray(vector).reshape(GRID, GRID)
        if grid.min() < 0:
            raise LcsError(f"a grid cell holds a negative count: {grid.min():g}")
        cell = max(size // GRID, 2)
        cells = np.full((GRID, GRID, 3), 255, np.uint8)
        cells[grid > 0] = (214, 39, 40)
        cells[grid > 1] = (120, 0, 0)
        image = np.repeat(np.repeat(cells, cell, axis=0), cell, axis=1)
        image[::cell] = image[:, ::cell] = 200
        return image


@dataclass(frozen=True)
class ListConditioner(_Conditioner):
    name: str = "list-all"
    slots: int = MAX_OBJECTS

    test_conditions = TEST_LOCATIONS

    @property
    def dim(self) -> int:
        return 3 * self.slots

    def encode_conditions(self, conditions) -> np.ndarray:
        conditions = list(conditions)
        if len(conditions) > self.slots:
            raise LcsError(f"{len(conditions)} locations do not fit into the list's {self.slots} slots")
        vector = np.zeros((self.slots, 3), np.float32)
        for slot, location in enumerate(conditions):
            vector[slot] = (1.0, *check_location(location))
        return vector.reshape(-1)

    def encode_table(self, table: SceneTable, seed: int, index: np.ndarray) -> np.ndarray:
        present = np.arange(self.slots) < table.counts[:, None]
        if table.counts.max(initial=0) > self.slots:
            raise LcsError(f"a scene with {table.counts.max()} objects does not fit into {self.slots} slots")
        vectors = np.zeros((len(table), self.slots, 3), np.float32)
        vectors[..., 0] = present
        vectors[..., 1:] = table.locations[:, : self.slots] * present[..., None]
        return vectors.reshape(len(table), -1)

    def picture(self, vector: np.ndarray, size: int = 256) -> np.ndarray:
        """A table with one row per slot: presence, then x and y as bars."""
        rows = np.asarray(vector).reshape(self.slots, 3)
        image = np.full((size, size, 3), 255, np.uint8)
        height, width = size // self.slots, size // 3
        for slot, (present, x, y) in enumerate(rows):
            top = slot * height
            image[top] = 200
            if present > 0:
                image[top + 2 : top + height - 1, 2 : width - 4] = (214, 39, 40)
                for column, value in ((1, x), (2, y)):
                    end = column * width + max(2, round(float(value) * (width - 6)))
                    image[top + 2 : top + height - 1, column * width + 2 : end] = (70, 110, 180)
        image[:, ::width] = 200
        return image


@dataclass(frozen=True)
class ColorConditioner(_Conditioner):
    name: str = "color"

    dim = len(TEST_COLORS)
    test_conditions = TEST_COLORS

    def encode_conditions(self, conditions) -> np.ndarray:
        """From colour names (repeats allowed) or a mapping from name to count."""
        counts = np.zeros(self.dim, np.float32)
        pairs = conditions.items() if isinstance(conditions, dict) else ((c, 1) for c in conditions)
        for color, count in pairs:
            if not (isinstance(count, (int, np.integer)) and count >= 0):
                raise LcsError(f"the count of {color!r} must be a whole number, 0 or more; got {count!r}")
            counts[TEST_COLORS.index(check_color(color))] += count
        return counts

    def encode_table(self, table: SceneTable, seed: int, index: np.ndarray) -> np.ndarray:
        column = np.array([TEST_COLORS.index(name) for name in world.COLOR_NAMES])
        counts = np.zeros((len(table), self.dim), np.float32)
        rows, slots = np.nonzero(np.arange(MAX_OBJECTS) < table.counts[:, None])
        np.add.at(counts, (rows, column[table.colors[rows, slots]]), 1)
        return counts

    def picture(self, vector: np.ndarray, size: int = 256) -> np.ndarray:
        """One column per colour, as many squares as objects of it."""
        image = np.full((size, size, 3), 255, np.uint8)
        side = size // self.dim
        for column, (name, count) in enumerate(zip(TEST_COLORS, vector, strict=True)):
            for k in range(min(int(count), self.dim)):
                bottom, left = size - k * side, column * side
                # the table's values are linear RGB: show them as they look
                shown = [round(255 * math.pow(v / 255, 1 / 2.2)) for v in world.COLORS[name]]
                image[bottom - side + 2 : bottom - 1, left + 2 : left + side - 1] = shown
        return image


CONDITIONERS = {
    c.name: c
    for c in (
        GridConditioner("grid-all", _all),
        GridConditioner("grid-single", _one),
        GridConditioner("grid-random", _random_number),
        GridConditioner("grid-drop-one", _all_but_one),
        ListConditioner(),
        ColorConditioner(),
    )
}


def get_conditioner(name: str):
    if name not in CONDITIONERS:
        raise LcsError(f"unknown conditioner {name!r}; choose from {', '.join(CONDITIONERS)}")
    return CONDITIONERS[name]
