"""Rendered datasets on disk: sharded, resumable, split over machines, with hashes.

    DIR/manifest.json                          what the dataset is, and every shard's sha256
    DIR/count-3/shard-00017.safetensors        images uint8 [n, H, W, 3] and the SceneTable columns
    DIR/count-3/shard-00017.json               written after its shard is complete

Scene i of a count has seed `base_seed * 2^32 + i`, so shard k always holds the same scenes, whoever
renders it. A shard appears under its name only when complete; a killed run leaves at most a hidden
temporary file, and running the same command again renders exactly what is missing.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tqdm import tqdm

from lcs.data.files import atomic_write, content_hash, map_safetensors, read_json, sha256_of, write_json
from lcs.errors import LcsError
from lcs.render.fast import render
from lcs.scenes.placement import MAX_OBJECTS, random_scene
from lcs.scenes.table import SceneTable, concatenate, table_of

FORMAT = 1
CHUNK = 64  # scenes rendered at once: small enough for a lively progress bar


@dataclass(frozen=True)
class DatasetSpec:
    counts: tuple[int, ...]  # object counts, e.g. (1, 2, 3)
    scenes: int  # per count
    size: int  # pixels per side
    shard_size: int = 2_000
    base_seed: int = 0
    format: int = FORMAT

    def __post_init__(self):
        if not self.counts or not all(0 <= c <= MAX_OBJECTS for c in self.counts):
            raise LcsError(f"object counts must lie in 0..{MAX_OBJECTS}, got {self.counts}")
        if self.scenes < 1 or self.shard_size < 1:
            raise LcsError(f"need at least one scene per count, got n = {self.scenes}, shard size {self.shard_size}")
        if not 8 <= self.size <= 1024:
            raise LcsError(f"image size {self.size} is not possible; allowed: 8..1024")
        if not 0 <= self.base_seed < 2**30:
            raise LcsError(f"the base seed must lie in 0..2^30-1, got {self.base_seed}")

    @property
    def shards(self) -> list[tuple[int, int]]:
        """Every (count, shard number)."""
        per_count = -(-self.scenes // self.shard_size)
        return [(count, shard) for count in self.counts for shard in range(per_count)]

    def scenes_in(self, shard: int) -> range:
        return range(shard * self.shard_size, min(self.scenes, (shard + 1) * self.shard_size))

    def seed_of(self, index: int) -> int:
        return self.base_seed * 2**32 + index


def parse_counts(text: str, option: str = "--count") -> tuple[int, ...]:
    """'3' or '1-3' as whole numbers, e.g. of objects."""
    first, dash, last = text.partition("-")
    try:
        low, high = int(first), int(last) if dash else int(first)
    except ValueError:
        raise LcsError(f"{option} takes a number or a range such as 1-3, got {text!r}") from None
    if low > high:
        raise LcsError(f"{option} {text!r}: the range runs backwards")
    return tuple(range(low, high + 1))


def parse_part(text: str | None) -> tuple[int, int]:
    """'i/n' (0 <= i < n): which part of the shards to render; by default the rank of `accelerate launch`."""
    if text is None:
        return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    try:
        i, n = (int(v) for v in text.split("/"))
    except ValueError:
        raise LcsError(f"--shard takes i/n such as 0/4, got {text!r}") from None
    if not 0 <= i < n:
        raise LcsError(f"--shard {text}: i must lie in 0..{n - 1}")
    return i, n


def shard_path(root: Path, count: int, shard: int) -> Path:
    return Path(root) / f"count-{count}" / f"shard-{shard:05d}.safetensors"


def render_dataset(root: Path, spec: DatasetSpec, part: tuple[int, int] = (0, 1), progress: bool = True) -> bool:
    """Renders this part's missing shards; writes the manifest once all parts are complete and says if they are."""
    root = Path(root)
    _check_same_spec(root, spec)
    mine = [s for k, s in enumerate(spec.shards) if k % part[1] == part[0]]
    missing = [(count, shard) for count, shard in mine if not _complete(root, count, shard)]
    total = sum(len(spec.scenes_in(shard)) for _, shard in mine)
    done = total - sum(len(spec.scenes_in(shard)) for _, shard in missing)
    with tqdm(total=total, initial=done, unit="img", disable=not progress, desc=f"rendering {spec.size} px") as bar:
        for count, shard in missing:
            _render_shard(root, spec, count, shard, bar)
    sidecars = {f"{c}/{s}": shard_path(root, c, s).with_suffix(".json") for c, s in spec.shards}
    if not all(path.exists() for path in sidecars.values()):
        return False
    write_json(
        root / "manifest.json",
        {**_spec_json(spec), "sha256": {key: read_json(path)["sha256"] for key, path in sidecars.items()}},
    )
    return True


