"""Training many runs, one after another, resumable and safe to start several times.

Each run lives in OUT/<scale>/<run name>. A process holds a lock file there while it trains, so two
`lcs train --all` side by side (one thread each) share the queue instead of repeating each other.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from pathlib import Path

import torch

from lcs import weights
from lcs.data.cifar import CifarImages
from lcs.data.files import read_json
from lcs.data.shards import RenderedScenes, StreamedScenes
from lcs.errors import LcsError
from lcs.experiments import STAGED, WARM_OBJECTS, Run
from lcs.training import checkpoint
from lcs.training.trainer import TrainSettings, is_finished, train


def run_folder(out: Path, run: Run) -> Path:
    return Path(out) / run.scale.name / run.name


def open_source(run: Run, data: Path | None, cifar: Path | None = None):
    """The images a run is trained on: rendered ones from `data`, or streamed if it is None; `cifar` for CIFAR-10."""
    if run.experiment.name == "cifar10":
        return CifarImages(cifar or data)
    counts = tuple(range(1, run.objects + 1))
    if data is None:
        return StreamedScenes(counts, run.scale.resolution)
    scenes = RenderedScenes(data, counts)
    if scenes.size != run.scale.resolution:
        raise LcsError(
            f"{data} holds images of {scenes.size} pixels, {run.name} at scale {run.scale.name} takes "
            f"{run.scale.resolution}; render them with --size {run.scale.resolution}"
        )
    return scenes


@contextmanager
def claimed(folder: Path):
    """Yields True if this process now holds the run's lock, False if another one does."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:  # one launch, many processes: they train the run together
        yield True
        return
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def train_all(
    runs: list[Run],
    data: Path | None,
    out: Path,
    seed: int,
    settings: TrainSettings,
    ship: bool = False,
    cifar: Path | None = None,
    keep_going: bool = False,
    from_shipped: bool = False,
) -> None:
    """Trains every run that is neither finished nor being trained elsewhere; `ship` exports what is finished.

    `keep_going`: a run without data does not stop the others. `from_shipped`: a run that has no state here goes on from
    its shipped weights instead of from the start.
    """
    for run in runs:
        folder = run_folder(out, run)
        with claimed(folder) as mine:
            if not mine:
                print(f"{run.name}: another process is training it")
                continue
            shipped = weights.find(run) if from_shipped and not (folder / checkpoint.STATE).exists() else None
            if is_finished(folder, run):
                print(f"{run.name}: finished")
            elif shipped and checkpoint.load_meta(shipped)["samples"] >= run.recipe.samples:
                print(f"{run.name}: shipped")
            else:
                warm = None if shipped else _warm_start(run, out, from_shipped)
                if run.warm_start and not shipped and not warm:
                    print(f"{run.name}: waits for {run.warm_start.name}")
                    continue
                try:
                    source = open_source(run, data, cifar)
                except LcsError as error:  # e.g. no scenes with so many objects: the other runs can go on
                    if not keep_going:
                        raise
                    print(f"{run.name}: skipped, {error}")
                    continue
                try:
                    train(run, source, folder, seed, settings, warm, shipped)
                except torch.OutOfMemoryError:
                    raise LcsError(
                        f"{run.name}: not enough memory for {settings.micro_batch or 'all'} samples at once; give a "
                        "smaller --micro-batch (the result stays the same)"
                    ) from None
            if ship and is_finished(folder, run):
                _ship(run, folder)


def _warm_start(run: Run, out: Path, from_shipped: bool) -> Path | None:
    """The weights of the run that this one starts from: of the folder of runs, else the shipped ones if allowed."""
    if run.warm_start is None:
        return None
    own = run_folder(out, run.warm_start) / "late.safetensors"
    return own if own.exists() else weights.find(run.warm_start) if from_shipped else None


def _ship(run: Run, folder: Path) -> None:
    """Exports the stages that are shipped of a run, unless they are already in the manifest with as many samples."""
    there = weights.read_manifest()
    for stage in weights.STAGES if run.experiment.name in STAGED and run.objects == WARM_OBJECTS else ("late",):
        path = folder / f"{stage}.safetensors"
        entry = there.get(weights.entry_key(run, stage), {})
        if path.exists() and (
            entry.get("samples") != checkpoint.load_meta(path)["samples"]
            or entry.get("settings") != read_json(folder / "run.json")
        ):
            weights.export(run, folder, stage)
