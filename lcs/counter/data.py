"""Rendered scenes for the counter: what is in every image is known exactly.

    DIR/spec.json                    what the folder holds
    DIR/part-0007.safetensors        images, empty rooms, masks, boxes and the SceneTable columns

Scene i has i mod 13 objects and its own seed, far from the seeds of any diffusion model's training set, so
the counter never sees an image that a model was trained on. Three ranges of seeds keep training, threshold
selection ("validation") and the reported error ("test") apart. Up to 6 objects keep CLEVR's distances, as
the models' training images do; CLEVR has no room for 12, so 7-12 objects stand closer. A part of the
training scenes is more crowded still and may interpenetrate, as generated objects do.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tqdm import tqdm

from lcs.data.files import atomic_write, map_safetensors, read_json, write_json
from lcs.errors import LcsError
from lcs.render.fast import render
from lcs.scenes import world
from lcs.scenes.placement import MAX_OBJECTS, random_scene
from lcs.scenes.scene import Scene
from lcs.scenes.table import SceneTable, concatenate, table_of

SIZE = 64  # pixels per side: the counter's native resolution
FIRST_SEED = {"train": 900_000_000_000, "validation": 910_000_000_000, "test": 920_000_000_000}
CHUNK = 50  # scenes rendered at once

# (min_margin, min_gap) between objects, in the units of lcs.scenes.world
STANDARD = (world.MIN_MARGIN, world.MIN_GAP)
CROWDED = (0.1, 0.1)
TOUCHING = (0.0, -0.1)  # may interpenetrate


@dataclass(frozen=True)
class CounterData:
    """Rendered scenes; rows are images. Slots past an image's count hold zeros."""

    images: np.ndarray  # uint8 [N, 64, 64, 3], sRGB
    empty: np.ndarray  # uint8 [N, 64, 64, 3]: the same room and lights without objects
    masks: np.ndarray  # uint8 [N, 64, 64]: 0 for the room, i + 1 for object i
    boxes: np.ndarray  # float32 [N, 12, 4]: what is visible of each object, (left, top, right, bottom) as fractions
    table: SceneTable

    def __len__(self) -> int:
        return len(self.images)

    def rows(self, index) -> CounterData:
        return CounterData(
            self.images[index], self.empty[index], self.masks[index], self.boxes[index], self.table.rows(index)
        )


def make_scene(split: str, index: int) -> Scene:
    """Scene `index` of a split; every 13 scenes hold 0..12 objects once."""
    if split not in FIRST_SEED:
        raise LcsError(f"unknown split {split!r}; choose from {', '.join(FIRST_SEED)}")
    count, block = index % (MAX_OBJECTS + 1), index // (MAX_OBJECTS + 1)
    margin, gap = STANDARD if count <= 6 else CROWDED
    if split == "train" and block % 4 == 2:
        margin, gap = CROWDED
    if split == "train" and block % 4 == 3:
        margin, gap = TOUCHING
    return random_scene(FIRST_SEED[split] + index, count, min_margin=margin, min_gap=gap)


def render_split(split: str, indices) -> CounterData:
    """Renders the given scenes of a split in memory."""
    scenes = [make_scene(split, int(i)) for i in indices]
    images, masks = render(scenes, SIZE, SIZE)
    empty, _ = render([Scene(s.seed, s.camera, s.lights, ()) for s in scenes], SIZE, SIZE)
    return CounterData(images, empty, masks, boxes_of(masks), table_of(scenes))


def boxes_of(masks: np.ndarray) -> np.ndarray:
    """Bounding boxes of the visible pixels of each object: float32 [N, 12, 4] as fractions; zeros where none."""
    boxes = np.zeros((len(masks), MAX_OBJECTS, 4), np.float32)
    height, width = masks.shape[1:]
    for slot in range(MAX_OBJECTS):
        seen = masks == slot + 1
        rows, cols = seen.any(2), seen.any(1)  # [N, H], [N, W]
        there = rows.any(1)
        left, right = cols.argmax(1), width - cols[:, ::-1].argmax(1)
        top, bottom = rows.argmax(1), height - rows[:, ::-1].argmax(1)
        sides = np.stack([left / width, top / height, right / width, bottom / height], 1)
        boxes[there, slot] = sides[there]
    return boxes


# ---- on disk --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DataSpec:
    split: str
    images: int
    part: int = 1_000  # images per file
    format: int = 1


def render_folder(root: Path, spec: DataSpec, progress: bool = True) -> None:
    """Renders what is missing of `spec` in `root`; run it again to resume. A part is whole or absent."""
    root = Path(root)
    if (root / "spec.json").exists():
        found = read_json(root / "spec.json")
        if found != asdict(spec):
            raise LcsError(f"{root} holds other data ({found}); choose an empty folder")
    else:
        write_json(root / "spec.json", asdict(spec))
    starts = range(0, spec.images, spec.part)
    missing = [at for at in starts if not _part(root, at, spec).exists()]
    done = spec.images - sum(min(spec.part, spec.images - at) for at in missing)
    with tqdm(total=spec.images, initial=done, unit="img", disable=not progress, desc=f"counter {spec.split}") as bar:
        for at in missing:
            end = min(at + spec.part, spec.images)
            pieces = []
            for first in range(at, end, CHUNK):
                pieces.append(render_split(spec.split, range(first, min(first + CHUNK, end))))
                bar.update(len(pieces[-1]))
            data = join(pieces)
            columns = {"images": data.images, "empty": data.empty, "masks": data.masks, "boxes": data.boxes}
            with atomic_write(_part(root, at, spec)) as temporary:
                save_file({**columns, **data.table.columns()}, temporary)


def open_folder(root: Path) -> CounterData:
    """Everything in a rendered folder, in memory (28 kB an image)."""
    spec = DataSpec(**read_json(Path(root) / "spec.json"))
    pieces = []
    for at in range(0, spec.images, spec.part):
        path = _part(Path(root), at, spec)
        if not path.exists():
            raise LcsError(f"{root} is incomplete: {path.name} is missing; render it again to resume")
        tensors = map_safetensors(path)
        own = {name: tensors.pop(name) for name in ("images", "empty", "masks", "boxes")}
        pieces.append(CounterData(**own, table=SceneTable(**tensors)))
    return join(pieces)


def join(pieces: list[CounterData]) -> CounterData:
    arrays = {
        name: np.concatenate([getattr(p, name) for p in pieces]) for name in ("images", "empty", "masks", "boxes")
    }
    return CounterData(**arrays, table=concatenate([p.table for p in pieces]))


def _part(root: Path, at: int, spec: DataSpec) -> Path:
    return root / f"part-{at // spec.part:04d}.safetensors"
