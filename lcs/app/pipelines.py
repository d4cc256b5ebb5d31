"""The text-to-image models of tab 4 and what is computed with them. `diffusers` is imported only when one is used."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from lcs.errors import LcsError

MINI, BASE = "mini-sdxl", "SDXL base"
SEEDS = (0, 1)  # over which a concept's features are averaged


class Pipelines:
    """The small pipeline beside the weights, and SDXL base if it is in the local cache and there is a GPU for it."""

    def __init__(self, folder: Path):
        self.folder, self._lock = Path(folder), threading.Lock()
        self._loaded: tuple[str, object] | None = None  # one at a time

    def __reduce__(self):
        """ZeroGPU sends arguments to another process: what is loaded here stays here."""
        return Pipelines, (self.folder,)

    def names(self) -> list[str]:
        found = [MINI] if (self.folder / "model_index.json").is_file() else []
        return found + ([BASE] if torch.cuda.is_available() and _cached_base() else [])

    def get(self, name):
        if not isinstance(name, str) or name not in self.names():
            raise LcsError(f"no model {str(name)[:40]!r}; there is {', '.join(self.names()) or 'none yet'}")
        with self._lock:
            if self._loaded is None or self._loaded[0] != name:
                self._loaded = None  # make room first
                self._loaded = (name, _load(self.folder if name == MINI else None))
            return self._loaded[1]


def _cached_base() -> bool:
    from huggingface_hub import try_to_load_from_cache

    from lcs.sdxl.facts import SDXL_BASE

    return isinstance(try_to_load_from_cache(SDXL_BASE, "model_index.json"), str)


def _load(folder: Path | None):
    from lcs.sdxl.facts import SDXL_BASE
    from lcs.sdxl.package import load_pipeline

    pipe = load_pipeline(SDXL_BASE) if folder is None else load_pipeline(folder.name, root=folder.parent)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def subject(name: str):
    """Prompts, concepts and settings of the study for one model."""
    from lcs.sdxl import concepts

    return concepts.MINI if name == MINI else concepts.SDXL


# ---- what runs in the lane ------------------------------------------------------------------------


def draw_both(
    pipe, prompt: str, seed: int, steps: int, guidance: float, local: bool, tell: Callable[[float, list], None]
) -> list[np.ndarray]:
    """The image, and with `local` also the one whose regions attend only to their own words."""
    from lcs.sdxl.generate import generate
    from lcs.sdxl.regions import regions_from_prompt

    if local:
        regions_from_prompt(prompt)  # refuses before anything is drawn
    images: list[np.ndarray] = []
    modes = (None, "separate") if local else (None,)
    for i, mode in enumerate(modes):

        def look(step: int, _steps: int, preview: np.ndarray, i: int = i) -> None:
            tell((i + step / steps) / len(modes), [*images, preview])

        tell(i / len(modes), list(images))
        images.append(generate(pipe, prompt, seed, steps, guidance, mode, look, preview_every=2))
    return images


def words_over_time(
    pipe, prompt: str, place: tuple[float, float], seed: int, steps: int, guidance: float, tell: Callable[[float], None]
) -> list[tuple[str, dict[str, float], np.ndarray]]:
    """(when, influence by word at the place, maps [K, h, w]) at high, middle and low noise."""
    from lcs.sdxl.pixel import word_influence_at

    found = []
    for i, (when, at) in enumerate((("high noise", 0), ("middle", (steps - 1) // 2), ("low noise", steps - 1))):
        tell(i / 3)
        words, influence, maps = word_influence_at(pipe, prompt, [place], seed, at, steps, guidance)
        found.append((when, dict(zip(words, map(float, influence[:, 0]), strict=True)), maps))
    return found


def cosines_by_layer(pipe, prompts: list[str], steps: int, tell: Callable[[float], None]) -> dict[str, np.ndarray]:
    """Cosines [P, P] between the concepts' mean differences of every block's hidden states, at the first step."""
    from lcs.sdxl.features import cosine_matrix
    from lcs.sdxl.hooks import capture_states, short_name, transformer_blocks
    from lcs.sdxl.sampling import encode, initial_noise, sample

    names = transformer_blocks(pipe.unet)
    means: list[dict[str, np.ndarray]] = []
    with capture_states(pipe.unet, names) as seen:
        seen.on = True
        for i, prompt in enumerate(["", *prompts]):
            tell(i / (1 + len(prompts)))
            cond = encode(pipe, [prompt]).repeat(len(SEEDS))
            sample(pipe, cond, initial_noise(pipe, SEEDS), steps, 1.0, stop_after=1)
            taken = seen.take()
            means.append({name: taken[name][0].float().mean(0).flatten().numpy() for name in names})
    nothing, *rest = means
    return {short_name(n): cosine_matrix(np.stack([m[n] - nothing[n] for m in rest])) for n in names}
