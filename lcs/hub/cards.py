"""The text of model and dataset cards, derived from the registry and the manifest: pure functions, no network."""

from __future__ import annotations

from huggingface_hub import DatasetCardData, EvalResult, ModelCardData

from lcs.data.shards import DatasetSpec
from lcs.experiments import Run
from lcs.hub import ARXIV, NAMESPACE
from lcs.model.build import resolution_of
from lcs.scenes.placement import MAX_OBJECTS

PAPER = f"[*Local Mechanisms of Compositional Generalization in Conditional Diffusion*](https://arxiv.org/abs/{ARXIV})"
TAGS = [f"arxiv:{ARXIV}", "diffusion", "edm2", "compositional-generalization", "length-generalization"]
GRID_FILE = "samples.png"

_CONDITIONS = {
    "grid-all": "a 16x16 grid with the number of object centres in each cell, flattened; every object is labelled",
    "grid-single": "a 16x16 grid, flattened, with one randomly chosen object labelled",
    "grid-random": "a 16x16 grid, flattened, with a random number of the objects labelled",
    "grid-drop-one": "a 16x16 grid, flattened, with all objects but one labelled",
    "list-all": "the locations of all objects, one after another in slots of (1, x, y)",
    "color": "how many objects there are of each of the 8 colours",
    "none": "nothing: the model is unconditional",
}


# ---- checkpoints ----------------------------------------------------------------------------------


def config(run: Run, stage: str, entry: dict, parameters: int) -> dict:
    """config.json of a checkpoint: all that determines it."""
    return {
        "model_type": "lcs-local-edm2" if run.experiment.local else "lcs-edm2",
        "stage": stage,
        "parameters": parameters,
        "stored_as": _stored_as(run),
        "conditioner": run.experiment.conditioner,
        "sigma_data": run.scale.sigma_data,
        "pixel_mean": run.pixel_mean,
        "pixel_std": run.pixel_std,
        "sha256": entry["sha256"],
        "samples_seen": entry["samples"],
        "ema_std": entry["ema_std"],
        "lcs_version": entry["version"],
        "training": entry["settings"],
    }


def model_card(
    run: Run, stage: str, entry: dict, parameters: int, result: dict | None = None, has_grid: bool = False
) -> str:
    """README.md of a checkpoint. `result` is one item of `lcs.evaluation.evaluate_all`: its row and its K_max."""
    cifar = run.experiment.name == "cifar10"
    unconditional = run.experiment.conditioner == "none"
    data = ModelCardData(
        license="apache-2.0",
        library_name="lcs",
        pipeline_tag="unconditional-image-generation" if unconditional else "other",
        tags=TAGS + (["cifar10"] if cifar else ["clevr"]),
        datasets=["uoft-cs/cifar10"] if cifar else None,
        model_name=f"lcs-{run.scale.name}-{run.name}",
        eval_results=None if result is None else [_k_max(run, result)],
    )
    sections = [
        f"---\n{data.to_yaml()}\n---",
        f"# {run.name}, {run.scale.name} scale" + ("" if stage == "late" else f", {stage} in training"),
        _about(run),
        "## Use\n\n" + _usage(run, stage),
    ]
    if has_grid:
        sections.append(f"## Samples\n\n![samples of {run.name}]({GRID_FILE})")
    if result is not None:
        sections.append("## Result\n\n" + _row(result))
    sections += [
        "## Training\n\n" + _training(run, stage, entry, parameters),
        "## Limits\n\n" + _limits(run, stage),
        "## Citation\n\n" + CITATION,
    ]
    return "\n\n".join(sections) + "\n"


def _about(run: Run) -> str:
    about = (
        f"A checkpoint of `lcs`, the first public implementation of {PAPER} (Bradley, 2025). "
        f'Experiment: **{run.experiment.title}** ("{run.experiment.paper_name}" in the paper).'
    )
    seen = "CIFAR-10" if run.experiment.name == "cifar10" else f"rendered scenes with {_counts(run)} object(s)"
    cells = 2 * run.scale.local_radius + 1
    kind = (
        f"a local model: each patch is denoised from {cells}x{cells} grid cells and the conditions inside them"
        if run.experiment.local
        else "a standard model: every pixel sees the whole image and all that is given as a condition"
    )
    side = resolution_of(run)
    return (
        f"{about}\n\n- Images: {side}x{side} RGB, trained on {seen}.\n- Network: EDM2 U-Net, {kind}.\n"
        f"- Condition: {_CONDITIONS[run.experiment.conditioner]}."
    )


