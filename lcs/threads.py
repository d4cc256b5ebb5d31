"""How many CPU threads a process computes with: PyTorch's operators and numba's loops alike."""

from __future__ import annotations

import numba
import torch


def use_threads(count: int) -> None:
    """From here on `count` threads; numba (the renderer) has no more than it started with."""
    torch.set_num_threads(count)
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
