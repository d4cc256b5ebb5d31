"""`lcs render --engine blender`: the same scenes through the reference renderer, one PNG each, resumable."""

from __future__ import annotations

from pathlib import Path

from PIL import Image
from tqdm import tqdm

from lcs.data.files import atomic_write, write_json
from lcs.data.shards import DatasetSpec
from lcs.render.blender import BlenderRenderer
from lcs.scenes.placement import random_scene
from lcs.scenes.scene import scene_to_json


def render_with_blender(
    out: Path, spec: DatasetSpec, part: tuple[int, int], samples: int, clevr_assets: Path | None
) -> None:
    """OUT/count-C/NNNNNN.png with its scene and mask beside it; files that exist are kept."""
    wanted = [(count, i) for count in spec.counts for i in range(spec.scenes)][part[0] :: part[1]]
    with BlenderRenderer(clevr_assets) as blender:
        for count, i in tqdm(wanted, "Blender", unit="img"):
            path = Path(out) / f"count-{count}" / f"{i:06d}.png"
            if path.exists():
                continue
            scene = random_scene(spec.seed_of(i), count)
            result = blender.render(scene, spec.size, spec.size, samples=samples)
            write_json(path.with_suffix(".json"), scene_to_json(scene))
            for target, pixels in ((path.with_suffix(".mask.png"), result.mask), (path, result.image)):
                with atomic_write(target) as temporary:  # the image last: it marks the scene as done
                    Image.fromarray(pixels).save(temporary, format="png")
