"""Files that are either whole or absent: atomic writes, and memory-mapped safetensors."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from safetensors import SafetensorError

from lcs.errors import DiskFull, LcsError

_DTYPES = {
    "U8": np.uint8, "I64": np.int64, "I32": np.int32, "F32": np.float32, "F16": np.float16, "BOOL": np.bool_,
}  # fmt: skip


@contextmanager
def atomic_write(path: Path):
    """Yields a temporary path beside `path`; it replaces `path` only if the block succeeds."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with open(temporary, "rb+") as handle:
            os.fsync(handle.fileno())
        temporary.chmod(0o644)  # safetensors makes files only their owner can read
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise write_error(path, error) from None
    finally:
        with suppress(OSError):  # the folder itself may be what is wrong
            temporary.unlink(missing_ok=True)


def write_error(path: Path, error: Exception) -> LcsError:
    """What to raise instead; safetensors wraps the system's error and leaves only its text."""
    if getattr(error, "errno", None) == errno.ENOSPC or f"os error {errno.ENOSPC})" in str(error):
        return DiskFull(f"the disk is full: cannot write {path}; what was there before is unchanged")
    return LcsError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}")


def write_json(path: Path, data) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")


def content_hash(data) -> str:
    """16 hex digits that stand for a value made of dictionaries, lists, numbers and texts"""
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:16]


def as_json(value):
    """Tuples as lists: the value as it comes back from a JSON file."""
    if isinstance(value, dict):
        return {k: as_json(v) for k, v in value.items()}
    return [as_json(v) for v in value] if isinstance(value, (list, tuple)) else value


def read_json(path: Path):
    try:
        return json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise LcsError(f"{path} does not exist") from None
    except OSError as error:
        raise LcsError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # no JSON, or no text
        raise LcsError(f"{path} is not valid JSON: {error}") from None


def sha256_of(path: Path) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def map_safetensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file as read-only views of the mapped file: nothing is read until used."""
    try:
        mapped = np.memmap(path, np.uint8, mode="r")
        header_size = int(mapped[:8].view("<u8")[0])
        header = json.loads(bytes(mapped[8 : 8 + header_size]))
        header.pop("__metadata__", None)
        data = mapped[8 + header_size :]
        tensors = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            tensors[name] = data[begin:end].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
        return tensors
    except FileNotFoundError:
        raise LcsError(f"{path} does not exist") from None
    except (ValueError, KeyError, IndexError, OSError) as error:
        raise LcsError(f"{path} is not a readable safetensors file: {error}") from None
