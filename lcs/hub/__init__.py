"""The Hugging Face Hub: checkpoints, rendered datasets and the demo Space.

Every checkpoint has a repository of its own. Its name follows from the registry, and the manifest of
`lcs.weights` pins the commit and the sha256 of what is in it:

    lcs-project/lcs-mini-grid-all-m3           config.json, model.safetensors, README.md (the model card)
    lcs-project/lcs-mini-grid-all-m3-early     the same run, early in training
    lcs-project/lcs-scenes-64                  rendered scenes, 64 pixels a side
"""

from __future__ import annotations

from lcs.experiments import Run

NAMESPACE = "lcs-project"  # user or organisation that owns the repositories
ARXIV = "2509.16447"


def repo_id(run: Run, stage: str = "late") -> str:
    """Where a checkpoint lives unless the manifest or the user says otherwise."""
    suffix = "" if stage == "late" else f"-{stage}"
    return f"{NAMESPACE}/lcs-{run.scale.name}-{run.name}{suffix}"


def dataset_repo_id(size: int) -> str:
    return f"{NAMESPACE}/lcs-scenes-{size}"
