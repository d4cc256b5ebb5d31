"""Pushing a checkpoint: one repository with its configuration, weights, card and, if given, sample grid.

What is pushed is the file of `weights/`, unchanged, so its sha256 on the Hub is the one in the manifest. The
commit it got there is written back into the manifest: this is the pin that `pull` uses.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import CommitOperationAdd, get_hf_file_metadata, hf_hub_url

from lcs.data.files import read_json
from lcs.errors import LcsError
from lcs.experiments import Run
from lcs.hub import cards, repo_id
from lcs.hub.client import HubError, endpoint, has_sha256, hub_errors, signed_in_api
from lcs.hub.pull import MODEL_FILE
from lcs.packing import unpack
from lcs.training.checkpoint import load_tensors
from lcs.weights import WEIGHTS, enter, entry_key, read_manifest


def checkpoint_files(
    run: Run, stage: str = "late", root: Path = WEIGHTS, result: dict | None = None, grid: Path | None = None
) -> dict[str, bytes | Path]:
    """Everything that goes into the repository of a checkpoint, by its name there."""
    entry = read_manifest(root).get(entry_key(run, stage))
    if entry is None:
        raise LcsError(f"no weights for {entry_key(run, stage)} in {root}; train and export them first")
    weights = Path(root) / entry["file"]
    if not has_sha256(weights, entry["sha256"]):
        raise LcsError(f"{weights} is missing or does not match its sha256 in the manifest; it is not pushed")
    if grid is not None and Path(grid).read_bytes()[:8] != b"\x89PNG\r\n\x1a\n":
        raise LcsError(f"the sample grid {grid} is not a PNG image")
    parameters = count_parameters(weights)
    card = cards.model_card(run, stage, entry, parameters, result, has_grid=grid is not None)
    configuration = json.dumps(cards.config(run, stage, entry, parameters), indent=1, sort_keys=True) + "\n"
    files = {"README.md": card.encode(), "config.json": configuration.encode(), MODEL_FILE: weights}
    return files if grid is None else files | {cards.GRID_FILE: Path(grid)}


def count_parameters(path: Path) -> int:
    """Weights of the network that a checkpoint holds, however they are stored."""
    return sum(tensor.numel() for tensor in unpack(load_tensors(path)[0]).values())


def push(
    run: Run,
    stage: str = "late",
    root: Path = WEIGHTS,
    repo: str | None = None,
    result: dict | None = None,
    grid: Path | None = None,
    private: bool = False,
) -> str:
    """Pushes a checkpoint and pins it in the manifest; returns the commit. Pushing the same again changes nothing."""
    repo = repo or repo_id(run, stage)
    files = checkpoint_files(run, stage, root, result, grid)
    key = entry_key(run, stage)
    commit = commit_files(repo, files, f"{key}: weights, configuration and card", private=private)
    url = hf_hub_url(repo, MODEL_FILE, revision=commit, endpoint=endpoint())
    with hub_errors(f"check what was pushed to {repo}"):
        stored = get_hf_file_metadata(url, endpoint=endpoint(), retry_on_errors=True)
    manifest = read_manifest(root)
    if stored.etag != manifest[key]["sha256"]:
        raise HubError(f"{repo} at {commit[:12]} does not hold the weights that were pushed; push again")
    enter(root, key, manifest[key] | {"hub": {"repo": repo, "revision": commit}})
    return commit


def commit_files(
    repo: str,
    files: dict[str, bytes | Path],
    message: str,
    repo_type: str = "model",
    private: bool = False,
    operations: Sequence = (),
    space_sdk: str | None = None,
) -> str:
    """Creates the repository if it is new and puts the files there in one commit; returns the commit."""
    client = signed_in_api(repo)
    with hub_errors(f"push to {repo}"):
        client.create_repo(repo, repo_type=repo_type, private=private or None, exist_ok=True, space_sdk=space_sdk)
        additions = [CommitOperationAdd(name, content) for name, content in files.items()]
        return client.create_commit(repo, [*operations, *additions], commit_message=message, repo_type=repo_type).oid


def read_result(path: Path, run: Run, stage: str = "late") -> dict:
    """The evaluation of a stage of `run` in a JSON file: one result, a list, or an object with a list of them."""
    content = read_json(path)
    if isinstance(content, dict) and "run" not in content:
        content = next((value for value in content.values() if isinstance(value, list)), [])
    results = content if isinstance(content, list) else [content]
    wanted = {"run", "k_max", "k_tested", "label"}
    for one in results:
        if not isinstance(one, dict) or not wanted <= set(one):
            continue
        if (one["run"], one["scale"], one.get("stage", "late")) == (run.name, run.scale.name, stage):
            return one
    raise LcsError(f"{path} has no evaluation of {run.name} ({stage}) at scale {run.scale.name}")
