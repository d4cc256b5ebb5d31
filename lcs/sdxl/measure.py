"""What is written beside mini-sdxl: how well it obeys held-out prompts and follows single words, and how well its
autoencoder reconstructs."""

from __future__ import annotations

from tqdm import tqdm

from lcs.counter.detector import Counter, load_counter
from lcs.counter.matching import pairs_within
from lcs.sdxl.autoencoder import psnr, reconstruct
from lcs.sdxl.concepts import MINI
from lcs.sdxl.gain import word_gains
from lcs.sdxl.judge import measure_obedience
from lcs.sdxl.sampling import Pipe
from lcs.sdxl.views import COUNTS, ZOOM, held_out_views, look


def measure_autoencoder(pipe: Pipe, counter: Counter, scenes: int = 200) -> dict:
    """PSNR of held-out renders, and how often the counter still finds colour and shape after reconstruction: the
    ceiling for whatever is generated through this decoder."""
    images, table = held_out_views(scenes, pipe.vae.config.sample_size)
    again = reconstruct(pipe.vae, images)
    both = colors = shapes = objects = 0
    for row, seen in enumerate(look(counter, again)):
        n = int(table.counts[row])
        a, b = pairs_within(table.locations[row, :n], seen.centers, ZOOM)
        c = table.colors[row, a] == seen.colors[b]
        s = table.shapes[row, a] == seen.shapes[b]
        objects, colors, shapes, both = objects + n, colors + c.sum(), shapes + s.sum(), both + (c & s).sum()
    return {"psnr": psnr(images, again), "objects": objects, "color": float(colors / objects),
            "shape": float(shapes / objects), "both": float(both / objects)}  # fmt: skip


def measure_mini(pipe: Pipe, prompts: int = 200, steps: int = 25, guidance: float | None = None) -> dict:
    """Obedience to held-out prompts with one and two objects, by the project's counter, with Wilson intervals."""
    counter = load_counter()
    guidance = MINI.guidance if guidance is None else guidance
    measured: dict = {"autoencoder": measure_autoencoder(pipe, counter), "word gains": word_gains(pipe)}
    with tqdm(total=2 * prompts, desc="held-out prompts", unit="img") as bar:
        for objects in COUNTS:
            result = measure_obedience(pipe, counter, objects, prompts, steps, guidance, done=bar.update)
            sizes = {size: {"right": right, "prompts": n} for size, (right, n) in result.by_size().items()}
            measured[f"{objects} objects"] = result.row() | {"by size": sizes}
    return measured
