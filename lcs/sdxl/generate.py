"""Prompt in, image out: what the app and the studies call, with the local intervention as an option."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import numpy as np

from lcs.errors import LcsError
from lcs.sdxl.kept import kept
from lcs.sdxl.regions import Region, plan_regions, restricted, stack_plans
from lcs.sdxl.sampling import Pipe, decode, encode, initial_noise, sample

STEPS, GUIDANCE = 25, 3.0
Callback = Callable[[int, int, np.ndarray], None]  # (step, steps, preview uint8 [H, W, 3])


def generate(
    pipe: Pipe,
    prompt: str,
    seed: int = 0,
    steps: int = STEPS,
    guidance: float = GUIDANCE,
    regions: str | Sequence[Region] | None = None,
    callback: Callback | None = None,
    preview_every: int = 5,
) -> np.ndarray:
    """One image, uint8 [H, W, 3].

    regions: None draws as the pipeline does; "separate" or "mask" takes regions from the prompt's own left, middle
    and right (see regions.py); a list of `Region`s is used as given, each phrase encoded on its own.
    """
    if not 1 <= steps <= 1000:
        raise LcsError(f"{steps} steps are not possible; allowed: 1..1000")
    look = None
    if callback is not None:

        def look(step) -> None:
            if step.index % preview_every == 0 or step.index == steps - 1:
                callback(step.index + 1, steps, decode(pipe, step.x0)[0])

    cond, around = encode(pipe, [prompt]), nullcontext()
    if regions is not None:
        mode = regions if isinstance(regions, str) else "separate"
        plan = plan_regions(pipe, prompt, None if isinstance(regions, str) else regions, mode)
        cond, around = plan.cond, restricted(pipe, plan)
    with around:
        latents = sample(pipe, cond, initial_noise(pipe, [seed]), steps, guidance, look)
    return decode(pipe, latents)[0]


def generate_many(
    pipe: Pipe,
    prompts: Sequence[str],
    seeds: Sequence[int],
    steps: int = STEPS,
    guidance: float = GUIDANCE,
    regions: str | None = None,
    batch: int = 32,
    done: Callable[[int], None] | None = None,
) -> np.ndarray:
    """Image i is of prompt i from seed i: uint8 [N, H, W, 3]; `regions` as in `generate`, "separate" or "mask"."""
    if len(prompts) != len(seeds):
        raise LcsError(f"need one seed per prompt, got {len(prompts)} prompts and {len(seeds)} seeds")
    images = []
    for at in range(0, len(prompts), batch):
        chunk, numbers = list(prompts[at : at + batch]), list(seeds[at : at + batch])

        def draw(chunk=chunk, numbers=numbers) -> dict[str, np.ndarray]:
            cond, around = encode(pipe, chunk), nullcontext()
            if regions is not None:
                plan = stack_plans([plan_regions(pipe, prompt, mode=regions) for prompt in chunk])
                cond, around = plan.cond, restricted(pipe, plan)
            with around:
                return {"images": decode(pipe, sample(pipe, cond, initial_noise(pipe, numbers), steps, guidance))}

        images.append(kept(["images", chunk, numbers, steps, guidance, regions], draw)["images"])
        if done is not None:
            done(len(chunk))
    return np.concatenate(images)
