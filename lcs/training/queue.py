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
from lcs.data.files import read_json, write_error
from lcs.data.shards import RenderedScenes, StreamedScenes
from lcs.errors import DiskFull, LcsError
from lcs.experiments import MAIN_OBJECTS, STAGED, Run
from lcs.training import checkpoint
from lcs.training.trainer import TrainSettings, is_finished, run_folder, train


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


def _processes() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


@contextmanager
def claimed(folder: Path):
    """Yields True if this process now holds the run's lock, False if another one does.

    The processes of one launch train a run together: the first of them holds the lock, and if it cannot, that is an
    error, which ends the launch.
    """
    together = _processes() > 1
    if together and int(os.environ.get("RANK", 0)) != 0:
        yield True
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = open(folder / "lock", "w")  # noqa: SIM115, closed below
    except OSError as error:
        raise write_error(folder, error) from None
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if together:
                raise LcsError(f"another process is training in {folder}; wait for it, or use another --out") from None
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

    `keep_going`: a run that fails (no data for it, a loss that is not finite) does not stop the others; it is named in
    the error at the end. Several processes of one launch do stop: one that went on alone would train the next run on
    the others' samples of this one. `from_shipped`: a run without a state here goes on from its shipped weights instead
    of from the start. What waits for another process's run is tried again after every run that was trained here.
    A run that begins with the weights of another one brings that along, unless it is there or shipped.
    """
    left, failed = _with_ancestors(runs, out), []
    while left:
        waiting, trained = [], False
        for run in left:
            try:
                outcome = _attend_to(run, data, out, seed, settings, ship, cifar, from_shipped)
            except DiskFull:
                raise
            except LcsError as error:
                if not keep_going or _processes() > 1:
                    raise
                print(f"{run.name}: skipped, {error}")
                failed.append(run.name)
                continue
            if outcome == "trained":
                trained = True
            elif outcome != "done":
                print(f"{run.name}: {outcome}")
                waiting.append(run)
            if trained and waiting:  # first what is needed more and was not ready before
                waiting += left[left.index(run) + 1 :]
                break
        left = waiting if trained else []
    if failed:
        raise LcsError(f"{', '.join(failed)} could not be trained, see above; the others are finished or in work")


def _with_ancestors(runs: list[Run], out: Path) -> list[Run]:
    """The runs, each behind those it is grown from whose weights are nowhere yet."""
    queue: list[Run] = []
    for run in runs:
        line = [run]
        while (parent := line[0].grown_from) is not None and _final_weights(parent, out) is None:
            line.insert(0, parent)
        queue += [r for r in line if r.name not in {q.name for q in queue}]
    return queue


def _final_weights(run: Run, out: Path) -> Path | None:
    """The weights at the end of a run: trained here, or shipped."""
    trained = run_folder(out, run) / "late.safetensors"
    return trained if trained.exists() else weights.find(run)


def _attend_to(run: Run, data, out: Path, seed: int, settings: TrainSettings, ship: bool, cifar, from_shipped) -> str:
    """Trains a run, or says that it is "done" or what it waits for."""
    folder = run_folder(out, run)
    with claimed(folder) as mine:
        if not mine:
            return "another process is training it"
        resumed = (folder / checkpoint.STATE).exists()
        shipped = weights.find(run) if from_shipped and not resumed else None
        parent, grown = run.grown_from, None
        if parent is not None and not resumed and not shipped:
            grown = _final_weights(parent, out)
            if grown is None:
                return f"waits for {parent.name}"
        outcome = "done"
        if is_finished(folder, run):
            print(f"{run.name}: finished")
        elif shipped and checkpoint.load_meta(shipped)["samples"] >= run.recipe.samples:
            print(f"{run.name}: shipped")
        else:
            try:
                train(run, open_source(run, data, cifar), folder, seed, settings, shipped, grown)
            except torch.OutOfMemoryError:
                raise LcsError(
                    f"{run.name}: not enough memory for {settings.micro_batch or 'all'} samples at once; give a "
                    "smaller --micro-batch (the result stays the same)"
                ) from None
            outcome = "trained"
        if ship and is_finished(folder, run) and int(os.environ.get("RANK", 0)) == 0:
            _ship(run, folder)
    return outcome


def _ship(run: Run, folder: Path) -> None:
    """Exports the stages that are shipped of a run, unless they are already in the manifest with as many samples."""
    there = weights.read_manifest()
    for stage in (
        reversed(weights.STAGES) if run.experiment.name in STAGED and run.objects == MAIN_OBJECTS else ("late",)
    ):
        path = folder / f"{stage}.safetensors"
        entry = there.get(weights.entry_key(run, stage), {})
        if not path.exists():
            continue
        samples, settings = checkpoint.load_meta(path)["samples"], read_json(folder / "run.json")
        if entry.get("samples", 0) > samples and stage == "late" and _same_recipe(entry["settings"], settings):
            print(f"{run.name}: not shipped, weights of {entry['samples']} samples are, these have {samples}")
            return
        if entry.get("samples") != samples or entry.get("settings") != settings:
            weights.export(run, folder, stage)


def _same_recipe(a: dict, b: dict) -> bool:
    """Settings that differ in length only: then more samples are better. Those of another recipe are superseded."""
    return {**a["recipe"], "samples": 0} == {**b["recipe"], "samples": 0} and a["network"] == b["network"]
