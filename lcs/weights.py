"""Shipped checkpoints: safetensors in `weights/`, described and hashed in `weights/manifest.json`.

An entry of the manifest is keyed by "<scale>/<run>/<stage>" and holds the settings the run was trained
with, the samples it has seen, the code version and the file's sha256. Loading checks the hash, so a
corrupt or foreign file is never used.
"""

from __future__ import annotations

import fcntl
from pathlib import Path

import torch
from torch import nn

import lcs
from lcs.data.files import read_json, sha256_of, write_json
from lcs.errors import LcsError
from lcs.experiments import Network, Run
from lcs.model.build import build_model, trained_network
from lcs.packing import pack, unpack
from lcs.training import checkpoint

WEIGHTS = Path(__file__).parents[1] / "weights"
STAGES = ("late", "mid", "early")


def entry_key(run: Run, stage: str = "late") -> str:
    return f"{run.scale.name}/{run.name}/{stage}"


def read_manifest(root: Path = WEIGHTS) -> dict[str, dict]:
    path = Path(root) / "manifest.json"
    entries = read_json(path) if path.exists() else {}
    if not isinstance(entries, dict) or not all(
        isinstance(e, dict) and {"file", "sha256"} <= e.keys() for e in entries.values()
    ):
        raise LcsError(f"{path} is not a manifest: every entry needs a file and its sha256; fetch it again")
    return entries


def export(run: Run, folder: Path, stage: str = "late", root: Path = WEIGHTS) -> Path:
    """Copies a trained stage of a run folder into `root`, in few bytes, and enters it in the manifest."""
    tensors, meta = checkpoint.load_tensors(Path(folder) / f"{stage}.safetensors")
    settings = read_json(Path(folder) / "run.json")
    path = Path(root) / f"{entry_key(run, stage).replace('/', '--')}.safetensors"
    checkpoint.save_tensors(
        path, pack(tensors) if run.scale.packed else {n: t.half() for n, t in tensors.items()}, meta
    )
    enter(root, entry_key(run, stage), {
        "file": path.name, "sha256": sha256_of(path), "bytes": path.stat().st_size,
        "samples": meta["samples"], "ema_std": meta["ema_std"], "version": lcs.__version__, "settings": settings,
    })  # fmt: skip
    return path


def enter(root: Path, key: str, entry: dict) -> None:
    """Puts an entry into the manifest; several processes may do so at once."""
    with open(Path(root) / ".manifest.lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        write_json(Path(root) / "manifest.json", read_manifest(root) | {key: entry})


def find(run: Run, stage: str = "late", root: Path = WEIGHTS) -> Path | None:
    """The file of a shipped checkpoint, whole and unchanged; None if it is not shipped."""
    entry = read_manifest(root).get(entry_key(run, stage))
    if entry is None:
        return None
    path = Path(root) / entry["file"]
    if not path.exists() or sha256_of(path) != entry["sha256"]:
        raise LcsError(f"{path} is missing or does not match its sha256 in the manifest; fetch it again")
    return path


def load(run: Run, stage: str = "late", root: Path = WEIGHTS) -> nn.Module:
    """The trained model of a run in evaluation mode; raises if it is not shipped or its file is damaged."""
    path = find(run, stage, root)
    if path is None:
        raise LcsError(f"no weights for {entry_key(run, stage)} in {root}; train them with `lcs train`")
    settings = read_manifest(root)[entry_key(run, stage)]["settings"]
    tensors, _ = checkpoint.load_tensors(path)
    return _fill(build_model(run, stored_network(settings)), tensors, path)


def stored_network(settings: dict) -> Network | None:
    """The network of a checkpoint by its own settings: the registry may have moved on since it was trained.

    None if the settings do not say: then it is the registry's.
    """
    if "network" not in settings:
        return None
    try:
        return Network(**{k: tuple(v) if isinstance(v, list) else v for k, v in settings["network"].items()})
    except TypeError as error:
        raise LcsError(f"the weights of {settings['run']} are of another version of lcs: {error}") from None


def load_stage(run: Run, path: Path) -> nn.Module:
    """The model of a run with the weights of any stage file, e.g. of a run that is still training."""
    tensors, _ = checkpoint.load_tensors(path)
    return _fill(build_model(run), tensors, path)


def load_running(run: Run, folder: Path) -> nn.Module:
    """The model of a run that is still training, with its averaged weights as of the last checkpoint."""
    path = Path(folder) / checkpoint.STATE
    if not path.exists():
        raise LcsError(f"{path} does not exist; give the folder of a run, e.g. runs/mini/grid-all-m3")
    tensors, _ = checkpoint.load_tensors(path)
    first = "ema.ema0."  # the width that is shipped
    averaged = {name.removeprefix(first): t for name, t in tensors.items() if name.startswith(first)}
    return _fill(build_model(run, stored_network(read_json(Path(folder) / "run.json"))), averaged, path)


def _fill(model: nn.Module, tensors: dict[str, torch.Tensor], path: Path) -> nn.Module:
    try:
        trained_network(model).load_state_dict(unpack(tensors))
    except RuntimeError as error:
        raise LcsError(f"{path} does not fit the model: {str(error).splitlines()[-1].strip()}") from None
    return model.eval().requires_grad_(False)
