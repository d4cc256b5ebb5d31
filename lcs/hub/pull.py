"""Pulling checkpoints: `weights/manifest.json` says which commit, which sha256 and how many bytes.

An entry without a pinned commit was never published; its file either ships with the code or must be trained.
What is on disk with the right hash is not asked for again, so a complete folder works without a network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from lcs.errors import LcsError
from lcs.experiments import Run
from lcs.hub import repo_id
from lcs.hub.client import HubError, download, has_sha256
from lcs.weights import WEIGHTS, entry_key, read_manifest

MODEL_FILE = "model.safetensors"


def pull(
    run: Run, stage: str = "late", root: Path = WEIGHTS, repo: str | None = None, revision: str | None = None
) -> str:
    """Brings the checkpoint into `root`; says how: 'present', 'cached' or 'downloaded'.

    `repo` and `revision` replace the pinned ones (a fork, a mirror); the sha256 of the manifest holds regardless.
    """
    key = entry_key(run, stage)
    entry = read_manifest(root).get(key)
    if entry is None:
        raise HubError(f"{key} is not in {Path(root) / 'manifest.json'}: there is no hash to check a download against")
    pinned = entry.get("hub", {})
    repo = repo or pinned.get("repo") or repo_id(run, stage)
    revision = revision or pinned.get("revision")
    path = Path(root) / Path(entry["file"]).name
    if revision is None:
        if has_sha256(path, entry["sha256"]):
            return "present"
        raise HubError(f"{key} has not been published: the manifest pins no revision; give --repo and --revision")
    return download(repo, MODEL_FILE, revision, path, entry["sha256"], entry["bytes"])


def pull_many(
    runs: Sequence[Run],
    stage: str = "late",
    root: Path = WEIGHTS,
    or_train: Callable[[Run], None] | None = None,
    repo: str | None = None,
    revision: str | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Pulls every run it can; what it cannot is handed to `or_train`, or reported at the end."""
    failed: list[HubError] = []
    for run in runs:
        try:
            say(f"{run.name}: {pull(run, stage, root, repo, revision)}")
        except HubError as error:
            if or_train is None:
                failed.append(error)
                continue
            say(f"{run.name}: {error}; training it instead")
            or_train(run)
            say(f"{run.name}: trained")
    if len(failed) == 1:
        raise failed[0]
    if failed:
        raise HubError(f"{len(failed)} of {len(runs)} could not be pulled; the first: {failed[0]}")


def trainer(
    out: Path, stage: str = "late", root: Path = WEIGHTS, data: Path | None = None, cifar: Path | None = None,
    seed: int = 0, cpu: bool = False,
) -> Callable[[Run], None]:  # fmt: skip
    """An `or_train` hook: trains a run in `out` (resuming what is there) and enters it in the manifest of `root`."""

    def train_and_export(run: Run) -> None:
        from lcs import weights
        from lcs.training.queue import run_folder, train_all
        from lcs.training.trainer import TrainSettings

        train_all([run], data, out, seed, TrainSettings(cpu=cpu), cifar=cifar)
        folder = run_folder(out, run)
        if not (folder / f"{stage}.safetensors").exists():
            raise LcsError(f"{run.name} is being trained by another process; run the same command again later")
        weights.export(run, folder, stage, root)

    return train_and_export
