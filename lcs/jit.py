"""numba's decorator for this package, with a compile cache that knows all sources it was built from.

numba invalidates a cached function when its own file changes, not when a function it inlines changes.
The cache folder therefore carries a hash of every compiled source.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import numba
from numba import njit, prange

_PACKAGE = Path(__file__).parent
_SOURCES = [
    Path(__file__),
    *sorted((_PACKAGE / "render").glob("*.py")),
    _PACKAGE / "scenes" / "world.py",
    _PACKAGE / "model" / "fused.py",
    _PACKAGE / "model" / "convolution.py",
    _PACKAGE / "model" / "residual.py",
    _PACKAGE / "model" / "vectors.py",
]


def _cache_folder() -> Path:
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in _SOURCES)).hexdigest()[:16]
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for folder in (base / "lcs", Path(tempfile.gettempdir()) / f"lcs-{os.getuid()}"):
        try:
            folder = folder / f"numba-{digest}"
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        except OSError:
            continue
    return Path(tempfile.mkdtemp(prefix="lcs-numba-"))


numba.config.CACHE_DIR = str(_cache_folder())

__all__ = ["njit", "prange"]
