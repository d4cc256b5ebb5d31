"""`lcs bench data`: how fast training batches are read, against what a GPU would consume."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from lcs.data.files import read_json
from lcs.data.shards import RenderedScenes

# An H100 at 40% of its bf16 peak (400 TFLOP/s) trains EDM2-XS at 128 px (3 x 349 GFLOP a sample): bytes a second.
H100_BYTES_PER_SECOND = 400e12 / (3 * 349e9) * 128 * 128 * 3


def bench_data(root: Path, batch: int = 256, seconds: float = 5.0) -> dict:
    """Random batches from a rendered dataset: images per second on one thread."""
    counts = tuple(read_json(Path(root) / "manifest.json")["counts"])
    source = RenderedScenes(root, counts)
    rng = np.random.default_rng(0)
    source.fetch(rng.integers(0, len(source), batch))
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        source.fetch(rng.integers(0, len(source), batch))
        done += batch
    rate = done / (time.perf_counter() - start)
    return {
        "images_per_second": rate,
        "megabytes_per_second": rate * source.size**2 * 3 / 1e6,
        "h100s_fed": rate * source.size**2 * 3 / H100_BYTES_PER_SECOND,
    }
