"""From conditions to pictures: sampling a trained model, one seed per image."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from lcs.diffusion.samplers import Callback, dpmpp_2m, heun, initial_noise, sigma_schedule
from lcs.errors import LcsError
from lcs.experiments import Run
from lcs.model.build import resolution_of
from lcs.training.batches import to_rgb

SOLVERS = {"heun": heun, "dpmpp_2m": dpmpp_2m}
DEFAULT_STEPS = 32  # the paper's: 63 network calls with Heun
CHUNK = 32  # images at once


def check_device(device: str) -> None:
    """Raises unless tensors can be put there."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise LcsError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from None


@torch.no_grad()
def sample(
    run: Run,
    model: nn.Module,
    labels: np.ndarray | Tensor | None,
    seeds: Sequence[int],
    steps: int = DEFAULT_STEPS,
    solver: str = "heun",
    callback: Callback | None = None,
) -> Tensor:
    """Images in model space, float32 [len(seeds), 3, H, W]. labels: one row per image, or one row for all."""
    if solver not in SOLVERS:
        raise LcsError(f"unknown solver {solver!r}; choose from {', '.join(SOLVERS)}")
    if not 1 <= steps <= 1000:
        raise LcsError(f"{steps} sampling steps are not possible; allowed: 1..1000")
    device = next(model.parameters()).device
    size = resolution_of(run)
    if labels is not None:
        labels = torch.as_tensor(labels, dtype=torch.float32, device=device).expand(len(seeds), -1)
        # A copy in PyTorch's aligned memory: matrix products round differently on numpy's, from one call to the next.
        labels = labels.clone(memory_format=torch.contiguous_format)
    images = []
    for at in range(0, len(seeds), CHUNK):
        part = slice(at, at + CHUNK)
        part_labels = None if labels is None else labels[part]
        noise = initial_noise(seeds[part], (3, size, size)).to(device)
        images.append(SOLVERS[solver](_Denoiser(model, part_labels), noise, sigma_schedule(steps), callback))
    return torch.cat(images)


class _Denoiser:
    def __init__(self, model: nn.Module, labels: Tensor | None):
        self.model, self.labels = model, labels

    def __call__(self, x: Tensor, sigma: float) -> Tensor:
        return self.model(x, sigma, self.labels)


def sample_rgb(run: Run, model: nn.Module, labels, seeds: Sequence[int], **options) -> np.ndarray:
    """The same as pictures: uint8 [len(seeds), H, W, 3]."""
    return to_rgb(sample(run, model, labels, seeds, **options), run)
