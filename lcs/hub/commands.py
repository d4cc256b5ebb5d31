"""The verbs `pull`, `push` and `space`; `register` adds them to the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lcs.errors import LcsError

Scale = Annotated[str, typer.Option(help="mini or paper.")]
Objects = Annotated[int, typer.Option(help="The run trained on scenes with 1..M objects.")]
Stage = Annotated[str, typer.Option(help="late, mid or early: when in training.")]
Repo = Annotated[str | None, typer.Option(help="Repository as owner/name; by default it follows from the run.")]
Weights = Annotated[Path | None, typer.Option(help="Folder of the weights and their manifest.json.")]
Private = Annotated[bool, typer.Option(help="Make a new repository private.")]


def register(app: typer.Typer) -> None:
    app.command("pull")(pull_command)
    app.command("push")(push_command)
    app.command("space")(space_command)


def pull_command(
    experiments: Annotated[list[str] | None, typer.Argument(help="Names in lcs/experiments.py.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every published run of the scale.")] = False,
    scale: Scale = "mini",
    objects: Objects = 3,
    stage: Stage = "late",
    or_train: Annotated[bool, typer.Option("--or-train", help="Train what cannot be pulled.")] = False,
    runs: Annotated[Path, typer.Option(help="With --or-train: folder of all runs.")] = Path("runs"),
    repo: Repo = None,
    revision: Annotated[str | None, typer.Option(help="Commit, instead of the pinned one.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Pull this dataset repository instead, into --out.")] = None,
    out: Annotated[Path | None, typer.Option(help="With --dataset: folder of the dataset.")] = None,
    weights: Weights = None,
) -> None:
    """Pull checkpoints, or a rendered dataset, from the Hugging Face Hub; run again to resume."""
    if dataset is not None:
        if experiments or all_ or or_train or repo:
            raise LcsError("--dataset stands alone: no experiment, --all, --or-train or --repo")
        if out is None:
            raise LcsError("--dataset needs --out, the folder to fill")
        from lcs.hub.datasets import pull_dataset

        commit = pull_dataset(dataset, out, revision or "main")
        print(f"{out}: complete, {dataset} at {commit}")
        return
    if bool(experiments) == all_:
        raise LcsError("name experiments, or give --all, or --dataset")
    if all_ and (repo or revision):
        raise LcsError("--repo and --revision belong to one run, not to --all")
    from lcs.experiments import get_run, paper_runs
    from lcs.hub.pull import pull_many, trainer
    from lcs.weights import WEIGHTS, entry_key, read_manifest

    root = weights or WEIGHTS
    _check_stage(stage)
    if all_:
        wanted = paper_runs(scale)
        if not or_train:
            wanted = [run for run in wanted if entry_key(run, stage) in read_manifest(root)]
        if not wanted:
            raise LcsError(f"{root / 'manifest.json'} names no {stage} checkpoint of scale {scale}; try --or-train")
    else:
        wanted = [get_run(name, 0 if name == "cifar10" else objects, scale) for name in experiments]
    if repo and len(wanted) > 1:
        raise LcsError("--repo holds one checkpoint: name one experiment")
    pull_many(wanted, stage, root, trainer(runs, stage, root) if or_train else None, repo, revision)


def push_command(
    experiment: Annotated[str | None, typer.Argument(help="Name in lcs/experiments.py.")] = None,
    scale: Scale = "mini",
    objects: Objects = 3,
    stage: Stage = "late",
    repo: Repo = None,
    result: Annotated[Path | None, typer.Option(help="JSON of the evaluation: its row goes into the card.")] = None,
    grid: Annotated[Path | None, typer.Option(help="PNG with samples for the card.")] = None,
    dataset: Annotated[Path | None, typer.Option(help="Push this rendered dataset folder instead.")] = None,
    private: Private = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the card and the files; send nothing.")] = False,
    weights: Weights = None,
) -> None:
    """Push a checkpoint with its model card, or a rendered dataset, to the Hugging Face Hub."""
    if (experiment is None) == (dataset is None):
        raise LcsError("name one experiment, or give --dataset")
    if dataset is not None:
        from lcs.hub.datasets import push_dataset

        if dry_run or result or grid:
            raise LcsError("--dry-run, --result and --grid belong to a checkpoint, not to --dataset")
        print(f"pushed {dataset} at {push_dataset(dataset, repo, private)}")
        return
    from lcs.experiments import get_run
    from lcs.hub import repo_id
    from lcs.hub.push import checkpoint_files, push, read_result
    from lcs.hub.space import listing
    from lcs.weights import WEIGHTS

    _check_stage(stage)
    run = get_run(experiment, 0 if experiment == "cifar10" else objects, scale)
    root = weights or WEIGHTS
    if grid is not None and not grid.is_file():
        raise LcsError(f"{grid} does not exist")
    row = None if result is None else read_result(result, run, stage)
    name = repo or repo_id(run, stage)
    if dry_run:
        files = checkpoint_files(run, stage, root, row, grid)
        print(files["README.md"].decode())
        print(f"{name}, nothing was sent:\n{listing(files)}")
        return
    print(f"pushed {run.name} to {name} at {push(run, stage, root, name, row, grid, private)}")


def space_command(
    repo: Annotated[str, typer.Option(help="The Space as owner/name.")],
    push: Annotated[bool, typer.Option("--push", help="Upload; without it nothing is sent.")] = False,
    sdk: Annotated[str, typer.Option(help="gradio, or docker: build the Dockerfile.")] = "gradio",
    python: Annotated[str, typer.Option(help="Python of a Gradio Space; ZeroGPU offers only some.")] = "3.11",
    private: Private = False,
    root: Annotated[Path | None, typer.Option(help="Folder of this project.")] = None,
) -> None:
    """Assemble the demo Space and list its files; --push uploads exactly these."""
    from lcs.hub.space import ROOT, assemble, listing, push_space

    files = assemble(root or ROOT, sdk, python)
    print(listing(files))
    if push:
        print(f"pushed the Space {repo} at {push_space(repo, files, sdk, private)}")
    else:
        print(f"nothing was sent to {repo}; --push uploads these files")


def _check_stage(stage: str) -> None:
    from lcs.weights import STAGES

    if stage not in STAGES:
        raise LcsError(f"unknown stage {stage!r}; choose from {', '.join(STAGES)}")
