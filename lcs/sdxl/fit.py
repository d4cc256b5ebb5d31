"""Fits a small part of mini-sdxl: the autoencoder, its decoder, the text encoders. Resumable."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from lcs.training import checkpoint


def fit(
    module: torch.nn.Module, loss_at: Callable[[int, int], Tensor], steps: int, rate: float, path: Path, name: str,
    checkpoint_seconds: float = 60.0, progress: bool = True,
) -> None:  # fmt: skip
    """Adam on `loss_at(step, steps)` with a cosine to zero after a short ramp; goes on from the state in `path`."""
    optimizer, step = torch.optim.Adam(module.parameters(), lr=rate, betas=(0.9, 0.99)), 0
    if path.exists():
        tensors, meta = checkpoint.load_tensors(path)
        checkpoint.restore_training_state(tensors, module, optimizer)
        step = meta["step"]
    saved = time.monotonic()
    with tqdm(total=steps, initial=step, disable=not progress, desc=name, mininterval=5) as bar:
        while step < steps:
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1, (step + 1) / 50) * 0.5 * (1 + np.cos(np.pi * step / steps))
            loss = loss_at(step, steps)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            step += 1
            bar.update()
            if step % 50 == 0:
                bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
            if step == steps or time.monotonic() - saved > checkpoint_seconds:
                checkpoint.save_tensors(path, checkpoint.training_state(module, optimizer, {}), {"step": step})
                saved = time.monotonic()