def _spec_json(spec: DatasetSpec) -> dict:
    return {**asdict(spec), "counts": list(spec.counts)}


def _check_same_spec(root: Path, spec: DatasetSpec) -> None:
    """A folder belongs to one dataset: refuses to mix two, before anything is rendered."""
    path = root / "dataset.json"
    if path.exists():
        found = read_json(path)
        if found != _spec_json(spec):
            differs = [k for k, v in _spec_json(spec).items() if found.get(k) != v]
            raise LcsError(f"{root} holds another dataset (differs in {', '.join(differs)}); choose an empty folder")
    else:
        write_json(path, _spec_json(spec))


def _complete(root: Path, count: int, shard: int) -> bool:
    path = shard_path(root, count, shard)
    return path.exists() and path.with_suffix(".json").exists()


def _render_shard(root: Path, spec: DatasetSpec, count: int, shard: int, bar: tqdm) -> None:
    images, tables = [], []
    indices = spec.scenes_in(shard)
    for begin in range(0, len(indices), CHUNK):
        scenes = [random_scene(spec.seed_of(i), count) for i in indices[begin : begin + CHUNK]]
        images.append(render(scenes, spec.size, spec.size)[0])
        tables.append(table_of(scenes))
        bar.update(len(scenes))
    path = shard_path(root, count, shard)
    with atomic_write(path) as temporary:
        save_file({"images": np.concatenate(images), **concatenate(tables).columns()}, temporary)
    write_json(path.with_suffix(".json"), {"sha256": sha256_of(path), "images": len(indices)})


# ---- reading --------------------------------------------------------------------------------------


class RenderedScenes:
    """A rendered dataset, memory-mapped: `fetch` copies just the rows asked for."""

    def __init__(self, root: Path, counts: tuple[int, ...], verify: bool = False):
        manifest = read_json(Path(root) / "manifest.json")
        absent = sorted(set(counts) - set(manifest["counts"]))
        if absent:
            raise LcsError(f"{root} has no scenes with {absent} objects; it holds {manifest['counts']}")
        self.size = manifest["size"]
        hashes = {key: digest for key, digest in manifest["sha256"].items() if int(key.split("/")[0]) in counts}
        self.identity = f"rendered {content_hash(hashes)}"  # of these very images, wherever they lie
        self._shards, tables = [], []
        for key, digest in hashes.items():
            count, shard = (int(v) for v in key.split("/"))
            path = shard_path(root, count, shard)
            if verify and sha256_of(path) != digest:
                raise LcsError(f"{path} does not match its sha256 in the manifest; render or download it again")
            tensors = map_safetensors(path)
            self._shards.append(tensors.pop("images"))
            tables.append(SceneTable(**{name: np.array(column) for name, column in tensors.items()}))
        self.table = concatenate(tables)
        self._first = np.concatenate([[0], np.cumsum([len(images) for images in self._shards])])

    def __len__(self) -> int:
        return int(self._first[-1])

    def fetch(self, index: np.ndarray) -> tuple[np.ndarray, SceneTable]:
        """Images uint8 [B, H, W, 3] and their scenes."""
        index = np.asarray(index)
        images = np.empty((len(index), self.size, self.size, 3), np.uint8)
        shard = np.searchsorted(self._first, index, side="right") - 1
        for row, (s, i) in enumerate(zip(shard, index - self._first[shard], strict=True)):
            images[row] = self._shards[s][i]
        return images, self.table.rows(index)


class StreamedScenes:
    """An endless dataset rendered on the fly; scene i is the same on every machine, nothing touches the disk."""

    def __init__(self, counts: tuple[int, ...], size: int, base_seed: int = 0):
        self.counts, self.size, self.base_seed = counts, size, base_seed
        self.identity = f"streamed {base_seed}"

    def __len__(self) -> int:
        return 2**31

    def fetch(self, index: np.ndarray) -> tuple[np.ndarray, SceneTable]:
        scenes = [
            random_scene(self.base_seed * 2**32 + int(i) // len(self.counts), self.counts[int(i) % len(self.counts)])
            for i in index
        ]
        return render(scenes, self.size, self.size)[0], table_of(scenes)