def _counts(run: Run) -> str:
    return "1" if run.objects == 1 else f"1-{run.objects}"


def _usage(run: Run, stage: str) -> str:
    objects = f" --objects {run.objects}" if run.objects else ""
    option = "" if stage == "late" else f" --stage {stage}"
    load = f'load(get_run("{run.experiment.name}", {run.objects}, "{run.scale.name}"), "{stage}")'
    return (
        f"```\npython -m lcs pull {run.experiment.name}{objects} --scale {run.scale.name}{option}\n```\n\n"
        f"```python\nfrom lcs.experiments import get_run\nfrom lcs.weights import load\n\n"
        f"model = {load}  # model(x, sigma, labels) -> denoised x\n```\n\n"
        "Sampling uses the raw conditional score: Heun steps, no guidance."
    )


def _row(result: dict) -> str:
    from lcs.evaluation import summary_rows, to_markdown

    samples = result.get("settings", {}).get("samples")
    counted = f" Objects were counted by a trained detector on {samples} samples per K." if samples else ""
    return (
        to_markdown(summary_rows([result])) + "\nK_max is the largest K such that the model draws what it is asked "
        f"for with 1..K conditions.{counted} K_max cannot exceed the largest K tested, {result['k_tested']}."
    )


def _k_max(run: Run, result: dict) -> EvalResult:
    return EvalResult(
        task_type="image-generation",
        task_name="length generalization",
        dataset_type="clevr-style-scenes",
        dataset_name=f"the paper's test conditions, 1..{result['k_tested']} at a time",
        metric_type="k_max",
        metric_name=f"K_max, trained on {_counts(run)}",
        metric_value=result["k_max"],
    )


def _training(run: Run, stage: str, entry: dict, parameters: int) -> str:
    settings = entry["settings"]
    recipe, network = settings["recipe"], settings["network"]
    grown = settings.get("grown_from")
    rows = {
        "samples seen": f"{entry['samples']:,} of {recipe['samples']:,} ({stage})",
        "parameters": f"{parameters:,}, stored as {_stored_as(run)}",
        "network": ", ".join(f"{name} {_plain(value)}" for name, value in network.items()),
        "batch": recipe["batch"],
        "learning rate": f"{recipe['lr']}, ramp-up {recipe['lr_rampup_samples']:,} samples, "
        f"inverse square root decay after {recipe['lr_decay_batches']:,} batches",
        "optimizer": f"{recipe.get('optimizer', 'adam').capitalize()}, betas {_plain(recipe['betas'])}; "
        "weights renormalised after the update",
        "noise": _noise(recipe) + f"; sigma_data {run.scale.sigma_data}",
        "weights": f"power-function EMA, std {entry['ema_std']}",
        "started from": f"the weights of {grown['run']} ({grown['samples']:,} samples)" if grown else "random weights",
        "seed": settings["seed"],
        "lcs": entry["version"],
        "sha256": f"`{entry['sha256']}`",
    }
    return "| setting | value |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows.items())


def _stored_as(run: Run) -> str:
    return "deflated rows of int8 (lcs/packing.py)" if run.scale.packed else "fp16"


def _noise(recipe: dict) -> str:
    text = f"log-normal, mean {recipe['p_mean']}, std {recipe['p_std']}"
    if first := recipe.get("high_noise_samples", 0):
        mean, std = recipe["high_noise"]
        text += f" (the first {first:,} samples: mean {mean}, std {std})"
    return text


def _plain(value) -> str:
    return (" ".join(str(v) for v in value) or "none") if isinstance(value, list | tuple) else str(value)


def _limits(run: Run, stage: str) -> str:
    limits = [
        "Made to study when conditional diffusion composes; it is no general image generator and draws nothing "
        "but what it was trained on.",
        "Drawing fewer objects than it is asked for can be the result under study, not a defect.",
        "Only the network's weights are in this repository, as safetensors; there is no code to execute.",
    ]
    if run.scale.name != "paper":
        limits.append(
            f"The {run.scale.name} scale has a smaller network, smaller images and shorter training than the paper: "
            "its numbers need not agree with the published ones."
        )
    if stage != "late":
        limits.append("Taken before the end of training, for plots over training time.")
    if run.experiment.name == "cifar10":
        limits.append("CIFAR-10 comes without a licence statement; its authors ask for citation of Krizhevsky (2009).")
    else:
        limits.append("Scenes come from our own renderer of CLEVR-style scenes, not from the CLEVR dataset.")
    return "\n".join(f"- {limit}" for limit in limits)


