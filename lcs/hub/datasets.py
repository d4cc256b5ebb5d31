"""Rendered datasets on the Hub: the shards of `lcs.data.shards`, their manifest and a card.

The manifest goes up last and is written last on the way down, so a dataset that has one is complete. Both
directions can be stopped at any time and continue where they were.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from huggingface_hub import hf_hub_download
from tqdm import tqdm

from lcs.data.files import read_json, sha256_of, write_json
from lcs.data.shards import DatasetSpec, shard_path
from lcs.errors import LcsError
from lcs.hub import dataset_repo_id
from lcs.hub.cards import dataset_card
from lcs.hub.client import download, endpoint, hub_errors, signed_in_api
from lcs.hub.push import commit_files


def read_spec(manifest: dict, where: str) -> DatasetSpec:
    """The specification in a dataset's manifest, with a hash for each of its shards."""
    try:
        names = ("scenes", "size", "shard_size", "base_seed", "format")
        spec = DatasetSpec(tuple(manifest["counts"]), **{name: int(manifest[name]) for name in names})
        hashes = manifest["sha256"]
        if set(hashes) != {f"{count}/{shard}" for count, shard in spec.shards}:
            raise KeyError("sha256")
    except (KeyError, TypeError, ValueError, LcsError):
        raise LcsError(f"{where}: manifest.json does not describe a rendered dataset") from None
    return spec


def push_dataset(folder: Path, repo: str | None = None, private: bool = False) -> str:
    """Pushes a complete dataset folder; returns the commit."""
    folder = Path(folder)
    if not (folder / "manifest.json").exists():
        raise LcsError(f"{folder} has no manifest.json: render the missing shards first")
    manifest = read_json(folder / "manifest.json")
    spec = read_spec(manifest, str(folder))
    repo = repo or dataset_repo_id(spec.size)
    client = signed_in_api(repo)
    for count, shard in tqdm(spec.shards, unit="shard", desc="checking"):
        path = shard_path(folder, count, shard)
        if not path.exists() or sha256_of(path) != manifest["sha256"][f"{count}/{shard}"]:
            raise LcsError(f"{path} is missing or does not match its sha256 in the manifest; nothing was pushed")
    with hub_errors(f"push to {repo}"):
        client.create_repo(repo, repo_type="dataset", private=private or None, exist_ok=True)
        client.upload_folder(
            repo_id=repo,
            folder_path=folder,
            repo_type="dataset",
            allow_patterns=[f"count-{count}/shard-*.safetensors" for count in spec.counts],
            commit_message="shards",
        )
    files = {"README.md": dataset_card(spec, repo).encode(), "manifest.json": folder / "manifest.json"}
    return commit_files(repo, files, "manifest and card", repo_type="dataset", private=private)


def pull_dataset(repo: str, folder: Path, revision: str = "main") -> str:
    """Pulls a dataset into `folder`, shard by shard, every hash checked; returns the commit it is from."""
    folder = Path(folder)
    with hub_errors(f"read the manifest of {repo}"):
        found = Path(
            hf_hub_download(repo, "manifest.json", repo_type="dataset", revision=revision, endpoint=endpoint())
        )
    commit = found.parent.name  # the cache keeps a file under the commit it belongs to
    manifest = read_json(found)
    spec = read_spec(manifest, repo)
    description = {**asdict(spec), "counts": list(spec.counts)}
    if (folder / "dataset.json").exists() and read_json(folder / "dataset.json") != description:
        raise LcsError(f"{folder} holds another dataset; choose an empty folder")
    write_json(folder / "dataset.json", description)
    for count, shard in tqdm(spec.shards, unit="shard", desc=repo):
        path, digest = shard_path(folder, count, shard), manifest["sha256"][f"{count}/{shard}"]
        name = path.relative_to(folder).as_posix()
        download(repo, name, commit, path, digest, repo_type="dataset")
        write_json(path.with_suffix(".json"), {"sha256": digest, "images": len(spec.scenes_in(shard))})
    write_json(folder / "manifest.json", manifest)
    return commit
