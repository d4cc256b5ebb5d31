"""`lcs bench render`: the fast renderer against Blender, speed and fidelity, on the same held-out scenes in one run."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from PIL import Image
from skimage.metrics import peak_signal_noise_ratio, structural_similarity
from tqdm import tqdm

from lcs.data.files import atomic_write
from lcs.render.blender import BlenderRenderer
from lcs.render.fast import render
from lcs.scenes.placement import random_scene
from lcs.scenes.scene import Scene

HELD_OUT_SEED = 700_000_000_000  # no dataset and no calibration uses these
SIZE = 128
REFERENCE_SAMPLES = 256  # with denoising: the picture fidelity is measured against


def held_out_scenes(count: int) -> list[Scene]:
    """Scenes with 1..6 objects in turn, as in the training sets."""
    return [random_scene(HELD_OUT_SEED + i, 1 + i % 6) for i in range(count)]


def fast_rate(size: int, seconds: float) -> float:
    """Images per second on all cores, scene packing and colour management included."""
    scenes = held_out_scenes(256)
    render(scenes[:8], size, size)  # compile
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        render(scenes, size, size)
        done += len(scenes)
    return done / (time.perf_counter() - start)


def mask_iou(ours: np.ndarray, theirs: np.ndarray, objects: int) -> list[float]:
    """Intersection over union of every object that either mask shows."""
    shares = []
    for i in range(1, objects + 1):
        union = ((ours == i) | (theirs == i)).sum()
        if union:
            shares.append(float(((ours == i) & (theirs == i)).sum() / union))
    return shares


def bench_render(scene_count: int = 50, timed: int = 6, seconds: float = 10.0, picture: Path | None = None) -> dict:
    """All numbers of one run; writes a side-by-side picture if asked to."""
    result = {f"fps_{size}": fast_rate(size, seconds) for size in (64, SIZE)}
    scenes = held_out_scenes(scene_count)
    images, masks = render(scenes, SIZE, SIZE)
    psnr, ssim, iou, references = [], [], [], []
    with BlenderRenderer() as blender:
        for name, options in (
            ("blender_fps_128", {"samples": 32, "denoise": True}),
            ("blender512_fps_128", {"samples": 512}),
        ):
            blender.render(scenes[0], SIZE, SIZE, samples=1, mask=False)  # warm up
            spent = [blender.render(s, SIZE, SIZE, mask=False, **options).seconds for s in tqdm(scenes[:timed], name)]
            result[name] = len(spent) / sum(spent)
        for scene, image, mask in zip(tqdm(scenes, "fidelity"), images, masks, strict=True):
            reference = blender.render(scene, SIZE, SIZE, samples=REFERENCE_SAMPLES, denoise=True)
            references.append(reference.image)
            psnr.append(peak_signal_noise_ratio(reference.image, image))
            ssim.append(structural_similarity(reference.image, image, channel_axis=2))
            iou += mask_iou(mask, reference.mask, len(scene.objects))
    result |= {"psnr": float(np.mean(psnr)), "ssim": float(np.mean(ssim)), "iou": float(np.mean(iou))}
    result["speedup_32"] = result["fps_128"] / result["blender_fps_128"]
    result["speedup_512"] = result["fps_128"] / result["blender512_fps_128"]
    if picture is not None:
        save_side_by_side(picture, references[:12], list(images[:12]))
    return result


def save_side_by_side(path: Path, references: list[np.ndarray], ours: list[np.ndarray], columns: int = 6) -> None:
    """Pairs of rows: Blender above, the fast renderer below."""
    rows = []
    for at in range(0, len(references), columns):
        rows += [np.concatenate(references[at : at + columns], 1), np.concatenate(ours[at : at + columns], 1)]
    with atomic_write(path) as temporary:
        Image.fromarray(np.concatenate(rows)).save(temporary, format="png")
