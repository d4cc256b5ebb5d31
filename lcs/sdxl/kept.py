"""What a long study has worked out so far, kept on disk: a kill loses one batch, not the hour before it.

    with keeping(folder):
        run_study(...)

Inside, `kept(facts, work)` is `work()`, or what an earlier run of the same study stored for the same facts. The folder
stands for everything the facts leave out, the model, the code and the device: who chooses it hashes those into its
name. Outside of `keeping` nothing is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from lcs.data.files import atomic_write, content_hash

_folder: ContextVar[Path | None] = ContextVar("folder", default=None)


@contextmanager
def keeping(folder: Path | None) -> Iterator[None]:
    """Stores parts in `folder` and takes them from there; None: does neither."""
    token = _folder.set(None if folder is None else Path(folder))
    try:
        yield
    finally:
        _folder.reset(token)


def kept(facts: list, work: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The arrays that `work` computes from `facts` (texts, numbers and lists of them)."""
    folder = _folder.get()
    if folder is None:
        return work()
    path = folder / f"{facts[0]}-{content_hash(facts)}.safetensors"
    if path.exists():
        try:
            return load_file(path)
        except (SafetensorError, OSError):  # damaged: work it out again
            pass
    arrays = {name: np.ascontiguousarray(array) for name, array in work().items()}
    with atomic_write(path) as temporary:
        save_file(arrays, temporary)
    return arrays