CITATION = """```bibtex
@article{bradley2025local,
  title   = {Local Mechanisms of Compositional Generalization in Conditional Diffusion},
  author  = {Bradley, Arwen},
  journal = {arXiv preprint arXiv:2509.16447},
  year    = {2025}
}
```"""


# ---- datasets -------------------------------------------------------------------------------------


def dataset_card(spec: DatasetSpec, repo: str) -> str:
    """README.md of a rendered dataset."""
    total = spec.scenes * len(spec.counts)
    data = DatasetCardData(
        license="cc-by-4.0",
        pretty_name=f"CLEVR-style scenes, {spec.size} px",
        size_categories=[_size_category(total)],
        task_categories=["unconditional-image-generation"],
        tags=[f"arxiv:{ARXIV}", "clevr", "synthetic", "compositional-generalization"],
        viewer=False,  # shards are safetensors, which the viewer cannot show
    )
    counts = ", ".join(str(c) for c in spec.counts)
    return f"""---
{data.to_yaml()}
---

# CLEVR-style scenes, {spec.size}x{spec.size}

{total:,} rendered scenes for {PAPER} (Bradley, 2025): {spec.scenes:,} for each number of objects in {counts}, with
the location, shape, size, colour and material of every object.

```
python -m lcs pull --dataset {repo} --out data/scenes
python -m lcs train grid-all --data data/scenes
```

## Files

`count-3/shard-00017.safetensors` holds up to {spec.shard_size:,} scenes with three objects:

| tensor | type | content |
|---|---|---|
| `images` | uint8 [n, {spec.size}, {spec.size}, 3] | RGB |
| `seeds`, `counts` | int64 [n], uint8 [n] | seed of the scene, number of objects |
| `locations` | float32 [n, {MAX_OBJECTS}, 2] | projected centres (x, y) as fractions of the image |
| `shapes`, `sizes`, `colors`, `materials` | uint8 [n, {MAX_OBJECTS}] | index into the lists of `lcs.scenes.world` |

`manifest.json` names every shard with its sha256. Scene i of a count has seed `{spec.base_seed} * 2^32 + i`:
`python -m lcs render` makes the same scenes again.

## Origin and limits

Drawn by the renderer of `lcs`, which follows the scene rules of CLEVR (Johnson et al., 2017); no image or asset of
CLEVR is contained. The renderer is close to Blender's output, not equal to it. Objects may hide each other, so a
location label can belong to an object that is barely visible.

## Citation

{CITATION}
"""


def _size_category(total: int) -> str:
    """The Hub's size classes."""
    low = "1K"
    for limit, name in ((10**3, "1K"), (10**4, "10K"), (10**5, "100K"), (10**6, "1M"), (10**7, "10M"), (10**8, "100M")):
        if total < limit:
            return "n<1K" if name == "1K" else f"{low}<n<{name}"
        low = name
    return "100M<n<1B"


# ---- the Space ------------------------------------------------------------------------------------


def space_card(sdk: str, gradio_version: str, python_version: str) -> str:
    """README.md of the Space; its front matter is the Space's configuration."""
    lines = ["title: Local conditional scores", "emoji: 🧊", "colorFrom: blue", "colorTo: gray", f"sdk: {sdk}"]
    if sdk == "gradio":
        lines += [f"sdk_version: {gradio_version}", f'python_version: "{python_version}"', "app_file: app.py"]
    else:
        lines += ["app_port: 7860"]
    lines += [
        "pinned: false",
        "license: apache-2.0",
        "short_description: When does a diffusion model count past its training?",
        "tags:",
        *(f"- {tag}" for tag in TAGS),
    ]
    front = "\n".join(lines)
    return f"""---
{front}
---

# Local conditional scores

A diffusion model trained on scenes with 1-3 objects is asked for more. Whether it draws them depends on how local
its scores are. This demo goes with {PAPER} (Bradley, 2025). Checkpoints: `{NAMESPACE}` on the Hub.
"""
