"""Many scenes as columns: what conditioners, shards and the counter need, without the 3d detail.

Rows are scenes, slots are objects; slots past a scene's count hold zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from lcs.scenes import world
from lcs.scenes.placement import MAX_OBJECTS
from lcs.scenes.scene import Scene


@dataclass(frozen=True)
class SceneTable:
    seeds: np.ndarray  # int64 [N]
    counts: np.ndarray  # uint8 [N]
    locations: np.ndarray  # float32 [N, 12, 2], projected centres as fractions (x, y) of the image
    shapes: np.ndarray  # uint8 [N, 12], index into world.SHAPES
    sizes: np.ndarray  # uint8 [N, 12], index into world.SIZE_NAMES
    colors: np.ndarray  # uint8 [N, 12], index into world.COLOR_NAMES
    materials: np.ndarray  # uint8 [N, 12], index into world.MATERIALS

    def __len__(self) -> int:
        return len(self.counts)

    def rows(self, index) -> SceneTable:
        """The scenes at `index` (a slice, or integer or boolean array)."""
        return SceneTable(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def columns(self) -> dict[str, np.ndarray]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


def table_of(scenes: list[Scene]) -> SceneTable:
    shape = (len(scenes), MAX_OBJECTS)
    table = SceneTable(
        seeds=np.array([scene.seed for scene in scenes], np.int64),
        counts=np.array([len(scene.objects) for scene in scenes], np.uint8),
        locations=np.zeros((*shape, 2), np.float32),
        shapes=np.zeros(shape, np.uint8),
        sizes=np.zeros(shape, np.uint8),
        colors=np.zeros(shape, np.uint8),
        materials=np.zeros(shape, np.uint8),
    )
    for row, scene in enumerate(scenes):
        for slot, o in enumerate(scene.objects):
            table.locations[row, slot] = o.location
            table.shapes[row, slot] = world.SHAPES.index(o.shape)
            table.sizes[row, slot] = world.SIZE_NAMES.index(o.size)
            table.colors[row, slot] = world.COLOR_NAMES.index(o.color)
            table.materials[row, slot] = world.MATERIALS.index(o.material)
    return table


def concatenate(tables: list[SceneTable]) -> SceneTable:
    return SceneTable(**{f.name: np.concatenate([getattr(t, f.name) for t in tables]) for f in fields(SceneTable)})
