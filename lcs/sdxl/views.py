"""The scenes as mini-sdxl sees them: the middle half of the frame, twice as large, with one or two objects.

In a whole frame of 64 pixels an object is 5 to 10 pixels wide, one or two latent positions: its shape is hardly there
to be learned. In the view it is 10 to 20. Objects stand near one of three spots (left, middle and further back, right),
so that a caption says nearly all there is to know: where an object may be anywhere, a network that is to learn what
"cylinder" means must first find it in the noise, and by then the noise tells its shape, too.

The counter knows whole frames only, so `look` puts a view back into an empty frame, at half its size and where it was
cut out, and gives what is found there in the view's own coordinates.

    OUT/scenes/00017.safetensors      views uint8 [n, S, S, 3] and the SceneTable columns, locations in the view
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tqdm import tqdm

from lcs.counter.detector import Counter, Detections
from lcs.data.files import atomic_write, map_safetensors
from lcs.render.fast import render
from lcs.scenes import world
from lcs.scenes.placement import random_scene
from lcs.scenes.scene import Scene, unproject
from lcs.scenes.table import SceneTable, concatenate, table_of
from lcs.sdxl.build import MiniSettings
from lcs.sdxl.captions import STYLED, STYLES, apply_style

ZOOM = 2
ORIGIN = np.array([0.25, 0.203125])  # the view's upper left corner (x, y), as fractions of the frame
SPOTS = {"left": (0.225, 0.55), "middle": (0.5, 0.33), "right": (0.775, 0.55)}  # (x, y) in the view
JITTER = (0.025, 0.04)  # how far from its spot an object's centre may be, either way
KEEP_SMALL = 1 / 2  # chance to be kept: a third of the objects is small then
COUNTS = (1, 2)  # objects per training scene: three are left for the study
FOLDER = "scenes"
SHARD = 1_000
CHUNK = 50  # scenes rendered at once
HELD_OUT_SEED = 6_006  # base seed of scenes no training run uses


def in_view(locations: np.ndarray) -> np.ndarray:
    """Fractions [..., 2] of the frame -> fractions of the view."""
    return (locations - ORIGIN) * ZOOM


def in_frame(points: np.ndarray) -> np.ndarray:
    """Fractions [..., 2] of the view -> fractions of the frame."""
    return points / ZOOM + ORIGIN


def at_spots(scene: Scene, rng: np.random.Generator) -> Scene:
    """The same camera, lights and objects, but each object near a spot of its own."""
    names = rng.permutation(list(SPOTS))[: len(scene.objects)]
    placed = []
    for thing, name in zip(scene.objects, names, strict=True):
        x, y = in_frame(np.array(SPOTS[name]) + np.array(JITTER) * rng.uniform(-1, 1, 2))
        pixel = (float(x) * world.IMAGE_WIDTH, float(y) * world.IMAGE_HEIGHT)
        placed.append(replace(thing, position=unproject(scene.camera, pixel, thing.radius), pixel=pixel))
    return replace(scene, objects=tuple(placed))


def view_scenes(count: int, base_seed: int) -> Iterator[Scene]:
    """Random scenes with `count` objects at their spots; small objects are thinned."""
    rng = np.random.default_rng([base_seed, count, 5])
    index = base_seed * 2**32
    while True:
        scene = random_scene(index, count)
        index += 1
        if all(o.size == "large" or rng.random() < KEEP_SMALL for o in scene.objects):
            yield at_spots(scene, rng)


def draw_views(scenes: Sequence[Scene], size: int) -> tuple[np.ndarray, SceneTable]:
    """Views uint8 [N, size, size, 3], and the table with locations in the view."""
    left, top = (round(v * ZOOM * size) for v in ORIGIN)
    frames = render(list(scenes), ZOOM * size, ZOOM * size)[0]
    table = table_of(list(scenes))
    inside = np.arange(table.locations.shape[1]) < table.counts[:, None]  # [N, 12]
    locations = np.where(inside[..., None], in_view(table.locations), 0).astype(np.float32)
    return frames[:, top : top + size, left : left + size], replace(table, locations=locations)


def held_out_views(n: int, size: int) -> tuple[np.ndarray, SceneTable]:
    """`n` views that no training run sees, one and two objects by turns."""
    streams = [view_scenes(count, HELD_OUT_SEED) for count in COUNTS]
    return draw_views([next(streams[i % len(COUNTS)]) for i in range(n)], size)


# ---- training set -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class StyledViews:
    """The training set: rendered views, memory-mapped, each with its fixed style."""

    shards: list[np.ndarray]  # uint8 [SHARD, S, S, 3] each, the last may be shorter
    table: SceneTable
    styles: np.ndarray  # uint8 [N], 0 is none, k is the k-th of STYLES

    def __len__(self) -> int:
        return len(self.table)

    def fetch(self, rows: np.ndarray) -> tuple[np.ndarray, SceneTable]:
        """Images uint8 [B, S, S, 3], in their styles, and their scenes."""
        images = np.stack([self.shards[row // SHARD][row % SHARD] for row in rows])
        for k, style in enumerate(STYLES, 1):
            which = self.styles[rows] == k
            if which.any():
                images[which] = apply_style(images[which], style)
        return images, self.table.rows(rows)


def training_views(settings: MiniSettings, out: Path, progress: bool = True) -> StyledViews:
    """Renders what is missing in OUT/scenes and opens it; one and two objects by turns."""
    folder = Path(out) / FOLDER
    shards = range(-(-settings.scenes // SHARD))
    paths = [folder / f"{k:05d}.safetensors" for k in shards]
    if not all(path.exists() for path in paths):
        streams = [view_scenes(count, settings.seed) for count in COUNTS]
        with tqdm(total=settings.scenes, disable=not progress, desc="rendering", unit="img", mininterval=5) as bar:
            for k, path in zip(shards, paths, strict=True):
                n = min(SHARD, settings.scenes - k * SHARD)
                scenes = [next(streams[i % len(COUNTS)]) for i in range(n)]  # also of shards that exist
                if not path.exists():
                    _render_shard(path, scenes, settings.size, bar)
                bar.update(k * SHARD + n - bar.n)
    opened = [map_safetensors(path) for path in paths]
    images = [tensors.pop("images") for tensors in opened]
    table = concatenate([SceneTable(**{name: np.array(c) for name, c in t.items()}) for t in opened])
    rng = np.random.default_rng([settings.seed, 1])
    styles = np.where(rng.random(len(table)) < STYLED, rng.integers(1, len(STYLES) + 1, len(table)), 0)
    return StyledViews(images, table, styles.astype(np.uint8))


def _render_shard(path: Path, scenes: list[Scene], size: int, bar: tqdm) -> None:
    images, tables = [], []
    for at in range(0, len(scenes), CHUNK):
        drawn, table = draw_views(scenes[at : at + CHUNK], size)
        images.append(drawn)
        tables.append(table)
        bar.update(len(drawn))
    with atomic_write(path) as temporary:
        save_file({"images": np.concatenate(images), **concatenate(tables).columns()}, temporary)


# ---- the counter's view of it -----------------------------------------------------------------------


@lru_cache(maxsize=2)
def _empty_frame(size: int) -> np.ndarray:
    """The median of empty frames (lights and camera differ a little): uint8 [size, size, 3]."""
    frames = render([random_scene(HELD_OUT_SEED * 2**32 + i, 0) for i in range(16)], size, size)[0]
    return np.median(frames, 0).astype(np.uint8)


def to_frames(views: np.ndarray) -> np.ndarray:
    """Views uint8 [N, S, S, 3] -> frames uint8 [N, S, S, 3] with the view, at half its size, where it was cut out."""
    n, size = views.shape[:2]
    part = size // ZOOM
    small = views.reshape(n, part, ZOOM, part, ZOOM, 3).mean((2, 4)) + 0.5
    left, top = (round(v * size) for v in ORIGIN)
    frames = np.repeat(_empty_frame(size)[None], n, 0)
    frames[:, top : top + part, left : left + part] = small.astype(np.uint8)
    return frames


def look(counter: Counter, views: np.ndarray) -> list[Detections]:
    """What the counter finds in each view, in the view's coordinates."""
    return [
        replace(seen, centers=in_view(seen.centers), boxes=in_view(seen.boxes.reshape(-1, 2, 2)).reshape(-1, 4))
        for seen in counter(to_frames(views))
    ]
